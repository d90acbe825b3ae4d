"""The users' own columns: one file per client, aligned by an id column.

CSV and Parquet files have named columns; .npz files hold ``ids``, ``features`` and optionally ``labels`` and
``columns``; an .npy file is a numeric matrix whose first column is the id (and whose last one is the label
when the client is the label client). The aligned order is the order of SHA-256(id): every client can compute
it, it does not depend on any feature, and it breaks the tie between ids and classes that sorted files have.

Aligning in the clear tells each client which people the others know: a set-up assumption (proofs §10.2).
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from accel.errors import InvalidArgument
from accel.validate import require, require_real
from vfl.data.sets import VerticalData

__all__ = ["AlignmentReport", "ClientTable", "align", "alignment_order", "load_columns", "read_client_file"]


class ColumnsError(InvalidArgument):
    """A file that cannot be used as it is; the message names file, column and row."""


@dataclass(frozen=True)
class ClientTable:
    """One client's file: ids as text, numeric features, labels if it is the label client."""

    source: str
    ids: tuple[str, ...]
    columns: tuple[str, ...]
    features: npt.NDArray[np.float32]
    labels: tuple[str, ...] | None = None

    def select(self, ids: Sequence[str]) -> ClientTable:
        """The rows of ``ids``, in that order."""
        position = {name: row for row, name in enumerate(self.ids)}
        rows = [position[name] for name in ids]
        labels = None if self.labels is None else tuple(self.labels[r] for r in rows)
        return ClientTable(self.source, tuple(ids), self.columns, self.features[rows], labels)


@dataclass(frozen=True)
class AlignmentReport:
    """What matched and what did not: per file, its rows and how many had no partner (with a few examples)."""

    matched: int
    files: tuple[tuple[str, int, int, tuple[str, ...]], ...]

    def __str__(self) -> str:
        lines = [f"{self.matched} people are in every file (order: SHA-256 of the id)"]
        for source, rows, unmatched, examples in self.files:
            some = f", for example {', '.join(examples)}" if examples else ""
            lines.append(f"  {source}: {rows} rows, {unmatched} without a partner elsewhere{some}")
        return "\n".join(lines)


def alignment_order(ids: Iterable[str]) -> list[str]:
    """Ids in the public order: by SHA-256 of the id, which every client can compute on its own."""
    return sorted(ids, key=lambda name: hashlib.sha256(name.encode()).digest())


def align(tables: Sequence[ClientTable]) -> tuple[list[ClientTable], AlignmentReport]:
    """Inner join by id in the public order, and the report; refuses an empty overlap."""
    require(len(tables) >= 1, "tables", len(tables), "at least one client's file")
    common = set(tables[0].ids).intersection(*(t.ids for t in tables[1:]))
    if not common:
        samples = "; ".join(f"{t.source} has ids such as {', '.join(map(repr, t.ids[:3]))}" for t in tables)
        raise ColumnsError(f"no id occurs in every file: {samples}; check the id column and how ids are written")
    order = alignment_order(common)
    files = []
    for table in tables:
        missing = [name for name in table.ids if name not in common]
        files.append((table.source, len(table.ids), len(missing), tuple(missing[:3])))
    return [t.select(order) for t in tables], AlignmentReport(len(order), tuple(files))


def read_client_file(
    path: str | Path,
    *,
    id_column: str = "id",
    label_column: str | None = None,
    forbidden_column: str | None = None,
) -> ClientTable:
    """Read one client's CSV, Parquet, .npz or .npy file. Refuses duplicates, gaps and text in number columns.

    ``label_column`` is given for the label client only (for .npz the array ``labels`` is used);
    ``forbidden_column`` is the labels' name for all others, which must not hold them.
    """
    file = Path(path)
    require(file.exists(), "file", str(path), "an existing CSV, Parquet, .npz or .npy file")
    kind = file.suffix.lower()
    if kind == ".csv":
        header, rows = _read_csv(file)
    elif kind in (".parquet", ".pq"):
        header, rows = _read_parquet(file)
    elif kind in (".npz", ".npy"):
        header, rows = _read_numpy(file, id_column, label_column)
    else:
        raise ColumnsError(f"{file.name}: ending {kind!r} must be one of .csv, .parquet, .pq, .npz, .npy")
    if len(set(header)) != len(header):
        twice = next(c for c in header if header.count(c) > 1)
        raise ColumnsError(f"{file.name}, column {twice!r}: occurs more than once; rename one of them")
    for role, wanted in (("id", id_column), ("label", label_column)):
        if wanted is not None and wanted not in header:
            raise ColumnsError(
                f"{file.name}: the {role} column {wanted!r} is missing; columns are {', '.join(map(repr, header))}"
            )
    if forbidden_column is not None and forbidden_column in header:
        raise ColumnsError(
            f"{file.name}, column {forbidden_column!r}: the labels belong in the last file only; "
            "drop the column here or put this file last"
        )
    if not rows:
        raise ColumnsError(f"{file.name}: has a header but no rows")
    id_at = header.index(id_column)
    label_at = None if label_column is None else header.index(label_column)
    feature_at = [i for i in range(len(header)) if i not in (id_at, label_at)]
    if not feature_at and label_at is None:
        raise ColumnsError(f"{file.name}: has no feature column beside {id_column!r}")
    ids = _read_ids(file.name, id_column, [row[id_at] for row in rows])
    features = np.empty((len(rows), len(feature_at)), dtype=np.float32)
    for out, at in enumerate(feature_at):
        features[:, out] = _numbers(file.name, header[at], [row[at] for row in rows])
    labels = None
    if label_at is not None:
        assert label_column is not None
        labels = tuple(_read_text(file.name, label_column, [row[label_at] for row in rows]))
    return ClientTable(file.name, tuple(ids), tuple(header[i] for i in feature_at), features, labels)


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
                f"{aligned[-1].source}, column {label_column!r}, id {aligned[-1].ids[row]!r}: class {text!r} "
                f"must be one of {', '.join(names)}"
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


def _read_csv(file: Path) -> tuple[list[str], list[list[object]]]:
    with file.open(newline="", encoding="utf-8-sig") as stream:
        reader = csv.reader(stream)
        header = [c.strip() for c in next(reader, [])]
        if not header:
            raise ColumnsError(f"{file.name}: is empty; the first line must name the columns")
        rows: list[list[object]] = []
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise ColumnsError(
                    f"{file.name}, line {reader.line_num}: {len(row)} values, "
                    f"but the header names {len(header)} columns"
                )
            rows.append(list(row))
    return header, rows


def _read_parquet(file: Path) -> tuple[list[str], list[list[object]]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ColumnsError(f"{file.name}: Parquet needs pyarrow; pip install 'ppvfl[columns]'") from error
    table = parquet.read_table(file)
    columns = [column.to_pylist() for column in table.columns]
    return list(table.column_names), [list(row) for row in zip(*columns, strict=True)]


def _read_numpy(file: Path, id_column: str, label_column: str | None) -> tuple[list[str], list[list[object]]]:
    if file.suffix.lower() == ".npy":
        matrix = np.load(file, allow_pickle=False)
        if matrix.ndim != 2 or matrix.shape[1] < 2 or not np.issubdtype(matrix.dtype, np.number):
            raise ColumnsError(
                f"{file.name}: must be a numeric matrix with the id in its first column, got "
                f"shape {matrix.shape}, type {matrix.dtype}"
            )
        last = matrix.shape[1] - (label_column is not None)
        header = [id_column] + [f"x{i}" for i in range(last - 1)] + ([label_column] if label_column else [])
        return header, [list(row) for row in matrix.tolist()]
    with np.load(file, allow_pickle=False) as z:
        arrays = {k: z[k] for k in z}
    for key in ("ids", "features") + (("labels",) if label_column else ()):
        if key not in arrays:
            raise ColumnsError(f"{file.name}: array {key!r} is missing; it holds {', '.join(sorted(arrays))}")
    features = arrays["features"]
    if features.ndim != 2 or len(features) != len(arrays["ids"]):
        raise ColumnsError(f"{file.name}, array 'features': shape {features.shape} must be (number of ids, columns)")
    names = [str(c) for c in arrays.get("columns", [f"x{i}" for i in range(features.shape[1])])]
    header = [id_column, *names] + ([label_column] if label_column else [])
    labels = arrays["labels"].tolist() if label_column else None
    rows = [
        [name, *values] + ([labels[i]] if labels is not None else [])
        for i, (name, values) in enumerate(zip(arrays["ids"].tolist(), features.tolist(), strict=True))
    ]
    return header, rows


def _is_missing(value: object) -> bool:
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return True
    return isinstance(value, str) and value.strip().lower() in ("", "na", "nan", "null", "none")


def _read_text(source: str, column: str, values: Sequence[object]) -> list[str]:
    texts = []
    for row, value in enumerate(values, start=1):
        if _is_missing(value):
            raise ColumnsError(f"{source}, column {column!r}, row {row}: the value is missing; fill it or drop the row")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        texts.append(str(value).strip())
    return texts


def _read_ids(source: str, column: str, values: Sequence[object]) -> list[str]:
    ids = _read_text(source, column, values)
    seen: dict[str, int] = {}
    for row, name in enumerate(ids, start=1):
        if name in seen:
            raise ColumnsError(
                f"{source}, column {column!r}, row {row}: id {name!r} is also in row {seen[name]}; "
                "one person must have one row (the DP claim is per row)"
            )
        seen[name] = row
    return ids


def _numbers(source: str, column: str, values: Sequence[object]) -> npt.NDArray[np.float32]:
    out = np.empty(len(values), dtype=np.float64)
    for row, value in enumerate(values, start=1):
        if _is_missing(value):
            raise ColumnsError(
                f"{source}, column {column!r}, row {row}: the value is missing; fill it with a public "
                "constant (not with a statistic of the private rows) or drop the row"
            )
        try:
            out[row - 1] = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise ColumnsError(
                f"{source}, column {column!r}, row {row}: {value!r} is not a number; encode the column, "
                "or drop it from the file"
            ) from None
    if not np.isfinite(out).all():
        row = int(np.flatnonzero(~np.isfinite(out))[0])
        raise ColumnsError(f"{source}, column {column!r}, row {row + 1}: {out[row]} must be a finite number")
    return out.astype(np.float32)


def _natural(text: str) -> tuple[int, float, str]:
    try:
        return (0, float(text), text)
    except ValueError:
        return (1, 0.0, text)
