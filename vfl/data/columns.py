"""The users' own columns: one file per client, aligned by an id column.

CSV and Parquet files have named columns; .npz files hold ``ids``, ``features`` and optionally ``labels`` and
``columns``; an .npy file is a numeric matrix whose first column is the id (and whose last one is the label
when the client is the label client). The aligned order is the order of SHA-256(id): every client can compute
it, it does not depend on any feature, and it breaks the tie between ids and classes that sorted files have.

Aligning in the clear tells each client which people the others know: a set-up assumption (proofs §10.2).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from accel.validate import require, require_real
from vfl.data.sets import VerticalData
from vfl.tables import ClientTable, ColumnsError, IdRule, Label, Schema, apply_schema, describe_ids, read_table
from vfl.tables.kinds import as_is

__all__ = ["AlignmentReport", "ClientTable", "align", "alignment_order", "load_columns", "read_client_file"]


@dataclass(frozen=True)
class AlignmentReport:
    """What matched and what did not: per file, its rows and how many had no partner."""

    matched: int
    files: tuple[tuple[str, int, int], ...]

    def __str__(self) -> str:
        lines = [f"{self.matched} people are in every file (order: SHA-256 of the id)"]
        lines += [f"  {source}: {rows} rows, {unmatched} without a partner" for source, rows, unmatched in self.files]
        return "\n".join(lines)


def alignment_order(ids: Iterable[str]) -> list[str]:
    """Ids in the public order: by SHA-256 of the id, which every client can compute on its own."""
    return sorted(ids, key=lambda name: hashlib.sha256(name.encode()).digest())


def align(tables: Sequence[ClientTable]) -> tuple[list[ClientTable], AlignmentReport]:
    """Inner join by id in the public order, and the report; refuses an empty overlap."""
    require(len(tables) >= 1, "tables", len(tables), "at least one client's file")
    common = set(tables[0].ids).intersection(*(t.ids for t in tables[1:]))
    if not common:
        forms = "; ".join(f"{t.source} has {describe_ids(t.ids)}" for t in tables)
        raise ColumnsError(f"no id occurs in every file: {forms}; check the id column and how ids are written")
    order = alignment_order(common)
    files = [(table.source, len(table.ids), len(table.ids) - len(common)) for table in tables]
    return [t.select(order) for t in tables], AlignmentReport(len(order), tuple(files))


def read_client_file(
    path: str | Path,
    *,
    id_column: str = "id",
    label_column: str | None = None,
    forbidden_column: str | None = None,
) -> ClientTable:
    """One client's CSV, Parquet, .npz or .npy file with numeric columns, as they are. Refuses duplicates, gaps and
    text.

    ``label_column`` is given for the label client only (for .npz the array ``labels`` is used);
    ``forbidden_column`` is the labels' name for all others, which must not hold them.
    """
    raw = read_table(path, id_column=id_column, label_column=label_column)
    if forbidden_column is not None and forbidden_column in raw.names:
        raise ColumnsError(
            f"{raw.source}, column {forbidden_column!r}: the labels belong in the last file only; "
            "drop the column here or put this file last"
        )
    label = None if label_column is None else Label(label_column)
    names = [name for name in raw.names if name not in (id_column, label_column)]
    if not names and label is None:
        raise ColumnsError(f"{raw.source}: has no feature column beside {id_column!r}")
    schema = Schema(tuple(as_is(name) for name in names), IdRule(id_column), label)
    return apply_schema(schema, raw)[0]


def load_columns(
    paths: Sequence[str | Path],
    *,
    id_column: str = "id",
    label_column: str = "label",
    classes: Sequence[str] | None = None,
    test_fraction: float = 0.2,
    public_fraction: float = 0.1,
) -> tuple[VerticalData, AlignmentReport]:
    """Read and align one file per client; the last file is the label client's.

    The last rows of the public order become the test rows, those before them the public rows. ``classes``
    states the class names; without it they are taken from the labels, and the set of names is then public.
    """
    require(
        len(paths) >= 1,
        "paths",
        list(paths),
        "at least one file",
        "one file per client, the label client's last",
    )
    require_real("test_fraction", test_fraction, 0.0, 1.0, open_low=True, open_high=True)
    require_real("public_fraction", public_fraction, 0.0, 1.0 - test_fraction, open_high=True)
    last = read_client_file(paths[-1], id_column=id_column, label_column=label_column)
    others = [read_client_file(p, id_column=id_column, forbidden_column=label_column) for p in paths[:-1]]
    tables = [*others, last]
    aligned, report = align(tables)
    texts = aligned[-1].labels
    assert texts is not None
    names = sorted(set(texts), key=_natural) if classes is None else [str(c) for c in classes]
    index = {name: i for i, name in enumerate(names)}
    for row, text in enumerate(texts):
        if text not in index:
            raise ColumnsError(
                f"{aligned[-1].source}, column {label_column!r}: the label of aligned row {row + 1} must be one of "
                f"{', '.join(names)}"
            )
    if len(names) < 2:
        raise ColumnsError(f"{aligned[-1].source}, column {label_column!r}: only one class, {names[0]!r}; need two")
    labels = np.array([index[t] for t in texts], dtype=np.int64)
    num_test, num_public = round(test_fraction * len(labels)), round(public_fraction * len(labels))
    num_train = len(labels) - num_test - num_public
    require(num_train >= 1 and num_test >= 1, "aligned rows", len(labels), "enough for train and test rows")
    cuts = [num_train, num_train + num_public]
    parts = [np.split(t.features, cuts) for t in aligned]
    label_parts = np.split(labels, cuts)
    notes = [f"classes: {', '.join(names)}" + ("" if classes else " (taken from the labels, hence public)")]
    data = VerticalData(
        name="columns",
        classes=len(names),
        train=tuple(p[0] for p in parts),
        train_labels=label_parts[0],
        test=tuple(p[2] for p in parts),
        test_labels=label_parts[2],
        public=tuple(p[1] for p in parts) if num_public else None,
        public_labels=label_parts[1] if num_public else None,
        notes=tuple(notes),
    )
    return data, report


def _natural(text: str) -> tuple[int, float, str]:
    try:
        return (0, float(text), text)
    except ValueError:
        return (1, 0.0, text)
