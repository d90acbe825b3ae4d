"""Runtime and communication: ``python -m bench.paper cost``.

Runtime and communication of one batch over LAN and WAN (the paper's Tables 5 and 8): the paper's own figures, MP-SPDZ
on this machine with explicit per-sample gradients as in the paper (when MPSPDZ_HOME is set), and our step with its
noise: explicit, factored with secret weights, and factored with open weights, the default. GL-BMF is factored only,
with its uploads (``bench.gl_step``). G-Shuff adds the shuffle of one batch's rows, which is a batch's part of an
epoch's shuffle. Ours and MP-SPDZ run under the same network profile (``bench.comparison.relay``); the paper's machine
is another one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.status import Status
from rich.table import Table

from accel.files import write_text
from bench.comparison.ours import measure_ours
from bench.comparison.systems import machine
from bench.comparison.workloads import Workload, make_workload
from bench.evaluation.paper_tables import paper_table
from bench.evaluation.report import printing_console
from bench.gl_step import measure_layer_step
from bench.mpspdz.runner import MpSpdz, MpSpdzError
from bench.shapes import PAPER_SHAPES, StepShape
from refmpc.net.emulation import network_profile

__all__ = ["CostRow", "Figure", "Pace", "cost_main", "load_costs", "measure_shape", "paper_costs"]

PROTOCOLS = ("G-Shuff", "G-BMF", "GL-BMF")
NETWORKS = ("lan", "wan")


@dataclass(frozen=True)
class Figure:
    """Seconds and megabytes of one batch."""

    seconds: float
    megabytes: float

    def __add__(self, other: Figure) -> Figure:
        return Figure(self.seconds + other.seconds, self.megabytes + other.megabytes)


@dataclass(frozen=True)
class CostRow:
    """One line of the table; None where a system has no figure."""

    network: str
    data: str
    pretraining: str
    protocol: str
    paper: Figure
    mpspdz: Figure | None
    ours_explicit: Figure | None
    ours: Figure | None  # factored, secret weights
    ours_open: Figure | None = None

    @property
    def best(self) -> Figure | None:
        """Ours with open weights, the default; with secret ones where those were not measured."""
        return self.ours if self.ours_open is None else self.ours_open

    @property
    def ratios(self) -> list[str]:
        """The paper's seconds and megabytes over ours."""
        if self.best is None:
            return ["–", "–"]
        return [f"{self.paper.seconds / self.best.seconds:.0f}", f"{self.paper.megabytes / self.best.megabytes:.0f}"]


def paper_costs() -> dict[tuple[str, str, str, str], Figure]:
    """The paper's figures by (network, data set, pre-training, protocol)."""
    figures = {}
    for network in NETWORKS:
        stored = paper_table(table_number(network)).figures
        for data, pretraining in PAPER_SHAPES:
            for protocol in PROTOCOLS:
                pair = stored[data][pretraining][protocol]
                assert isinstance(pair, list)
                figures[network, data, pretraining, protocol] = Figure(*pair)
    return figures


def table_number(network: str) -> int:
    """The paper's number of the table of a network."""
    return {"lan": 5, "wan": 8}[network]


def _workloads(shape: StepShape, method: str) -> tuple[Workload, Workload]:
    """The step, and the shuffle of a batch: embeddings, labels and the squared norm of each row."""
    columns = shape.width + shape.classes + 1
    return (
        make_workload("step", "step", (method, shape)),
        make_workload("shuffle", "shuffle", (shape.batch, columns)),
    )


def _ours(shape: StepShape, network: str, repeat: int) -> list[Figure]:
    """Steps: factored with secret and with open weights, explicit; then the shuffle."""
    step, shuffle = _workloads(shape, "factored")
    explicit = _workloads(shape, "explicit")[0]
    found = measure_ours([step, replace(step, weights="open"), explicit, shuffle], repeat, network)
    return [Figure(min(each.times), each.bytes / 1e6) for each in found]


class Pace:
    """How long MP-SPDZ's explicit step will take. It works on B·(d+1)·S gradient entries: the first guess is what such
    an entry took on one 2-core machine, and each run corrects it for this one."""

    COMPILATION = 10.0  # seconds, whatever the size
    ENTRY = 1e-5  # seconds of computing
    ENTRY_BYTES, ROUNDS = 170 / 6, 195  # over each of six links, and of a step

    def __init__(self) -> None:
        self.factor = 1.0

    def guess(self, shape: StepShape, network: str) -> float:
        """Seconds of one run."""
        profile, entries = network_profile(network), shape.batch * (shape.width + 1) * shape.classes
        sending = entries * self.ENTRY_BYTES / profile.bandwidth + self.ROUNDS * profile.delay
        return self.factor * (entries * self.ENTRY + sending)

    def learn(self, shape: StepShape, network: str, seconds: float) -> None:
        """A run took this long."""
        self.factor *= seconds / self.guess(shape, network)


def _mpspdz(
    system: MpSpdz, shape: StepShape, network: str, repeat: int, pace: Pace, progress: Callable[[str], None]
) -> tuple[Figure, Figure]:
    figures = []
    for workload in _workloads(shape, "explicit"):
        timed = workload.program == "step"
        progress(f"MP-SPDZ, {workload.program}: compiling, about {pace.COMPILATION:.0f} s unless kept")
        compiled = system.compile(workload.program, *workload.arguments)
        outcomes = []
        for number in range(repeat):
            about = f", about {pace.guess(shape, network):.0f} s" if timed else ""
            progress(f"MP-SPDZ, {workload.program}: run {number + 1} of {repeat}{about}")
            begun = time.perf_counter()
            outcomes.append(system.run(compiled, workload.inputs, network))
            if timed:
                pace.learn(shape, network, time.perf_counter() - begun)
        figures.append(Figure(min(run.seconds for run in outcomes), outcomes[0].bytes / 1e6))
    return figures[0], figures[1]


def measure_shape(
    network: str,
    data: str,
    pretraining: str,
    repeat: int,
    mpspdz: MpSpdz | None,
    pace: Pace,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[CostRow], str]:
    """The rows of one shape over one network, and why MP-SPDZ's figure is missing ("" if it is not)."""
    shape, missing = PAPER_SHAPES[data, pretraining], ""

    def say(text: str) -> None:
        progress(f"{network}, {data} {pretraining}: {text}")

    say("ours, G-BMF and G-Shuff")
    own_step, own_open, own_explicit, own_shuffle = _ours(shape, network, repeat)
    say("ours, GL-BMF")
    joint, joint_open = (Figure(*measure_layer_step(shape, network, w)) for w in ("secret", "open"))
    theirs: tuple[Figure, Figure] | None = None
    if mpspdz is not None:
        try:
            theirs = _mpspdz(mpspdz, shape, network, max(1, repeat // 3), pace, say)
        except MpSpdzError as error:
            missing = str(error)
    ours = {"G-Shuff": own_step + own_shuffle, "G-BMF": own_step, "GL-BMF": joint}
    opened = {"G-Shuff": own_open + own_shuffle, "G-BMF": own_open, "GL-BMF": joint_open}
    explicit = {"G-Shuff": own_explicit + own_shuffle, "G-BMF": own_explicit}
    peers = {"G-Shuff": theirs[0] + theirs[1], "G-BMF": theirs[0]} if theirs else {}
    published, rows = paper_costs(), []
    for protocol in PROTOCOLS:
        key = (network, data, pretraining, protocol)
        figures = [system.get(protocol) for system in (peers, explicit, ours, opened)]
        rows.append(CostRow(*key, published[key], *figures))
    return rows, missing


COLUMNS = (
    "paper",
    "MP-SPDZ explicit, here",
    "ours explicit",
    "ours, secret weights",
    "ours, open weights",
    "paper : ours",
)


def _lines(row: CostRow) -> list[list[str]]:
    """Time and bytes of every column."""
    cells = [
        ["–", "–"] if figure is None else [f"{figure.seconds:.3g} s", f"{figure.megabytes:,.4g} MB"]
        for figure in (row.paper, row.mpspdz, row.ours_explicit, row.ours, row.ours_open)
    ]
    return [*cells, row.ratios]


def _title(network: str) -> str:
    return f"One batch of 128 over {network.upper()}, as in Table {table_number(network)} of the paper"


def table(rows: list[CostRow], network: str) -> Table:
    """The rows of one network: time and bytes of all parties."""
    view = Table(title=_title(network), show_lines=True)
    view.add_column("shape")
    view.add_column("protocol")
    for column in COLUMNS:
        view.add_column(column, justify="right")
    for row in rows:
        if row.network == network:
            cells = ["\n".join(lines) for lines in _lines(row)]
            view.add_row(f"{row.data}\n{row.pretraining}", row.protocol, *cells)
    return view


def markdown(rows: list[CostRow], network: str) -> str:
    """The same as a Markdown table."""
    names = ("shape", "protocol", *COLUMNS)
    lines = [_title(network) + ":", "", "| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for row in rows:
        if row.network == network:
            cells = [", ".join(cell) for cell in _lines(row)]
            lines.append("| " + " | ".join([f"{row.data} {row.pretraining}", row.protocol, *cells]) + " |")
    return "\n".join(lines)


def load_costs(file: Path) -> tuple[list[CostRow], dict[str, str]]:
    """What ``bench.paper cost --json`` wrote: rows and the machine."""
    stored = json.loads(file.read_text(encoding="utf-8"))
    rows = []
    for row in stored["rows"]:
        figures = {
            name: None if row.get(name) is None else Figure(**row[name])
            for name in ("paper", "mpspdz", "ours_explicit", "ours", "ours_open")
        }
        rows.append(CostRow(**{**row, **figures}))
    return rows, stored["machine"]


def _write_costs(rows: Sequence[CostRow]) -> str:
    return json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=2)


def _parser() -> argparse.ArgumentParser:
    cost = argparse.ArgumentParser(
        prog="python -m bench.paper cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cost.add_argument("--network", choices=(*NETWORKS, "both"), default="both")
    cost.add_argument("--only", default="", metavar="TEXT", help="only shapes whose name contains this, as CIFAR-10")
    cost.add_argument("--repeat", type=int, default=3, help="repetitions of ours; a third of that for MP-SPDZ")
    cost.add_argument("--no-mpspdz", action="store_true", help="leave MP-SPDZ out")
    cost.add_argument(
        "--keep",
        type=Path,
        metavar="FILE",
        help="rows are written here shape by shape, and those there not measured again",
    )
    output = cost.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON instead of tables")
    output.add_argument("--markdown", action="store_true", help="print Markdown tables")
    return cost


def _progress(errors: Console, status: Status) -> Callable[[str], None]:
    """A line that changes on a terminal; lines with the time of day elsewhere."""

    def say(text: str) -> None:
        status.update(text)
        if not errors.is_terminal:
            print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    return say


def _measure_network(
    network: str, options: argparse.Namespace, system: MpSpdz | None, pace: Pace, found: list[CostRow], errors: Console
) -> None:
    """Add the rows of a network to ``found``, which is written to ``--keep`` after every shape."""
    for data, pretraining in PAPER_SHAPES:
        place = (network, data, pretraining)
        kept = [row for row in found if (row.network, row.data, row.pretraining) == place]
        complete = kept and (system is None or any(row.mpspdz is not None for row in kept))
        if options.only not in f"{data} {pretraining}" or complete:
            continue
        with errors.status("starting") as status:
            rows, missing = measure_shape(*place, options.repeat, system, pace, _progress(errors, status))
        if missing:
            errors.print(f"no figure of MP-SPDZ for {network}, {data} {pretraining}: {missing}")
        found[:] = [row for row in found if row not in kept] + rows
        if options.keep is not None:
            write_text(options.keep, _write_costs(found))


def cost_main(argv: list[str]) -> None:
    """Measure and print."""
    cost = _parser()
    options = cost.parse_args(argv)
    names = [f"{data} {pretraining}" for data, pretraining in PAPER_SHAPES]
    if not any(options.only in name for name in names):
        cost.error(f"--only {options.only!r} matches none of: {', '.join(names)}")
    console, errors = printing_console(), Console(stderr=True)
    system = None
    if not options.no_mpspdz:
        try:
            system = MpSpdz()
        except MpSpdzError as error:
            errors.print(f"MP-SPDZ is left out: {error}")
    found = load_costs(options.keep)[0] if options.keep is not None and options.keep.exists() else []
    pace = Pace()
    for network in NETWORKS if options.network == "both" else (options.network,):  # each as soon as it is measured
        _measure_network(network, options, system, pace, found, errors)
        rows = [row for row in found if row.network == network and options.only in f"{row.data} {row.pretraining}"]
        if options.markdown:
            print(markdown(rows, network), end="\n\n", flush=True)
        elif not options.json:
            console.print(table(rows, network))
    if options.json:
        print(_write_costs(found))
        return
    about = machine()
    heading = f"{about['date']}; {about['processor']}, {about['cores']} cores, load {about['load before the run']}"
    console.print(f"{heading}.", soft_wrap=True)
