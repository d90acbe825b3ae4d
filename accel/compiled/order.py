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
def order_reply(c, halves, slots, scale, mask, turn, width, prime, leads, out):
    """See ``accel.reference.order.order_reply``.

    Tests are sums of at most 3·digits + 3 halves below 37 and are kept positive by adding a multiple of the prime, so
    that one exact division of a small number is left for each.
    """
    digits = (width + 1) // 2
    count = 2 * digits + 1
    classes = c.shape[1]
    one = np.int32(1 if leads else 0)
    modulus = np.int32(prime)
    inverse = np.uint64((1 << 32) // prime + 1)
    ring, low_mask = _low(width + 1), _low(width)
    lift = modulus * np.int32(64)  # more than any negative sum
    tests = np.empty(count, dtype=np.int32)
    reduced = np.empty(count, dtype=np.uint8)
    for row in range(c.shape[0]):
        pair = 0
        for i in range(classes):
            for j in range(i + 1, classes):
                difference = (c[row, i] - c[row, j]) & ring
                low = difference & low_mask
                a, b = np.int64(slots[row, i]), np.int64(slots[row, j])
                same = np.int32(difference >> np.uint64(width)) ^ np.int32(a > b)
                top = np.int32(halves[row, pair, 3 * digits])
                differs = one - top if same else top
                equals = top if same else one - top
                before = np.int32(0)
                for d in range(digits):
                    digit = np.int64((low >> np.uint64(2 * (digits - 1 - d))) & np.uint64(3))
                    at = 3 * d + digit  # both are loaded and then chosen: a branch would be taken at random
                    at_least, above = np.int32(halves[row, pair, max(at - 1, 0)]), np.int32(halves[row, pair, at])
                    at_least = one if digit == 0 else at_least
                    above = np.int32(0) if digit == 3 else above
                    tests[d] = before + at_least + differs
                    tests[digits + 1 + d] = before + one - above + equals
                    before += one - (at_least - above)
                tests[digits] = before + differs
                first, second = min(a, b), max(a, b)
                place = first * (2 * classes - first - 1) // 2 + second - first - 1
                shift = np.int64(turn[row, pair])
                for t in range(count):  # LLVM turns this into vector code
                    entry = np.int32(mask[row, pair, t])
                    factor = np.int32(scale[row, pair, t]) + np.int32(1)
                    value = np.uint64((tests[t] + lift) * factor + (entry if leads else modulus - entry))
                    quotient = (value * inverse) >> np.uint64(32)
                    reduced[t] = np.uint8(value - quotient * np.uint64(modulus))
                for t in range(count - shift):
                    out[row, place, shift + t] = reduced[t]
                for t in range(shift):
                    out[row, place, t] = reduced[count - shift + t]
                pair += 1


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
