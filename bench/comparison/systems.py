"""The systems side by side: each measures the same workloads, pass by pass, so that machine noise hits all alike."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from accel.validate import require_integer
from bench.comparison.ours import measure_ours
from bench.comparison.workloads import Workload
from bench.mpspdz.runner import MpSpdz, MpSpdzError
from bench.spu.runner import SUPPORTED, Spu, SpuError

__all__ = ["OURS", "PEERS", "Cell", "Comparison", "compare", "machine"]

OURS = "ours"
PEERS = ("MP-SPDZ", "SPU")


@dataclass(frozen=True)
class Cell:
    """One system on one workload: best time, bytes of all parties, rounds and CPU time a party (None where not
    reported), largest error."""

    seconds: float
    bytes: int
    rounds: int | None
    error: float
    cpu: float | None = None

    def joined(self, other: Cell | None) -> Cell:
        """Best time, worst error of two passes."""
        if other is None:
            return self
        cpu = None if self.cpu is None or other.cpu is None else min(self.cpu, other.cpu)
        return Cell(min(self.seconds, other.seconds), self.bytes, self.rounds, max(self.error, other.error), cpu)


@dataclass(frozen=True)
class Comparison:
    """All cells by (title, system), what ran, and why a system or a cell is missing."""

    titles: list[str]
    cells: dict[tuple[str, str], Cell]
    versions: dict[str, str]
    missing: dict[str, str]
    network: str
    repeats: int
    machine: dict[str, str]

    def cell(self, title: str, system: str) -> Cell | None:
        return self.cells.get((title, system))

    @property
    def systems(self) -> list[str]:
        return [name for name in (OURS, *PEERS) if name in self.versions]


def machine() -> dict[str, str]:
    """What a reader must know about the machine of a measurement."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        model = names[0] if names else model
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": model,
        "cores": str(os.cpu_count()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load before the run": f"{os.getloadavg()[0]:.1f}",
    }


Measure = Callable[[Sequence[Workload], int, str], dict[str, Cell]]


def _ours(workloads: Sequence[Workload], inner: int, network: str) -> dict[str, Cell]:
    found = measure_ours(workloads, inner, network)
    return {
        w.title: Cell(min(r.times), r.bytes, r.rounds, w.error(r.values), min(r.cpu))
        for w, r in zip(workloads, found, strict=True)
    }


def _mpspdz(system: MpSpdz) -> Measure:
    def measure(workloads: Sequence[Workload], inner: int, network: str) -> dict[str, Cell]:
        found: dict[str, Cell] = {}
        for workload in workloads:
            compiled = system.compile(workload.program, *workload.arguments)
            for _ in range(inner):
                out = system.run(compiled, workload.inputs, network)
                cell = Cell(out.seconds, out.bytes, out.rounds, workload.error(out.values))
                found[workload.title] = cell.joined(found.get(workload.title))
        return found

    return measure


def _spu(system: Spu) -> Measure:
    def measure(workloads: Sequence[Workload], inner: int, network: str) -> dict[str, Cell]:
        able = [workload for workload in workloads if workload.program in SUPPORTED]
        found = system.run(able, inner, network) if able else []
        return {w.title: Cell(min(r.times), r.bytes, None, w.error(r.values)) for w, r in zip(able, found, strict=True)}

    return measure


def _own_version() -> str:
    try:
        return version("ppvfl")
    except PackageNotFoundError:
        return "this checkout"


def _across(workloads: Sequence[Workload], cells: dict[tuple[str, str], Cell]) -> list[str]:
    """Our factored step beside the peers' explicit one: a row made of cells already measured."""
    steps = {w.arguments[0]: w for w in workloads if w.program == "step"}
    if not {"factored", "explicit"} <= steps.keys():
        return []
    title = steps["explicit"].title.replace("explicit", "ours factored, theirs explicit")
    cells[title, OURS] = cells[steps["factored"].title, OURS]
    for peer in PEERS:
        if (steps["explicit"].title, peer) in cells:
            cells[title, peer] = cells[steps["explicit"].title, peer]
    return [title]


def compare(
    workloads: Sequence[Workload],
    *,
    repeat: int = 3,
    inner: int = 3,
    network: str = "loopback",
    peers: Sequence[str] = PEERS,
    progress: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """``repeat`` passes over all systems, ``inner`` repetitions a pass; a peer that is not there is left out and
    named."""
    require_integer("repeat", repeat, 1)
    require_integer("inner", inner, 1)
    measures: dict[str, Measure] = {OURS: _ours}
    versions, missing = {OURS: _own_version()}, {}
    about = machine()
    if "MP-SPDZ" in peers:
        try:
            mpspdz = MpSpdz()
            for workload in workloads:
                progress(f"MP-SPDZ compiles {workload.title}")
                mpspdz.compile(workload.program, *workload.arguments)
            measures["MP-SPDZ"], versions["MP-SPDZ"] = _mpspdz(mpspdz), mpspdz.version()
        except MpSpdzError as error:
            missing["MP-SPDZ"] = str(error)
    if "SPU" in peers:
        try:
            spu = Spu()
            versions["SPU"] = spu.version()
            measures["SPU"] = _spu(spu)
        except SpuError as error:
            missing["SPU"] = str(error)
    cells: dict[tuple[str, str], Cell] = {}
    for number in range(repeat):
        for name, measure in measures.items():
            progress(f"pass {number + 1} of {repeat}: {name}")
            for title, cell in measure(workloads, inner, network).items():
                cells[title, name] = cell.joined(cells.get((title, name)))
    if "MP-SPDZ" in measures and not mpspdz.plain:
        versions["MP-SPDZ"] += ", over TLS (built without -DINSECURE)"
    titles = [workload.title for workload in workloads]
    titles += _across(workloads, cells)
    return Comparison(titles, cells, versions, missing, network, repeat * inner, about)
