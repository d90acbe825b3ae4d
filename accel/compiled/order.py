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
def _differences(words, ring, out):
    """Differences of all pairs of a row, modulo 2^(w+1)."""
    at = 0
    for row in range(words.shape[0]):
        for i in range(words.shape[1] - 1):
            for j in range(i + 1, words.shape[1]):
                out[at] = (words[row, i] - words[row, j]) & ring
                at += 1


# Loops over all pairs with few arrays each: LLVM makes vector code of those, and gives up on one that does everything.


@njit(cache=True, nogil=True)
def _digit(words, shift, out):
    for p in range(out.size):
        out[p] = np.uint8((words[p] >> shift) & np.uint64(3))


@njit(cache=True, nogil=True)
def _deal_bit(digit, value, half, modulus, out):
    for p in range(out.size):
        bit = np.uint8(digit[p] > value)
        out[p] = bit - half[p] + modulus * np.uint8(bit < half[p])


@njit(cache=True, nogil=True)
def order_deal(rho, halves, width, prime, out):
    """See ``accel.reference.order.order_deal``."""
    digits = (width + 1) // 2
    modulus, low = np.uint8(prime), _low(width)
    differences = np.empty(out.shape[1], dtype=np.uint64)
    digit = np.empty(out.shape[1], dtype=np.uint8)
    _differences(rho, _low(width + 1), differences)
    _digit(differences, np.uint64(width), digit)
    _deal_bit(digit, np.uint8(0), halves[3 * digits], modulus, out[3 * digits])
    for p in range(differences.size):
        differences[p] &= low
    for d in range(digits):
        _digit(differences, np.uint64(2 * (digits - 1 - d)), digit)
        for v in range(3):
            _deal_bit(digit, np.uint8(v), halves[3 * d + v], modulus, out[3 * d + v])


@njit(cache=True, nogil=True)
def _chosen(digit, zero, one, two, three, out):
    """By masks: of a choice LLVM makes a jump where no vector is left to fill."""
    for p in range(out.size):
        odd, upper = np.uint8(0) - (digit[p] & np.uint8(1)), np.uint8(0) - (digit[p] >> np.uint8(1))
        low = zero[p] ^ ((zero[p] ^ one[p]) & odd)
        high = two[p] ^ ((two[p] ^ three[p]) & odd)
        out[p] = low ^ ((low ^ high) & upper)


@njit(cache=True, nogil=True)
def _plus(before, step, more, out):
    for p in range(out.size):
        out[p] = before[p] + np.int16(step[p]) + more[p]


@njit(cache=True, nogil=True)
def _minus(before, step, less, constant, out):
    for p in range(out.size):
        out[p] = before[p] + constant - np.int16(step[p]) - less[p]


@njit(cache=True, nogil=True)
def _advance(before, at_least, above, one):
    for p in range(before.size):
        before[p] += one - np.int16(at_least[p]) + np.int16(above[p])


@njit(cache=True, nogil=True)
def _blinded(tests, scale, mask, prime, leads, out):
    """(tests·(scale + 1) ± mask) mod prime.

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
def _places(slots, places, swapped):
    """Where the pair of two slots stands among all pairs of all rows, and whether the first class is in the later
    slot."""
    rows, classes = slots.shape
    pairs = classes * (classes - 1) // 2
    table = np.zeros((classes, classes), dtype=np.int64)
    for a in range(classes):
        for b in range(a + 1, classes):
            table[a, b] = table[b, a] = a * (2 * classes - a - 1) // 2 + b - a - 1
    at = 0
    for row in range(rows):
        for i in range(classes - 1):
            one = np.int64(slots[row, i])
            for j in range(i + 1, classes):
                other = np.int64(slots[row, j])
                places[at] = row * pairs + table[one, other]
                swapped[at] = np.int16(one > other)
                at += 1


@njit(cache=True, nogil=True)
def _differs(differences, width, swapped, top, one, out):
    for p in range(out.size):
        half = np.int16(top[p])
        same = np.int16(differences[p] >> width) ^ swapped[p]
        out[p] = half + same * (one - np.int16(2) * half)


@njit(cache=True, nogil=True)
def _first_targets(turn, places, out):
    for p in range(out.size):
        out[p] = np.int64(turn[p]) * out.size + places[p]


@njit(cache=True, nogil=True)
def _put(values, targets, end, out):
    """Each value to its target; then all targets move on by one row of ``out``, and from the last to the first."""
    step = targets.size
    for p in range(values.size):
        out[targets[p]] = values[p]
    for p in range(targets.size):
        following = targets[p] + step
        targets[p] = following - (end if following >= end else 0)


@njit(cache=True, nogil=True)
def order_reply(c, halves, slots, scale, mask, turn, width, prime, leads, out):
    """See ``accel.reference.order.order_reply``: the tests of all pairs, then their blinding, then each to its place.

    Nothing branches on secrets: the processor would guess wrong every second time, and take longer than the tests do.
    """
    digits = (width + 1) // 2
    pairs = out.shape[1]
    one = np.int16(1 if leads else 0)
    differences = np.empty(pairs, dtype=np.uint64)
    places, targets = np.empty(pairs, dtype=np.int64), np.empty(pairs, dtype=np.int64)
    wide, small = np.empty((3, pairs), dtype=np.int16), np.empty((4, pairs), dtype=np.uint8)
    swapped, differs, before = wide[0], wide[1], wide[2]
    digit, at_least, above, reduced = small[0], small[1], small[2], small[3]
    always, never = np.full(pairs, np.uint8(one)), np.zeros(pairs, dtype=np.uint8)
    tests = np.empty((2 * digits + 1, pairs), dtype=np.int16)
    _differences(c, _low(width + 1), differences)
    _places(slots, places, swapped)
    _differs(differences, np.uint64(width), swapped, halves[3 * digits], one, differs)
    low = _low(width)
    for p in range(pairs):
        differences[p] &= low
        before[p] = np.int16(0)
    for d in range(digits):
        _digit(differences, np.uint64(2 * (digits - 1 - d)), digit)
        above_0, above_1, above_2 = halves[3 * d], halves[3 * d + 1], halves[3 * d + 2]
        _chosen(digit, always, above_0, above_1, above_2, at_least)
        _chosen(digit, above_0, above_1, above_2, never, above)
        _plus(before, at_least, differs, tests[d])
        _minus(before, above, differs, one + one, tests[digits + 1 + d])
        _advance(before, at_least, above, one)
    for p in range(pairs):
        tests[digits, p] = before[p] + differs[p]
    _first_targets(turn, places, targets)
    for t in range(2 * digits + 1):
        _blinded(tests[t], scale[t], mask[t], prime, leads, reduced)
        _put(reduced, targets, out.size, out.reshape(-1))


@njit(cache=True, nogil=True)
def order_place(words, slots, first, second, width, out):
    """See ``accel.reference.order.order_place``."""
    ring = _low(width + 1)
    for row in range(words.shape[0]):
        for i in range(words.shape[1]):
            at = np.int64(slots[row, i])
            out[row, at] = (words[row, i] + first[row, at] + second[row, at]) & ring


@njit(cache=True, nogil=True)
def _note_zeros(left, right, modulus, zero):
    for p in range(zero.size):
        total = np.uint8(left[p] + right[p])
        zero[p] |= np.uint8(total == 0) | np.uint8(total == modulus)


@njit(cache=True, nogil=True)
def order_decide(left, right, prime, rho_left, rho_right, width, best, summand):
    """See ``accel.reference.order.order_decide``."""
    classes = best.shape[1]
    ring = _low(width + 1)
    zero = np.zeros(left.shape[1], dtype=np.uint8)
    for t in range(left.shape[0]):
        _note_zeros(left[t], right[t], np.uint8(prime), zero)
    wins = np.empty(classes, dtype=np.int64)
    pair = 0
    for row in range(best.shape[0]):
        wins[:] = 0
        for a in range(classes):
            for b in range(a + 1, classes):
                wins[a] += np.int64(zero[pair])
                wins[b] += np.int64(1 - zero[pair])
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
