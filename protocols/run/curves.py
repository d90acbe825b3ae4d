"""``curves.png`` of a run: what may be drawn without spending privacy.

Counts and rates of the transport, and the public schedule of noise and learning rate. Loss and accuracy along the way
on public rows only, where weights are open: on private ones the servers never see them, and opening one in every step
would be a release that the claim does not cover.
"""

from __future__ import annotations

import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from protocols.plan.run_plan import Plan
from protocols.server.open_training import PUBLIC_ROWS

__all__ = ["Timeline", "curve_title", "draw_curves"]


@dataclass
class Timeline:
    """Seconds, steps done and bytes sent by all servers, as reported while training; and (epoch, accuracy, loss) on
    public rows, with the epoch that was best."""

    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    curve: list[list[float]] = field(default_factory=list)
    best_epoch: int | None = None
    _sent: dict[Any, int] = field(default_factory=dict)

    def listen(self, peer: Any, message: dict[str, Any]) -> None:
        """Take a report of a server."""
        if message["phase"] == PUBLIC_ROWS and peer == 0:
            self.curve, self.best_epoch = message["curve"], message["best"]
        if message["phase"] != "training":
            return
        self._sent[peer] = message.get("bytes", 0)
        if peer == 0:
            self.seconds.append(time.monotonic())
            self.steps.append(message["done"])
            self.bytes.append(sum(self._sent.values()))

    def rates(self, windows: int = 60) -> tuple[np.ndarray, np.ndarray]:
        """(step, steps per second since the point before), over at most ``windows`` stretches of time."""
        if len(self.steps) < 2:
            return np.empty(0), np.empty(0)
        kept = np.unique(np.linspace(0, len(self.steps) - 1, windows + 1).astype(int))
        steps, seconds = np.array(self.steps)[kept], np.array(self.seconds)[kept]
        return steps[1:], np.diff(steps) / np.maximum(np.diff(seconds), 1e-9)


def curve_title(plan: Plan) -> str:
    """What the picture says of privacy."""
    said = "Neither loss nor accuracy is released on the way."
    if plan.opens_sums:
        said = "The weights of every step are open, neither loss nor accuracy on private rows is."
    if plan.public_rows is not None:
        said += f" Below: {len(plan.public_rows)} public rows."
    return f"{plan.protocol}, the whole run: {plan.claim.headline()}. {said}"


def draw_curves(plan: Plan, timeline: Timeline, file: Path) -> bool:
    """Draw ``file``; false if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure  # not pyplot, whose import takes longer than the picture
    except ImportError:
        return False
    steps = np.arange(plan.schedule.num_steps)
    noise = plan.noise.outsider_std * plan.factorisation.noise_norms()[: len(steps)] / plan.schedule.divisor
    used = [plan.scales.learning_rate_used(plan.learning_rate(step)) for step in range(len(steps))]
    rate_steps, rates = timeline.rates()
    measured = bool(timeline.curve)
    height = 6 + 3 * measured
    figure = Figure(figsize=(9, height))
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(2 + measured, 2, sharex=True)
    figure.subplots_adjust(
        left=0.07, right=0.98, bottom=0.48 / height, top=1 - 0.96 / height, wspace=0.2, hspace=0.2
    )  # inches for the title; a computed layout takes as long as all the drawing
    panels: list[tuple[Any, Any, Any, str]] = [
        (axes[0, 0], timeline.steps, np.array(timeline.bytes) / 1e6, "MB sent by the servers since the start"),
        (axes[0, 1], rate_steps, rates, "steps per second"),
        (axes[1, 0], steps + 1, noise, "std of the noise, one coordinate of the mean gradient"),
        (axes[1, 1], steps + 1, used, "learning rate"),
    ]
    if measured:
        epochs, accuracies, losses = np.array(timeline.curve).T
        ends = epochs * plan.schedule.num_batches
        panels += [
            (axes[2, 0], ends, accuracies, "accuracy on public rows"),
            (axes[2, 1], ends, losses, "loss on them"),
        ]
    for axis, across, up, title in panels:
        axis.plot(across, up, color="#33658a", linewidth=1.5, marker="." if len(across) < 30 else None)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_ylim(0, 1.1 * max(up, default=0) or 1)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[-1]:
        axis.set_xlim(0, plan.schedule.num_steps)
        axis.set_xlabel("step")
    figure.suptitle("\n".join(textwrap.wrap(curve_title(plan), 100)), fontsize=10)
    canvas.print_figure(file, dpi=120)
    return True
