"""Membership inference on the plaintext twins: the population attack, and LiRA as the stronger one.

P-Attack (Ye et al., CCS 2022): one threshold per false-positive rate, the quantile of the target model's
loss on population data; a record is called a member when its loss is below. Weak and average-case, needs no
shadow models; this is what the paper reports.
LiRA (Carlini et al., S&P 2022): shadow models trained on random halves give, per record, the distribution of
its logit-scaled confidence with and without it; the score is the likelihood ratio.

``python -m vfl.attack`` runs both on digits against Plain, G-Shuff and G-BMF.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from accel.validate import require, require_integer
from vfl.federation import Federation
from vfl.gradients import GlobalModel, softmax
from vfl.progress import progress_bar
from vfl.training import TrainingConfig
from vfl.twins import train_g_bmf, train_g_shuff, train_plain

__all__ = [
    "METHODS",
    "AttackReport",
    "attack_twin",
    "confidences",
    "confidences_of",
    "lira_scores",
    "main",
    "population_attack",
    "roc_report",
]

Floats = npt.NDArray[np.floating]
Train = Callable[[Federation, TrainingConfig], GlobalModel]


@dataclass(frozen=True)
class AttackReport:
    """AUC, TPR at low FPR, and the ROC curve (both axes ascending)."""

    attack: str
    auc: float
    tpr_at_fpr_0_1_percent: float
    tpr_at_fpr_1_percent: float
    members: int
    non_members: int
    false_positive_rates: Floats
    true_positive_rates: Floats

    def summary(self) -> dict[str, float | str | int]:
        return {
            "attack": self.attack,
            "auc": self.auc,
            "tpr_at_fpr_0.1%": self.tpr_at_fpr_0_1_percent,
            "tpr_at_fpr_1%": self.tpr_at_fpr_1_percent,
            "members": self.members,
            "non_members": self.non_members,
        }


def roc_report(attack: str, member_scores: Floats, other_scores: Floats) -> AttackReport:
    """ROC of a score that is larger for members; ties count half in the AUC (Mann-Whitney).

    TPR at an FPR is the best that keeps the *measured* FPR at or below it; with fewer than 1,000
    non-members 0.1 % means no false positive at all.
    """
    require(
        len(member_scores) > 0 and len(other_scores) > 0,
        "scores",
        "none",
        "at least one member and one other",
    )
    members, others = np.sort(member_scores), np.sort(other_scores)
    thresholds = np.unique(np.concatenate([members, others]))[::-1]
    tpr = 1.0 - np.searchsorted(members, thresholds, side="left") / len(members)
    fpr = 1.0 - np.searchsorted(others, thresholds, side="left") / len(others)
    tpr, fpr = np.concatenate([[0.0], tpr]), np.concatenate([[0.0], fpr])
    auc = float(np.sum(np.diff(fpr) * (tpr[1:] + tpr[:-1]) / 2))

    def at(rate: float) -> float:
        return float(tpr[fpr <= rate + 1e-12].max())

    return AttackReport(attack, auc, at(0.001), at(0.01), len(members), len(others), fpr, tpr)


def population_attack(member_losses: Floats, other_losses: Floats, population_losses: Floats) -> AttackReport:
    """P-Attack: thresholds are quantiles of the population's losses on the target model.

    The score of a record is minus the share of the population with a smaller loss, which is the same family
    of tests; losses below the whole population keep their order.
    """
    require(len(population_losses) > 0, "population_losses", 0, "at least one loss")
    population = np.sort(population_losses)

    def scores(losses: Floats) -> Floats:
        rank = np.searchsorted(population, losses, side="left").astype(np.float64)
        below = losses < population[0]
        # Linear interpolation of the threshold beyond the smallest population loss (down to loss 0).
        rank[below] = losses[below] / max(float(population[0]), 1e-300) - 1.0
        return -rank

    return roc_report("P-Attack", scores(member_losses), scores(other_losses))


def lira_scores(
    target: Floats, shadows: Floats, included: npt.NDArray[np.bool_], *, shared_variance: bool = True
) -> Floats:
    """Log-likelihood ratios log N(φ; in) − log N(φ; out) for every record.

    ``target`` (n,) and ``shadows`` (models, n) hold logit-scaled confidences, ``included`` (models, n) who
    was trained on. ``shared_variance`` pools the variances over records, the choice for few shadow models.
    """
    require(shadows.shape == included.shape, "included", included.shape, f"of shape {shadows.shape}")
    counts_in, counts_out = included.sum(0), (~included).sum(0)
    require(
        bool((counts_in >= 2).all() and (counts_out >= 2).all()),
        "shadow models",
        len(shadows),
        "enough that every record is in at least two and out of at least two",
        "train more shadow models",
    )
    with_it, without = included, ~included
    mean_in = (shadows * with_it).sum(0) / counts_in
    mean_out = (shadows * without).sum(0) / counts_out
    var_in = (((shadows - mean_in) ** 2) * with_it).sum(0) / (counts_in - 1)
    var_out = (((shadows - mean_out) ** 2) * without).sum(0) / (counts_out - 1)
    if shared_variance:
        var_in, var_out = np.full_like(var_in, var_in.mean()), np.full_like(var_out, var_out.mean())
    var_in, var_out = np.maximum(var_in, 1e-12), np.maximum(var_out, 1e-12)
    return (
        -((target - mean_in) ** 2) / (2 * var_in)
        + (target - mean_out) ** 2 / (2 * var_out)
        - 0.5 * np.log(var_in / var_out)
    )


def confidences(model: GlobalModel, rows: Floats, labels: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    """(losses, logit-scaled confidences) of the true class."""
    return confidences_of(model.logits(rows), labels)


def confidences_of(logits: Floats, labels: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    """The same from the logits of any model."""
    logits = logits.astype(np.float64)
    at = (np.arange(len(labels)), labels)
    probabilities = softmax(logits)
    losses = -np.log(np.maximum(probabilities[at], 1e-300))
    others = logits.copy()
    others[at] = -np.inf
    highest = others.max(axis=1)
    rest = highest + np.log(np.exp(others - highest[:, None]).sum(axis=1))
    return losses, logits[at] - rest  # log p/(1−p), without cancellation


def attack_twin(
    train: Train,
    federation: Federation,
    config: TrainingConfig,
    *,
    num_shadows: int = 16,
    seed: int = 0,
    progress: bool = False,
) -> list[AttackReport]:
    """Train the target on a random half of the rows and attack it; members and non-members are balanced.

    P-Attack takes the test rows as population. LiRA trains ``num_shadows`` models, each on a random half;
    every model, the target included, uses its own noise. ``num_shadows=0`` runs P-Attack only.
    """
    require_integer("num_shadows", num_shadows, 0)
    rows, labels = federation.rows(), federation.labels
    count = len(labels) // 2 * 2
    random = np.random.default_rng([seed, 0x617474])

    def half() -> npt.NDArray[np.bool_]:
        chosen = np.zeros(count, dtype=bool)
        chosen[random.permutation(count)[: count // 2]] = True
        return chosen

    def fit(chosen: npt.NDArray[np.bool_], run: int) -> GlobalModel:
        order = random.permutation(np.flatnonzero(chosen))
        return train(federation.subset(order), config.with_(seed=1000 * seed + run))

    member = half()
    target = fit(member, 0)
    losses, confidence = confidences(target, rows[:count], labels[:count])
    population, _ = confidences(target, federation.test_rows(), federation.test_labels)
    reports = [population_attack(losses[member], losses[~member], population)]
    if num_shadows:
        shadows, included = np.empty((num_shadows, count)), np.empty((num_shadows, count), dtype=bool)
        with progress_bar("shadow models", num_shadows, progress) as advance:
            for k in range(num_shadows):
                # Pairs of complementary halves: every record is in exactly half of the models.
                included[k] = ~included[k - 1] if k % 2 else half()
                model = fit(included[k], k + 1)
                shadows[k] = confidences(model, rows[:count], labels[:count])[1]
                advance(1)
        scores = lira_scores(confidence, shadows, included)
        reports.append(roc_report(f"LiRA ({num_shadows} shadow models)", scores[member], scores[~member]))
    return reports


METHODS: dict[str, Train] = {
    "Plain": lambda f, c: train_plain(f, c).model,
    "G-Shuff": lambda f, c: train_g_shuff(f, c).model,
    "G-BMF": lambda f, c: train_g_bmf(f, c).model,
}


def plot_reports(results: Sequence[tuple[str, AttackReport]], path: Path) -> None:
    """ROC curves on logarithmic axes, where membership inference matters."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 5.2), layout="constrained")
    for k, (method, report) in enumerate(results):
        style = "-" if report.attack.startswith("LiRA") else "--"
        axes.plot(
            np.maximum(report.false_positive_rates, 1e-4),
            np.maximum(report.true_positive_rates, 1e-4),
            style,
            color=f"C{list(METHODS).index(method) if method in METHODS else k}",
            label=f"{method}, {report.attack.split(' ')[0]}: AUC {report.auc:.3f}",
        )
    axes.plot([1e-4, 1], [1e-4, 1], ":", color="grey", label="guessing")
    axes.set(xscale="log", yscale="log", xlim=(1e-3, 1), ylim=(1e-3, 1))
    axes.set_xlabel("false positive rate")
    axes.set_ylabel("true positive rate")
    axes.set_title("Membership inference against the released model")
    axes.legend(fontsize=8, loc="lower right")
    axes.grid(alpha=0.3, which="both")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack the twins on an embedded data set; table, PNG, --json."""
    from rich.console import Console
    from rich.table import Table

    from vfl.data.sets import load_data
    from vfl.federation import build_federation

    parser = argparse.ArgumentParser(prog="python -m vfl.attack", description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="digits", choices=("digits", "breast_cancer"))
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--shadows", type=int, default=32, help="shadow models for LiRA; 0 skips it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/attack"), help="folder for the PNG")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    federation = build_federation(load_data(options.data, seed=options.seed))
    config = TrainingConfig(epsilon=options.epsilon, epochs=options.epochs, batch_size=64)
    results: list[tuple[str, AttackReport]] = []
    started = time.perf_counter()
    for method, train in METHODS.items():
        for report in attack_twin(
            train,
            federation,
            config,
            num_shadows=options.shadows,
            seed=options.seed,
            progress=not options.json,
        ):
            results.append((method, report))
    plot_reports(results, options.out / "roc.png")
    if options.json:
        print(json.dumps([{"method": m, **r.summary()} for m, r in results], indent=1))
        return 0
    table = Table(title=f"Membership inference, {options.data}, ε = {options.epsilon:g}")
    for column in ("method", "attack", "AUC", "TPR at 0.1 % FPR", "TPR at 1 % FPR"):
        table.add_column(column, justify="left" if column in ("method", "attack") else "right")
    for method, report in results:
        table.add_row(
            method,
            report.attack,
            f"{report.auc:.3f}",
            f"{report.tpr_at_fpr_0_1_percent:.2%}",
            f"{report.tpr_at_fpr_1_percent:.2%}",
        )
    console = Console()
    console.print(table)
    console.print(f"ROC curves: {options.out / 'roc.png'}; {time.perf_counter() - started:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
