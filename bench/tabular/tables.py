"""Tables of two parties for ``bench.tabular``: training, test and public rows, schemas, and what is to be predicted.

Made up, embedded in scikit-learn, or (``--data-root``) read from the public files adult.csv of UCI and Default.csv of
ISLP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.validate import require
from ppvfl import VerticalClassifier, VerticalRegressor
from vfl.tables import Label, Schema, apply_schema, fit_schema

__all__ = ["FILES", "TABLES", "TARGET", "Task", "mixed_tables", "table_from_file"]

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
    positive: str = "yes"

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
    """A bank's and a card company's tables: numbers with long tails and gaps, text, dates, truth values; a tenth of the
    bank's people are not the card company's."""
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


FILES = {  # public files: their label, its positive value, which columns the first party has, the rule for ids
    "adult": (
        "adult.csv",
        "income",
        ">50K",
        (
            "age",
            "workclass",
            "education",
            "education-num",
            "marital-status",
            "relationship",
            "race",
            "sex",
            "native-country",
        ),
    ),
    "default": ("Default.csv", "default", "Yes", ("balance",)),
}
_ADULT = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
    "income",
)


def table_from_file(name: str, root: str | Path) -> Task:
    """UCI's Adult or ISLP's Default, cut in two: a tenth public, a fifth for the test, ids of our own, a twentieth of
    the first party's people unknown to the second. Weights of the survey (fnlwgt) are left out."""
    import pandas

    file, label, positive, first = FILES[name]
    path = Path(root) / file
    require(
        path.exists(), "--data-root", str(root), f"a folder with {file}", "it is public, and not part of this project"
    )
    read = pandas.read_csv(path, skipinitialspace=True, na_values="?")
    if name == "adult":
        require(
            read.shape[1] == len(_ADULT),
            str(path),
            f"{read.shape[1]} columns",
            f"{len(_ADULT)}, with a first line of names",
        )
        read = read.set_axis(list(_ADULT), axis=1).drop(columns="fnlwgt").dropna(subset=["income"])
    random = np.random.default_rng(0)
    read = read.iloc[random.permutation(len(read))].reset_index(drop=True)
    read.insert(0, "person", [f"p{number}" for number in random.permutation(10 * len(read))[: len(read)]])
    own, rest = ["person", *first], ["person", *(c for c in read.columns if c not in ("person", *first))]
    public, test, train = np.split(read.index, [len(read) // 10, 3 * len(read) // 10])
    parts = [{"first": read.loc[rows, own], "second": read.loc[rows, rest]} for rows in (train, test, public)]
    parts[0]["second"] = parts[0]["second"].iloc[len(train) // 20 :]
    schemas = {
        "first": fit_schema(parts[2]["first"], id_column="person"),
        "second": fit_schema(parts[2]["second"], id_column="person", label=Label(label)),
    }
    rows = len(parts[0]["second"])
    return Task(f"{name}, {rows:,} rows", "AUC", parts[0], parts[1], schemas, label, positive=positive)
