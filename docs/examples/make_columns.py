"""Two files about the same people, as two organisations would have them: bank.csv and card.csv, in a random order each.

All columns lie between 0 and 1: a range that is stated, not looked up in the rows.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

PEOPLE = 800


def main(folder: Path) -> None:
    rng = np.random.default_rng(0)
    people = rng.uniform(0, 1, (PEOPLE, 5)).round(4)
    defaulted = people @ [2.0, -1.5, 1.0, 1.5, -2.0] + rng.normal(0, 0.2, PEOPLE) > 0.5
    bank = [["id", "balance", "age", "loans"], *([f"p{i}", *row[:3]] for i, row in enumerate(people.tolist()))]
    card = [
        ["id", "limit", "spending", "defaulted"],
        *([f"p{i}", *row[3:], "yes" if defaulted[i] else "no"] for i, row in enumerate(people.tolist())),
    ]
    for name, (header, *rows) in {"bank.csv": bank, "card.csv": card}.items():
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows([header, *(rows[i] for i in rng.permutation(PEOPLE))])
    print(f"bank.csv and card.csv: {PEOPLE} people, 3 and 2 columns; card.csv has the labels")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path())
