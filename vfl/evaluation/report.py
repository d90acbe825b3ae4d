"""A report as one HTML page without any other file: figures, confusion, ROC, calibration, learning curve. Fits a
phone."""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.errors import InvalidArgument
from accel.files import write_text
from vfl.dp.claim import NO_CLAIM
from vfl.evaluation.metrics import Evaluation

__all__ = ["OUTSIDE", "LearningCurve", "report_html", "write_report"]

OUTSIDE = (
    "These figures are outside the privacy claim. They are computed without noise from the labels of {rows:,} rows "
    "and from "
    "predictions that depend on all clients' columns of these rows, so whoever sees this page learns something about "
    "these rows. About "
    "the rows of the training it tells no more than the model, which the claim covers, because these rows took no "
    "part in it."
)
_INK, _OURS, _FAINT = "#1f2328", "#0b6bcb", "#8b949e"
_COLOURS = (
    "#0b6bcb",
    "#c2410c",
    "#15803d",
    "#7c3aed",
    "#be185d",
    "#0e7490",
    "#a16207",
    "#4d7c0f",
    "#1e40af",
    "#9f1239",
)
_MOST_CURVES = 10


@dataclass(frozen=True)
class LearningCurve:
    """(epoch, accuracy) on public rows, how many these are, and the accuracy of their most frequent class."""

    points: tuple[tuple[int, float], ...]
    rows: int
    chance: float


def write_report(file: str | Path, evaluation: Evaluation, **options: Any) -> None:
    """``report_html`` into a file, mode 0600."""
    write_text(Path(file), report_html(evaluation, **options), private=True)


def report_html(
    evaluation: Evaluation,
    *,
    title: str = "Evaluation",
    claim: str = "",
    rows_in_words: str = "rows that took no part in the training",
    non_private: Mapping[str, float] | None = None,
    learning_curve: LearningCurve | None = None,
) -> str:
    """``non_private``: the same figures of a model that was trained without privacy, where somebody has one (on public
    or made-up rows). ``learning_curve``: how the run did on public rows. ``claim`` is the training's."""
    e = html.escape
    title = f"{NO_CLAIM} · {title}" if claim.startswith(NO_CLAIM) else title
    lead = f"{evaluation.rows:,} {rows_in_words}."
    if len(evaluation.classes) == 2:
        lead += f" AUC, average precision, F1 and the curves are those of the class {evaluation.classes[1]}."
    parts = [f"<p class=lead>{e(lead)}</p>", _figures(evaluation, non_private or {})]
    parts += [_section(name, svg, words) for name, svg, words in _pictures(evaluation, learning_curve)]
    if evaluation.confusion:
        parts.append(_confusion(evaluation))
    parts.append(f"<h2>What this page tells, and to whom</h2><p>{e(OUTSIDE.format(rows=evaluation.rows))}</p>")
    if claim:
        parts.append(f"<h2>The claim of the training</h2><p>{e(claim)}</p>")
    return _PAGE.format(title=e(title), style=_STYLE, body="\n".join(parts))


def _figures(evaluation: Evaluation, non_private: Mapping[str, float]) -> str:
    heads = ["", "this model", "best constant answer", *(["without privacy"] if non_private else [])]
    lines = []
    for name, value in evaluation.metrics.items():
        cells = [_number(value), _number(evaluation.chance.get(name))]
        cells += [_number(non_private.get(name))] if non_private else []
        lines.append(f"<tr><th>{html.escape(name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return "not defined" if math.isnan(value) else f"{value:.4g}" if abs(value) >= 10 else f"{value:.3f}"


def _confusion(evaluation: Evaluation) -> str:
    e, classes = html.escape, evaluation.classes
    head = "".join(f"<th>{e(name)}</th>" for name in classes)
    lines = []
    for name, row in zip(classes, evaluation.confusion, strict=True):
        total = max(1, sum(row))
        cells = "".join(f'<td style="background:rgb(11 107 203/{0.6 * n / total:.2f})">{n:,}</td>' for n in row)
        lines.append(f"<tr><th>{e(name)}</th>{cells}</tr>")
    words = "Rows: the true class. Columns: the class with the largest predicted probability."
    table = f"<table class=confusion><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f"<h2>Confusion</h2><p>{words}</p><div class=scroll>{table}</div>"


def _section(name: str, svg: str, words: str) -> str:
    return f"<h2>{html.escape(name)}</h2><p>{html.escape(words)}</p><figure>{svg}</figure>"


def _pictures(evaluation: Evaluation, learning_curve: LearningCurve | None) -> list[tuple[str, str, str]]:
    """(title, SVG, words below) of everything that there is to draw."""
    found = []
    if evaluation.roc:
        words = "True positives against false positives at every threshold; the dashed line is chance."
        found.append(("ROC", _draw(lambda axes: _roc(axes, evaluation)), words))
    if evaluation.calibration:
        words = (
            "Of the rows with a predicted probability of 0.7, about 70 % should be of the class: the dashed line. "
            "Larger dots, more rows."
        )
        found.append(("Calibration", _draw(lambda axes: _calibration(axes, evaluation)), words))
    if evaluation.pairs[0]:
        words = "Each dot is a row; the dashed line is a perfect prediction."
        found.append(("Predictions", _draw(lambda axes: _scatter(axes, evaluation)), words))
    if learning_curve is not None and learning_curve.points:
        words = (
            f"Accuracy on {learning_curve.rows:,} public rows after each epoch, which costs no privacy; the dashed "
            f"line is the best "
            "constant answer on them."
        )
        found.append(("Learning curve on public rows", _draw(lambda axes: _learning(axes, learning_curve)), words))
    return found


def _roc(axes: Any, evaluation: Evaluation) -> None:
    axes.plot([0, 1], [0, 1], "--", color=_FAINT, linewidth=1)
    for colour, (name, false, true) in zip(_COLOURS, evaluation.roc[:_MOST_CURVES], strict=False):
        axes.plot(false, true, color=colour, label=name, linewidth=2)
    _square(axes, "false positives", "true positives", len(evaluation.roc))


def _calibration(axes: Any, evaluation: Evaluation) -> None:
    axes.plot([0, 1], [0, 1], "--", color=_FAINT, linewidth=1)
    for colour, (name, predicted, observed, rows) in zip(_COLOURS, evaluation.calibration[:_MOST_CURVES], strict=False):
        sizes = [20 + 180 * count / max(rows) for count in rows]
        axes.plot(predicted, observed, color=colour, linewidth=1.5, label=name)
        axes.scatter(predicted, observed, s=sizes, color=colour, alpha=0.6)
    _square(axes, "predicted probability", "observed share", len(evaluation.calibration))


def _square(axes: Any, x: str, y: str, curves: int) -> None:
    axes.set(xlabel=x, ylabel=y, xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    if curves > 1:
        axes.legend(fontsize=8, frameon=False)


def _scatter(axes: Any, evaluation: Evaluation) -> None:
    truth, guess = evaluation.pairs
    shown = slice(None, None, max(1, len(truth) // 2000))  # a page of some hundred kB
    ends = (min(truth), max(truth))
    axes.plot(ends, ends, "--", color=_FAINT, linewidth=1)
    axes.scatter(truth[shown], guess[shown], s=8, color=_OURS, alpha=0.4)
    axes.set(xlabel="true value", ylabel="prediction")


def _learning(axes: Any, curve: LearningCurve) -> None:
    epochs, scores = zip(*curve.points, strict=True)
    axes.axhline(curve.chance, linestyle="--", color=_FAINT, linewidth=1)
    axes.plot(epochs, scores, color=_OURS, linewidth=2, marker="." if len(epochs) < 40 else None)
    axes.set(xlabel="epoch", ylabel="accuracy", ylim=(min(curve.chance, *scores) - 0.05, 1.02))
    axes.xaxis.get_major_locator().set_params(integer=True)


def _draw(paint: Any) -> str:
    """An SVG picture that takes the width it is given."""
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidArgument("the report's pictures need matplotlib: pip install 'ppvfl[plots]'") from None
    figure = Figure(figsize=(4.6, 4.2), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=9)
    paint(axes)
    stream = io.BytesIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    svg = stream.getvalue().decode()
    svg = svg[svg.index("<svg") :]
    head, end, body = svg.partition(">")
    return re.sub(r' (width|height)="[^"]*"', "", head) + end + body


_STYLE = """
:root { color-scheme: light; --ink: #1f2328; --faint: #59636e; --line: #d8dee4; --shade: #f6f8fa; }
body { font: 16px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; color: var(--ink); background: #fff;
  max-width: 44rem; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .3rem; border-bottom: 1px solid var(--line); }
p { margin: .5rem 0; overflow-wrap: anywhere; } .lead { color: var(--faint); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child { text-align: left; } thead th { color: var(--faint); font-weight: 500; font-size: .9rem; }
figure { margin: .5rem 0; } figure svg { width: 100%; max-width: 30rem; height: auto; display: block; }
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><h1>{title}</h1>
{body}
</body></html>
"""
