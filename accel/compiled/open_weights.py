"""Integers of a step with open weights in numba; ``accel.reference.open_weights`` explains them."""

from __future__ import annotations

import numpy as np
from numba import njit

from accel.compiled.bits import word_behind

__all__ = ["add_packed", "centred_rounded", "cut_words", "largest_absolute", "largest_square_sum"]


@njit(cache=True, nogil=True)
def cut_words(z, own, bits, out):
    """See ``accel.reference.open_weights.cut_words``."""
    shift = np.uint64(bits)
    if own is None:
        for i in range(out.size):
            out[i] = z[i] >> shift
    else:
        for i in range(out.size):
            out[i] = (z[i] + own[i]) >> shift


@njit(cache=True, nogil=True)
def _add_packed(mine, first, first_tail, second, second_tail, width, out):
    low = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width)
    up = np.uint64(64 - width)
    inside = min(out.size, first.size * 64 // width)
    for i in range(inside):
        bit = i * width
        at, offset = bit >> 6, bit & 63
        one, other = first[at] >> np.uint64(offset), second[at] >> np.uint64(offset)
        if offset + width > 64:
            one |= first[at + 1] << np.uint64(64 - offset)
            other |= second[at + 1] << np.uint64(64 - offset)
        total = np.uint64(mine[i]) + (one & low) + (other & low)
        out[i] = np.int64(total << up) >> np.int64(64 - width)
    for i in range(inside, out.size):
        total = np.uint64(mine[i]) + word_behind(first, first_tail, i * width, width)
        total += word_behind(second, second_tail, i * width, width)
        out[i] = np.int64(total << up) >> np.int64(64 - width)


def add_packed(mine: np.ndarray, first: np.ndarray, second: np.ndarray, width: int, out: np.ndarray) -> None:
    """See ``accel.reference.open_weights.add_packed``."""
    whole = first.size // 8 * 8
    one, other = first[:whole].view(np.uint64), second[:whole].view(np.uint64)
    _add_packed(mine, one, first[whole:], other, second[whole:], width, out)


@njit(cache=True, nogil=True)
def centred_rounded(values, bits, out):
    """See ``accel.reference.open_weights.centred_rounded``."""
    rows, columns = values.shape
    half = np.int64(1) << np.int64(bits) >> np.int64(1)
    for i in range(rows):
        total = np.int64(0)
        for j in range(columns):
            total += values[i, j]
        mean = (2 * total + columns) // (2 * columns)
        for j in range(columns):
            out[i, j] = (values[i, j] - mean + half) >> np.int64(bits)


@njit(cache=True, nogil=True)
def largest_absolute(values):
    """See ``accel.reference.open_weights.largest_absolute``."""
    low, high = np.int64(0), np.int64(0)
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            low = min(low, values[i, j])
            high = max(high, values[i, j])
    return max(high, -low)


@njit(cache=True, nogil=True)
def largest_square_sum(columns, shift):
    """See ``accel.reference.open_weights.largest_square_sum``."""
    sums = np.zeros(columns.shape[1], dtype=np.int64)
    up = (np.int64(1) << np.int64(shift)) - np.int64(1)
    for i in range(columns.shape[0]):
        for j in range(columns.shape[1]):
            size = (abs(columns[i, j]) + up) >> np.int64(shift)
            sums[j] += size * size
    largest = np.int64(0)
    for j in range(sums.size):
        largest = max(largest, sums[j])
    return largest
