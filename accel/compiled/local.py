"""Local operations on words: numpy's own loops for any layout, and compiled ones for arrays in one piece of memory,
which a recorded step calls without the interpreter (``accel.compiled.calls``)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from accel.compiled.calls import Call, Composed
from accel.reference import local as _reference
from accel.reference.local import add, bitwise_and, matmul_words, shift_left, take_rows

__all__ = [
    "add",
    "bitwise_and",
    "copy",
    "matmul_words",
    "multiply",
    "negate",
    "shift_left",
    "shift_right",
    "subtract",
    "sum_axes",
    "take_rows",
    "xor",
]

_FEW = 8  # rows that are copied one by one


def _are_words(*arrays: Any) -> bool:
    """Whether they are arrays of 64-bit words of one shape, each in one piece of memory."""
    return all(
        isinstance(array, np.ndarray)
        and array.dtype == np.uint64
        and array.flags.c_contiguous
        and array.shape == arrays[0].shape
        for array in arrays
    )


def _flat(*arrays: np.ndarray) -> list[np.ndarray]:
    return [array.reshape(-1) for array in arrays]


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


@njit(cache=True, nogil=True)
def _subtract(x, y, out):
    for i in range(out.size):
        out[i] = x[i] - y[i]


@Composed
def subtract(x: Any, y: Any, out: np.ndarray) -> list[Call]:
    """See ``accel.reference.local``."""
    return [(_subtract, _flat(x, y, out))] if _are_words(x, y, out) else [(_reference.subtract, (x, y, out))]


@njit(cache=True, nogil=True)
def _multiply(x, factor, out):
    for i in range(out.size):
        out[i] = x[i] * factor


@Composed
def multiply(x: Any, y: Any, out: np.ndarray) -> list[Call]:
    """See ``accel.reference.local``."""
    if _are_words(x, out) and isinstance(y, np.uint64):
        return [(_multiply, (*_flat(x), y, *_flat(out)))]
    return [(_reference.multiply, (x, y, out))]


@njit(cache=True, nogil=True)
def _negate(x, out):
    for i in range(out.size):
        out[i] = np.uint64(0) - x[i]


@Composed
def negate(x: Any, out: np.ndarray) -> list[Call]:
    """See ``accel.reference.local``."""
    return [(_negate, _flat(x, out))] if _are_words(x, out) else [(_reference.negate, (x, out))]


@njit(cache=True, nogil=True)
def _shift_right(x, bits, out):
    for i in range(out.size):
        out[i] = x[i] >> np.uint64(bits)


@Composed
def shift_right(x: Any, bits: Any, out: np.ndarray) -> list[Call]:
    """See ``accel.reference.local``."""
    if _are_words(x, out) and not isinstance(bits, np.ndarray) and 0 <= bits < 64:
        return [(_shift_right, (*_flat(x), int(bits), *_flat(out)))]
    return [(_reference.shift_right, (x, bits, out))]


@njit(cache=True, nogil=True)
def _xor(x, y, out):
    for i in range(out.size):
        out[i] = x[i] ^ y[i]


@Composed
def xor(x: Any, y: Any, out: np.ndarray) -> list[Call]:
    """See ``accel.reference.local``."""
    if _are_alike(x, out) and _are_alike(y, out):
        return [(_xor, [_bytes(array) for array in (x, y, out)])]
    return [(_reference.xor, (x, y, out))]


def _are_alike(x: Any, out: np.ndarray) -> bool:
    """Whether both are of one type and shape, each in one piece of memory."""
    same = isinstance(x, np.ndarray) and x.dtype == out.dtype and x.shape == out.shape
    return same and x.flags.c_contiguous and out.flags.c_contiguous


@njit(cache=True, nogil=True)
def _copy(x, out):
    for i in range(out.size):
        out[i] = x[i]


@njit(cache=True, nogil=True)
def _fill(number, out):
    for i in range(out.size):
        out[i] = number


@Composed
def copy(x: Any, out: np.ndarray) -> list[Call]:
    """See ``accel.reference.local``."""
    if isinstance(x, np.uint64) and _are_words(out):
        return [(_fill, (x, *_flat(out)))]
    if _are_alike(x, out):
        return [(_copy, (_bytes(x), _bytes(out)))]
    if isinstance(x, np.ndarray) and x.dtype == out.dtype and x.shape == out.shape and x.ndim == 2:
        if x.shape[1] == 1:
            return [(_copy, (x[:, 0], out[:, 0]))]
        if len(x) <= _FEW and all(array.strides[1] == array.itemsize for array in (x, out)):
            return [(_copy, (_bytes(x[row]), _bytes(out[row]))) for row in range(len(x))]
    return [(_reference.copy, (x, out))]


@njit(cache=True, nogil=True)
def _sum_rows(x, out):
    for row in range(out.size):
        total = np.uint64(0)
        for i in range(x.shape[1]):
            total += x[row, i]
        out[row] = total


@Composed
def sum_axes(x: np.ndarray, axes: tuple[int, ...], out: np.ndarray) -> list[Call]:
    """See ``accel.reference.local``."""
    if _are_words(x) and _are_words(out) and x.ndim == 2 and axes == (1,):
        return [(_sum_rows, (x, out))]
    return [(_reference.sum_axes, (x, axes, out))]
