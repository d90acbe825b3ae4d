"""Runtime and communication: ``python -m bench.paper cost``.

Runtime and communication of one batch over LAN and WAN (the paper's Tables 5 and 8): the paper's own figures, MP-SPDZ
on this machine with explicit per-sample gradients as in the paper (when MPSPDZ_HOME is set), and our step with its
noise: explicit, factored with secret weights, and factored with open weights, the default. GL-BMF is factored only, with its
uploads (``bench.gl_step``). G-Shuff adds the shuffle of
one batch's rows, which is a batch's part of an epoch's shuffle. Ours and MP-SPDZ run under the same network profile
(``bench.relay``); the paper's machine is another one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.evaluation.paper_tables import paper_table
from bench.gl_step import measure_layer_step
from bench.mpspdz.runner import MpSpdz, MpSpdzError
from bench.ours import measure_ours
from bench.shapes import PAPER_SHAPES, StepShape
from bench.systems import machine
from bench.workloads import Workload, make_workload

__all__ = ["CostRow", "Figure", "cost_main", "load_costs", "measure_costs", "paper_costs"]

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


def _mpspdz(system: MpSpdz, shape: StepShape, network: str, repeat: int) -> tuple[Figure, Figure]:
    figures = []
    for workload in _workloads(shape, "explicit"):
        compiled = system.compile(workload.program, *workload.arguments)
        runs = [system.run(compiled, workload.inputs, network) for _ in range(repeat)]
        figures.append(Figure(min(run.seconds for run in runs), runs[0].bytes / 1e6))
    return figures[0], figures[1]


def measure_costs(
    networks: tuple[str, ...] = NETWORKS,
    only: str = "",
    repeat: int = 3,
    mpspdz: MpSpdz | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[CostRow], dict[str, str]]:
    """All rows for these networks and shapes, and why a figure of MP-SPDZ is missing."""
    published = paper_costs()
    rows, missing = [], {}
    for network in networks:
        for (data, pretraining), shape in PAPER_SHAPES.items():
            name = f"{data} {pretraining}"
            if only not in name:
                continue
            progress(f"{network}, {name}: ours")
            own_step, own_open, own_explicit, own_shuffle = _ours(shape, network, repeat)
            progress(f"{network}, {name}: ours, GL-BMF")
            joint, joint_open = (Figure(*measure_layer_step(shape, network, w)) for w in ("secret", "open"))
            theirs: tuple[Figure, Figure] | None = None
            if mpspdz is not None:
                progress(f"{network}, {name}: MP-SPDZ, explicit")
                try:
                    theirs = _mpspdz(mpspdz, shape, network, max(1, repeat // 3))
                except MpSpdzError as error:
                    missing[f"{network}, {name}"] = str(error)
            ours = {"G-Shuff": own_step + own_shuffle, "G-BMF": own_step, "GL-BMF": joint}
            opened = {"G-Shuff": own_open + own_shuffle, "G-BMF": own_open, "GL-BMF": joint_open}
            explicit = {"G-Shuff": own_explicit + own_shuffle, "G-BMF": own_explicit}
            peers = {"G-Shuff": theirs[0] + theirs[1], "G-BMF": theirs[0]} if theirs else {}
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


def cost_main(argv: list[str]) -> None:
    """Measure and print."""
    cost = argparse.ArgumentParser(
        prog="python -m bench.paper cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cost.add_argument("--network", choices=(*NETWORKS, "both"), default="both")
    cost.add_argument("--only", default="", metavar="TEXT", help="only shapes whose name contains this, as CIFAR-10")
    cost.add_argument("--repeat", type=int, default=3, help="repetitions of ours; a third of that for MP-SPDZ")
    cost.add_argument("--no-mpspdz", action="store_true", help="leave MP-SPDZ out")
    output = cost.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON instead of tables")
    output.add_argument("--markdown", action="store_true", help="print Markdown tables")
    options = cost.parse_args(argv)
    names = [f"{data} {pretraining}" for data, pretraining in PAPER_SHAPES]
    if not any(options.only in name for name in names):
        cost.error(f"--only {options.only!r} matches none of: {', '.join(names)}")
    console, errors = Console(), Console(stderr=True)
    system = None
    if not options.no_mpspdz:
        try:
            system = MpSpdz()
        except MpSpdzError as error:
            errors.print(f"MP-SPDZ is left out: {error}")
    networks = NETWORKS if options.network == "both" else (options.network,)
    found: list[CostRow] = []
    for network in networks:  # each as soon as it is measured
        with errors.status("starting") as status:
            rows, missing = measure_costs((network,), options.only, options.repeat, system, status.update)
        for name, sentence in missing.items():
            errors.print(f"no figure of MP-SPDZ for {name}: {sentence}")
        found += rows
        if options.markdown:
            print(markdown(rows, network), end="\n\n", flush=True)
        elif not options.json:
            console.print(table(rows, network))
    about = machine()
    if options.json:
        print(json.dumps({"machine": about, "rows": [asdict(row) for row in found]}, indent=2))
        return
    heading = f"{about['date']}; {about['processor']}, {about['cores']} cores, load {about['load before the run']}"
    console.print(f"{heading}.", soft_wrap=True)
