"""How long a client's file takes to read, and how much memory: ``python -m bench.reading``.

A file of numbers, texts, dates and booleans with gaps is made in a temporary folder and read in a process of its own,
once for its cells (``read_table``) and once more into features (``apply_schema``). Memory is the process's largest
resident size, imports included.
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, parquet

from accel.validate import require_choice, require_integer
from bench.harness import Option, benchmark
from vfl.tables import Boolean, Category, Date, IdRule, Label, Number, Schema, apply_schema, read_table

__all__ = ["main", "measure", "read", "write"]

KINDS = ("parquet", "csv")


def schema(columns: int) -> Schema:
    """One category for each seven columns, one boolean, one date; the others are numbers."""
    texts = max(1, columns // 7)
    numbers = columns - texts - 2
    return Schema(
        (
            *(Number(f"n{i}", centre=0.0, spread=1.0) for i in range(numbers)),
            *(Category(f"c{i}", ("alpha", "beta", "gamma")) for i in range(texts)),
            Boolean("b"),
            Date("d", ("1995-01-01", "2025-01-01")),
        ),
        IdRule("id"),
        Label("y", classes=("no", "yes")),
    )


def write(file: Path, rows: int, columns: int) -> None:
    """Random cells, of which two of a hundred are empty."""
    random = np.random.default_rng(0)
    made: dict[str, Any] = {"id": np.arange(rows)}
    for column in schema(columns).columns:
        if column.kind == "number":
            cells = pa.array(random.normal(size=rows))
        elif column.kind == "category":
            cells = pa.array(np.array(["alpha", "beta", "gamma", "delta"])[random.integers(0, 4, rows)])
        elif column.kind == "boolean":
            cells = pa.array(random.random(rows) < 0.5)
        else:
            cells = pa.array(random.integers(9000, 20000, rows).astype(np.int32)).cast(pa.date32())
        gaps = pa.array(random.random(rows) < 0.02)
        made[column.name] = pc.if_else(gaps, None, cells)
    made["y"] = np.array(["no", "yes"])[random.integers(0, 2, rows)]
    table = pa.table(made)
    parquet.write_table(table, file) if file.suffix == ".parquet" else csv.write_csv(table, file)


def read(file: Path, columns: int) -> dict[str, float]:
    """Seconds and gigabytes of this process."""
    begun, used = time.perf_counter(), time.process_time()
    raw = read_table(file)
    between = time.perf_counter()
    table, _ = apply_schema(schema(columns), raw)
    return {
        "rows": len(table.ids),
        "features": table.features.shape[1],
        "reading seconds": between - begun,
        "encoding seconds": time.perf_counter() - between,
        "CPU seconds": time.process_time() - used,
        "peak GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def measure(rows: int = 1_000_000, columns: int = 50, kind: str = "parquet") -> dict[str, float]:
    """One file, read in a process of its own."""
    require_integer("--rows", rows, 1)
    require_integer("--columns", columns, 4)
    require_choice("--kind", kind, KINDS)
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(1) as pool:
        file = Path(folder) / f"table.{kind}"
        write(file, rows, columns)
        return {"columns": columns, **pool.apply(read, (file, columns))}


def sentence(facts: dict[str, float]) -> str:
    """The figures for people."""
    return (
        f"{facts['rows']:,} rows of {facts['columns']} columns, {facts['features']} features: "
        f"{facts['reading seconds']:.1f} s reading, {facts['encoding seconds']:.1f} s encoding, "
        f"{facts['CPU seconds']:.1f} s of CPU, {facts['peak GB']:.2f} GB"
    )


main = benchmark(measure, sentence, rows="of the file", columns="of the file", kind=Option("of the file", KINDS))

if __name__ == "__main__":
    main()
