"""Errors of the secure mathematics over their domains, as a table and as plots: ``python -m bench.accuracy``.

Each function runs once in three threads on points all over its domain; the error of every point is drawn against the
bound that the docstring states. The truncations round at random, as they do in use: the tests force them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import refmpc
from refmpc.core.party import Party
from refmpc.mathematics.clipping import FACTOR_BITS, ClipConstants

__all__ = ["CURVES", "Curve", "Points", "main", "measure"]

BITS = 16
COUNT = 20_000
LOGITS = 2.0**10
STEP_CLIP_BITS = 22  # of the clip factor, in a step with q ≤ 512


@dataclass(frozen=True)
class Curve:
    """One function: points, the call, the true values, and the stated bound of the drawn error."""

    title: str
    points: Callable[[], np.ndarray]
    call: Callable[[refmpc.ArithmeticTensor], Coroutine[Any, Any, refmpc.ArithmeticTensor]]
    truth: Callable[[np.ndarray], np.ndarray]
    bound: Callable[[np.ndarray], np.ndarray]  # of the error, by x
    relative: bool
    along: Callable[[np.ndarray], np.ndarray] = lambda x: x  # what the horizontal axis shows
    axis: str = "x"
    logarithmic: bool = True
    never_above: bool = False
    sizes: bool = False  # draw sizes of errors on a logarithmic axis


@dataclass(frozen=True)
class Points:
    """What was measured: position on the axis, signed error (relative or absolute), stated bound."""

    along: np.ndarray
    error: np.ndarray
    bound: np.ndarray

    @property
    def worst(self) -> float:
        """The largest error in absolute value."""
        return float(np.abs(self.error).max())

    @property
    def used(self) -> float:
        """The largest share of the bound that an error takes."""
        return float((np.abs(self.error) / self.bound).max())


def _on_grid(values: np.ndarray) -> np.ndarray:
    return np.rint(values * 2.0**BITS) * 2.0**-BITS


def _powers(low: float, high: float) -> Callable[[], np.ndarray]:
    return lambda: _on_grid(np.exp2(np.linspace(low, high, COUNT)))


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _logits(classes: int) -> Callable[[], np.ndarray]:
    """Rows whose logits spread over ±2^-6 to ±2^10, a quarter of them tied at the top."""

    def points() -> np.ndarray:
        rng = np.random.default_rng(classes)
        rows = COUNT // classes
        x = rng.uniform(-1, 1, (rows, classes)) * np.exp2(np.linspace(-6, np.log2(LOGITS), rows))[:, np.newaxis]
        x[::4, : classes // 2] = x[::4].max(axis=-1, keepdims=True)
        return _on_grid(x)

    return points


def _spread(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.ptp(x, axis=-1, keepdims=True), x.shape)


def _softmax_curve(classes: int) -> Curve:
    return Curve(
        f"softmax, {classes} classes",
        _logits(classes),
        lambda x: refmpc.softmax(x),
        _softmax,
        lambda x: np.full(x.shape, 2.0**-14),
        relative=False,
        along=_spread,
        axis="largest difference of two logits in the row",
        sizes=True,
    )


async def _probabilities(x: refmpc.ArithmeticTensor) -> refmpc.ArithmeticTensor:
    return await refmpc.replicate(await refmpc.probabilities(x, 2 * LOGITS))


async def _clip_root(q: refmpc.ArithmeticTensor) -> refmpc.ArithmeticTensor:
    """As a step uses it: cut to 22 bits, one unit taken off."""
    factor = await refmpc.clip_root(q, 512.0)
    ones = refmpc.ArithmeticTensor.zeros(q.party, (len(q), 1), 0) + 1
    cut = await refmpc.scale_rows(factor, ones, FACTOR_BITS - STEP_CLIP_BITS, margin=1)
    return (await refmpc.replicate(cut)).reshape(-1)


CURVES = {
    "probabilities 10": Curve(
        "probabilities of a step, 10 classes",
        _logits(10),
        _probabilities,
        _softmax,
        lambda x: np.full(x.shape, 2.0**-15 + 1.65 * 9 * 2.0**-18),
        relative=False,
        along=_spread,
        axis="largest difference of two logits in the row",
        sizes=True,
    ),
    "clip_root": Curve(
        "clip_root of a step, q ≤ 512, at 22 bits",
        _powers(-12, 9),
        _clip_root,
        lambda q: np.maximum(q, 1.0) ** -0.5,
        lambda q: np.full(q.shape, ClipConstants(BITS, 512.0).largest_loss(STEP_CLIP_BITS)),
        relative=True,
        axis="q",
        never_above=True,
    ),
    "softmax 10": _softmax_curve(10),
    "softmax 64": _softmax_curve(64),
    "clip_factor": Curve(
        "clip_factor, q ≤ 2^20",
        _powers(-12, 20),
        lambda q: refmpc.clip_factor(q, 2.0**20),
        lambda q: np.maximum(q, 1.0) ** -0.5,
        lambda q: 2.0**-16.3 + 2.0**-23.4 * np.maximum(q, 1.0) ** 0.5,
        relative=True,
        axis="q",
        never_above=True,
    ),
    "reciprocal": Curve(
        "reciprocal on 2^-8..2^8",
        _powers(-8, 8),
        lambda x: refmpc.reciprocal(x, 2.0**-8, 2.0**8),
        lambda x: 1 / x,
        lambda x: 2.0**-16.4 + 2.0**-26 * x,
        relative=True,
    ),
    "inverse_sqrt": Curve(
        "inverse_sqrt on 2^-12..2^20",
        _powers(-12, 20),
        lambda x: refmpc.inverse_sqrt(x, 2.0**-12, 2.0**20),
        lambda x: x**-0.5,
        lambda x: 2.0**-16.9 + 2.0**-26 * x**0.5,
        relative=True,
    ),
    "exp": Curve(
        "exp, x ≤ 0, result at 30 bits",
        lambda: _on_grid(np.linspace(-28, 0, COUNT)),
        lambda x: refmpc.exp(x, fraction_bits=30),
        np.exp,
        lambda x: 2.0**-21 * np.exp(x) + 2.0**-28 + 2.0**-30,
        relative=False,
        logarithmic=False,
        sizes=True,
    ),
    "log": Curve(
        "log on 2^-12..2^20",
        _powers(-12, 20),
        lambda x: refmpc.log(x, 2.0**-12, 2.0**20),
        np.log,
        lambda x: np.full(x.shape, 2.0**-13.7),
        relative=False,
    ),
}


def measure(curve: Curve) -> Points:
    """Run one function on its points."""
    x = curve.points()
    words = refmpc.encode(x, BITS)

    def program(party: Party) -> np.ndarray:
        values = refmpc.decode(words, BITS) if party.id == 0 else None
        secret = party.complete(refmpc.input_from_party(party, 0, values, x.shape, BITS))
        return party.complete(refmpc.reveal(party.complete(curve.call(secret)), "errors"))

    outputs = refmpc.run(program, releases={"errors": "benchmark data, no secret"}).outputs
    truth = curve.truth(x)
    error = outputs[0] - truth
    if curve.relative:
        error = error / truth
    return Points(*(np.ravel(part) for part in (curve.along(x), error, curve.bound(x))))


# showing ------------------------------------------------------------------------------------------------


def _power(value: float) -> str:
    return f"2^{np.log2(value):.1f}" if value > 0 else "0"


def table(found: dict[str, Points]) -> Table:
    """Worst errors for people."""
    view = Table(title="errors over the whole domain, truncations rounding at random")
    for column in ("function", "points", "error", "worst", "stated bound", "of the bound", "largest above"):
        view.add_column(column, justify="left" if column in ("function", "error") else "right")
    for name, points in found.items():
        curve = CURVES[name]
        at = int(np.argmax(np.abs(points.error)))
        above = points.error.max()
        view.add_row(
            curve.title,
            f"{points.error.size:,}",
            "relative" if curve.relative else "absolute",
            _power(points.worst),
            _power(points.bound[at]),
            f"{points.used:.0%}",
            _power(above) if above > 0 else f"never ({above:.1e})",
        )
    return view


def draw(found: dict[str, Points], directory: Path) -> list[Path]:
    """One PNG for softmax and the clip factor, one with the other functions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = {"accuracy": [], "accuracy_functions": []}  # type: dict[str, list[str]]
    for name in found:
        groups["accuracy" if name in ("softmax 10", "softmax 64", "clip_factor") else "accuracy_functions"].append(name)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for stem, names in groups.items():
        if not names:
            continue
        columns = min(len(names), 3 if stem == "accuracy" else 2)
        rows = -(-len(names) // columns)
        figure, axes = pyplot.subplots(rows, columns, figsize=(5.4 * columns, 3.8 * rows), squeeze=False)
        for axis, name in zip(axes.ravel(), names, strict=False):
            _draw_one(axis, CURVES[name], found[name])
        for axis in axes.ravel()[len(names) :]:
            axis.set_visible(False)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.tight_layout(rect=(0, 0.28 / (3.8 * rows), 1, 1))
        figure.legend(handles, labels, loc="lower center", ncols=2, markerscale=6, frameon=False)
        paths.append(directory / f"{stem}.png")
        figure.savefig(paths[-1], dpi=130)
        pyplot.close(figure)
    return paths


def _draw_one(axis: Any, curve: Curve, points: Points) -> None:
    order = np.argsort(points.along, kind="stable")
    along, error, bound = points.along[order], points.error[order], points.bound[order]
    dots = {"linestyle": "", "marker": ".", "markersize": 1.8, "color": "#1f6fb2", "alpha": 0.45, "label": "measured"}
    line = {"color": "#c0392b", "linewidth": 1.4}
    kind = "relative" if curve.relative else "absolute"
    if curve.sizes:  # errors far below the bound, or bounds over many magnitudes: sizes on a logarithmic axis
        axis.plot(along, np.maximum(np.abs(error), bound.min() / 2**10), **dots)
        axis.plot(along, bound, label="stated bound", **line)
        axis.set_yscale("log", base=2)
        axis.set_ylabel(f"{kind} error, size")
    else:
        unit = 2.0 ** np.floor(np.log2(bound.min()))
        axis.axhline(0, color="#888888", linewidth=0.8)
        axis.plot(along, error / unit, **dots)
        axis.plot(along, -bound / unit, label="stated bound", **line)
        axis.plot(along, np.zeros_like(bound) if curve.never_above else bound / unit, **line)
        axis.set_ylabel(f"{kind} error, in units of $2^{{{int(np.log2(unit))}}}$")
    if curve.logarithmic:
        axis.set_xscale("log", base=2)
    worst = f"$2^{{{np.log2(points.worst):.1f}}}$"
    axis.set_title(f"{_mathematical(curve.title)}\nworst {worst}, {points.used:.0%} of the bound", fontsize=10)
    axis.set_xlabel(curve.axis)
    axis.grid(alpha=0.25)


def _mathematical(title: str) -> str:
    return re.sub(r"2\^(-?\d+)", r"$2^{\1}$", title)


def main(argv: list[str] | None = None) -> None:
    """Measure, draw and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/accuracy"), help="directory of the PNGs")
    parser.add_argument("--only", default="", help="run only functions whose name contains this text")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    curves = {name: curve for name, curve in CURVES.items() if options.only in name}
    if not curves:
        parser.error(f"--only {options.only!r} matches none of: {', '.join(CURVES)}")
    with np.errstate(over="ignore"):
        found = {name: measure(curve) for name, curve in curves.items()}
    paths = draw(found, options.out)
    if options.json:
        figures = {
            name: {"worst": p.worst, "of_bound": p.used, "largest_above": float(p.error.max()), "points": p.error.size}
            for name, p in found.items()
        }
        print(json.dumps({"functions": figures, "plots": [str(path) for path in paths]}, indent=2))
        return
    console = Console()
    console.print(table(found))
    for path in paths:
        console.print(f"drawn: {path}")


if __name__ == "__main__":
    main()
