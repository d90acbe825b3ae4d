"""Tables: AUC or R² of the twin and of real three-party computation at ε = 1, 3, 8, beside scikit-learn without privacy.

    python -m bench.tabular            # all three tables; about two minutes
    python -m bench.tabular --only regression --epsilon 3 --backends twin

Every row of the table is a mean over seeds of the noise, on the same split and the same scaled columns. Public rows (for scaling) take no
part in training or test. Parameters are the API's defaults, from sizes and ε alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import r2_score, roc_auc_score

from protocols import VerticalClassifier, VerticalRegressor
from vfl.tables import Label, Schema, apply_schema, fit_schema

__all__ = ["TABLES", "Task", "main", "measure", "mixed_tables"]

EPSILONS = (1.0, 3.0, 8.0)
BACKENDS = ("twin", "local")
BIG = 20_000
TARGET = (-4.0, 6.0)


@dataclass(frozen=True)
class Task:
    """Tables of both parties (training, test, public rows), and what is to be predicted."""

    name: str
    metric: str
    train: dict[str, Any]
    test: dict[str, Any]
    schemas: dict[str, Schema]
    label: str
    regression: bool = False

    def estimator(self, epsilon: float, backend: str, seed: int) -> VerticalClassifier | VerticalRegressor:
        """With the defaults of the API."""
        common: dict[str, Any] = {"schemas": self.schemas, "epsilon": epsilon, "backend": backend, "random_state": seed}
        return VerticalRegressor(target_range=TARGET, **common) if self.regression else VerticalClassifier(**common)

    def features(self, tables: dict[str, Any]) -> tuple[npt.NDArray[np.float64], npt.NDArray[Any]]:
        """All scaled columns side by side, and the labels: what scikit-learn gets."""
        read = [apply_schema(schema, tables[name])[0] for name, schema in self.schemas.items()]
        order = [person for person in read[-1].ids if person in set(read[0].ids)]
        parts = [table.select(order) for table in read]
        labels = parts[-1].targets if self.regression else np.array(parts[-1].labels)
        assert labels is not None
        return np.concatenate([part.features.astype(float) for part in parts], axis=1), labels


def mixed_tables(rows: int, seed: int, first: int = 0) -> dict[str, Any]:
    """A bank's and a card company's tables: numbers with long tails and gaps, text, dates, truth values; a tenth of the bank's people
    are not the card company's."""
    import pandas

    random = np.random.default_rng([seed, 0x7461626C65])
    everybody = rows + rows // 10
    people = np.array([f"person-{first + i}" for i in range(everybody)])
    income, age = random.lognormal(10.3, 0.6, everybody), random.integers(18, 80, everybody)
    job = random.choice(
        ["clerk", "nurse", "driver", "chef", "teacher", "other"], everybody, p=[0.3, 0.2, 0.2, 0.1, 0.1, 0.1]
    )
    since = random.integers(0, 5000, everybody)
    purchases, share = random.poisson(20, everybody), random.beta(2, 6, everybody)
    abroad, overdraft = random.random(everybody) < 0.3, random.exponential(300, everybody)
    score = 0.9 * (np.log(income) - 10.3) - 0.02 * (age - 45) + 0.8 * (job == "nurse") - 0.6 * (job == "driver")
    score += since / 5000 + 0.05 * (purchases - 20) - 2.0 * share - 0.5 * abroad - overdraft / 600
    score += 0.5 * np.sin(age / 6.0) + random.logistic(0, 0.5, everybody)
    bank = pandas.DataFrame({"customer": people, "income": income, "age": age, "job": job})
    bank["since"] = pandas.to_datetime("2010-01-01") + pandas.to_timedelta(since, unit="D")
    bank.loc[random.random(everybody) < 0.08, "income"] = np.nan
    bank.loc[random.random(everybody) < 0.03, "job"] = None
    card = pandas.DataFrame({"customer": people, "purchases": purchases, "share": share, "abroad": abroad})
    card["overdraft"], card["spent"] = overdraft, np.clip(score, *TARGET)
    card["good"] = np.where(score > 0.3, "yes", "no")
    order = random.permutation(everybody)
    return {"bank": bank.iloc[order].reset_index(drop=True), "card": card.iloc[:rows].reset_index(drop=True)}


def _mixed(regression: bool) -> Task:
    column, other = ("spent", "good") if regression else ("good", "spent")
    label = Label(column, "number", range=TARGET) if regression else Label(column)
    found = []
    for rows, seed, first in ((BIG, 0, 0), (5000, 1, 10**6), (1000, 2, 2 * 10**6)):
        tables = mixed_tables(rows, seed, first)
        found.append({"bank": tables["bank"], "card": tables["card"].drop(columns=other)})
    train, test, public = found
    schemas = {
        "bank": fit_schema(public["bank"], id_column="customer"),
        "card": fit_schema(public["card"], id_column="customer", label=label),
    }
    name = f"{'regression' if regression else 'mixed'}, {BIG:,} rows"
    return Task(name, "R²" if regression else "AUC", train, test, schemas, column, regression)


def _cancer() -> Task:
    import pandas
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    tables = []
    for rows in np.split(order, [370, 512]):
        parts = {"clinic": pandas.DataFrame(x[rows, :15]), "laboratory": pandas.DataFrame(x[rows, 15:])}
        for part in parts.values():
            part.columns = [f"column {i}" for i in part.columns]
            part.insert(0, "patient", [f"patient-{row}" for row in rows])
        parts["laboratory"]["benign"] = np.where(y[rows] == 1, "yes", "no")
        tables.append(parts)
    train, test, public = tables
    schemas = {
        "clinic": fit_schema(public["clinic"], id_column="patient"),
        "laboratory": fit_schema(public["laboratory"], id_column="patient", label=Label("benign")),
    }
    return Task("breast_cancer, 370 rows", "AUC", train, test, schemas, "benign")


TABLES: dict[str, Callable[[], Task]] = {
    "breast_cancer": _cancer,
    "mixed": lambda: _mixed(False),
    "regression": lambda: _mixed(True),
}


def non_private(task: Task) -> float:
    """scikit-learn on the same scaled columns and the same split, without privacy."""
    x, y = task.features(task.train)
    new, truth = task.features(task.test)
    if task.regression:
        return float(r2_score(truth, Ridge(1e-3).fit(x, y).predict(new)))
    model = LogisticRegression(max_iter=2000).fit(x, y)
    return float(roc_auc_score(truth == "yes", model.decision_function(new)))


def measure(task: Task, epsilon: float, backend: str, seeds: int) -> list[float]:
    """The metric on the test tables, once for each seed of the noise."""
    found = []
    for seed in range(seeds):
        model = task.estimator(epsilon, backend, seed).fit(task.train)
        if isinstance(model, VerticalRegressor):
            found.append(model.score(task.test))
        else:
            _, truth = task.features(task.test)
            found.append(float(roc_auc_score(truth == "yes", model.decision_function(task.test))))
    return found


def main(argv: list[str] | None = None) -> None:
    """The command ``python -m bench.tabular``."""
    parser = argparse.ArgumentParser(prog="python -m bench.tabular", description=__doc__)
    parser.add_argument("--only", choices=tuple(TABLES), action="append", help="one table (may be repeated)")
    parser.add_argument("--epsilon", type=float, action="append", help="default 1, 3 and 8")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="twin, local (three processes) or threads")
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
        task = TABLES[name]()
        plain = non_private(task)
        for backend in options.backends.split(","):
            shown = []
            for epsilon in epsilons:
                found = measure(task, epsilon, backend, options.seeds if backend == "twin" else 1)
                spread = f" ± {np.std(found):.3f}" if len(found) > 1 else ""
                shown.append(f"{np.mean(found):.3f}{spread}")
            view.add_row(f"{task.name} ({task.metric})", backend, f"{plain:.3f}", *shown)
    Console(width=120).print(view)


if __name__ == "__main__":
    main()
