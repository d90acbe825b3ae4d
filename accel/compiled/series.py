"""Dealt sines and cosines in numba; ``accel.reference.series`` explains them."""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = [
    "cut_low",
    "lifted_product_deal",
    "lifted_product_hold",
    "lifted_squares_deal",
    "lifted_squares_hold",
    "scaled_deal",
    "scaled_hold",
    "series_deal",
    "series_hold",
]

_HALF = np.int64(1 << 29)


@njit(cache=True, nogil=True)
def _low(bits):
    return np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits)


@njit(inline="always")
def _add(a, b, c, d):
    return (a * c - b * d + _HALF) >> 30, (a * d + b * c + _HALF) >> 30


@njit(inline="always")
def _turn(word, m, odd, tables):
    """Cosine and sine of an angle, and of the step to the next multiple."""
    turn = (word << np.uint64(20 - m)) & np.uint64(0xFFFFF)
    high, low = np.int64(turn >> np.uint64(10)), np.int64(turn & np.uint64(1023))
    c, s = _add(tables[0, high], tables[1, high], tables[2, low], tables[3, low])
    if odd:
        up, across = _add(c, s, c, s)
        return c, s, up, across
    return c, s, c, s


@njit(cache=True, nogil=True)
def cut_low(z, offset, bits, cut, low, out):
    """See ``accel.reference.series.cut_low``."""
    ring, kept = _low(bits), _low(low)
    for i in range(out.size):
        out[i] = (((z[i] + np.uint64(offset)) & ring) >> np.uint64(cut)) & kept


@njit(cache=True, nogil=True)
def series_deal(rho, m, odd, terms, dealt_bits, bits, tables, halves, out):
    """See ``accel.reference.series.series_deal``."""
    ring = _low(bits)
    half, cut = np.int64(1) << np.int64(29 - dealt_bits), np.int64(30 - dealt_bits)
    for i in range(rho.size):
        c, s, up, across = _turn(rho[i], m, odd, tables)
        for k in range(terms):
            out[i, k] = (np.uint64((c + half) >> cut) - halves[i, k]) & ring
            out[i, terms + k] = (np.uint64((s + half) >> cut) - halves[i, terms + k]) & ring
            c, s = _add(c, s, up, across)


@njit(cache=True, nogil=True)
def series_hold(c_, m, odd, sine, cosine, cut, constant, bits, tables, halves, leads, out):
    """See ``accel.reference.series.series_hold``."""
    ring, terms = _low(bits), sine.size
    down, half = np.int64(cut), np.int64(1) << np.int64(cut - 1)
    for i in range(c_.size):
        c, s, up, across = _turn(c_[i], m, odd, tables)
        total = np.uint64(constant) if leads else np.uint64(0)
        for k in range(terms):
            total += np.uint64((sine[k] * s + cosine[k] * c + half) >> down) * halves[i, k]
            total += np.uint64((cosine[k] * s - sine[k] * c + half) >> down) * halves[i, terms + k]
            c, s = _add(c, s, up, across)
        out[i] = total & ring


@njit(cache=True, nogil=True)
def scaled_deal(rho, m, odd, terms, dealt_bits, factor, shift, bits, tables, halves, out):
    """See ``accel.reference.series.scaled_deal``."""
    ring = _low(bits)
    half, cut = np.int64(1) << np.int64(29 - dealt_bits), np.int64(30 - dealt_bits)
    entries, count = factor.shape[1], 2 * terms + 1
    begun = out.shape[1] - entries * count
    words = np.empty(count, np.uint64)
    words[0] = 1
    for row in range(factor.shape[0]):
        c, s, up, across = _turn(rho[row], m, odd, tables)
        for k in range(terms):
            words[1 + k] = np.uint64((c + half) >> cut)
            words[1 + terms + k] = np.uint64((s + half) >> cut)
            c, s = _add(c, s, up, across)
        for j in range(begun):
            out[row, j] = (words[1 + j] - halves[row, j]) & ring
        at = begun
        for i in range(entries):
            x = factor[row, i] >> np.uint64(shift)
            for j in range(count):
                out[row, at] = (words[j] * x - halves[row, at]) & ring
                at += 1


@njit(cache=True, nogil=True)
def scaled_hold(c_angle, m, odd, sine, cosine, cut, constant, c, width, offset, bits, tables, halves, tops, leads, out):
    """See ``accel.reference.series.scaled_hold``."""
    ring, terms = _low(bits), sine.size
    down, half = np.int64(cut), np.int64(1) << np.int64(cut - 1)
    count, top = 2 * terms + 1, np.uint64(width - 1)
    held = np.empty(count, np.uint64)
    for row in range(c.shape[0]):
        x, s, up, across = _turn(c_angle[row], m, odd, tables)
        held[0] = np.uint64(constant)
        own = held[0] if leads else np.uint64(0)
        for k in range(terms):
            held[1 + k] = np.uint64((sine[k] * s + cosine[k] * x + half) >> down)
            held[1 + terms + k] = np.uint64((cosine[k] * s - sine[k] * x + half) >> down)
            own += held[1 + k] * halves[row, k] + held[1 + terms + k] * halves[row, terms + k]
            x, s = _add(x, s, up, across)
        for i in range(c.shape[1]):
            at = 2 * terms + i * count
            total = (c[row, i] - np.uint64(offset) + np.uint64(1)) * own
            for j in range(count):
                total -= held[j] * halves[row, at + j]
            if tops.size and (c[row, i] >> top) == 0:
                above = np.uint64(0)
                for j in range(count):
                    above += held[j] * tops[row, i * count + j]
                total += above << np.uint64(width)
            out[row, i] = total & ring


@njit(cache=True, nogil=True)
def lifted_squares_deal(rho, width, bits, halves, out):
    """See ``accel.reference.series.lifted_squares_deal``."""
    ring, entries = _low(bits), rho.shape[1]
    for row in range(rho.shape[0]):
        total = np.uint64(0)
        for i in range(entries):
            x = rho[row, i]
            top = (x >> np.uint64(width - 1)) << np.uint64(width)
            out[row, 3 * i] = (x - halves[row, 3 * i]) & ring
            out[row, 3 * i + 1] = (top - halves[row, 3 * i + 1]) & ring
            out[row, 3 * i + 2] = (top * top - np.uint64(2) * x * top - halves[row, 3 * i + 2]) & ring
            total += x * x
        out[row, 3 * entries] = (total - halves[row, 3 * entries]) & ring


@njit(cache=True, nogil=True)
def lifted_squares_hold(c, width, offset, bits, halves, leads, out):
    """See ``accel.reference.series.lifted_squares_hold``."""
    ring, entries, two = _low(bits), c.shape[1], np.uint64(2)
    for row in range(c.shape[0]):
        total = halves[row, 3 * entries]
        for i in range(entries):
            g = c[row, i] - np.uint64(offset) + np.uint64(1)
            total -= two * g * halves[row, 3 * i]
            if (c[row, i] >> np.uint64(width - 1)) == 0:
                total += two * g * halves[row, 3 * i + 1] + halves[row, 3 * i + 2]
            if leads:
                total += g * g
        out[row] = total & ring


@njit(cache=True, nogil=True)
def lifted_product_deal(rho_x, width_x, rho_y, width_y, bits, halves, out):
    """See ``accel.reference.series.lifted_product_deal``."""
    ring, entries = _low(bits), rho_y.shape[1]
    for row in range(rho_y.shape[0]):
        x = rho_x[row]
        t = (x >> np.uint64(width_x - 1)) << np.uint64(width_x)
        out[row, 0] = (x - halves[row, 0]) & ring
        out[row, 1] = (t - halves[row, 1]) & ring
        at = 2
        for i in range(entries):
            y = rho_y[row, i]
            top = (y >> np.uint64(width_y - 1)) << np.uint64(width_y)
            out[row, at] = (y - halves[row, at]) & ring
            out[row, at + 1] = (top - halves[row, at + 1]) & ring
            out[row, at + 2] = (x * y - halves[row, at + 2]) & ring
            out[row, at + 3] = (x * top - halves[row, at + 3]) & ring
            out[row, at + 4] = (t * y - halves[row, at + 4]) & ring
            out[row, at + 5] = (t * top - halves[row, at + 5]) & ring
            at += 6


@njit(cache=True, nogil=True)
def lifted_product_hold(c_x, width_x, offset_x, c_y, width_y, offset_y, bits, halves, leads, out):
    """See ``accel.reference.series.lifted_product_hold``."""
    ring, one = _low(bits), np.uint64(1)
    for row in range(c_y.shape[0]):
        x = c_x[row] - np.uint64(offset_x) + one
        clear = (c_x[row] >> np.uint64(width_x - 1)) == 0
        own = (halves[row, 1] if clear else np.uint64(0)) - halves[row, 0]
        at = 2
        for i in range(c_y.shape[1]):
            y = c_y[row, i] - np.uint64(offset_y) + one
            total = y * own - x * halves[row, at] + halves[row, at + 2]
            if clear:
                total -= halves[row, at + 4]
            if (c_y[row, i] >> np.uint64(width_y - 1)) == 0:
                total += x * halves[row, at + 1] - halves[row, at + 3]
                if clear:
                    total += halves[row, at + 5]
            if leads:
                total += x * y
            out[row, i] = total & ring
            at += 6
