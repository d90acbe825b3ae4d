"""From what a user passes as X to one block of numbers for each party: a matrix to be split, or a table for each.

Without a schema columns are taken as they are: their owner states that they are scaled by public constants. Nothing
here is ever fitted on the rows that are trained on (proofs §10.1).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pyarrow import types as pa_types

from accel.validate import require, require_integer
from vfl.tables import (
    ClientTable,
    IdRule,
    Label,
    RawTable,
    Schema,
    apply_schema,
    as_raw_table,
    fit_schema,
    read_table,
    refuse_private_rows,
)
from vfl.tables.cells import plain, texts

__all__ = [
    "ROW",
    "Blocks",
    "Columns",
    "as_arrow",
    "is_blocks",
    "labels_of",
    "learn_columns",
    "path_of",
    "require_matrix",
    "split_widths",
    "texts_of",
    "with_ids",
]

Floats = npt.NDArray[np.float64]
PREDICTION = "prediction"
ROW = "row"  # the id of rows that have none: their number
AS_IS = "the owners state that their columns are scaled by public constants"


@dataclass(frozen=True)
class Columns:
    """What was learnt of the parties' columns: how new rows are read."""

    names: tuple[str, ...]
    widths: tuple[int, ...]
    matrix: bool  # whether X is one matrix, cut by ``strips``
    strips: tuple[tuple[int, ...], ...] = ()
    column_names: tuple[tuple[str, ...], ...] = ()  # of each party, if its table has names
    schemas: Mapping[str, Schema] = field(default_factory=dict)
    aligned_by_id: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        """Where the constants come from, for the claim."""
        return tuple(dict.fromkeys(schema.source for schema in self.schemas.values())) or (AS_IS,)

    def read(self, x: Any, *, with_label: bool = False) -> Blocks:
        """The blocks of all parties, in the order of ``names``; labels from the last one's schema if asked for."""
        tables = self._tables(x)
        if not self.schemas:
            rows = [self._plain(name, table, i) for i, (name, table) in enumerate(zip(self.names, tables, strict=True))]
            return replace(_in_order(self.names, rows, None), given=dict(zip(self.names, map(len, rows), strict=True)))
        rows, last = [], None
        read: list[ClientTable] = []
        for index, (name, table) in enumerate(zip(self.names, tables, strict=True)):
            schema = self.schemas.get(name)
            if schema is None:  # another party's, of which only scaled numbers are known
                rows.append(self._plain(name, table, index))
                continue
            raw = _raw(name, table, ROW if schema.id.column == ROW else None)
            label = with_label and index == len(self.names) - 1
            read.append(apply_schema(schema, raw, source=name, with_label=label)[0])
            rows.append(read[-1].features.astype(np.float64))
            last = read[-1] if index == len(self.names) - 1 else None
        found = _aligned(self.names, read) if self.aligned_by_id else _in_order(self.names, rows, last)
        found = replace(found, given=dict(zip(self.names, map(len, rows), strict=True)))
        return found if last is None else _as_in_the_table(found, raw, schema)

    def _tables(self, x: Any) -> list[Any]:
        if self.matrix:
            require(not is_blocks(x), "X", type(x).__name__, "one matrix, as in fit")
            return [x[:, list(strip)] if isinstance(x, np.ndarray) else x for strip in self.strips]
        if isinstance(x, Mapping):
            require(
                set(x) == set(self.names), "X: parties", ", ".join(map(str, x)), f"the parties {', '.join(self.names)}"
            )
            return [x[name] for name in self.names]
        require(
            isinstance(x, Sequence) and len(x) == len(self.names),
            "X",
            len(x) if isinstance(x, Sequence) else type(x).__name__,
            f"{len(self.names)} tables, one for each party: {', '.join(self.names)}",
        )
        return list(x)

    def _plain(self, name: str, table: Any, index: int) -> Floats:
        """Numbers as they are, in the order of the columns' names where there are some."""
        known = self.column_names[index] if self.column_names else ()
        if known and hasattr(table, "columns"):
            given = [str(column) for column in table.columns]
            missing = [column for column in known if column not in given]
            require(not missing, f"{name}: columns", f"without {', '.join(missing[:5])}", "those of fit, by name")
            require(
                len(given) == len(known),
                f"{name}: columns",
                ", ".join(column for column in given if column not in known),
                f"those of fit and no others: {', '.join(known[:10])}",
            )
            table = table[[table.columns[given.index(column)] for column in known]]
        return _numbers(name, table, self.widths[index])


@dataclass(frozen=True)
class Blocks:
    """Rows of all parties side by side: the same people in the same order."""

    features: tuple[Floats, ...]
    ids: tuple[str, ...] | None
    labels: tuple[str, ...] | None
    targets: Floats | None
    typed_labels: npt.NDArray[Any] | None = None  # ``labels`` as the table has them: 0 and 1 are no texts
    shown_ids: tuple[Any, ...] | None = None  # ``ids`` as the label party's table has them
    given: Mapping[str, int] = field(default_factory=dict)  # rows of each party's table

    def __len__(self) -> int:
        return len(self.features[0])


def path_of(argument: str, value: Any) -> Path:
    """A file's or folder's name."""
    require(isinstance(value, str | os.PathLike), argument, value, "a path")
    return Path(value)


def require_matrix(x: Any) -> None:
    """Refuse what can be no matrix; scikit-learn says the rest."""
    like = not isinstance(x, str) and any(hasattr(x, name) for name in ("shape", "__len__", "__array__"))
    require(like, "X", x, "one matrix, or a table for each party")


def is_blocks(x: Any) -> bool:
    """Whether X is a table for each party, rather than one matrix."""
    if isinstance(x, Mapping):
        return True
    return isinstance(x, list | tuple) and len(x) > 0 and all(_is_table(item) for item in x)


def _is_table(item: Any) -> bool:
    return isinstance(item, str | Path | RawTable) or (hasattr(item, "shape") and len(item.shape) == 2)


def split_widths(width: int, parties: int | Mapping[str, Sequence[int]]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Names of the parties and which columns of a matrix each has: strips as equal as can be, or as stated."""
    if isinstance(parties, Mapping):
        strips = tuple(tuple(int(column) for column in columns) for columns in parties.values())
        flat = sorted(column for strip in strips for column in strip)
        require(
            flat == list(range(width)), "parties", parties, f"each of the {width} columns of X at exactly one party"
        )
        return tuple(map(str, parties)), strips
    largest = max(2, width)  # of one column the default, two parties, leaves one
    count = min(require_integer("parties", parties, 1, largest, f"X has {width} columns"), width)
    cut = np.array_split(np.arange(width), count)
    return tuple(f"party {i + 1}" for i in range(count)), tuple(tuple(map(int, strip)) for strip in cut)


def learn_columns(
    x: Any,
    parties: int | Mapping[str, Sequence[int]],
    schemas: Mapping[str, Schema] | None,
    public: Any,
    id_column: str | None,
    label: Label | None,
    id_rule: str = "text",
) -> Columns:
    """How these tables become numbers. ``schemas`` hold by themselves; else ``public`` rows give them; else nothing is
    scaled."""
    stated = schemas is None or isinstance(schemas, Mapping)
    require(stated, "schemas", schemas, "{party: schema} of every party, or None", "vfl.tables makes them")
    require(schemas is None or public is None, "public", "given", "absent with schemas, which hold their constants")
    stated = id_rule == "text" or (public is not None and id_column is not None)
    require(stated, "id_rule", id_rule, "'text' without public and id_column", "schemas hold a rule of their own")
    matrix = not is_blocks(x)
    strips: tuple[tuple[int, ...], ...] = ()
    if matrix:
        names, strips = split_widths(x.shape[1], parties)
        tables = [x[:, list(strip)] for strip in strips]
    elif isinstance(x, Mapping):
        names, tables = tuple(map(str, x)), list(x.values())
    else:
        names, tables = tuple(f"party {i + 1}" for i in range(len(x))), list(x)
    if public is not None:
        given = _public_tables(public, names, strips)
        rule = None if id_column is None else IdRule(id_column, id_rule)
        for name, table in zip(names, tables, strict=True):
            refuse_private_rows(f"public: {name}", _raw(name, given[name], None), _raw(name, table, None), rule)
        schemas = {
            name: fit_schema(
                _raw(name, table, ROW if id_column is None else None),
                id_column=id_column or ROW,
                id_rule=id_rule if id_column is not None else "text",
                label=label if name == names[-1] else None,
            )
            for name, table in given.items()
        }
    if schemas is not None:
        require(set(schemas) == set(names), "schemas", ", ".join(schemas), f"one for each party: {', '.join(names)}")
        kept = {name: schemas[name] for name in names}
        by_id = all(schema.id.column != ROW for schema in kept.values())
        widths = tuple(schema.width for schema in kept.values())
        return Columns(names, widths, matrix, strips, schemas=kept, aligned_by_id=by_id)
    require(id_column is None, "id_column", id_column, "absent without schemas or public rows: rows must be aligned")
    found = tuple(_width(name, table) for name, table in zip(names, tables, strict=True))
    titled = [tuple(map(str, table.columns)) if hasattr(table, "columns") else () for table in tables]
    return Columns(names, found, matrix, strips, tuple(titled) if all(titled) else ())


def _public_tables(public: Any, names: tuple[str, ...], strips: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    if strips:
        rows, width = np.asarray(public), sum(map(len, strips))
        require(rows.ndim == 2 and rows.shape[1] == width, "public", public, f"rows with the {width} columns of X")
        return {name: rows[:, list(strip)] for name, strip in zip(names, strips, strict=True)}
    tables = isinstance(public, Mapping | list | tuple) and len(public) == len(names)
    require(tables, "public", public, f"a table for each of {', '.join(names)}, as in X")
    found = dict(zip(names, public.values() if isinstance(public, Mapping) else public, strict=True))
    if isinstance(public, Mapping):
        require(set(map(str, public)) == set(names), "public", ", ".join(map(str, public)), ", ".join(names))
        found = {name: public[name] for name in names}
    return found


def _raw(name: str, table: Any, row_ids: str | None) -> RawTable:
    """A table with an id column; arrays get names of columns, and rows without ids their numbers."""
    import pyarrow as pa

    if isinstance(table, str | Path):
        raw = read_table(table)
    else:
        raw = table if isinstance(table, RawTable) else RawTable(name, as_arrow(name, table))
    if row_ids is None:
        return raw
    numbered = raw.table.append_column(row_ids, pa.array([str(i) for i in range(raw.table.num_rows)]))
    return RawTable(raw.source, numbered, raw.notes)


def as_arrow(name: str, table: Any) -> Any:
    """An array or a DataFrame as a pyarrow.Table; columns of an array are numbered."""
    import pyarrow as pa

    if isinstance(table, np.ndarray):
        require(table.ndim == 2, f"{name}: shape", table.shape, "(rows, columns)")
        return pa.table({f"column {i}": table[:, i] for i in range(table.shape[1])})
    return as_raw_table(table, source=name).table


def _width(name: str, table: Any) -> int:
    require(
        hasattr(table, "shape") and len(table.shape) == 2,
        f"{name}: table",
        type(table).__name__,
        "an array or a DataFrame of numbers",
        "give schemas= or public= for files and mixed tables",
    )
    return int(table.shape[1])


def _numbers(name: str, table: Any, width: int) -> Floats:
    try:
        rows = np.asarray(table, dtype=np.float64)
    except (TypeError, ValueError) as error:
        require(
            False,
            f"{name}: table",
            str(error),
            "numbers only",
            "text, dates and gaps need schemas= (vfl.tables) or public= rows to make them from",
        )
        raise AssertionError from None
    good = rows.ndim == 2 and rows.shape[1] == width
    require(good, f"{name}: shape", rows.shape, f"(rows, {width})")
    require(bool(np.isfinite(rows).all()), f"{name}: table", "NaN or inf", "finite numbers", "or give schemas=")
    return rows


def _same_rows(names: Sequence[str], rows: Sequence[npt.NDArray[Any]]) -> None:
    counts = {name: len(part) for name, part in zip(names, rows, strict=True)}
    require(
        len(set(counts.values())) == 1, "rows", counts, "as many at every party: row i is the same person everywhere"
    )


def _as_in_the_table(blocks: Blocks, raw: RawTable, schema: Schema | None) -> Blocks:
    """Labels and ids in the types of the last party's table, whose rows are compared as texts."""
    assert schema is not None
    if blocks.ids is not None:
        column = raw.table.column(schema.id.column)
        known = dict(zip(schema.id.read(column)[0].to_pylist(), plain(column).to_pylist(), strict=True))
        blocks = replace(blocks, shown_ids=tuple(known[name] for name in blocks.ids))
    if blocks.labels is None:
        return blocks
    assert schema.label is not None
    array = plain(raw.table.column(schema.label.column))
    kind = array.type
    if not (pa_types.is_integer(kind) or pa_types.is_floating(kind) or pa_types.is_boolean(kind)):
        return replace(blocks, typed_labels=np.array(blocks.labels))
    known = dict(zip(texts(array).to_pylist(), array.to_pylist(), strict=True))
    labels = np.array([known[text] for text in blocks.labels], dtype=kind.to_pandas_dtype())
    return replace(blocks, typed_labels=labels)


def with_ids(
    x: Any, id_column: str, ids: npt.NDArray[Any] | None, found: npt.NDArray[Any], names: Sequence[Any]
) -> Any:
    """Predictions in the form of the label party's table: a pandas object whose index is the ids, or an Arrow table
    with a column of ids (of files too). Arrays, and rows without ids, get an array. ``names``: of the columns, where
    there are several."""
    table = x if not is_blocks(x) else list(x.values() if isinstance(x, Mapping) else x)[-1]
    if ids is None or isinstance(table, np.ndarray):
        return found
    if hasattr(table, "iloc"):
        import pandas

        index = pandas.Index(ids, name=id_column)
        if found.ndim == 1:
            return pandas.Series(found, index=index, name=PREDICTION)
        return pandas.DataFrame(found, index=index, columns=list(names))
    import pyarrow as pa

    columns = {PREDICTION: found} if found.ndim == 1 else dict(zip(map(str, names), found.T, strict=True))
    return pa.table({id_column: ids, **{name: pa.array(np.ascontiguousarray(c)) for name, c in columns.items()}})


def texts_of(labels: npt.NDArray[Any]) -> tuple[str, ...]:
    """The names of classes in a model file: those that a table with these labels has."""
    import pyarrow as pa

    if labels.dtype.kind in "iufb":
        return tuple(texts(pa.array(labels)).to_pylist())
    return tuple(map(str, labels.tolist()))


def labels_of(names: Sequence[str], kind: str) -> npt.NDArray[Any]:
    """The inverse of ``texts_of`` for labels of the numpy type ``kind``; empty: texts."""
    if not kind or np.dtype(kind).kind not in "iufb":
        return np.asarray(names, dtype=object if kind == "object" else None)
    if np.dtype(kind).kind == "b":
        return np.array([name.lower() == "true" for name in names])
    return np.array([float(name) if np.dtype(kind).kind == "f" else int(name) for name in names], dtype=kind)


def _in_order(names: tuple[str, ...], rows: Sequence[Floats], last: ClientTable | None) -> Blocks:
    """Row i is the same person everywhere; labels are those of the ``last`` party's table, if it has been read."""
    _same_rows(names, rows)
    return Blocks(tuple(rows), None, None if last is None else last.labels, None if last is None else last.targets)


def _aligned(names: tuple[str, ...], tables: Sequence[ClientTable]) -> Blocks:
    """The common people, in the order of the label party's table."""
    common = set(tables[0].ids).intersection(*(table.ids for table in tables[1:]))
    order = [name for name in tables[-1].ids if name in common]
    require(len(order) > 0, "common ids", 0, f"at least one person in the tables of {', '.join(names)}")
    chosen = [table.select(order) for table in tables]
    return Blocks(tuple(_double(table) for table in chosen), tuple(order), chosen[-1].labels, chosen[-1].targets)


def _double(table: ClientTable) -> Floats:
    return table.features.astype(np.float64)
