"""AUC or R² of twin, three processes and ``ppvfl``, beside scikit-learn without privacy, on the same split."""

from __future__ import annotations

import argparse

import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import r2_score, roc_auc_score

from accel.validate import require
from bench.tabular.deployed import deployed_score
from bench.tabular.tables import FILES, TABLES, Task, table_from_file
from ppvfl import VerticalRegressor

__all__ = ["main", "measure", "non_private"]

EPSILONS = (1.0, 3.0, 8.0)
BACKENDS = ("twin", "local", "ppvfl")


def non_private(task: Task) -> float:
    """scikit-learn on the same scaled columns and the same split, without privacy."""
    x, y = task.features(task.train)
    new, truth = task.features(task.test)
    if task.regression:
        return float(r2_score(truth, Ridge(1e-3).fit(x, y).predict(new)))
    model = LogisticRegression(max_iter=2000).fit(x, y == task.positive)
    return float(roc_auc_score(truth == task.positive, model.decision_function(new)))


def measure(task: Task, epsilon: float, backend: str, seeds: int) -> list[float]:
    """The metric on the test tables, once for each seed of the noise."""
    if backend == "ppvfl":
        return [deployed_score(task, epsilon) for _ in range(seeds)]
    found = []
    for seed in range(seeds):
        model = task.estimator(epsilon, backend, seed).fit(task.train)
        if isinstance(model, VerticalRegressor):
            found.append(model.score(task.test))
        else:
            _, truth = task.features(task.test)
            at = 1 if model.classes_[1] == task.positive else -1
            found.append(float(roc_auc_score(truth == task.positive, at * model.decision_function(task.test))))
    return found


def main(argv: list[str] | None = None) -> None:
    """The command ``python -m bench.tabular``."""
    parser = argparse.ArgumentParser(prog="python -m bench.tabular", description=__doc__)
    names = (*TABLES, *FILES)
    parser.add_argument("--only", choices=names, action="append", help="one table (may be repeated)")
    parser.add_argument(
        "--data-root", metavar="DIR", help="where adult.csv (UCI) and Default.csv (ISLP) lie, for these"
    )
    parser.add_argument("--epsilon", type=float, action="append", help="default 1, 3 and 8")
    parser.add_argument(
        "--backends", default=",".join(BACKENDS), help="twin, local (three processes), threads, ppvfl (a federation)"
    )
    parser.add_argument("--seeds", type=int, default=5, help="of the twin's noise; a real run is made once")
    options = parser.parse_args(argv)
    view = Table(title="AUC or R² on rows that took no part")
    view.add_column("table")
    view.add_column("", style="bold")
    view.add_column("scikit-learn, not private", justify="right")
    epsilons = options.epsilon or EPSILONS
    for epsilon in epsilons:
        view.add_column(f"ε = {epsilon:g}", justify="right")
    for name in options.only or TABLES:
        task = _task(name, options.data_root)
        plain = non_private(task)
        for backend in options.backends.split(","):
            shown = []
            for epsilon in epsilons:
                found = measure(task, epsilon, backend, options.seeds if backend == "twin" else 1)
                spread = f" ± {np.std(found):.4f}" if len(found) > 1 else ""
                shown.append(f"{np.mean(found):.4f}{spread}")
            view.add_row(f"{task.name} ({task.metric})", backend, f"{plain:.4f}", *shown)
    Console(width=120).print(view)


def _task(name: str, root: str | None) -> Task:
    if name in TABLES:
        return TABLES[name]()
    require(root is not None, "--data-root", root, f"given for {name}: a folder with the public file")
    return table_from_file(name, str(root))
