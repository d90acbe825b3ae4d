"""The defaults for tables beside what else could have been chosen: ``python -m bench.defaults``.

Twins of G-BMF on public and made-up tables, each at several ε: with the defaults of ``vfl.defaults``, with those of
earlier versions (rows normalised to 1, B = 128, 40 epochs, rate 2), with the best of a grid (which nobody may choose on
private rows), and logistic regression without privacy. Scores are the area under the ROC curve, accuracy for digits,
means over seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from rich.table import Table
from sklearn.datasets import load_breast_cancer, make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from accel.validate import require_choice
from bench.harness import Option, benchmark
from vfl.data.sets import VerticalData, load_data
from vfl.defaults import table_row_bound, training_defaults
from vfl.federation import Federation, build_federation
from vfl.losses import probabilities
from vfl.tables import apply_schema, fit_schema
from vfl.training import TrainingConfig
from vfl.twins import train_g_bmf

__all__ = ["DATA", "PublicTable", "main", "mixed_table", "public_table"]

DATA = ("breast_cancer", "digits", "narrow", "mixed")
EARLIER = {"batch_size": 128, "epochs": 40, "learning_rate": 2.0}


@dataclass(frozen=True)
class PublicTable:
    """Scaled rows: training and test."""

    name: str
    train: np.ndarray
    train_labels: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray

    def federation(self, row_bound: float, row_rule: str) -> Federation:
        """Two clients, half of the columns each."""
        half = self.train.shape[1] // 2
        data = VerticalData(
            self.name,
            int(self.train_labels.max()) + 1,
            (self.train[:, :half], self.train[:, half:]),
            self.train_labels,
            (self.test[:, :half], self.test[:, half:]),
            self.test_labels,
            are_embeddings=True,
        )
        return build_federation(data, row_bound=row_bound, row_rule=row_rule, progress=False)


def mixed_table(rows: int = 30_000, seed: int = 0) -> tuple[dict[str, Any], np.ndarray]:
    """Numbers, heavy tails, categories, a boolean and gaps, made by scikit-learn's ``make_classification``; 24 % are
    positive."""
    values, labels = make_classification(
        rows,
        n_features=14,
        n_informative=8,
        n_redundant=3,
        weights=[0.76],
        class_sep=0.8,
        flip_y=0.05,
        random_state=seed,
    )
    random = np.random.default_rng(seed)
    columns: dict[str, Any] = {f"x{i}": values[:, i] for i in range(14)}
    for place, count in enumerate((5, 4, 3, 8)):
        edges = np.quantile(values[:, place], np.linspace(0, 1, count + 1)[1:-1])
        columns[f"x{place}"] = np.char.add("v", np.digitize(values[:, place], edges).astype(str))
    columns["x4"] = values[:, 4] > 0
    columns["x5"] = np.exp(2 * values[:, 5])
    for name in ("x1", "x6", "x7"):
        columns[name] = pa.array(columns[name].tolist(), mask=random.random(rows) < 0.05)
    return {"id": np.arange(rows), **columns}, labels


def public_table(name: str) -> PublicTable:
    """One of ``DATA``, scaled by rows that take no further part."""
    require_choice("data", name, DATA)
    if name == "digits":
        data = load_data("digits")
        parts = [np.concatenate([x.reshape(len(x), -1) for x in p], axis=1) / 8 - 1 for p in (data.train, data.test)]
        return PublicTable(name, parts[0], data.train_labels, parts[1], data.test_labels)
    if name == "mixed":
        columns, labels = mixed_table()
        public, stop = 2000, 24_000
    elif name == "narrow":  # three columns and 3 % positives, like ISLP's Default
        random, count = np.random.default_rng(0), 10_000
        balance, student = np.maximum(0, random.normal(835, 480, count)), random.random(count) < 0.3
        labels = (random.random(count) < 1 / (1 + np.exp(10.9 - 0.00574 * balance + 0.65 * student))).astype(np.int64)
        columns = {
            "id": np.arange(count),
            "balance": balance,
            "income": random.normal(33500, 13300, count),
            "student": student,
        }
        public, stop = 500, 8000
    else:
        raw = load_breast_cancer()
        order = np.random.default_rng(1).permutation(len(raw.target))
        labels = raw.target[order]
        columns = {"id": np.arange(len(order)), **{f"x{i}": raw.data[order, i] for i in range(30)}}
        public, stop = 60, 400
    table = pa.table(columns)
    schema = fit_schema(table.slice(0, public))
    rows = apply_schema(schema, table)[0].features
    return PublicTable(name, rows[public:stop], labels[public:stop], rows[stop:], labels[stop:])


def score(shares: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve of the second of two classes, else accuracy."""
    if shares.shape[1] == 2:
        return float(roc_auc_score(labels, shares[:, 1]))
    return float((shares.argmax(axis=1) == labels).mean())


def twin_score(federation: Federation, epsilon: float, options: dict[str, Any], seeds: int) -> float:
    """Mean over seeds of the noise; two classes are one logit, as everywhere by default."""
    rows, found = federation.test_rows(), []
    task = "binary" if federation.classes == 2 else "classification"
    for seed in range(seeds):
        config = TrainingConfig(epsilon=epsilon, seed=seed, dtype="float32", task=task, **options)
        model = train_g_bmf(federation, config).model
        found.append(score(probabilities(task, model.logits(rows)), federation.test_labels))
    return float(np.mean(found))


def lines_of(name: str, epsilons: Sequence[float], seeds: int, grid: bool) -> list[dict[str, Any]]:
    """A line for each ε."""
    table = public_table(name)
    count, width = table.train.shape
    plain = LogisticRegression(max_iter=1000).fit(table.train, table.train_labels)
    without = score(plain.predict_proba(table.test), table.test_labels)
    ours = table.federation(table_row_bound(width), "clip")
    before = table.federation(1.0, "normalise")
    found = []
    for epsilon in epsilons:
        chosen = training_defaults(count, epsilon)
        line = {"data": name, "rows": count, "width": width, "epsilon": epsilon, **chosen}
        line["defaults"] = twin_score(ours, epsilon, chosen, seeds)
        line["earlier defaults"] = twin_score(before, epsilon, {**EARLIER, "batch_size": min(128, count)}, seeds)
        if grid:
            line["best of grid"] = max(
                twin_score(ours, epsilon, options, seeds) for options in _grid(count, int(chosen["batch_size"]))
            )
        line["without privacy"] = without
        found.append(line)
    return found


def _grid(count: int, batch: int) -> list[dict[str, Any]]:
    found = []
    for size, steps, rate in itertools.product((batch, max(16, batch // 4)), (100, 250, 500), (0.25, 0.5, 1.0, 2.0)):
        found.append({"batch_size": size, "epochs": max(1, round(steps / (count // size))), "learning_rate": rate})
    return found


def measure(
    data: str = ",".join(DATA), epsilons: str = "1,3,8", seeds: int = 3, grid: bool = False
) -> list[dict[str, Any]]:
    """A line for each data set and ε."""
    budgets = [float(text) for text in epsilons.split(",")]
    return [line for name in data.split(",") for line in lines_of(name, budgets, seeds, grid)]


def table(lines: list[dict[str, Any]]) -> Table:
    """All lines for people."""
    view = Table(*lines[0], title="defaults for tables, twins of G-BMF")
    for line in lines:
        stated = ("epsilon", "learning_rate")
        view.add_row(
            *(f"{v:.3f}" if isinstance(v, float) and k not in stated else f"{v:g}" if isinstance(v, float) else str(v)
              for k, v in line.items())
        )  # fmt: skip
    return view


main = benchmark(
    measure,
    table,
    data=Option("data sets", metavar="NAME,…"),
    epsilons=Option("budgets", metavar="ε,…"),
    seeds="of the noise",
    grid="search the grid too (minutes)",
)

if __name__ == "__main__":
    main()
