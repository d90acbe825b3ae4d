"""Arithmetic modulo 2^64 in numba; loops are plain, so that LLVM vectorises them."""

from __future__ import annotations

import numpy as np
from numba import njit

from accel.compiled import tiles
from accel.reference.ring import decode_fixed, gather_rows, shift_right_arithmetic, shift_right_logical

__all__ = [
    "decode_fixed",  # these four are single memory-bound passes: numpy's own loops are as fast
    "dot_pair",
    "encode_fixed",
    "gather_rows",
    "matmul_pair",
    "product_pair",
    "random_permutation",
    "shift_right_arithmetic",
    "shift_right_logical",
]


@njit(cache=True, nogil=True)
def _product_pair(x, y, out):
    for i in range(out.size):
        out[i] = x[0, i] * (y[0, i] + y[1, i]) + x[1, i] * y[0, i]


def product_pair(x: np.ndarray, y: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """See ``accel.reference.ring.product_pair``."""
    out = np.empty(x.shape[1:], dtype=np.uint64)
    _product_pair(x.reshape(2, out.size), y.reshape(2, out.size), out.reshape(-1))
    return out if mask is None else np.add(out, mask, out=out)


@njit(cache=True, nogil=True)
def _dot_pair(x, y, out):
    for i in range(out.size):
        total = out[i]
        for l in range(x.shape[2]):
            total += x[0, i, l] * (y[0, i, l] + y[1, i, l]) + x[1, i, l] * y[0, i, l]
        out[i] = total


def dot_pair(x: np.ndarray, y: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """See ``accel.reference.ring.dot_pair``."""
    out = mask.copy()
    _dot_pair(x, y, out)
    return out


def matmul_pair(x0: np.ndarray, x1: np.ndarray, y0: np.ndarray, y1: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """See ``accel.reference.ring.matmul_pair``."""
    out = np.ascontiguousarray(mask).copy()
    inner, columns = y0.shape
    if x0.strides[0] < x0.strides[1] and x0.T.flags.c_contiguous and x1.T.flags.c_contiguous:
        y = np.empty((2, inner, columns), dtype=np.uint64)
        np.add(y0, y1, out=y[0])
        y[1] = y0
        tiles.by_columns(x0.T, x1.T, y, out)
        return out
    y = np.empty((2, columns, inner), dtype=np.uint64)
    np.add(y0.T, y1.T, out=y[0])
    y[1] = y0.T
    tiles.by_rows(np.ascontiguousarray(x0), np.ascontiguousarray(x1), y, out)
    return out


@njit(cache=True, nogil=True)
def _random_permutation(words, order):
    position = 0
    for i in range(order.size - 1, 0, -1):
        choices = np.uint64(i + 1)
        largest = np.uint64(0xFFFFFFFFFFFFFFFF) - (np.uint64(0) - choices) % choices  # the last word without bias
        while words[position] > largest:
            position += 1
        j = np.int64(words[position] % choices)
        position += 1
        order[i], order[j] = order[j], order[i]


def random_permutation(words: np.ndarray, count: int) -> np.ndarray:
    """See ``accel.reference.ring.random_permutation``."""
    order = np.arange(count, dtype=np.int64)
    _random_permutation(words, order)
    return order


@njit(cache=True, nogil=True)
def _encode_fixed(values, scale, limit, out):
    first_bad = -1
    for i in range(values.size):
        value = values[i]
        if not abs(value) < limit:
            if first_bad < 0:
                first_bad = i
            value = 0.0
        out[i] = np.int64(np.rint(value * scale))
    return first_bad


def encode_fixed(values: np.ndarray, fraction_bits: int, limit: float) -> tuple[np.ndarray, int]:
    """See ``accel.reference.ring.encode_fixed``."""
    out = np.empty(values.shape, dtype=np.int64)
    flat = np.ascontiguousarray(values, dtype=np.float64).reshape(-1)
    first_bad = _encode_fixed(flat, 2.0**fraction_bits, float(limit), out.reshape(-1))
    return out.view(np.uint64), int(first_bad)
