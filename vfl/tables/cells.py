"""Cells of an Arrow column as numbers, texts or days, whole columns at a time.

Every function refuses what it cannot read with a ``Misread``: the row (from 1) and what is wrong there, without the
value, which is private. Arrow's own errors quote it, so they are never passed on.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from accel.errors import PpvflError

__all__ = ["Misread", "booleans", "dates", "is_missing", "numbers", "plain", "texts"]

MISSING_TEXTS = ("", "na", "n/a", "nan", "null", "none")
TRUE_TEXTS, FALSE_TEXTS = ("true", "t", "yes", "y", "1"), ("false", "f", "no", "n", "0")
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_LARGEST_WHOLE = 2.0**53  # beyond this a float does not hold every whole number

Mask = npt.NDArray[np.bool_]


class Misread(PpvflError):
    """``row`` (from 1) of a column cannot be read; ``what`` says why, without the value. Row 0: the whole column."""

    def __init__(self, row: int, what: str):
        super().__init__(what)
        self.row, self.what = row, what


def plain(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """One array without dictionary encoding."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # too long for one array
        raise Misread(0, "is too large for one column; give the file in parts")
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    return array


def is_missing(array: pa.Array) -> Mask:
    """Empty cells: null, NaN, or a text such as '', NA, null."""
    missing = pc.is_null(array, nan_is_null=pa.types.is_floating(array.type))
    if _is_text(array):
        lower = pc.utf8_lower(pc.utf8_trim_whitespace(array))
        missing = pc.or_(missing, pc.fill_null(pc.is_in(lower, pa.array(MISSING_TEXTS, array.type)), False))
    return _mask(missing)


def numbers(array: pa.Array) -> tuple[npt.NDArray[np.float64], Mask]:
    """Finite numbers and which cells are empty (NaN there). Text is parsed; booleans, times and lists are refused."""
    kind = array.type
    missing = is_missing(array)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        values = _as_float(array)
    elif _is_text(array):
        trimmed = pc.if_else(pa.array(missing), None, pc.utf8_trim_whitespace(array))
        try:
            values = _as_float(trimmed)
        except pa.ArrowInvalid:  # its text quotes the cell
            wrong = ~_mask(pc.fill_null(pc.match_substring_regex(trimmed, _NUMBER), True))
            raise Misread(_first(wrong) if wrong.any() else 0, "is text, not a number") from None
    elif pa.types.is_null(kind):
        values = np.full(len(array), np.nan)
    else:
        raise Misread(0, f"holds {_kind_in_words(kind)}, not numbers")
    infinite = np.isinf(values)
    if infinite.any():
        raise Misread(_first(infinite), "is infinite, not a finite number")
    values[missing] = np.nan
    return values, missing


def texts(array: pa.Array) -> pa.Array:
    """Texts without surrounding space, null where there is none; whole numbers as digits (7.0 is "7"), true and
    false."""
    kind = array.type
    if _is_text(array):
        return pc.utf8_trim_whitespace(array.cast(pa.string()))
    if pa.types.is_integer(kind):
        return array.cast(pa.string())
    if pa.types.is_floating(kind):
        values = array.to_numpy(zero_copy_only=False)
        empty = np.isnan(values)
        broken = ~empty & ((values != np.floor(values)) | (np.abs(values) > _LARGEST_WHOLE))
        if broken.any():
            raise Misread(_first(broken), "is a number with a fraction (or above 2^53), not text or a whole number")
        whole = np.where(empty, 0, values).astype(np.int64)
        return pa.array(whole, mask=empty).cast(pa.string())
    if pa.types.is_boolean(kind):
        return array.cast(pa.string())
    if pa.types.is_null(kind):
        return array.cast(pa.string())
    raise Misread(0, f"holds {_kind_in_words(kind)}, not text")


def booleans(array: pa.Array) -> tuple[Mask, Mask]:
    """True or false and which cells are empty; texts such as yes/no, true/false, 1/0 and the numbers 1 and 0."""
    missing = is_missing(array)
    if pa.types.is_boolean(array.type):
        return _mask(pc.fill_null(array, False)), missing
    lower = pc.utf8_lower(texts(array))
    yes = _mask(pc.fill_null(pc.is_in(lower, pa.array(TRUE_TEXTS)), False))
    no = _mask(pc.fill_null(pc.is_in(lower, pa.array(FALSE_TEXTS)), False))
    wrong = ~(yes | no | missing)
    if wrong.any():
        raise Misread(_first(wrong), "is neither true/false, yes/no, t/f, y/n nor 1/0")
    return yes & ~missing, missing


def dates(array: pa.Array, form: str) -> tuple[npt.NDArray[np.float64], Mask]:
    """Days since 1970-01-01 (with fractions for times) and which cells are empty. Text is parsed by ``form``
    (strptime)."""
    kind = array.type
    missing = is_missing(array)
    if _is_text(array):
        trimmed = pc.if_else(pa.array(missing), None, pc.utf8_trim_whitespace(array))
        stamps = pc.strptime(trimmed, format=form, unit="s", error_is_null=True)
        wrong = _mask(pc.is_null(stamps)) & ~missing
        if wrong.any():
            raise Misread(_first(wrong), f"is not a date of the form {form}")
    elif pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        stamps = array.cast(pa.timestamp("s"), safe=False) if not _has_zone(kind) else _without_zone(array)
    elif pa.types.is_null(kind):
        return np.full(len(array), np.nan), missing
    else:
        raise Misread(0, f"holds {_kind_in_words(kind)}, not dates")
    seconds = pc.fill_null(stamps.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    days = seconds.astype(np.float64) / 86400.0
    days[missing] = np.nan
    return days, missing


def _has_zone(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) and kind.tz is not None


def _without_zone(array: pa.Array) -> pa.Array:
    """Times with a zone count as UTC."""
    return array.cast(pa.timestamp("s", tz="UTC"), safe=False).cast(pa.int64()).cast(pa.timestamp("s"))


def _is_text(array: pa.Array) -> bool:
    return pa.types.is_string(array.type) or pa.types.is_large_string(array.type)


def _as_float(array: pa.Array) -> npt.NDArray[np.float64]:
    """A copy that may be written to; null becomes NaN."""
    filled = array.cast(pa.float64(), safe=False)
    return np.array(filled.to_numpy(zero_copy_only=False), dtype=np.float64, copy=True)


def _mask(array: pa.Array) -> Mask:
    return np.asarray(array.to_numpy(zero_copy_only=False), dtype=bool)


def _first(mask: Mask) -> int:
    return int(np.flatnonzero(mask)[0]) + 1


def _kind_in_words(kind: pa.DataType) -> str:
    if pa.types.is_boolean(kind):
        return "true and false"
    if pa.types.is_temporal(kind):
        return "dates or times"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "numbers"
    return "text" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else f"values of type {kind}"
