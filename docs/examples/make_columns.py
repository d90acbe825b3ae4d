"""Two organisations' tables about the same people, as they come: text, gaps, dates, other ids, and public rows to scale
by.

A clinic and a laboratory hold parts of scikit-learn's embedded breast cancer data, with made-up columns beside them.
The clinic writes ids with leading zeros, the laboratory as plain numbers; some cells are empty. The files called public
hold rows of other people, who do not mind.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet
from sklearn.datasets import load_breast_cancer

PUBLIC, NEW = 80, 40
CLINIC = ("person", "radius", "texture", "area", "symmetry", "region", "first_visit", "smoker")
LABORATORY = ("person", "smoothness", "concavity", "perimeter", "grade", "diagnosis")


def people(random: np.random.Generator) -> dict[str, np.ndarray]:
    """Everything about everybody, by column; the diagnosis is what is to be predicted."""
    data = load_breast_cancer()
    column = dict(zip(data.feature_names, data.data.T, strict=True))
    count = len(data.target)
    days = np.datetime64("2015-01-01") + random.integers(0, 3650, count)
    grade = np.digitize(column["worst texture"], [20.0, 25.0, 30.0])
    found = {
        "person": random.permutation(10 * count)[:count] + 1,
        "radius": column["mean radius"].round(2),
        "texture": column["mean texture"].round(2),
        "area": column["mean area"].round(1),
        "symmetry": column["mean symmetry"].round(4),
        "region": random.choice(["north", "south", "east", "west"], count, p=[0.4, 0.3, 0.2, 0.1]),
        "first_visit": np.array([f"{day[8:]}.{day[5:7]}.{day[:4]}" for day in days.astype(str)]),
        "smoker": np.where(random.random(count) < 0.3, "yes", "no"),
        "smoothness": column["mean smoothness"].round(4),
        "concavity": column["worst concavity"].round(4),
        "perimeter": column["worst perimeter"].round(1),
        "grade": np.array(["I", "II", "III", "IV"])[grade],
        "diagnosis": np.where(data.target == 0, "malignant", "benign"),
    }
    order = random.permutation(count)
    return {name: cells[order] for name, cells in found.items()}


def with_gaps(column: np.ndarray, random: np.random.Generator) -> pa.Array:
    """Four cells of a hundred are empty."""
    return pa.array(column.tolist(), mask=random.random(len(column)) < 0.04)


def main(folder: Path) -> None:
    random = np.random.default_rng(0)
    everybody = people(random)
    count = len(everybody["person"])
    gaps = ("radius", "texture", "region", "smoker", "smoothness", "grade")
    cells: dict[str, Any] = {k: with_gaps(v, random) if k in gaps else pa.array(v) for k, v in everybody.items()}
    clinic = pa.table({name: cells[name] for name in CLINIC})
    clinic = clinic.set_column(0, "person", pa.array([f"{who:06d}" for who in everybody["person"]]))
    laboratory = pa.table({name: cells[name] for name in LABORATORY})
    public, new, known = np.arange(PUBLIC), np.arange(PUBLIC, PUBLIC + NEW), np.arange(PUBLIC + NEW, count)
    csv.write_csv(clinic.take(public), folder / "clinic-public.csv")
    csv.write_csv(laboratory.take(public), folder / "laboratory-public.csv")
    csv.write_csv(clinic.take(random.permutation(new)), folder / "clinic-new.csv")
    csv.write_csv(laboratory.drop_columns("diagnosis").take(random.permutation(new)), folder / "laboratory-new.csv")
    ours, theirs = (
        random.permutation(known)[: round(0.95 * len(known))] for _ in range(2)
    )  # some people are at one only
    csv.write_csv(clinic.take(ours), folder / "clinic.csv")
    parquet.write_table(laboratory.take(theirs), folder / "laboratory.parquet")
    print(f"clinic.csv: {len(ours):,} people, {len(CLINIC) - 1} columns; ids such as 004711")
    print(
        f"laboratory.parquet: {len(theirs):,} people, {len(LABORATORY) - 2} columns and the diagnosis; ids such as 4711"
    )
    print(f"clinic-new.csv, laboratory-new.csv: {NEW} people whose diagnosis is not known yet")
    print(f"clinic-public.csv, laboratory-public.csv: {PUBLIC} people who do not mind, to scale by and to measure on")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path())
