"""Integers of a step with open weights in numba; ``accel.reference.open_weights`` explains them."""

from __future__ import annotations

import numpy as np
from numba import njit

from accel.compiled.bits import WIDEST_IN_EIGHT_BYTES, bytes_as_word, word_behind
from accel.compiled.calls import Call, Composed
from accel.reference.open_weights import ACROSS, LANES, STEP

__all__ = [
    "add_packed",
    "centred_rounded",
    "checksum",
    "cut_words",
    "largest_absolute",
    "largest_square_sum",
    "lifted",
    "moved_weights",
]


@njit(cache=True, nogil=True)
def cut_words(z, plus, minus, own, bits, out):
    """See ``accel.reference.open_weights.cut_words``."""
    shift = np.uint64(bits)
    if own is None:
        for i in range(out.size):
            out[i] = (z[i] + plus[i] - minus[i]) >> shift
    else:
        for i in range(out.size):
            out[i] = (z[i] + plus[i] - minus[i] + own[i]) >> shift


@njit(cache=True, nogil=True)
def _add_packed(mine, first, first_tail, second, second_tail, width, start, out):
    low = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width)
    up = np.uint64(64 - width)
    for i in range(start, out.size):
        total = np.uint64(mine[i]) + word_behind(first, first_tail, i * width, width)
        total += word_behind(second, second_tail, i * width, width)
        out[i] = np.int64((total & low) << up) >> np.int64(64 - width)


@njit(cache=True, nogil=True)
def _add_packed_narrow(mine, first, second, width, out):
    """Those values that lie in eight bytes from the byte on in which they begin, with eight bytes there to be read."""
    up = np.uint64(64 - width)
    for i in range(out.size):
        at, offset = (i * width) >> 3, np.uint64((i * width) & 7)
        one = bytes_as_word(first, at) >> offset  # type: ignore[call-arg]
        other = bytes_as_word(second, at) >> offset
        out[i] = np.int64((np.uint64(mine[i]) + one + other) << up) >> np.int64(64 - width)


@Composed
def add_packed(mine: np.ndarray, first: np.ndarray, second: np.ndarray, width: int, out: np.ndarray) -> list[Call]:
    """See ``accel.reference.open_weights.add_packed``."""
    whole = first.size // 8 * 8
    one, other = first[:whole].view(np.uint64), second[:whole].view(np.uint64)
    inside = 0  # values that the quick way can read
    if width <= WIDEST_IN_EIGHT_BYTES and first.size >= 8:
        inside = min(out.size, (8 * (first.size - 8) + 7) // width + 1)
    return [
        (_add_packed_narrow, (mine[:inside], first, second, width, out[:inside])),
        (_add_packed, (mine, one, first[whole:], other, second[whole:], width, inside, out)),
    ]


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
def largest_square_sum(rows, shift):
    """See ``accel.reference.open_weights.largest_square_sum``."""
    up = (np.int64(1) << np.int64(shift)) - np.int64(1)
    largest = np.int64(0)
    for i in range(rows.shape[0]):
        total = np.int64(0)
        for j in range(rows.shape[1]):
            size = (abs(rows[i, j]) + up) >> np.int64(shift)
            total += size * size
        largest = max(largest, total)
    return largest


@njit(cache=True, nogil=True)
def lifted(noise, shift, constant, count, out):
    """See ``accel.reference.open_weights.lifted``."""
    up, more = np.uint64(shift), np.uint64(constant)
    for i in range(count):
        out[i] = (np.uint64(noise[i]) << up) + more
    for i in range(count, out.size):
        out[i] = np.uint64(noise[i]) << up


@njit(cache=True, nogil=True)
def _moved(values, change, decay, rate, out):
    alpha, bits = np.int64(decay[0]), np.int64(decay[1])
    half = np.int64(1) << bits >> np.int64(1)
    low, high = np.int64(0), np.int64(0)
    for i in range(out.size):
        out[i] = ((alpha * values[i] + half) >> bits) - np.int64(rate) * change[i]
        low, high = min(low, out[i]), max(high, out[i])
    return max(high, -low)


@njit(cache=True, nogil=True)
def moved_weights(values, velocity, sums, momentum, decay, rate, out):
    """See ``accel.reference.open_weights.moved_weights``."""
    if velocity is None:
        return _moved(values, sums, decay, rate, out)
    beta, bits = np.int64(momentum[0]), np.int64(momentum[1])
    half = np.int64(1) << bits >> np.int64(1)
    for i in range(out.size):
        velocity[i] = ((beta * velocity[i] + half) >> bits) + sums[i]
    return _moved(values, velocity, decay, rate, out)


@njit(cache=True, nogil=True)
def _checksum(words):
    step, total, power = np.uint64(STEP), np.uint64(0), np.uint64(1)
    sums = np.zeros(LANES, dtype=np.uint64)
    whole = words.size - words.size % LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            sums[lane] = sums[lane] * step + words[start + lane]
    for lane in range(LANES):
        if whole < words.size:
            sums[lane] *= step
            if whole + lane < words.size:
                sums[lane] += words[whole + lane]
        total += sums[lane] * power
        power *= np.uint64(ACROSS)
    return total


def checksum(words: np.ndarray) -> int:
    """See ``accel.reference.open_weights.checksum``."""
    return int(_checksum(words))
