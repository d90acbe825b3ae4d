"""The kinds of columns, each with the public constants that turn its cells into numbers.

========== ====================================================== =========================== =======================
kind       constants                                              becomes                     empty cells (``fill``)
========== ====================================================== =========================== =======================
number     ``range``, or ``centre`` and ``spread``, or            one column, −1..1 or        centre, a number,
           ``quantiles`` of public rows                           ±limit deviations           refuse, drop
category   ``values``, and a rest category or none                one column of 0/1 a value   rest, refuse, drop
boolean                                                           one column, −1 or 1         centre, refuse, drop
date       ``range`` of two days, ``form`` of text                one column, −1..1           centre, refuse, drop
========== ====================================================== =========================== =======================

Every kind looks at one cell at a time. ``centre`` fills with what becomes 0, ``drop`` leaves out the whole row before
ids are matched, ``refuse`` ends with an error that names the row.
"""

from __future__ import annotations

import datetime
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from accel.validate import require, require_choice, require_real
from vfl.tables.cells import Mask, Misread, booleans, dates, is_missing, numbers, texts

__all__ = ["KINDS", "Boolean", "Category", "Column", "Date", "Encoded", "Number", "as_is", "column_from_dict"]

STANDARD_LIMIT = 4.0
REST = "…"  # the rest category in names of outputs


@dataclass(frozen=True)
class Encoded:
    """A column as numbers (rows, outputs), and which cells were empty, beyond the range, or in the rest category."""

    values: npt.NDArray[np.float32]
    missing: Mask
    clipped: Mask
    rest: Mask


@dataclass(frozen=True)
class Column(ABC):
    """What all kinds have in common."""

    name: str
    kind: ClassVar[str]
    fills: ClassVar[tuple[str, ...]] = ("centre", "refuse", "drop")

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the columns of numbers that it becomes."""
        return (self.name,)

    @abstractmethod
    def encode(self, array: pa.Array) -> Encoded:
        """Cells as numbers; raises ``Misread``."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values: what a file holds."""
        return {"kind": self.kind, **{k: v for k, v in asdict(self).items() if v is not None}}


@dataclass(frozen=True)
class Number(Column):
    """A number. Exactly one of three scalings, all by public constants: ``range`` (low, high) onto −1..1; ``centre``
    and ``spread`` (x − centre)/spread within ±``limit``; ``quantiles``, evenly spaced ones of public rows, onto
    −1..1."""

    range: tuple[float, float] | None = None
    centre: float | None = None
    spread: float | None = None
    limit: float = STANDARD_LIMIT
    quantiles: tuple[float, ...] | None = None
    fill: str | float = "centre"
    kind: ClassVar[str] = "number"

    def __post_init__(self) -> None:
        where = f"column {self.name!r}"
        given = [self.range is not None, self.centre is not None or self.spread is not None, self.quantiles is not None]
        require(
            sum(given) == 1,
            f"{where}: scaling",
            ", ".join(n for n, g in zip(("range", "centre and spread", "quantiles"), given, strict=True) if g)
            or "none",
            "one of range = [LOW, HIGH], centre and spread, or quantiles",
            "state what is known without looking at the rows, or take it from public ones",
        )
        if self.range is not None:
            low, high = self.range
            require_real(f"{where}: range", low)
            require_real(f"{where}: range", high, low, open_low=True)
        elif self.quantiles is not None:
            steps = np.diff(self.quantiles)
            finite = len(self.quantiles) >= 2 and bool(np.isfinite(self.quantiles).all())
            good = finite and bool((steps >= 0).all()) and bool(steps.any())
            require(
                good,
                f"{where}: quantiles",
                list(self.quantiles),
                "two or more finite numbers in ascending order, not all equal",
            )
        else:
            require_real(f"{where}: centre", self.centre)
            require_real(f"{where}: spread", self.spread, 0.0, open_low=True)
            require(self.limit > 0, f"{where}: limit", self.limit, "above 0 (inf: values are used as they are)")
        if isinstance(self.fill, str):
            require_choice(f"{where}: fill", self.fill, self.fills, "or a number")
        else:
            require_real(f"{where}: fill", self.fill)

    def as_dict(self) -> dict[str, Any]:
        found = super().as_dict()
        if self.centre is None:
            del found["limit"]
        return found

    def scale(self, values: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], Mask]:
        """Scaled values, and which of them were beyond the range."""
        if self.quantiles is not None:
            knots = np.array(self.quantiles)
            places = np.linspace(-1.0, 1.0, len(knots))
            # as scikit-learn's QuantileTransformer: the middle of a run of equal quantiles
            scaled = (np.interp(values, knots, places) - np.interp(-values, -knots[::-1], -places[::-1])) / 2
            return scaled, (values < knots[0]) | (values > knots[-1])
        if self.range is not None:
            low, high = self.range
            scaled, limit = (2.0 * values - (high + low)) / (high - low), 1.0
        else:
            assert self.centre is not None and self.spread is not None
            scaled, limit = (values - self.centre) / self.spread, self.limit
        return np.clip(scaled, -limit, limit), np.abs(scaled) > limit

    def encode(self, array: pa.Array) -> Encoded:
        values, missing = numbers(array)
        if not isinstance(self.fill, str):
            values[missing] = self.fill
        scaled, clipped = self.scale(values)
        if isinstance(self.fill, str):
            scaled[missing] = 0.0
        return Encoded(scaled.astype(np.float32)[:, None], missing, clipped & ~missing, np.zeros(len(values), bool))


@dataclass(frozen=True)
class Category(Column):
    """One of ``values``, as a column of 0 and 1 each, in this order. Other values count as the rest category, a further
    column; with ``rest`` false they are refused."""

    values: tuple[str, ...] = ()
    rest: bool = True
    fill: str = "rest"
    kind: ClassVar[str] = "category"
    fills: ClassVar[tuple[str, ...]] = ("rest", "refuse", "drop")

    def __post_init__(self) -> None:
        where = f"column {self.name!r}"
        require(
            len(self.values) >= 1,
            f"{where}: values",
            [],
            "a list of at least one text",
            "state the values that are known without looking at the rows, or take them from public ones",
        )
        require(
            all(isinstance(v, str) and v.strip() == v and v for v in self.values),
            f"{where}: values",
            "a value that is empty, has space around it, or is not a text",
            "texts without space around them",
        )
        require(len(set(self.values)) == len(self.values), f"{where}: values", "one that occurs twice", "all different")
        require_choice(f"{where}: fill", self.fill, self.fills)
        require(self.rest or self.fill != "rest", f"{where}: fill", self.fill, "'refuse' or 'drop' with rest = false")

    @property
    def outputs(self) -> tuple[str, ...]:
        names = [f"{self.name}={value}" for value in self.values]
        return (*names, f"{self.name}={REST}") if self.rest else tuple(names)

    def encode(self, array: pa.Array) -> Encoded:
        cells = texts(array)
        place = pc.index_in(cells, pa.array(self.values)).to_numpy(zero_copy_only=False)
        known = ~np.isnan(place.astype(np.float64))
        missing = is_missing(array) & ~known  # "none" may be a value
        other = ~known & ~missing
        if not self.rest and other.any():
            raise Misread(int(np.flatnonzero(other)[0]) + 1, "is none of the stated values, and rest = false")
        values = np.zeros((len(cells), len(self.outputs)), np.float32)
        rows = np.flatnonzero(known)
        values[rows, place[known].astype(np.int64)] = 1.0
        if self.rest:
            values[~known, -1] = 1.0
        return Encoded(values, missing, np.zeros(len(cells), bool), other)


@dataclass(frozen=True)
class Boolean(Column):
    """True or false: 1 and −1; an empty cell is 0."""

    fill: str = "centre"
    kind: ClassVar[str] = "boolean"

    def __post_init__(self) -> None:
        require_choice(f"column {self.name!r}: fill", self.fill, self.fills)

    def encode(self, array: pa.Array) -> Encoded:
        true, missing = booleans(array)
        values = np.where(missing, 0.0, np.where(true, 1.0, -1.0)).astype(np.float32)
        nothing = np.zeros(len(values), bool)
        return Encoded(values[:, None], missing, nothing, nothing)


@dataclass(frozen=True)
class Date(Column):
    """A day (or time): ``range``, two days as YYYY-MM-DD, onto −1..1. ``form``: how text is written (strptime)."""

    range: tuple[str, str] = ("", "")
    form: str = "%Y-%m-%d"
    fill: str = "centre"
    kind: ClassVar[str] = "date"

    def __post_init__(self) -> None:
        low, high = self._days()
        require(low < high, f"column {self.name!r}: range", list(self.range), "two days, the earlier one first")
        require_choice(f"column {self.name!r}: fill", self.fill, self.fills)

    def _days(self) -> tuple[int, int]:
        epoch = datetime.date(1970, 1, 1)
        try:
            low, high = (datetime.date.fromisoformat(str(day)) for day in self.range)
        except (ValueError, TypeError):
            require(
                False, f"column {self.name!r}: range", list(self.range), 'two days such as ["1990-01-01", "2030-01-01"]'
            )
        return (low - epoch).days, (high - epoch).days

    def encode(self, array: pa.Array) -> Encoded:
        days, missing = dates(array, self.form)
        low, high = self._days()
        scaled = (2.0 * days - (high + low)) / (high - low)
        clipped = np.abs(scaled) > 1.0
        values = np.where(missing, 0.0, np.clip(scaled, -1.0, 1.0)).astype(np.float32)
        return Encoded(values[:, None], missing, clipped & ~missing, np.zeros(len(days), bool))


def as_is(name: str, fill: str = "refuse") -> Number:
    """A number that is scaled already."""
    return Number(name, centre=0.0, spread=1.0, limit=math.inf, fill=fill)


KINDS: dict[str, type[Column]] = {cls.kind: cls for cls in (Number, Category, Boolean, Date)}


def column_from_dict(values: Mapping[str, Any]) -> Column:
    """The inverse of ``Column.as_dict``; refuses unknown kinds and keys."""
    name = values.get("name")
    require(isinstance(name, str) and name != "", "[[column]] name", name, "text, the column's name in the file")
    where = f"column {name!r}"
    kind = values.get("kind")
    require_choice(f"{where}: kind", kind, tuple(KINDS))
    cls = KINDS[str(kind)]
    known = cls.__dataclass_fields__
    for key in values:
        require(key == "kind" or key in known, f"{where}: key", key, f"one of {', '.join(known)} for kind {kind!r}")
    given = {key: _plain(where, key, value) for key, value in values.items() if key != "kind"}
    return cls(**given)


def _plain(where: str, key: str, value: Any) -> Any:
    """Lists as tuples, and only the types that belong to a key."""
    if key in ("range", "values", "quantiles"):
        require(isinstance(value, list | tuple), f"{where}: {key}", value, "a list")
        if key == "range":
            require(len(value) == 2, f"{where}: range", value, "two values, [LOW, HIGH]")
        if key == "quantiles" or (key == "range" and all(isinstance(v, int | float) for v in value)):
            require(all(_is_number(v) for v in value), f"{where}: {key}", value, "numbers")
            return tuple(float(v) for v in value)
        return tuple(str(v) for v in value) if key == "range" else tuple(value)
    if key in ("centre", "spread", "limit"):
        require(_is_number(value) and not math.isnan(value), f"{where}: {key}", value, "a number")
        return float(value)
    if key == "rest":
        require(isinstance(value, bool), f"{where}: rest", value, "true or false")
    elif key == "fill":
        return float(value) if _is_number(value) else str(value)
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
