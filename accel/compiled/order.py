"""Local steps of ``order`` in numba; ``accel.reference.order`` explains them."""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["order_deal", "order_decide", "order_pick", "order_place", "order_reply", "order_shuffle"]


@njit(cache=True, nogil=True)
def _low(bits):
    return np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits)


@njit(cache=True, nogil=True)
def order_shuffle(draws, out):
    """See ``accel.reference.order.order_shuffle``."""
    for row in range(out.shape[0]):
        for i in range(out.shape[1]):
            out[row, i] = np.uint8(i)
        for i in range(out.shape[1] - 1, 0, -1):
            j = np.int64(draws[i - 1, row])
            swapped = out[row, j]
            out[row, j] = out[row, i]
            out[row, i] = swapped


@njit(cache=True, nogil=True)
def order_deal(rho, halves, width, prime, out):
    """See ``accel.reference.order.order_deal``."""
    digits = (width + 1) // 2
    modulus = np.uint8(prime)
    ring, low_mask = _low(width + 1), _low(width)
    for row in range(rho.shape[0]):
        pair = 0
        for i in range(rho.shape[1]):
            for j in range(i + 1, rho.shape[1]):
                difference = (rho[row, i] - rho[row, j]) & ring
                low = difference & low_mask
                for d in range(digits):
                    digit = (low >> np.uint64(2 * (digits - 1 - d))) & np.uint64(3)
                    for v in range(3):
                        bit = np.uint8(digit > np.uint64(v))
                        half = halves[row, pair, 3 * d + v]
                        out[row, pair, 3 * d + v] = bit - half if bit >= half else bit + modulus - half
                top = np.uint8(difference >> np.uint64(width))
                half = halves[row, pair, 3 * digits]
                out[row, pair, 3 * digits] = top - half if top >= half else top + modulus - half
                pair += 1


@njit(cache=True, nogil=True)
def _blinded(tests, scale, mask, prime, leads, out):
    """(tests·(scale + 1) ± mask) mod prime. LLVM turns this into vector code.

    Tests are sums of at most 3·digits + 3 halves below 37 and are kept positive by adding a multiple of the prime, so
    that one exact division of a small number is left for each.
    """
    modulus = np.uint64(prime)
    inverse = np.uint64((1 << 32) // prime + 1)
    lift = np.int64(64 * prime)  # more than any negative sum
    for k in range(out.size):
        entry = np.uint64(mask[k])
        value = np.uint64(np.int64(tests[k]) + lift) * (np.uint64(scale[k]) + np.uint64(1))
        value += entry if leads else modulus - entry
        out[k] = np.uint8(value - ((value * inverse) >> np.uint64(32)) * modulus)


@njit(cache=True, nogil=True)
def order_reply(c, halves, slots, scale, mask, turn, width, prime, leads, out):
    """See ``accel.reference.order.order_reply``: the tests of all pairs, then their blinding, then each to its place.

    Nothing branches on secrets: the processor would guess wrong every second time, and take longer than the tests do.
    """
    digits = (width + 1) // 2
    count = 2 * digits + 1
    rows, classes = c.shape
    one = np.int64(1 if leads else 0)
    ring, low_mask = _low(width + 1), _low(width)
    tests = np.empty((*halves.shape[:2], count), dtype=np.int16)
    places = np.empty(halves.shape[:2], dtype=np.uint16)
    for row in range(rows):
        pair = 0
        for i in range(classes):
            for j in range(i + 1, classes):
                difference = (c[row, i] - c[row, j]) & ring
                low = difference & low_mask
                a, b = np.int64(slots[row, i]), np.int64(slots[row, j])
                same = np.int64(difference >> np.uint64(width)) ^ np.int64(a > b)
                top = np.int64(halves[row, pair, 3 * digits])
                differs = top + same * (one - 2 * top)
                equals = one - differs
                before = np.int64(0)
                for d in range(digits):
                    digit = np.int64((low >> np.uint64(2 * (digits - 1 - d))) & np.uint64(3))
                    at, is_zero, is_three = 3 * d + digit, np.int64(digit == 0), np.int64(digit == 3)
                    at_least = np.int64(halves[row, pair, at - 1 + is_zero]) * (1 - is_zero) + one * is_zero
                    above = np.int64(halves[row, pair, at]) * (1 - is_three)
                    tests[row, pair, d] = before + at_least + differs
                    tests[row, pair, digits + 1 + d] = before + one - above + equals
                    before += one - (at_least - above)
                tests[row, pair, digits] = before + differs
                first, second = min(a, b), max(a, b)
                places[row, pair] = first * (2 * classes - first - 1) // 2 + second - first - 1
                pair += 1
    reduced = np.empty(tests.size, dtype=np.uint8)
    _blinded(tests.reshape(-1), scale.reshape(-1), mask.reshape(-1), prime, leads, reduced)
    start = 0
    for row in range(rows):
        for pair in range(places.shape[1]):
            place, begin = np.int64(places[row, pair]), count - np.int64(turn[row, pair])
            for t in range(count):
                at = begin + t
                out[row, place, t] = reduced[start + at - count * np.int64(at >= count)]
            start += count


@njit(cache=True, nogil=True)
def order_place(words, slots, first, second, width, out):
    """See ``accel.reference.order.order_place``."""
    ring = _low(width + 1)
    for row in range(words.shape[0]):
        for i in range(words.shape[1]):
            at = np.int64(slots[row, i])
            out[row, at] = (words[row, i] + first[row, at] + second[row, at]) & ring


@njit(cache=True, nogil=True)
def order_decide(left, right, prime, rho_left, rho_right, width, best, summand):
    """See ``accel.reference.order.order_decide``."""
    classes = best.shape[1]
    ring = _low(width + 1)
    modulus = np.uint8(prime)
    wins = np.empty(classes, dtype=np.int64)
    for row in range(best.shape[0]):
        wins[:] = 0
        pair = 0
        for a in range(classes):
            for b in range(a + 1, classes):
                zero = np.uint8(0)
                for t in range(left.shape[2]):
                    total = np.uint8(left[row, pair, t] + right[row, pair, t])
                    zero |= np.uint8(total == 0) | np.uint8(total == modulus)
                wins[a] += np.int64(zero)
                wins[b] += np.int64(1 - zero)
                pair += 1
        found = 0
        for a in range(classes):
            if wins[a] > wins[found]:
                found = a
            best[row, a] = np.uint64(0)
        best[row, found] = np.uint64(1)
        summand[row] = (np.uint64(0) - rho_left[row, found] - rho_right[row, found]) & ring


@njit(cache=True, nogil=True)
def order_pick(half, placed, width, out):
    """See ``accel.reference.order.order_pick``."""
    ring = _low(width + 1)
    for row in range(half.shape[0]):
        total = np.uint64(0)
        for h in range(half.shape[1]):
            total += half[row, h] * placed[row, h]
        out[row] = total & ring
