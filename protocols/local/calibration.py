"""How long a run will take, from a short run of the same shape on this machine: ``--estimate --calibrate``, ``ppvfl estimate``.

Three servers and the clients run as processes over mutual TLS on loopback: the plan itself, on fewer rows and for fewer steps, twice.
Two sizes give a line for each phase, seconds = fixed + each·n, with n the rows or the steps. Matching ids is measured apart, on a few
thousand. A network adds its latency for every round and its bandwidth for every byte; both are named with the result.

What is assumed is said with the result, too (``Forecast.assumptions``): above all, that the hosts will be as this machine is now. A
calibration takes some ten seconds, most of which is starting processes.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import refmpc
from accel.files import write_bytes
from accel.validate import require
from protocols.client.upload import ClientJob, client_program
from protocols.local.phase_costs import phase_costs
from protocols.plan.gl_plan import LayerPlan
from protocols.plan.run_plan import Plan
from protocols.registry import protocol
from protocols.server.training import ServerJob
from refmpc.net.emulation import NetworkProfile, network_profile
from vfl.alignment.group import blind, hash_and_blind

__all__ = ["PHASES", "Calibration", "Forecast", "Line", "calibrate", "forecast", "print_forecast"]

# Phases of a forecast, and the phases of the ledger that they are made of.
PHASES = {
    "upload": ("upload",),
    "tests of the rows": ("verification",),
    "norms for the clip": ("norms",),
    "shuffle": ("shuffle",),
    "training": ("training", "checkpoint", "noise", "joint noise"),
}
_SHARES = 64 << 20  # bytes of shares of the larger run
_STEPS = 40, 200
_IDS = 4096
_PIECES, _PIECE = 24, 1 << 20
_ID_BYTES = 108  # of two clients, an id: three lists of 32 bytes, three of positions


@dataclass(frozen=True)
class Line:
    """Seconds of a phase: ``fixed`` and so many for ``each`` row or step."""

    fixed: float
    each: float

    @classmethod
    def through(cls, one: tuple[float, float], two: tuple[float, float]) -> Line:
        """The line through two points (n, seconds); never falling, never negative."""
        (n, seconds), (more, longer) = one, two
        each = max(0.0, (longer - seconds) / (more - n)) if more > n else longer / max(1.0, more)
        return cls(max(0.0, longer - each * more), each)

    def at(self, count: float) -> float:
        return self.fixed + self.each * count


@dataclass(frozen=True)
class Calibration:
    """What was measured: of every phase a line; of an id the seconds that one client takes with all cores of this machine (hashed and
    blinded, and blinded for another); of a byte of an upload the seconds to keep it on disk, synced, and to read it back."""

    lines: Mapping[str, Line]
    id_seconds: float
    disk_seconds: float
    cores: int
    rows: int
    steps: int


@dataclass(frozen=True)
class Forecast:
    """Seconds of every phase, in their order, and what they rest on."""

    seconds: dict[str, float]
    assumptions: tuple[str, ...]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def calibrate(plan: Plan, checkpoint_every: int = 100, *, synced: bool = True) -> Calibration:
    """Run the plan's shapes here, on few rows, and measure. Tens of seconds at most, and up to a GB of memory."""
    require(
        not isinstance(plan, LayerPlan), "protocol", plan.protocol, "g_bmf or g_shuff", "clients of gl_bmf compute, too"
    )
    sizes = _sizes(plan)
    found = [_measure(_shortened(plan, *size), checkpoint_every, synced) for size in sizes]
    lines = {}
    for name in PHASES:
        if any(name in seconds for seconds in found):
            counts = [_count(name, *size, plan) for size in sizes]
            points = [(float(count), seconds.get(name, 0.0)) for count, seconds in zip(counts, found, strict=True)]
            lines[name] = Line.through(points[0], points[-1])
    return Calibration(lines, _measure_ids(), _measure_disk(), os.cpu_count() or 1, *sizes[-1])


def _count(name: str, rows: int, steps: int, plan: Plan) -> int:
    """What the seconds of a phase grow with."""
    if name == "shuffle" and plan.protocol == "g_shuff":  # in every epoch
        return steps * plan.schedule.batch_size
    return steps if name == "training" else rows


def _sizes(plan: Plan) -> list[tuple[int, int]]:
    """Rows and steps of the two runs: whole batches, not more than the run itself has."""
    batch, all_rows = plan.schedule.batch_size, plan.schedule.num_rows
    most = max(2, min(all_rows, _SHARES // (16 * (plan.width + plan.outputs))) // batch)
    found = []
    for batches, steps in ((max(1, most // 4), _STEPS[0]), (most, _STEPS[1])):
        epochs = max(1, min(plan.schedule.num_steps // batches, round(steps / batches)))
        found.append((batches * batch, epochs * batches))
    return found


def _shortened(plan: Plan, rows: int, steps: int) -> Plan:
    schedule = replace(plan.schedule, num_samples=rows, dummies=0, epochs=steps * plan.schedule.batch_size // rows)
    return replace(plan, schedule=schedule, public_rows=None)


def _measure(plan: Plan, every: int, synced: bool) -> dict[str, float]:
    """Seconds of every phase of a run with random rows; of the slowest server."""
    random = np.random.default_rng(0)
    count, clients = plan.schedule.num_samples, {}
    for name, width, bound in zip(plan.client_names, plan.client_widths, plan.client_bounds, strict=True):
        rows = random.normal(size=(count, width))
        rows *= 0.9 * bound / np.linalg.norm(rows, axis=1, keepdims=True)
        labels = None
        if name == plan.client_names[-1]:
            regression = plan.training.task == "regression"
            own = random.uniform(-1, 1, count) if regression else random.integers(0, plan.classes, count)
            labels = plan.labels_to_share(own)
        clients[name] = client_program, ClientJob(plan, rows, labels)
    program = protocol(plan.protocol).servers
    with tempfile.TemporaryDirectory(prefix="ppvfl-calibrates-") as folder:
        jobs = [ServerJob(plan, Path(folder) / f"server-{i}", every, synced) for i in range(3)]
        result = refmpc.run(
            program, jobs, clients=clients, parties="processes", tls=True, releases=plan.releases, timeout=120
        )
    return {
        name: max(
            sum(ledger.phases[part].seconds for part in parts if part in ledger.phases) for ledger in result.ledgers
        )
        for name, parts in PHASES.items()
        if any(part in result.ledgers[0].phases for part in parts)
    }


def _measure_ids() -> float:
    """Seconds an id: hashed and blinded as one's own, and blinded as another's."""
    values, key = [b"calibration-%09d" % i for i in range(_IDS)], os.urandom(32)
    best = float("inf")
    for _ in range(2):  # the first also starts threads
        begun = time.perf_counter()
        blind(key, hash_and_blind(key, values, _silent), _silent)
        best = min(best, (time.perf_counter() - begun) / _IDS)
    return best


def _measure_disk() -> float:
    """Seconds a byte: pieces as servers keep them before they acknowledge, and read back."""
    piece = os.urandom(_PIECE)
    with tempfile.TemporaryDirectory(prefix="ppvfl-calibrates-") as folder:
        files = [Path(folder) / f"{i}.message" for i in range(_PIECES)]
        begun = time.perf_counter()
        for file in files:
            write_bytes(file, piece, private=True)
        for file in files:
            file.read_bytes()
        return (time.perf_counter() - begun) / (_PIECES * _PIECE)


def _silent(count: int) -> None:
    return


def forecast(
    plan: Plan,
    measured: Calibration,
    network: str | NetworkProfile = "loopback",
    *,
    keeps_steps: bool = True,
    keeps_uploads: bool = True,
) -> Forecast:
    """Seconds of every phase over ``network``: "loopback" means everybody on this machine, anything else a host each.

    ``keeps_steps``, ``keeps_uploads``: whether servers have every step, and what clients send, on disk (``ppvfl`` does)."""
    profile = network_profile(network)
    together, clients = profile.name == "loopback", len(plan.client_names)
    rows, steps = plan.schedule.num_rows, plan.schedule.num_steps
    costs = phase_costs(plan, keeps_steps=keeps_steps)
    passes = clients * clients / 4  # every client blinds every list
    if together:
        seconds = {"align": rows * passes * 2 * measured.id_seconds}  # two lists at a time, each with half of the cores
    else:
        moved = _ID_BYTES * rows * clients * (clients - 1) / 2
        seconds = {"align": rows * passes * measured.id_seconds + moved / profile.bandwidth}
    for name, line in measured.lines.items():
        count = _count(name, rows, steps, plan)
        parts = [costs[part] for part in PHASES[name] if part in costs]
        waits = sum(cost.rounds * profile.delay + cost.bytes / 3 / profile.bandwidth for cost in parts)
        kept = 16 * rows * (plan.width + plan.outputs) * measured.disk_seconds / (1 if together else 3)
        if name == "upload":  # a client sends a third of its shares' bytes to each server, over one link
            waits = 16 * rows * (max(plan.client_widths) + plan.outputs) / profile.bandwidth
        seconds[name] = line.at(count) + (0.0 if together else waits)
        seconds[name] += kept if name == "upload" and keeps_uploads else 0.0
    return Forecast(seconds, _assumptions(measured, profile, together))


def print_forecast(found: Forecast, network: str, console: Console) -> None:
    """For people: a line a phase, and what it rests on."""
    view = Table(title=f"time ({'all on this machine' if network == 'loopback' else network})", show_header=False)
    view.add_column(style="bold")
    view.add_column(justify="right")
    for name, seconds in found.seconds.items():
        view.add_row(name, f"{seconds:,.1f} s")
    view.add_row("all", f"{found.total:,.1f} s")
    console.print(view)
    for words in found.assumptions:
        console.print(f"- {words}", style="dim", highlight=False)


def _assumptions(measured: Calibration, profile: NetworkProfile, together: bool) -> tuple[str, ...]:
    where = (
        "all participants on this machine, as busy as it is now"
        if together
        else f"a host each, like this one but with three servers' work on it; latency {profile.delay * 1e3:g} ms, "
        f"{profile.bandwidth * 8 / 1e6:g} Mbit/s each way, nothing of which is hidden by computing"
    )
    return (
        f"measured here on {measured.rows:,} rows and {measured.steps:,} steps, {measured.cores} cores; lines through two sizes",
        where,
        "as many ids at each client as rows are common; everybody is there from the beginning",
        "not counted: starting, reading files, meeting, waits for people and for what breaks",
    )
