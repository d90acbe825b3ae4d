"""A first schema: constants from public rows (scikit-learn's scalers, kept as plain numbers), or names and kinds only.

``fit_schema`` looks at every value of the table it is given, so these rows must be public. ``draft_schema`` takes no
more than names and types of columns, so the table may be private; what is left open in it has to be stated by hand.
"""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from accel.errors import PpvflError
from accel.validate import require, require_integer
from vfl.tables.cells import Misread, booleans, dates, is_missing, numbers, plain, texts
from vfl.tables.errors import ColumnsError
from vfl.tables.ids import IdRule
from vfl.tables.kinds import Boolean, Category, Column, Date, Number
from vfl.tables.reading import RawTable, as_raw_table
from vfl.tables.schema import FORMAT, Label, Schema

__all__ = ["UnusedColumnWarning", "draft_schema", "fit_schema", "refuse_private_ids", "refuse_private_rows"]

_COMPARED, _COMPARED_COLUMNS = 1000, 50  # rows and columns, where rows have no ids

HEAVY_TAIL = 10.0  # deviations: a column with values beyond this is scaled by quantiles
QUANTILES = 33
MOST_CATEGORIES = 20
LONGEST_CATEGORY = 100  # characters; what is longer is a text, and no category
_EPOCH = datetime.date(1970, 1, 1)


class UnusedColumnWarning(UserWarning):
    """A column of the public rows becomes no feature; the message names it and says why."""


class _Unused(PpvflError):
    """Nothing can be learnt from a column; the message says why."""


def fit_schema(
    public: Any,
    *,
    id_column: str = "id",
    id_rule: str = "text",
    label: Label | None = None,
    stated: Mapping[str, Column] | None = None,
    ignored: Sequence[str] = (),
    most_categories: int = MOST_CATEGORIES,
) -> Schema:
    """A schema whose constants come from ``public`` (a RawTable, pyarrow.Table or pandas.DataFrame), which must be
    public rows.

    Numbers: mean and deviation, or quantiles where a value lies beyond ten deviations. Text: the ``most_categories``
    most frequent values and a rest category. Dates: first and last day. ``stated`` columns are taken as given. Id and
    label need not be in the public rows. Columns that are empty, long text, or text that hardly repeats, are ignored,
    with an ``UnusedColumnWarning``.
    """
    raw = as_raw_table(public, source="public rows", keep=(id_column,))
    require_integer("most_categories", most_categories, 1)
    require(len(raw) >= 2, f"{raw.source}: public rows", len(raw), "at least two", "or state the ranges by hand")
    apart = {id_column, *ignored, *([label.column] if label else [])}
    columns: list[Column] = []
    useless: list[str] = []
    for name in raw.names:
        if name in apart:
            continue
        try:
            columns.append((stated or {}).get(name) or _fit_column(raw, name, most_categories))
        except _Unused as reason:
            useless.append(name)
            warnings.warn(f"{raw.source}, column {name!r}: is not used: {reason}", UnusedColumnWarning, stacklevel=2)
    unknown = sorted(set(stated or {}) - set(raw.names))
    require(not unknown, "stated columns", ", ".join(unknown), f"columns of {raw.source}")
    require(len(columns) >= 1, f"{raw.source}: columns", "none that is a feature", "at least one beside id and label")
    source = f"scaled by {len(raw)} public rows" + (" and stated constants" if stated else "")
    return Schema(tuple(columns), IdRule(id_column, id_rule), label, (*ignored, *useless), source)


def refuse_private_rows(argument: str, public: RawTable, private: RawTable, rule: IdRule | None) -> None:
    """Refuse public rows that are the private ones: by their ids, or, where they have none (``rule`` None), by their
    cells.

    Seen by whoever has both tables, so nothing is said of it to anybody else. Other people with the same ids, or the
    same people under other ids, are not told apart.
    """
    if rule is None:
        _refuse_some(argument, _same_rows(public.table, private.table), public, "are rows that are trained on")
    else:
        refuse_private_ids(argument, public, _ids(private, rule), rule)


def refuse_private_ids(argument: str, public: RawTable, ids: Iterable[str], rule: IdRule) -> None:
    """``refuse_private_rows`` by the ids of the private rows."""
    if rule.column in public.names:
        known = set(ids)
        found = sum(name in known for name in _ids(public, rule))
        _refuse_some(argument, found, public, "have an id of the rows that are trained on")


def _refuse_some(argument: str, found: int, public: RawTable, what: str) -> None:
    way_out = "constants from private rows would be a release that the claim does not cover: state them in a schema"
    require(found == 0, argument, f"{found:,} of {len(public):,} rows {what}", "rows of other people", way_out)


def _ids(raw: RawTable, rule: IdRule) -> list[str]:
    if rule.column not in raw.names:
        return []  # which is refused, by name, where the rows are read
    try:
        return [name for name in rule.read(raw.table.column(rule.column))[0].to_pylist() if name is not None]
    except Misread as error:
        raise ColumnsError(f"{raw.source}, column {rule.column!r}, row {error.row}: {error.what}") from None


def _same_rows(public: pa.Table, private: pa.Table) -> int:
    """How many public rows are private rows; 0 where rows repeat so much, or are so few, that this says nothing."""
    same = [
        f.name for f in public.schema if f.name in private.column_names and private.schema.field(f.name).type == f.type
    ]
    if not same:
        return 0
    rows = {name: plain(public.column(name)).slice(0, _COMPARED) for name in same[:_COMPARED_COLUMNS]}
    best = max(rows, key=lambda name: pc.count_distinct(rows[name]).as_py())
    near = pc.is_in(plain(private.column(best)), value_set=rows[best])
    others = zip(*(plain(private.column(name)).filter(near).to_pylist() for name in rows), strict=True)
    ours = set(zip(*(array.to_pylist() for array in rows.values()), strict=True))
    both = len(ours & set(others))
    distinct = len(ours) >= 0.9 * len(rows[best]) and pc.count_distinct(rows[best]).as_py() >= 0.5 * len(rows[best])
    return both if distinct and both >= max(2, len(ours) / 2) else 0


def _fit_column(raw: RawTable, name: str, most_categories: int) -> Column:
    """Raises ``_Unused`` where there is nothing to learn from it."""
    try:
        array = plain(raw.table.column(name))
    except Misread as error:
        raise ColumnsError(f"{raw.source}, column {name!r}: {error.what}") from None
    missing = is_missing(array)
    if missing.all():
        raise _Unused("it is empty in all public rows; if the private rows have values, state its range or its values")
    kind = _kind(array)
    if kind == "boolean":
        return Boolean(name)
    if kind == "number":
        return _fit_number(name, numbers(array)[0][~missing])
    if kind == "date":
        days = dates(array, "%Y-%m-%d")[0][~missing]
        first, last = (_EPOCH + datetime.timedelta(days=float(np.floor(day))) for day in (days.min(), days.max()))
        return Date(name, (first.isoformat(), max(last, first + datetime.timedelta(days=1)).isoformat()))
    if kind == "category":
        return _fit_category(name, texts(array).filter(pa.array(~missing)), most_categories)
    raise ColumnsError(
        f"{raw.source}, column {name!r}: is of type {array.type}; convert it, or add it to ignored columns"
    )


def _fit_number(name: str, values: np.ndarray) -> Number:
    from sklearn.preprocessing import QuantileTransformer, StandardScaler

    scaler = StandardScaler().fit(values[:, None])
    centre, spread = float(scaler.mean_[0]), float(scaler.scale_[0])  # the scale of a constant column is 1
    if np.abs(values - centre).max() <= HEAVY_TAIL * spread:
        return Number(name, centre=centre, spread=spread)
    count = min(QUANTILES, len(values))
    quantiles = QuantileTransformer(n_quantiles=count, subsample=None).fit(values[:, None]).quantiles_[:, 0]
    return Number(name, quantiles=tuple(map(float, np.maximum.accumulate(quantiles))))


def _fit_category(name: str, values: pa.Array, most_categories: int) -> Category:
    from sklearn.preprocessing import OneHotEncoder

    distinct = len(pc.unique(values))
    if distinct > max(most_categories, len(values) // 2):
        raise _Unused(
            f"it has {distinct:,} different texts in {len(values):,} public rows, so hardly any text repeats; "
            "state values to use some"
        )
    longest = pc.max(pc.utf8_length(values)).as_py()
    if longest > LONGEST_CATEGORY:
        raise _Unused(f"it holds text of up to {longest:,} characters, and a category has at most {LONGEST_CATEGORY}")
    cells = np.array(values.to_pylist(), dtype=object)[:, None]
    encoder = OneHotEncoder(max_categories=most_categories + 1, handle_unknown="infrequent_if_exist").fit(cells)
    rare = encoder.infrequent_categories_[0]
    kept = [value for value in encoder.categories_[0] if rare is None or value not in set(rare)]
    return Category(name, tuple(kept))


def _kind(array: pa.Array) -> str:
    """What public cells look like."""
    kind = kind_of_type(array.type)
    if kind != "category":
        return kind
    for name, read in (("number", numbers), ("date", lambda a: dates(a, "%Y-%m-%d")), ("boolean", booleans)):
        try:
            read(array)
            return name
        except Misread:
            continue
    return "category"


def kind_of_type(kind: pa.DataType) -> str:
    """The kind that a type suggests; empty if there is none."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "number"
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return "date"
    return "category" if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind) else ""


def draft_schema(
    raw: RawTable,
    *,
    id_column: str = "id",
    id_rule: str = "text",
    label: Label | None = None,
    ranges: Mapping[str, Sequence[Any]] | None = None,
    values: Mapping[str, Sequence[str]] | None = None,
    ignored: Sequence[str] = (),
) -> dict[str, Any]:
    """The plain form of a schema (``Schema.as_dict``) from names and types alone. Ranges of numbers and dates and
    values of categories are those that are stated; where none is, the entry lacks it, and cannot be used until somebody
    states it."""
    ranges, values = dict(ranges or {}), dict(values or {})
    unknown = sorted((set(ranges) | set(values) | set(ignored)) - set(raw.names))
    require(not unknown, "columns", ", ".join(unknown), f"columns of {raw.source}: {', '.join(raw.names[:20])}")
    require(id_column in raw.names, f"{raw.source}: the id column", id_column, f"one of {', '.join(raw.names[:20])}")
    apart = {id_column, *ignored, *([label.column] if label else [])}
    columns: list[dict[str, Any]] = []
    left = list(ignored)
    for name in raw.names:
        if name in apart:
            continue
        kind = "category" if name in values else kind_of_type(raw.table.schema.field(name).type)
        if name in ranges and kind != "date":
            kind = "number" if all(_is_number(end) for end in ranges[name]) else "date"
        if not kind:
            left.append(name)
            continue
        entry: dict[str, Any] = {"name": name, "kind": kind}
        if name in ranges:
            entry["range"] = list(ranges[name])
        if name in values:
            entry["values"] = list(values[name])
        columns.append(entry)
    found: dict[str, Any] = {
        "version": FORMAT,
        "source": "stated constants",
        "id": {"column": id_column, "rule": id_rule},
    }
    if label is not None:
        found["label"] = Schema((), IdRule("id"), label).as_dict()["label"]
    return {**found, "ignored": left, "column": columns}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
