"""Made-up Parquet files of any length for two clients: written block by block, so that making them takes little
memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from accel.validate import require_integer

__all__ = ["CLIENTS", "ID", "LABEL", "make_tables"]

CLIENTS = ("bank", "card")  # the second has the labels
ID, LABEL = "customer", "defaulted"
BLOCK = 1 << 16  # rows at a time


def make_tables(directory: Path, rows: int, columns: int, seed: int = 0) -> dict[str, Path]:
    """One file a client, each with half of the ``columns`` (−1 … 1) of the same people in an order of its own; the
    label follows a linear score of all columns."""
    require_integer("rows", rows, 1)
    require_integer("columns", columns, 2)
    widths = (columns // 2, columns - columns // 2)
    directory.mkdir(parents=True, exist_ok=True)
    weights = np.random.default_rng([seed, 1]).normal(size=columns) / np.sqrt(columns)
    files = {}
    for place, client in enumerate(CLIENTS):
        files[client] = directory / f"{client}.parquet"
        _write(files[client], _blocks(place, rows, widths, weights, seed))
    return files


def _blocks(
    place: int, rows: int, widths: tuple[int, int], weights: np.ndarray, seed: int
) -> Iterator[dict[str, np.ndarray]]:
    starts = range(0, rows, BLOCK)
    for start in starts if place == 0 else reversed(starts):
        count = min(BLOCK, rows - start)
        random = np.random.default_rng([seed, 2, start])
        values = random.uniform(-1.0, 1.0, (count, sum(widths))).astype(np.float32)
        label = np.where(values @ weights + random.logistic(0.0, 0.3, count) > 0, "yes", "no")
        order = np.random.default_rng([seed, 3, start, place]).permutation(count)
        first = 0 if place == 0 else widths[0]
        block: dict[str, np.ndarray] = {ID: np.char.mod("customer-%09d", order + start)}
        for column in range(first, first + widths[place]):
            block[f"column_{column}"] = values[order, column]
        if place == 1:
            block[LABEL] = label[order]
        yield block


def _write(file: Path, blocks: Iterator[dict[str, np.ndarray]]) -> None:
    import pyarrow
    import pyarrow.parquet

    writer: Any = None
    try:
        for block in blocks:
            table = pyarrow.table({name: pyarrow.array(values) for name, values in block.items()})
            if writer is None:
                writer = pyarrow.parquet.ParquetWriter(file, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
