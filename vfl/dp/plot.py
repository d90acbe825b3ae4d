"""Workload error against the number of bands, BSR and BISR, as a PNG (``python -m vfl.dp.plot``)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from accel.errors import PpvflError
from vfl.dp.factorisation import factorise
from vfl.dp.sensitivity import Participation, fixed_order
from vfl.dp.table import BATCH_SIZE, DATA_SETS, SETTINGS

__all__ = ["band_grid", "error_curve", "main"]

_COLOURS = {"bisr": "#0b6e99", "bsr": "#c0532b"}


def band_grid(min_separation: int, num_steps: int) -> list[int]:
    """Powers of two and the half-steps between them, b itself, and up to 4b: where the curves bend."""
    last = min(4 * min_separation, num_steps)
    grid = {1, min_separation, last}
    size = 1
    while size <= last:
        grid |= {size, min(last, size + size // 2)}
        size *= 2
    return sorted(grid)


def error_curve(
    kind: str,
    run: Participation,
    weight_decay: float,
    momentum: float,
    bands: list[int],
    progress: Callable[[], None] | None = None,
) -> list[float]:
    """Sensitivity times error of the last iterate, for each number of bands (quantised mechanisms)."""
    errors = []
    for p in bands:
        f = factorise(kind, run.num_steps, weight_decay=weight_decay, momentum=momentum, bands=p)
        errors.append(f.sensitivity(run.max_participations, run.min_separation) * f.workload_error())
        if progress is not None:
            progress()
    return errors


def main(arguments: list[str] | None = None) -> int:
    """Draw both settings side by side and print the best number of bands."""
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    parser = argparse.ArgumentParser(prog="python -m vfl.dp.plot", description=__doc__)
    parser.add_argument("--data", choices=list(DATA_SETS), default="CIFAR-10")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("workload-error.png"))
    parser.add_argument("--json", action="store_true", help="print the curves as JSON")
    options = parser.parse_args(arguments)
    console = Console(stderr=options.json)
    try:
        run = fixed_order(DATA_SETS[options.data][0], BATCH_SIZE, options.epochs)
    except PpvflError as error:
        console.print(f"[red]{error}")
        return 2
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator
    except ImportError:
        console.print("[red]matplotlib is missing: install the extra 'plots' (pip install 'ppvfl[plots]')")
        return 2
    bands = band_grid(run.min_separation, run.num_steps)
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots(1, len(SETTINGS))
    curves: dict[str, dict[str, list[float]]] = {}
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("factorisations", total=2 * len(SETTINGS) * len(bands))
        for axis, (setting, (alpha, beta)) in zip(axes, SETTINGS.items(), strict=True):
            curves[setting] = {}
            for kind in ("bisr", "bsr"):
                errors = error_curve(kind, run, alpha, beta, bands, lambda: bar.advance(task))
                curves[setting][kind] = errors
                axis.plot(bands, errors, marker="o", markersize=3, color=_COLOURS[kind], label=kind.upper())
                best = min(range(len(bands)), key=errors.__getitem__)
                axis.annotate(
                    f"best: {errors[best]:.1f} at p = {bands[best]}",
                    (bands[best], errors[best]),
                    textcoords="offset points",
                    xytext=(6, -22) if kind == "bisr" else (6, 44),
                    ha="right",
                    fontsize=8,
                    color=_COLOURS[kind],
                    arrowprops={"arrowstyle": "-", "color": _COLOURS[kind], "linewidth": 0.6},
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
                )
            axis.axvline(run.min_separation, color="grey", linewidth=0.8, linestyle=":")
            axis.text(run.min_separation, max(errors), " b", color="grey", va="top")
            axis.set(yscale="log", xlabel="bands p", title=f"setting {setting}: α = {alpha:g}, β = {beta:g}")
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0.6 * min(min(curve) for curve in curves[setting].values()))
            axis.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
            for direction, minor in ((axis.xaxis, False), (axis.yaxis, False), (axis.yaxis, True)):
                (direction.set_minor_formatter if minor else direction.set_major_formatter)("{x:.0f}")
            axis.grid(alpha=0.3)
            axis.legend()
    axes[0].set_ylabel("sensitivity × error of the last iterate")
    sizes = f"T = {run.num_steps}, b = {run.min_separation}"
    figure.suptitle(f"{options.data}, {options.epochs} epochs: {sizes} (lower is better)", fontsize=11)
    figure.savefig(options.output, dpi=110)
    if options.json:
        print(json.dumps({"bands": bands, "curves": curves, "output": str(options.output)}))
        return 0
    table = Table(title="Best number of bands (sensitivity × error of the last iterate)")
    for heading in ("setting", "kind", "best p", "error", "error at p = 256"):
        table.add_column(heading, justify="right")
    for setting, by_kind in curves.items():
        for kind, errors in by_kind.items():
            best = min(range(len(bands)), key=errors.__getitem__)
            at_default = f"{errors[bands.index(256)]:.1f}" if 256 in bands else "–"
            table.add_row(setting, kind, str(bands[best]), f"{errors[best]:.1f}", at_default)
    console.print(table)
    console.print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
