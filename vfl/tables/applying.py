"""A schema applied to a table: features, labels and ids, and for its owner's eyes what was filled, clipped or
dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from accel.validate import require
from vfl.tables.cells import Misread, is_missing, numbers, plain, texts
from vfl.tables.errors import ColumnsError
from vfl.tables.ids import Ids
from vfl.tables.reading import RawTable, as_raw_table
from vfl.tables.schema import Schema

__all__ = ["ClientTable", "ColumnReport", "TableReport", "apply_schema"]


@dataclass(frozen=True)
class ClientTable:
    """One client's rows: ids as text, features as numbers (rows, columns), labels (texts) or targets (numbers) if it
    has them."""

    source: str
    ids: Ids
    columns: tuple[str, ...]
    features: npt.NDArray[np.float32] = field(repr=False)
    labels: tuple[str, ...] | None = field(default=None, repr=False)
    targets: npt.NDArray[np.float64] | None = field(default=None, repr=False)

    def select(self, ids: Sequence[str]) -> ClientTable:
        """The rows of ``ids``, in that order."""
        position = {name: row for row, name in enumerate(self.ids)}
        rows = [position[name] for name in ids]
        labels = None if self.labels is None else tuple(self.labels[row] for row in rows)
        targets = None if self.targets is None else self.targets[rows]
        return ClientTable(self.source, Ids(ids), self.columns, self.features[rows], labels, targets)


@dataclass(frozen=True)
class ColumnReport:
    """One column: how many cells were empty, beyond the range, in the rest category. Private, like every count of
    rows."""

    name: str
    kind: str
    outputs: int
    missing: int = 0
    clipped: int = 0
    rest: int = 0
    fill: str = ""


@dataclass(frozen=True)
class TableReport:
    """What applying a schema did; for the owner of the rows only."""

    source: str
    rows: int
    dropped: int
    columns: tuple[ColumnReport, ...]
    notes: tuple[str, ...] = ()


def apply_schema(
    schema: Schema, table: Any, *, source: str | None = None, with_label: bool | None = None
) -> tuple[ClientTable, TableReport]:
    """``table`` (a RawTable, pyarrow.Table or pandas.DataFrame) through ``schema``, in the schema's order of columns.

    Refuses a missing column, cells of another kind, a repeated id. ``with_label``: read the label (default: if the
    schema has one); False for new rows, whose label is not known. Features are float32: 4 bytes a number.
    """
    raw = as_raw_table(table, source=source or "the table", keep=(schema.id.column,))
    return _Application(schema, raw, schema.label is not None if with_label is None else with_label).run()


class _Application:
    def __init__(self, schema: Schema, raw: RawTable, with_label: bool):
        self._schema, self._raw, self._with_label = schema, raw, with_label
        self._keep = np.ones(len(raw), bool)
        self._notes: list[str] = []

    def run(self) -> tuple[ClientTable, TableReport]:
        schema, raw = self._schema, self._raw
        self._check_names()
        ids, reports = self._ids(), []
        features = np.empty((len(raw), schema.width), np.float32)
        start = 0
        for column in schema.columns:
            try:
                encoded = column.encode(self._array(column.name))
            except Misread as error:
                raise self._error(column.name, error) from None
            fill = getattr(column, "fill", "")
            self._empty(column.name, encoded.missing, str(fill))
            stop = start + len(column.outputs)
            features[:, start:stop] = encoded.values
            counts = (int(encoded.missing.sum()), int(encoded.clipped.sum()), int(encoded.rest.sum()))
            reports.append(ColumnReport(column.name, column.kind, stop - start, *counts, str(fill)))
            start = stop
        labels, targets = self._labels()
        keep = self._keep
        dropped = int((~keep).sum())
        if dropped:
            require(dropped < len(raw), f"{raw.source}: rows", "all dropped", "at least one that is kept")
            ids, features = ids.filter(pa.array(keep)), features[keep]
            labels = None if labels is None else labels.filter(pa.array(keep))
            targets = None if targets is None else targets[keep]
        self._refuse_repeated(ids)
        table = ClientTable(
            raw.source,
            Ids(ids),
            schema.outputs,
            features,
            None if labels is None else tuple(labels.to_pylist()),
            targets,
        )
        return table, TableReport(
            raw.source, len(raw), dropped, tuple(reports), (*raw.notes, *self._left_out(), *self._notes)
        )

    def _check_names(self) -> None:
        schema, raw = self._schema, self._raw
        label = [("label", schema.label.column)] if schema.label is not None and self._with_label else []
        for role, wanted in (("id", schema.id.column), *label, *(("", column.name) for column in schema.columns)):
            if wanted not in raw.names:
                what = f"the {role} column {wanted!r}" if role else f"the column {wanted!r}, which the schema names,"
                known = {c.name for c in schema.columns} | {schema.id.column}
                others = [name for name in raw.names if name not in known] if not role else list(raw.names)
                hint = f"; columns are {', '.join(map(repr, others[:20]))}" if role else _perhaps(others)
                raise ColumnsError(f"{raw.source}: {what} is missing{hint}")

    def _left_out(self) -> list[str]:
        schema = self._schema
        known = {column.name for column in schema.columns} | set(schema.ignored) | {schema.id.column}
        label = schema.label.column if schema.label is not None else None
        others = [name for name in self._raw.names if name not in known and name != label]
        if not others:
            return []
        return [f"{self._raw.source}: not in the schema, and left out: {', '.join(map(repr, others[:20]))}"]

    def _array(self, name: str) -> pa.Array:
        return plain(self._raw.table.column(name))

    def _ids(self) -> pa.Array:
        name = self._schema.id.column
        try:
            ids, missing = self._schema.id.read(self._raw.table.column(name))
        except Misread as error:
            raise self._error(name, error) from None
        self._empty(name, missing, self._schema.id.missing)
        return ids

    def _labels(self) -> tuple[pa.Array | None, npt.NDArray[np.float64] | None]:
        label = self._schema.label
        if label is None or not self._with_label:
            return None, None
        try:
            array = self._array(label.column)
            if label.kind == "number":
                values, missing = numbers(array)
                self._empty(label.column, missing, label.missing)
                self._in_range(values)
                return None, values
            found = texts(array)
            known = np.zeros(len(found), bool)
            if label.classes:
                known = np.asarray(
                    pc.fill_null(pc.is_in(found, pa.array(label.classes)), False).to_numpy(zero_copy_only=False)
                )
            missing = is_missing(array) & ~known
            self._empty(label.column, missing, label.missing)
            wrong = ~known & ~missing if label.classes else ~np.ones(len(found), bool)
            if wrong.any():
                row = int(np.flatnonzero(wrong)[0]) + 1
                raise Misread(row, f"is none of the classes {', '.join(label.classes)}")
            return found, None
        except Misread as error:
            raise self._error(label.column, error) from None

    def _in_range(self, values: npt.NDArray[np.float64]) -> None:
        """Targets beyond the stated range are brought to its ends, and counted: the range is part of the claim."""
        label = self._schema.label
        assert label is not None
        if label.range is None:
            return
        low, high = label.range
        beyond = int(((values < low) | (values > high)).sum())
        if beyond:
            where = f"{self._raw.source}, column {label.column!r}"
            self._notes.append(
                f"{where}: {beyond:,} targets are beyond the range {low:g} to {high:g}, and count as its ends"
            )
        np.clip(values, low, high, out=values)

    def _empty(self, name: str, missing: np.ndarray, fill: str) -> None:
        if fill == "drop":
            self._keep &= ~missing
        elif fill == "refuse" and missing.any():
            row, count = int(np.flatnonzero(missing)[0]) + 1, int(missing.sum())
            more = f" (and {count - 1} more)" if count > 1 else ""
            raise ColumnsError(
                f"{self._raw.source}, column {name!r}, row {row}{more}: the value is missing; fill it with a public "
                "constant (not with a statistic of the private rows), drop the row, or give the column a fill rule in "
                "columns.toml"
            )

    def _refuse_repeated(self, ids: pa.Array) -> None:
        codes = ids.dictionary_encode().indices.to_numpy(zero_copy_only=False)
        first = np.full(len(codes) + 1, -1)
        if len(np.unique(codes)) == len(codes):
            return
        rows = np.flatnonzero(self._keep)  # numbers of rows are those of the file
        for place, code in enumerate(codes):
            if first[code] >= 0:
                raise ColumnsError(
                    f"{self._raw.source}, column {self._schema.id.column!r}, row {rows[place] + 1}: has the same id "
                    f"as row {rows[first[code]] + 1}; keep one row for each id, or give each row an id of its own and "
                    "state rows_per_person"
                )
            first[code] = place

    def _error(self, name: str, error: Misread) -> ColumnsError:
        where = f"{self._raw.source}, column {name!r}" + (f", row {error.row}" if error.row else "")
        return ColumnsError(f"{where}: {error.what}")


def _perhaps(others: list[str]) -> str:
    shown = ", ".join(map(repr, others[:10]))
    return f"; the file's columns that the schema does not name: {shown}" if others else ""
