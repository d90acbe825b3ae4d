"""What a run tells: a short table for people, the claim in words, the same facts as JSON, and files in the run's
folder."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import refmpc
from accel.files import write_text
from protocols.plan.gl_plan import LayerPlan
from protocols.plan.gl_shapes import JacobianShape
from protocols.plan.run_plan import Plan
from protocols.plan.scales import EMBEDDING_BITS
from protocols.run.calibration import Forecast, print_forecast
from protocols.run.curves import Timeline, draw_curves
from protocols.run.phase_costs import phase_costs, total_cost
from protocols.server.intake import shares_of_rows
from protocols.server.joint_noise import MOST_SAMPLES, SAMPLE_MEMORY, joint_block_rows
from protocols.server.open_training import durability
from protocols.server.verification import COMPARED_ROWS, PIECE_ROWS
from protocols.settings import RunOptions
from protocols.state.model_file import MODEL, ReleasedModel, write_model
from protocols.state.stored_rows import IN_MEMORY
from protocols.step.clip import NORM_CHUNK
from protocols.step.cost import step_cost
from refmpc import Ledger
from refmpc.core.ledger import Release
from vfl.dp.claim import NO_CLAIM
from vfl.hidden import activation
from vfl.losses import score_in_words, score_name

__all__ = [
    "NoiseChoice",
    "RunReport",
    "estimate",
    "estimate_as_facts",
    "print_estimate",
    "print_report",
    "size_in_words",
    "write_report",
]


@dataclass
class RunReport:
    """One finished run."""

    options: RunOptions
    plan: Plan
    directory: Path
    layers: list[np.ndarray]
    accuracy: float
    twin_accuracy: float | None
    ledgers: list[Ledger]
    seconds: float
    notes: tuple[str, ...]
    timeline: Timeline

    def phases(self) -> list[dict[str, Any]]:
        """Rounds, bytes of all servers and seconds waited, by phase."""
        rows = []
        for name, first in self.ledgers[0].phases.items():
            counters = [ledger.phases[name] for ledger in self.ledgers if name in ledger.phases]
            rows.append(
                {
                    "phase": name,
                    "rounds": first.rounds,
                    "bytes": sum(c.bytes_sent for c in counters),
                    "seconds": max(c.seconds for c in counters),
                }
            )
        return rows

    def to_dict(self) -> dict[str, Any]:
        """All facts of the run, plain."""
        training = self.plan.training
        return {
            **_begin(self.plan),
            "protocol": self.plan.protocol,
            "directory": str(self.directory),
            "score": score_name(self.plan.training.task),
            "test_accuracy": self.accuracy,
            "accuracy_is_of": "the released model",
            "twin_accuracy": self.twin_accuracy,
            "steps": self.plan.schedule.num_steps,
            "hidden": list(training.hidden),
            "norm_limit": self.plan.scales.norm_limit,
            "learning_rate_used": self.plan.scales.learning_rate_used(training.learning_rate),
            "privacy": self.plan.claim.headline(),
            "claim": json.loads(self.plan.claim.to_json()),
            "phases": self.phases(),
            "weights": training.weights,
            "average": training.average,
            "public_rows": self.on_public_rows(),
            "releases": _counted(self.ledgers[0].releases),
            "seconds": self.seconds,
            "notes": [*self.notes, self.plan.schedule.sentence],
        }

    def on_public_rows(self) -> dict[str, Any] | None:
        """The learning curve, and where the run ended because of it."""
        rows, curve = self.plan.public_rows, self.timeline.curve
        if rows is None or not curve:
            return None
        return {
            "rows": len(rows),
            "curve": [{"epoch": int(epoch), "accuracy": right, "loss": loss} for epoch, right, loss in curve],
            "patience": rows.patience,
            "best_epoch": self.timeline.best_epoch,
            "stopped_early": len(curve) < self.plan.schedule.epochs,
        }


def _begin(plan: Plan) -> dict[str, str]:
    """The first field of JSON about a run with a twin."""
    return {"no_claim": NO_CLAIM} if plan.claim.simulated else {}


def _counted(releases: Sequence[Release]) -> list[dict[str, Any]]:
    """Releases in their order; one that is made again and again, as in every step, is told once with how many times."""
    found = []
    for release, same in itertools.groupby(releases):
        times = len(list(same))
        found.append({**asdict(release), **({"times": times} if times > 1 else {})})
    return found


def write_report(report: RunReport) -> None:
    """Model, claim, ledger, facts and curves into the run's directory."""
    directory = report.directory
    task = report.plan.training.task
    scaled = (-1.0, 1.0) if task == "regression" else None  # targets as the run took them
    claim = report.plan.claim.paragraph()
    used = activation(report.plan.training.hidden, report.plan.training.weights)
    model = ReleasedModel(report.layers, claim=claim, task=task, target_range=scaled, activation=used)
    write_model(directory / MODEL, model)
    kept = durability(report.plan, report.options.checkpoint_every, report.options.durability == "power")
    write_text(directory / "claim.txt", f"{claim} {kept}".rstrip() + "\n")
    write_text(directory / "ledger.json", report.ledgers[0].to_json())
    if not draw_curves(report.plan, report.timeline, directory / "curves.png"):
        report.notes = (*report.notes, "no curves.png: matplotlib is not installed (pip install 'ppvfl[plots]')")
    write_text(directory / "report.json", json.dumps(report.to_dict(), indent=2))
    if report.options.plot:
        _plot(report, directory / "costs.png")


def size_in_words(count: float) -> str:
    """Bytes for people: 1.50 MB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"


def _print_begin(plan: Plan, console: Console) -> None:
    """The first line about a run with a twin."""
    if plan.claim.simulated:
        console.print(NO_CLAIM, style="bold")


def print_report(report: RunReport, console: Console) -> None:
    """The end of a run, for people or as JSON."""
    if report.options.json:
        print(json.dumps(report.to_dict(), indent=2))
        return
    plan = report.plan
    _print_begin(plan, console)
    view = Table(title=f"{plan.protocol}: {plan.schedule.num_steps} steps in real 3PC", show_header=False)
    view.add_column(style="bold")
    view.add_column()
    task = plan.training.task
    of_model = (
        f"{score_in_words(task, report.accuracy, named=False)} (of the released model, on rows that took no part)"
    )
    view.add_row(f"test {score_name(task)}", of_model)
    if report.twin_accuracy is not None:
        twin_noise = "given the servers' noise"
        if plan.shuffles_epochs:
            twin_noise = "its own order and noise"
        elif plan.secret_order:
            twin_noise += ", an order of its own: nobody knows that of the run"
        if plan.training.noise == "joint":
            twin_noise = "noise of its own: nobody knows that of the run"
        view.add_row("plaintext twin", f"{score_in_words(task, report.twin_accuracy, named=False)} ({twin_noise})")
    if (measured := report.on_public_rows()) is not None:
        first, last = measured["curve"][0], measured["curve"][-1]
        text = f"{first['accuracy']:.2%} after epoch 1, {last['accuracy']:.2%} after epoch {last['epoch']}"
        if plan.public_rows is not None and plan.public_rows.patience:
            text += f" of {plan.schedule.epochs}; the model is that of epoch {measured['best_epoch']}"
        view.add_row(f"{measured['rows']} public rows", text)
    if plan.training.average != "none":
        view.add_row("average", {"fifth": "of the last fifth of all steps"}.get(plan.training.average, "exponential"))
    if plan.training.hidden:
        sizes = " → ".join(map(str, (plan.width, *plan.training.hidden, plan.outputs)))
        limit = plan.scales.norm_limit
        beyond = "tanh" if limit is None else f"ReLU; samples with hidden norms above {limit:g} do not count"
        view.add_row("layers", f"{sizes}, {beyond}")
    view.add_row("privacy", plan.claim.headline())
    used = plan.scales.learning_rate_used(plan.training.learning_rate)
    view.add_row("learning rate used", f"{used:.6g} (asked for {plan.training.learning_rate:g})")
    view.add_row("time", f"{report.seconds:.1f} s with start-up")
    view.add_row("kept in", str(report.directory))
    console.print(view)
    costs = Table(title="cost by phase, all three servers")
    for column in ("phase", "rounds", "bytes", "time"):
        costs.add_column(column, justify="left" if column == "phase" else "right")
    for row in report.phases():
        costs.add_row(row["phase"], f"{row['rounds']:,}", size_in_words(row["bytes"]), f"{row['seconds']:.2f} s")
    console.print(costs)
    console.print(plan.claim.paragraph())
    for note in (*report.notes, plan.schedule.sentence):
        console.print(f"- {note}", style="dim")


# before a run ------------------------------------------------------------------------------------


INTERPRETER = 176 << 20  # bytes of a server that holds nothing yet, measured: Python, libraries, kernels of a training
_ROW_WORK = 1024  # bytes for each row whose norm is computed at a time, besides the row, measured
_COMPARED = 128  # bytes for each row and client that is compared at a time, measured


def estimate(plan: Plan, *, keeps_steps: bool = False) -> dict[str, float]:
    """Rounds, bytes and memory of a run: all phases between the servers (``protocols.run.phase_costs``), and what
    clients send.

    ``keeps_steps``: whether steps are kept on disk. Times are those of the network alone.
    """
    if isinstance(plan, LayerPlan):
        return _estimate_of_layers(plan)
    step, costs = step_cost(plan), phase_costs(plan, keeps_steps=keeps_steps)
    all_phases = total_cost(costs.values())
    checks = total_cost(costs[name] for name in ("verification", "norms") if name in costs)
    shuffles = plan.shuffles
    history = 8 * plan.parameters * (plan.factorisation.bands + 128)
    if plan.training.noise == "joint":
        block = joint_block_rows(plan.parameters)
        history += 8 * plan.parameters * (plan.factorisation.bands + 2 * block) + SAMPLE_MEMORY * MOST_SAMPLES
    return {
        "rounds_per_step": step.rounds,
        "bytes_per_step": step.bytes,
        "noise_bytes": costs["noise"].bytes if "noise" in costs else 0,
        "rounds": all_phases.rounds,
        "bytes": all_phases.bytes,
        "checks_rounds": checks.rounds,
        "checks_bytes": checks.bytes,
        "upload_bytes": 16 * plan.schedule.num_samples * (plan.width + plan.outputs),
        "shuffle_bytes": costs["shuffle"].bytes / shuffles if shuffles else 0,
        "shuffles": shuffles,
        "memory_per_server": INTERPRETER + _rows_in_memory(plan, shuffles) + history,
        "seconds_lan": all_phases.rounds * 1e-3 + all_phases.bytes / 3 / (1e9 / 8),
        "seconds_wan": all_phases.rounds * 20e-3 + all_phases.bytes / 3 / (200e6 / 8),
    }


def _estimate_of_layers(plan: LayerPlan) -> dict[str, float]:
    """Rounds, bytes and memory of a run, from a dry run of one step; uploads and layer gradients are per step here."""
    step = step_cost(plan)
    steps, batch = plan.schedule.num_steps, plan.schedule.batch_size
    upload, blocks, written_out = 0, 0, 0
    for shape in plan.shapes:
        upload += 16 * batch * shape.width
        if isinstance(shape, JacobianShape):
            upload += 16 * batch * shape.width * shape.parameters
            written_out += 16 * batch * shape.width * shape.parameters
        else:
            upload += 16 * (batch * (shape.stacked_rank + 1) + shape.width * shape.stacked_rank)
            blocks += 16 * plan.schedule.num_samples * sum(shape.block_widths) if shape.with_down else 0
    opening = refmpc.opening_bytes(plan.scales.truncated_bits) * sum(shape.parameters for shape in plan.shapes)
    history = 8 * plan.parameters * (plan.factorisation.bands + 128)
    labels = 16 * plan.schedule.num_samples * plan.classes
    bytes_per_step = step.bytes + upload + opening
    return {
        "rounds_per_step": step.rounds,
        "bytes_per_step": bytes_per_step,
        "rounds": step.rounds * steps,
        "bytes": (step.bytes + opening) * steps,
        "upload_bytes": upload * steps + blocks + labels,
        "shuffles": 0,
        "memory_per_server": INTERPRETER
        + written_out
        + blocks
        + 16 * plan.schedule.num_samples * plan.classes
        + history,
        "seconds_lan": step.rounds * steps * 1e-3 + bytes_per_step * steps / 3 / (1e9 / 8),
        "seconds_wan": step.rounds * steps * 20e-3 + bytes_per_step * steps / 3 / (200e6 / 8),
    }


def _rows_in_memory(plan: Plan, shuffles: int) -> int:
    """All rows if they are few or shuffled (twice then, while they are), and what takes more: the tests (rows of a
    piece, read and in one piece, of every row the square of each client and their sum, and what is compared at a time),
    or the norms (of every row its square and its norm, in blocks and as a whole)."""
    shares, rows, clients = shares_of_rows(plan), plan.schedule.num_rows, len(plan.client_names)
    held = shares * (2 if shuffles else 1) if shuffles or shares <= IN_MEMORY else 0
    piece = 2 * 16 * (plan.width + 1) * min(PIECE_ROWS, rows)
    tests = piece + clients * (_COMPARED * min(COMPARED_ROWS, rows) + 24 * rows) + 16 * rows
    norms = _ROW_WORK * min(NORM_CHUNK, rows) + 3 * 16 * rows
    return held + max(tests, norms)


@dataclass(frozen=True)
class NoiseChoice:
    """What one way of making noise would cost, and how much noise it is; ``refused``: why it cannot be had here."""

    name: str
    noise_multiplier: float = math.nan
    model_noise: float = math.nan  # deviation of a weight over the iterates (RMSE), per unit of learning rate
    rounds: float = math.nan
    bytes: float = math.nan
    seconds_lan: float = math.nan
    seconds_wan: float = math.nan
    refused: str = ""

    @classmethod
    def of(cls, plan: Plan, found: dict[str, float]) -> NoiseChoice:
        deviation = plan.noise.outsider_std * plan.factorisation.workload_error("mean") / plan.schedule.divisor
        costs = {key: found[key] for key in ("rounds", "bytes", "seconds_lan", "seconds_wan")}
        return cls(plan.training.noise, plan.noise.noise_multiplier, deviation, refused="", **costs)

    def as_dict(self) -> dict[str, Any]:
        if self.refused:
            return {"refused": self.refused}
        return {key: value for key, value in asdict(self).items() if key not in ("name", "refused")}


def _noise_table(choices: Sequence[NoiseChoice]) -> Table:
    view = Table(title="Who makes the noise (--noise): the same claim, less noise for more bytes")
    view.add_column("noise", style="bold")
    for heading in ("σ", "noise of a weight", "bytes", "rounds", "LAN", "WAN"):
        view.add_column(heading, justify="right", no_wrap=True)
    most = max((choice.model_noise for choice in choices if not choice.refused), default=math.nan)
    for choice in choices:
        if choice.refused:
            view.add_row(choice.name, "–", "–", "–", "–", "–", "–")
            continue
        view.add_row(
            choice.name,
            f"{choice.noise_multiplier:.4g}",
            f"{choice.model_noise:.3g} ({choice.model_noise / most:.0%})",
            size_in_words(choice.bytes),
            f"{choice.rounds:,.0f}",
            f"{choice.seconds_lan:,.0f} s",
            f"{choice.seconds_wan:,.0f} s",
        )
    view.caption = "network time alone; noise of a weight: RMSE over all steps, per unit of learning rate"
    return view


def estimate_as_facts(
    plan: Plan, found: dict[str, float], expected: Forecast | None = None, network: str = "loopback"
) -> dict[str, Any]:
    """What every door tells of an estimate as JSON."""
    content = {**_begin(plan), **found, "steps": plan.schedule.num_steps, "privacy": plan.claim.headline()}
    content["claim"] = json.loads(plan.claim.to_json())
    content["forecast"] = None if expected is None else {**asdict(expected), "network": network}
    return content


def print_estimate(
    plan: Plan,
    options: RunOptions,
    console: Console,
    found: dict[str, float] | None = None,
    other: NoiseChoice | None = None,
    expected: Forecast | None = None,
) -> None:
    """What the run would cost: ``found`` if the protocol estimates for itself; ``other``: with the other kind of noise;
    ``expected``: how long it would take."""
    found = found or estimate(plan)
    choices = [] if other is None else sorted((NoiseChoice.of(plan, found), other), key=lambda choice: choice.name)
    if options.json:
        content = estimate_as_facts(plan, found, expected, options.network)
        if choices:
            content["noise"] = {choice.name: choice.as_dict() for choice in choices}
        print(json.dumps(content, indent=2))
        return
    _print_begin(plan, console)
    view = Table(title=f"{plan.protocol}: what {plan.schedule.num_steps} steps would cost", show_header=False)
    view.add_column(style="bold")
    view.add_column()
    view.add_row("one step", f"{found['rounds_per_step']:.0f} rounds, {size_in_words(found['bytes_per_step'])} in all")
    view.add_row("all", f"{found['rounds']:,.0f} rounds, {size_in_words(found['bytes'])} between the servers")
    if found.get("checks_rounds"):
        checks = f"{found['checks_rounds']:,.0f} rounds, {size_in_words(found['checks_bytes'])}"
        view.add_row("tests of the rows, norms", f"{checks} of these")
    if found.get("noise_bytes"):
        view.add_row("joint noise", f"{size_in_words(found['noise_bytes'])} (of these)")
    view.add_row("upload", f"{size_in_words(found['upload_bytes'])} from the clients")
    if found.get("shuffles"):
        often = f"{found['shuffles']:.0f} times " if found["shuffles"] > 1 else ""
        view.add_row("shuffle", f"{often}{size_in_words(found['shuffle_bytes'])} (of these)")
    view.add_row("memory", f"about {size_in_words(found['memory_per_server'])} a server")
    view.add_row(
        "network time",
        f"LAN {found['seconds_lan']:,.0f} s, WAN {found['seconds_wan']:,.0f} s, computing on top"
        + (" (--calibrate measures that here)" if expected is None else ""),
    )
    limit = plan.scales.norm_limit
    hidden = "" if limit is None else f"; samples with hidden norms above {limit:g} do not count"
    view.add_row("privacy", plan.claim.headline())
    view.add_row("scales", f"embeddings {EMBEDDING_BITS} bits, weights {plan.scales.weight_bits} bits{hidden}")
    console.print(view)
    if expected is not None:
        print_forecast(expected, options.network, console)
    if choices:
        console.print(_noise_table(choices))
        for choice in choices:
            if choice.refused:
                console.print(f"- {choice.name} noise cannot be had here: {choice.refused}", style="dim")
    console.print(plan.claim.paragraph())


def _plot(report: RunReport, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in report.phases() if row["bytes"] or row["seconds"] > 0.01]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    names = [row["phase"] for row in rows]
    for axis, key, scale, label in ((axes[0], "bytes", 1e6, "MB, all servers"), (axes[1], "seconds", 1, "seconds")):
        axis.barh(names, [row[key] / scale for row in rows], color="#33658a")
        axis.set_xlabel(label)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{report.plan.protocol}: cost by phase")
    figure.savefig(file, dpi=120)
    plt.close(figure)
