"""The paper's settings in numbers: sensitivities, noise norms, workload errors, σ; a command."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass

from accel.errors import PpvflError
from accel.validate import require
from vfl.dp.calibration import any_order_sigma, poisson_sigma
from vfl.dp.factorisation import workload_factorisation
from vfl.dp.mechanism import calibrate_matrix_factorisation
from vfl.dp.sensitivity import Participation, fixed_order
from vfl.dp.slack import FixedPointSlack

__all__ = [
    "DATA_SETS",
    "EPSILONS",
    "SETTINGS",
    "MechanismRow",
    "ShuffleRow",
    "main",
    "mechanism_row",
    "shuffle_row",
]

DATA_SETS = {"CIFAR-10": (50_000, 10), "EMNIST letters": (124_800, 26)}  # rows, classes
SETTINGS = {"1": (1.0, 0.0), "2": (1.0, 0.9)}  # α, β
EPSILONS = (1.0, 2.0, 5.0, 8.0, 10.0)
BATCH_SIZE, CLIP_NORM, DELTA = 128, 1.2, 1e-5
_KINDS = ("bisr", "bsr", "identity")  # optimising for 100,000 steps would take minutes


@dataclass(frozen=True)
class MechanismRow:
    """One mechanism in one setting; ``server_std`` per ε is what each server samples, slack included."""

    data: str
    epochs: int
    setting: str
    kind: str
    bands: int
    num_steps: int
    min_separation: int
    sensitivity: float
    exact: bool
    noise_norm: float
    final_error: float
    error_product: float
    slack_percent: float
    noise_multiplier: dict[float, float]
    server_std: dict[float, float]


@dataclass(frozen=True)
class ShuffleRow:
    """G-Shuff: noise multiplier per step, as the paper accounts and by the proven any-order bound."""

    data: str
    epochs: int
    paper: dict[float, float]
    proven: dict[float, float]


def mechanism_row(
    data: str, epochs: int, setting: str, kind: str, *, width: int = 2000, row_bound: float = 64.0
) -> MechanismRow:
    """Everything about one mechanism, with the bands that a run would choose."""
    run, classes = _run(data, epochs)
    require(setting in SETTINGS, "setting", setting, f"one of {', '.join(SETTINGS)}")
    alpha, beta = SETTINGS[setting]
    factorisation = workload_factorisation(kind, run.num_steps, run.min_separation, weight_decay=alpha, momentum=beta)
    report = factorisation.sensitivity_report(run.max_participations, run.min_separation)
    slack = FixedPointSlack(row_bound, classes, width, run.num_steps, batch_size=BATCH_SIZE)
    noise = {
        epsilon: calibrate_matrix_factorisation(
            epsilon, DELTA, CLIP_NORM, factorisation, run.max_participations, run.min_separation, slack
        )
        for epsilon in EPSILONS
    }
    final = factorisation.workload_error("final")
    return MechanismRow(
        data,
        epochs,
        setting,
        kind,
        factorisation.bands,
        run.num_steps,
        run.min_separation,
        report.value,
        report.exact,
        float(factorisation.noise_norms()[-1]),
        final,
        final * report.value,
        100 * (noise[EPSILONS[0]].sensitivity / (report.value * CLIP_NORM) - 1),
        {epsilon: n.noise_multiplier for epsilon, n in noise.items()},
        {epsilon: n.server_std for epsilon, n in noise.items()},
    )


def shuffle_row(data: str, epochs: int) -> ShuffleRow:
    """Noise multipliers of G-Shuff for all ε."""
    run, _ = _run(data, epochs)
    rate = BATCH_SIZE / run.num_samples
    return ShuffleRow(
        data,
        epochs,
        {epsilon: poisson_sigma(epsilon, DELTA, rate, run.num_steps) for epsilon in EPSILONS},
        {epsilon: any_order_sigma(epsilon, DELTA, epochs) for epsilon in EPSILONS},
    )


def _run(data: str, epochs: int) -> tuple[Participation, int]:
    require(data in DATA_SETS, "data", data, f"one of {', '.join(DATA_SETS)}")
    rows, classes = DATA_SETS[data]
    return fixed_order(rows, BATCH_SIZE, epochs), classes


def main(arguments: list[str] | None = None) -> int:
    """Print the tables (or JSON) for CIFAR-10 and EMNIST, 20 and 100 epochs, settings 1 and 2."""
    from rich import box
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    parser = argparse.ArgumentParser(prog="python -m vfl.dp.table", description=__doc__)
    parser.add_argument("--data", nargs="+", choices=list(DATA_SETS), default=list(DATA_SETS))
    parser.add_argument("--epochs", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--width", type=int, default=2000, help="embedding width, for the fixed-point slack")
    parser.add_argument("--row-bound", type=float, default=64.0, help="norm bound of a row, for the slack")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args(arguments)
    console = Console(stderr=options.json)
    cases = [
        (data, epochs, setting, kind)
        for data in options.data
        for epochs in options.epochs
        for setting in SETTINGS
        for kind in _KINDS
    ]
    try:
        rows = [
            mechanism_row(*case, width=options.width, row_bound=options.row_bound)
            for case in track(cases, "factorisations", console=console, transient=True)
        ]
        pairs = [(data, epochs) for data in options.data for epochs in options.epochs]
        shuffles = [shuffle_row(*pair) for pair in track(pairs, "G-Shuff", console=console, transient=True)]
    except PpvflError as error:
        console.print(f"[red]{error}")
        return 2
    if options.json:
        content = {
            "delta": DELTA,
            "clip_norm": CLIP_NORM,
            "batch_size": BATCH_SIZE,
            "mechanisms": [asdict(r) for r in rows],
            "shuffled": [asdict(r) for r in shuffles],
        }
        print(json.dumps(content))
        return 0
    console.print(f"B = {BATCH_SIZE}, clip norm γ = {CLIP_NORM}, δ = {DELTA:g}; setting 1: β = 0, setting 2: β = 0.9")
    console.print("sens: per unit clip norm (≤: upper bound); norm: ‖Ω⁻¹[T,:]‖; error: last iterate;")
    console.print("for each ε: the std of z that each server samples, σ·Δ/√2, slack included")
    sigmas = [f"{sigma:.3f}" for sigma in rows[0].noise_multiplier.values()]
    for group in range(0, len(rows), len(_KINDS)):
        first = rows[group]
        title = f"{first.data}, {first.epochs} epochs, setting {first.setting}"
        console.print(f"\n[bold]{title}[/]: T = {first.num_steps}, b = {first.min_separation}")
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        headings = ("kind", "p", "sens", "norm", "error", "sens·err", *(f"ε={e:g}" for e in EPSILONS))
        for heading, width in zip(headings, (8, 3, 6, 5, 7, 8, *[6] * len(EPSILONS)), strict=True):
            table.add_column(heading, justify="left" if heading == "kind" else "right", min_width=width)
        for r in rows[group : group + len(_KINDS)]:
            table.add_row(
                r.kind,
                str(r.bands),
                f"{'' if r.exact else '≤'}{r.sensitivity:.3f}",
                f"{r.noise_norm:.3f}",
                f"{r.final_error:.2f}",
                f"{r.error_product:.1f}",
                *(f"{std:.2f}" for std in r.server_std.values()),
            )
        table.add_row("σ", "", "", "", "", "", *sigmas, style="dim")
        console.print(table)
    console.print(f"\nfixed point adds at most {max(r.slack_percent for r in rows):.3f} % to the sensitivity\n")
    table = Table(title="G-Shuff: noise multiplier per step", box=box.SIMPLE_HEAD)
    for heading in ("data", "epochs", "accounting", *(f"ε={epsilon:g}" for epsilon in EPSILONS)):
        table.add_column(heading, justify="right" if heading[0] == "ε" else "left", no_wrap=True)
    for row in shuffles:
        for name, sigmas_of in (("paper", row.paper), ("proven", row.proven)):
            cells = [f"{sigma:.3f}" for sigma in sigmas_of.values()]
            table.add_row(row.data.split()[0], str(row.epochs), name, *cells)
    console.print(table)
    console.print("paper: as if batches were Poisson samples, no proven bound; proven: holds for any order")
    return 0


if __name__ == "__main__":
    sys.exit(main())
