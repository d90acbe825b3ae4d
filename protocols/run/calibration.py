"""How long a run will take, from short runs of the same shape on this machine: ``--estimate --calibrate``, ``ppvfl
estimate``.

The plan itself runs on fewer rows and for fewer steps, three times: on a few rows as a run begins, once more the same,
and on as many as are measured at all. The last two give the seconds of a row or a step, the first what comes on top
once (``Line``). Who runs it is the caller's affair: ``measure_here`` runs processes as ``python -m protocols…`` does,
``protocols.run.timing_run`` a federation as ``ppvfl`` does, with everything that servers keep on disk. Matching ids is
measured apart, for two clients. A network adds its latency for every round and its bandwidth for every byte; both are
named with the result.

What is assumed is said with the result, too (``Forecast.assumptions``): above all, that the hosts will be as this
machine is now.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.table import Table

from accel.validate import require
from protocols.client.upload import ClientJob
from protocols.plan.gl_plan import LayerPlan
from protocols.plan.run_plan import Plan
from protocols.run.phase_costs import phase_costs
from protocols.run.session import Session, Where
from refmpc.net.emulation import NetworkProfile, network_profile
from vfl.alignment import matching_costs, rehearse

__all__ = [
    "MEMORY",
    "PHASES",
    "SENDING",
    "Calibration",
    "Forecast",
    "Line",
    "Measure",
    "calibrate",
    "elapsed",
    "forecast",
    "measure_here",
    "print_forecast",
]

SENDING = "sending"  # what clients do until the servers have all rows, where servers take them in only afterwards
MEMORY = "new memory"  # seconds of a core that files take more, at most, if the machine must be given memory for them
# Phases of a forecast, and the measured phases that they are made of: those of the ledger, and SENDING. MEMORY is none:
# the upload has a range.
PHASES = {
    "upload": (SENDING, "commitments", "upload"),
    "tests of the rows": ("verification",),
    "norms for the clip": ("norms",),
    "shuffle": ("shuffle",),
    "training": ("training", "checkpoint", "noise", "joint noise"),
}
Measure = Callable[[Sequence[Plan]], list[dict[str, float]]]  # seconds by measured phase of these plans, run one by one
_SHARES = 320 << 20  # bytes of shares of the largest run
_STEPS = 20, 800  # of the small runs, and of the large one
_IDS = 1 << 15
_TIMEOUT = 120.0
_NARROW = 0.1  # a range that is narrower is none


@dataclass(frozen=True)
class Line:
    """Seconds of a phase: ``fixed`` and so many for ``each`` row or step."""

    fixed: float
    each: float

    @classmethod
    def through(cls, first: tuple[float, float], *others: tuple[float, float]) -> Line:
        """From points (n, seconds): ``each`` by the last two, ``fixed`` by the first, which alone has what is done
        once; never falling, never negative."""
        (small, seconds), (large, longer) = (first, *others)[-2:] if others else ((0.0, 0.0), first)
        each = max(0.0, (longer - seconds) / (large - small)) if large > small else longer / max(1.0, large)
        return cls(max(0.0, first[1] - each * first[0]), each)

    def at(self, count: float) -> float:
        return self.fixed + self.each * count


@dataclass(frozen=True)
class Calibration:
    """What was measured: of every phase a line; of ids the seconds that two clients take who share this machine,
    matching them as ``matching`` says. ``rows`` and ``steps`` of the largest run."""

    lines: Mapping[str, Line]
    memory: Line
    ids: Line
    cores: int
    rows: int
    steps: int
    matching: str = "ot"


@dataclass(frozen=True)
class Forecast:
    """Seconds of every phase, in their order, and what they rest on; of those that vary by more than a clock does, from
    where to where (``seconds`` is the upper end: the larger the run, the nearer)."""

    seconds: dict[str, float]
    assumptions: tuple[str, ...]
    ranges: dict[str, tuple[float, float]]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def calibrate(plan: Plan, measure: Measure, matching: str = "ot") -> Calibration:
    """Run the plan's shapes here, on few rows, and measure. Tens of seconds at most, and up to a GB of memory and of
    disk."""
    require(
        not isinstance(plan, LayerPlan), "protocol", plan.protocol, "g_bmf or g_shuff", "clients of gl_bmf compute, too"
    )
    sizes = _sizes(plan)
    measured = measure([_shortened(plan, *size) for size in sizes])
    found = [_by_phase(seconds) for seconds in measured]
    lines = {}
    for name in found[-1]:
        counts = [_count(name, *size, plan) for size in sizes]
        points = [(float(count), seconds.get(name, 0.0)) for count, seconds in zip(counts, found, strict=True)]
        lines[name] = Line.through(*points)
    memory = Line(0.0, measured[-1].get(MEMORY, 0.0) / sizes[-1][0])
    return Calibration(lines, memory, _measure_ids(matching), os.cpu_count() or 1, *sizes[-1], matching)


def _by_phase(measured: Mapping[str, float]) -> dict[str, float]:
    return {
        name: sum(measured.get(part, 0.0) for part in parts)
        for name, parts in PHASES.items()
        if any(part in measured for part in parts)
    }


def _count(name: str, rows: int, steps: int, plan: Plan) -> int:
    """What the seconds of a phase grow with."""
    if name == "shuffle" and plan.shuffles_epochs:  # in every epoch
        return steps * plan.schedule.batch_size
    return steps if name == "training" else rows


def _sizes(plan: Plan) -> list[tuple[int, int]]:
    """Rows and steps of the runs: whole batches, not more than the run itself has."""
    batch, all_rows = plan.schedule.batch_size, plan.schedule.num_rows
    most = max(1, min(all_rows, _SHARES // (16 * (plan.width + 1 + plan.outputs + 1))) // batch)
    found = []
    for batches, steps in zip((most // 16, most // 16, most), (_STEPS[0], *_STEPS), strict=True):
        whole = max(1, batches)
        epochs = max(1, min(plan.schedule.num_steps // whole, round(steps / whole)))
        found.append((whole * batch, epochs * whole))
    return found


def _shortened(plan: Plan, rows: int, steps: int) -> Plan:
    schedule = replace(plan.schedule, num_samples=rows, dummies=0, epochs=steps * plan.schedule.batch_size // rows)
    return replace(plan, schedule=schedule, public_rows=None)


def measure_here(checkpoint_every: int = 100, *, synced: bool = True, tls: bool = False) -> Measure:
    """Servers and clients as processes of this machine, as a run of ``python -m protocols…`` starts them."""
    return lambda plans: [_measure(plan, checkpoint_every, synced, tls) for plan in plans]


def _measure(plan: Plan, every: int, synced: bool, tls: bool) -> dict[str, float]:
    """Seconds of every phase of the ledger, with random rows."""
    random = np.random.default_rng(0)
    count, jobs = plan.schedule.num_samples, {}
    for name, width, bound in zip(plan.client_names, plan.client_widths, plan.client_bounds, strict=True):
        rows = random.normal(size=(count, width))
        rows *= 0.9 * bound / np.linalg.norm(rows, axis=1, keepdims=True)
        labels = None
        if name == plan.client_names[-1]:
            regression = plan.training.task == "regression"
            own = random.uniform(-1, 1, count) if regression else random.integers(0, plan.classes, count)
            labels = plan.labels_to_share(own)
        jobs[name] = ClientJob(plan, rows, labels)
    where = Where(tls=tls, timeout=_TIMEOUT, checkpoint_every=every, synced=synced)
    result = Session(plan, where).play(jobs)
    return elapsed([{name: phase.seconds for name, phase in ledger.phases.items()} for ledger in result.ledgers])


def elapsed(servers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds of each phase, from those of the servers one after the other: from the moment at which the last server
    has ended the one before. Whoever was early waits for the others, and that wait is no work of the phase in which it
    happens."""
    found, ends = dict[str, float](), [0.0] * len(servers)
    for phase in dict.fromkeys(name for own in servers for name in own):
        before = max(ends)
        ends = [end + own.get(phase, 0.0) for end, own in zip(ends, servers, strict=True)]
        found[phase] = max(ends) - before
    return found


def _measure_ids(matching: str) -> Line:
    """Two clients match few ids and many, after they have done so once."""
    rehearse(matching, 64)
    return Line.through(*((float(count), rehearse(matching, count)) for count in (_IDS >> 4, _IDS)))


def forecast(
    plan: Plan,
    measured: Calibration,
    network: str | NetworkProfile = "loopback",
    *,
    keeps_steps: bool = True,
) -> Forecast:
    """Seconds of every phase over ``network``: "loopback" means everybody on this machine, anything else a host each.

    ``keeps_steps``: whether servers have every step on disk (``ppvfl`` does)."""
    profile = network_profile(network)
    together, clients = profile.name == "loopback", len(plan.client_names)
    rows, steps = plan.schedule.num_rows, plan.schedule.num_steps
    costs = phase_costs(plan, keeps_steps=keeps_steps)
    work, moved = matching_costs(measured.matching, clients)
    if together:
        seconds = {"align": work * measured.ids.at(rows)}
    else:  # the other's half is another host's
        seconds = {"align": work / 2 * measured.ids.at(rows) + moved * rows / profile.bandwidth}
    for name, line in measured.lines.items():
        count = _count(name, rows, steps, plan)
        parts = [costs[part] for part in PHASES[name] if part in costs]
        waits = sum(cost.rounds * profile.delay + cost.bytes / 3 / profile.bandwidth for cost in parts)
        if name == "upload":  # a client sends a third of its shares' bytes to each server, over one link
            waits = 16 * rows * (max(plan.client_widths) + plan.outputs) / profile.bandwidth
        seconds[name] = line.at(count) + (0.0 if together else waits)
    ranges = {}
    extra = measured.memory.at(rows) / (min(3, measured.cores) if together else 3)
    if extra > _NARROW * seconds["upload"]:
        ranges["upload"] = seconds["upload"], seconds["upload"] + extra
        seconds["upload"] += extra
    return Forecast(seconds, _assumptions(measured, profile, together, bool(ranges)), ranges)


def print_forecast(found: Forecast, network: str, console: Console) -> None:
    """For people: a line a phase, and what it rests on."""
    view = Table(title=f"time ({'all on this machine' if network == 'loopback' else network})", show_header=False)
    view.add_column(style="bold")
    view.add_column(justify="right")
    for name, seconds in found.seconds.items():
        low, high = found.ranges.get(name, (seconds, seconds))
        view.add_row(name, f"{seconds:,.1f} s" if name not in found.ranges else f"{low:,.1f} to {high:,.1f} s")
    view.add_row("all", f"{found.total:,.1f} s")
    console.print(view)
    for words in found.assumptions:
        console.print(f"- {words}", style="dim", highlight=False)


def _assumptions(measured: Calibration, profile: NetworkProfile, together: bool, varies: bool) -> tuple[str, ...]:
    where = (
        "all participants on this machine, as busy as it is now"
        if together
        else f"a host each, like this one but with three servers' work on it; latency {profile.delay * 1e3:g} ms, "
        f"{profile.bandwidth * 8 / 1e6:g} Mbit/s each way, nothing of which is hidden by computing"
    )
    ranges = (
        "upload: the more the longer ago the memory that its files take was in use, because this machine gets it "
        "from a host",
    )
    return (
        f"measured here on {measured.rows:,} rows and {measured.steps:,} steps, {measured.cores} cores, and on fewer",
        where,
        "as many ids at each client as rows are common; everybody is there from the beginning",
        "not counted: starting, reading files, meeting, waits for people and for what breaks",
        *(ranges if varies else ()),
    )
