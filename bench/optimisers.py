"""SGD beside Adam on the same noised sums: ``python -m bench.optimisers --data-root DIR``.

Twins of G-BMF with the default batches, steps and average, over a grid of rates that nobody may search on private rows:
the best of each, and each at one rate for everything (4, and 0.1). "none": no clip and no noise. Scores are accuracies,
for two classes areas under the ROC curve, means over seeds; the spread is the largest deviation over seeds of a best
one. Images have rows of norm 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table

from bench.defaults import public_table, score
from bench.harness import Option, benchmark
from vfl.data.sets import load_data
from vfl.defaults import adam_rate, table_row_bound, training_defaults
from vfl.dp import workload_factorisation
from vfl.federation import Federation, build_federation
from vfl.losses import probabilities
from vfl.training import TrainingConfig
from vfl.twins import train_g_bmf, train_plain
from vfl.twins.engine import Optimiser
from vfl.twins.noise import filtered_noise

__all__ = ["main"]

IMAGES = ("digits", "ocr_letters")
RATES = {
    "sgd": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0),
    "adam": (0.01, 0.03, 0.1, 0.3, 1.0),
}
ONE_RATE = {"sgd": 4.0, "adam": adam_rate(hidden=False)}


def federation_of(name: str, data_root: str | None) -> Federation:
    """Two clients, half of the columns each."""
    if name in IMAGES:
        return build_federation(load_data(name, data_root=data_root), progress=False)
    table = public_table(name)
    return table.federation(table_row_bound(table.train.shape[1]), "clip")


def twin_scores(federation: Federation, epsilon: float | None, seeds: int, **options: Any) -> list[float]:
    """One for each seed of the noise, or of the order where there is none."""
    task = "binary" if federation.classes == 2 and not options["hidden"] else "classification"
    rows, found = federation.test_rows(), []
    for seed in range(seeds):
        used = TrainingConfig.epsilon if epsilon is None else epsilon
        config = TrainingConfig(epsilon=used, seed=seed, dtype="float32", task=task, **options)
        model = (train_plain if epsilon is None else train_g_bmf)(federation, config).model
        shares = probabilities(task, model.logits(rows))
        found.append(score(shares, federation.test_labels) if np.isfinite(shares).all() else 0.0)  # it diverged
    return found


def line(
    name: str, federation: Federation, epsilon: float | None, seeds: int, hidden: tuple[int, ...]
) -> dict[str, Any]:
    """Both optimisers on one data set at one ε."""
    chosen = training_defaults(federation.num_samples, epsilon or 8.0, hidden=bool(hidden))
    found: dict[str, Any] = {"data": name, "epsilon": epsilon, "average": chosen["average"]}
    spreads = []
    for optimiser, rates in RATES.items():
        chosen["optimiser"], chosen["hidden"] = optimiser, hidden
        scores = {r: twin_scores(federation, epsilon, seeds, **(chosen | {"learning_rate": r})) for r in rates}
        best = max(scores, key=lambda rate: float(np.mean(scores[rate])))
        found[f"{optimiser}, best"], found[f"{optimiser}, its rate"] = float(np.mean(scores[best])), best
        found[f"{optimiser} at {ONE_RATE[optimiser]:g}"] = float(np.mean(scores[ONE_RATE[optimiser]]))
        spreads.append(float(np.std(scores[best])))
    return found | {"spread": max(spreads)}


def noise_kept(signal: float, steps: int = 500, batches: int = 20, coordinates: int = 2000) -> dict[str, Any]:
    """How far noise alone moves the weights: correlated noise over independent noise of as much in a step. The gradient
    swings over 50 steps, with ``signal`` deviations of that noise."""
    found: dict[str, Any] = {"gradient over noise": signal}
    times, phases = np.arange(steps), np.random.default_rng(0).uniform(0, 2 * np.pi, coordinates)
    gradients = signal * np.sqrt(2) * np.sin(2 * np.pi * times[:, None] / 50 + phases)
    for optimiser in RATES:
        moved = []
        for kind in ("bisr", "identity"):
            mechanism = workload_factorisation(kind, steps, batches, weight_decay=1.0, momentum=0.0)
            norms, noise = mechanism.noise_norms(), filtered_noise(mechanism, coordinates, 1.0, seed=1)
            with_noise, without = (np.zeros(coordinates) for _ in range(2))
            rules = [Optimiser(TrainingConfig(optimiser=optimiser), with_noise) for _ in range(2)]
            for step, gradient in enumerate(gradients):
                rules[0].move(with_noise, gradient + noise(step) / norms[step], 1.0, 1.0)
                rules[1].move(without, gradient.copy(), 1.0, 0.0)
            moved.append(float(np.std(with_noise - without)))
        found[optimiser] = moved[0] / moved[1]
    return found


def measure(
    data: str = "digits,ocr_letters,mixed,breast_cancer",
    epsilons: str = "1,3,8,none",
    seeds: int = 3,
    hidden: int = 0,
    data_root: str | None = None,
    noise_only: bool = False,
) -> list[dict[str, Any]]:
    """A line for each data set and ε."""
    if noise_only:
        return [noise_kept(signal) for signal in (0.0, 0.3, 1.0, 3.0)]
    budgets = [None if text == "none" else float(text) for text in epsilons.split(",")]
    layers = (hidden,) if hidden else ()
    found = []
    for name in data.split(","):
        federation = federation_of(name, data_root)
        found += [line(name, federation, epsilon, seeds, layers) for epsilon in budgets]
    return found


def table(lines: list[dict[str, Any]]) -> Table:
    """All lines for people."""
    view = Table(*lines[0], title="SGD and Adam on the same sums, twins of G-BMF")
    for each in lines:
        view.add_row(*(_shown(name, value) for name, value in each.items()))
    return view


def _shown(name: str, value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:g}" if name.endswith("rate") or name == "epsilon" else f"{value:.3f}"


main = benchmark(
    measure,
    table,
    data=Option("data sets: digits, ocr_letters, or a table of bench.defaults", metavar="NAME,…"),
    epsilons=Option("budgets, or none", metavar="ε,…"),
    seeds="of the noise",
    hidden="width of a hidden layer; 0: none",
    data_root=Option("folder with ocr_letters.npz", metavar="DIR"),
    noise_only="how much of the correlated noise's cancellation is left, on made-up gradients",
)

if __name__ == "__main__":
    main()
