"""The report's pictures, as SVG text to stand inside a page."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.evaluation.cells import JOINT, SECRET
from bench.evaluation.cost import CostRow
from bench.evaluation.paper_tables import METHOD_NAMES
from bench.evaluation.presets import PRESETS
from bench.evaluation.tables import MARK, NOT_PROVEN, Line, Results, Summary, summary
from vfl.twins import plan_matrix_factorisation, plan_shuffled

__all__ = ["plot_accuracy", "plot_costs", "plot_noise", "plot_roc"]

_COLOURS = {"published": "#8a8a8a", "paper": "#2b6cb0", "ours": "#c05621"}
_LABELS = {"published": "paper", "paper": "ours, the paper's settings", "ours": "ours, our settings"}


def _figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "report"}
    )
    return plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False, **options)


def _svg(figure: Any) -> str:
    import matplotlib.pyplot as plt

    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = stream.getvalue()
    return text[text.index("<svg") :]


def plot_accuracy(lines: Sequence[Line], results: Results, classes: int) -> str | None:
    """Accuracy against ε of the first data set: a panel for every method, the paper's curve beside ours, all on one
    scale, with the accuracy of guessing and of the same layer without privacy."""
    first = [l for l in lines if (l.data, l.pretraining) == (lines[0].data, lines[0].pretraining)]
    panels: dict[tuple[str, int], list[Line]] = {}
    for line in (line for line in first if line.method != "plain"):
        panels.setdefault((line.method, line.setting), []).append(line)
    shown = [k for k, group in panels.items() if any(_points(l, results) for l in group if l.source != "published")]
    if not shown:
        return None
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    figure, axes = _figure(2.5 * columns, 2.4 * rows + 0.6, rows, columns, sharex=True, sharey=True)
    handles: dict[str, Any] = {}
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, (method, setting) in zip(axes.flat, shown, strict=False):
        for line in panels[method, setting]:
            _draw(axis, line, results, handles)
        for label, height, style in _references(first, results, classes):
            handles.setdefault(label, axis.axhline(height, ls=style, color="#444444", lw=0.9))
        which = f", Setting {setting}" if method in ("g_bmf", "gl_bmf") else ""
        axis.set_title(f"{METHOD_NAMES[method]}{which}{_mark(method)}", fontsize=8.5)
        ticks = sorted({e.epsilon for l in panels[method, setting] for e in l.entries if e.epsilon is not None})
        axis.set(xscale="log", ylim=(0, 100), xlabel="ε", ylabel="test accuracy in %")
        axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axis.set_yticks(range(0, 101, 20))
        axis.minorticks_off()
        axis.tick_params(labelbottom=True, labelleft=True)  # shared axes would leave all but the outer ones bare
        axis.grid(alpha=0.25)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)), frameon=False
    )
    return _svg(figure)


def _points(line: Line, results: Results) -> list[tuple[float, float, float]]:
    """(ε, mean, deviation) of a line, as far as there are figures."""
    out = []
    for entry in line.entries:
        found = Summary(entry.paper, 0.0, 1) if entry.paper is not None else summary(entry, results)
        if found is not None and entry.epsilon is not None:
            out.append((entry.epsilon, found.mean, found.deviation))
    return out


# Markers and dashes of what a panel may hold besides the preset's own line.
_STYLES = {"estimated": "s:", SECRET: "^--", JOINT: "v-.", f"{SECRET}, {JOINT}": "D-"}


def _draw(axis: Any, line: Line, results: Results, handles: dict[str, Any]) -> None:
    points = _points(line, results)
    if not points:
        return
    x, y, spread = zip(*points, strict=True)
    style = "x--" if line.source == "published" else _STYLES.get(line.variant, "o-")
    drawn = axis.errorbar(x, y, spread, fmt=style, color=_COLOURS[line.source], ms=3.5, lw=1.3, capsize=2)
    variant = f", {line.variant}" if line.variant not in ("", "released") and line.source != "published" else ""
    handles.setdefault(_LABELS[line.source] + variant, drawn)


def _references(lines: Sequence[Line], results: Results, classes: int) -> list[tuple[str, float, str]]:
    """Horizontal lines: (label, height, dashes)."""
    out = [("guessing", 100 / classes, ":")]
    for line in lines:
        if (
            line.method == "plain"
            and line.source == "ours"
            and (found := summary(line.entries[0], results)) is not None
        ):
            out.append(("no privacy (Plain), our settings", found.mean, "--"))
    return out


def _mark(method: str) -> str:
    return MARK if method in NOT_PROVEN else ""


def plot_noise(num_samples: int, epsilons: Sequence[float], epochs: int = 20) -> str:
    """How much of the largest possible signal is noise, in one coordinate of the sum of all clipped gradients."""
    figure, axes = _figure(4.2, 2.7)
    axis = axes[0, 0]
    curves = [
        ("paper", "g_shuff", 1),
        ("paper", "g_bmf", 1),
        ("paper", "g_bmf", 2),
        ("ours", "g_bmf", 1),
    ]
    for preset, method, setting in curves:
        relative = []
        for epsilon in epsilons:
            config = PRESETS[preset].config(setting, epochs=epochs, epsilon=epsilon)
            schedule = config.steps(num_samples)
            plan = (plan_shuffled if method == "g_shuff" else plan_matrix_factorisation)(config, schedule)
            # the last iterate's noise at η = B = 1; momentum β multiplies signal and noise by up to 1/(1 − β)
            noise = plan.std * plan.factorisation.workload_error("final") * (1 - config.momentum)
            relative.append(noise / (config.clip_norm * schedule.num_samples * epochs))
        style = {"g_shuff": "s--", "g_bmf": "o-" if setting == 1 else "^-"}[method]
        name = METHOD_NAMES[method] + (f" {setting}" if method == "g_bmf" else _mark(method))
        axis.plot(
            epsilons,
            relative,
            style,
            ms=3.5,
            lw=1.3,
            color=_COLOURS[preset],
            label=f"{name}: {_LABELS[preset].replace('ours, ', '')}",
        )
    axis.set(xscale="log", yscale="log", xlabel="ε", ylabel="noise : largest signal")
    axis.set_xticks(epsilons, [f"{e:g}" for e in epsilons])
    low, high = axis.get_ylim()
    ticks = [t for k in range(-12, 3) for d in (1, 2, 5) if low <= (t := d * 10.0**k) <= high]
    axis.set_yticks(ticks, [f"{t:.0e}".replace("e-0", "e-") for t in ticks])  # one power of ten would say little
    axis.minorticks_off()
    axis.grid(alpha=0.25)
    axis.legend(fontsize=6.5, frameon=False)
    return _svg(figure)


def plot_costs(rows: Sequence[CostRow]) -> str | None:
    """Seconds and megabytes of one batch, the paper's bar beside ours, on logarithmic scales."""
    rows = [
        row
        for row in rows
        if row.best is not None and row.data == rows[0].data and row.pretraining == rows[0].pretraining
    ]
    if not rows:
        return None
    figure, axes = _figure(8.6, 2.7, 1, 2)
    place = np.arange(len(rows))
    for axis, what in zip(axes[0], ("seconds", "megabytes"), strict=True):
        for shift, name, source in ((-0.2, "published", "paper"), (0.2, "ours", "best")):
            values = [getattr(getattr(row, source), what) for row in rows]
            bars = axis.bar(
                place + shift, values, 0.38, color=_COLOURS[name], label="paper" if source == "paper" else "ours"
            )
            axis.bar_label(bars, [f"{v:,.0f}" if v >= 100 else f"{v:.3g}" for v in values], fontsize=6.5, padding=1)
        axis.set_yscale("log")
        axis.set_xticks(place, [f"{row.protocol}\n{row.network.upper()}" for row in rows])
        axis.set_title(f"{what} a batch")
        axis.margins(y=0.15)
    axes[0, 0].legend(frameon=False)
    return _svg(figure)


def plot_roc(lines: Sequence[Line], results: Results) -> str | None:
    """ROC curves of P-Attack, one for every method, first seed that was run."""
    curves = []
    for line in lines:
        for entry in line.entries:
            found = next((r for c in entry.cells if isinstance(r := results.get(c), dict)), None)
            if found is not None:
                curves.append((line, found))
    if not curves:
        return None
    figure, axes = _figure(4.2, 3.4)
    axis = axes[0, 0]
    methods = list(dict.fromkeys((l.method, l.setting, l.variant) for l, _ in curves))
    for line, found in curves:
        x, y = zip(*found["roc"], strict=True)
        number = methods.index((line.method, line.setting, line.variant))
        label = re.sub(r"Setting ", "S", line.label) + f", {PRESETS[line.source].title}: {found['auc']:.3f}"
        axis.plot(x, y, "-" if line.source == "paper" else "--", lw=1.1, color=f"C{number}", label=label)
    axis.plot([0, 1], [0, 1], ":", color="grey", label="guessing: 0.5")
    axis.set(xlabel="false positive rate", ylabel="true positive rate", xlim=(0, 1), ylim=(0, 1))
    axis.legend(fontsize=6, frameon=False, title="AUC", title_fontsize=7)
    axis.grid(alpha=0.25)
    return _svg(figure)
