"""Local steps of the two-holder protocols in numba; ``accel.reference.two_holder`` explains them."""

from __future__ import annotations

import numpy as np
from numba import njit

from accel.reference.two_holder import lookup_deal, lookup_hold

__all__ = [
    "inject_deal",
    "inject_hold",
    "inject_key",
    "inject_result",
    "lookup_deal",  # these two only write and gather whole tables: numpy is as fast
    "lookup_hold",
    "reshare_hold",
    "select_deal",
    "select_hold",
    "uniform_below",
    "weigh_hold",
]


_PAIRS = 32  # of values, in one pass of vector code


@njit(cache=True, nogil=True)
def uniform_below(random, bound, out):
    """See ``accel.reference.two_holder.uniform_below``."""
    words, pairs = random[: random.size // 2 * 2].view(np.uint16), out[: out.size // 2 * 2].view(np.uint16)
    square, modulus = np.uint32(bound * bound), np.uint32(bound)
    rejected_below = np.uint32(65536 % (bound * bound))
    inverse = np.uint32((1 << 24) // bound + 1)  # exact quotients of what is below bound² ≤ 2^16
    low, one, two, three = np.uint32(0xFFFF), np.uint32(8), np.uint32(16), np.uint32(24)  # bytes
    digits = np.empty(_PAIRS, dtype=np.uint16)
    found, i = np.int64(0), np.int64(0)  # pairs, words
    while i + _PAIRS <= words.size and found + _PAIRS <= pairs.size:
        rejected = np.uint32(0)
        for k in range(_PAIRS):  # LLVM turns this into vector code
            scaled = np.uint32(words[i + k]) * square
            pair = scaled >> two
            first = (pair * inverse) >> three
            digits[k] = np.uint16(first | (pair - first * modulus) << one)
            rejected |= np.uint32((scaled & low) < rejected_below)
        if rejected == 0:
            for k in range(_PAIRS):
                pairs[found + k] = digits[k]
            found += _PAIRS
        else:
            for k in range(_PAIRS):
                pairs[found] = digits[k]
                found += np.int64((np.uint32(words[i + k]) * square & low) >= rejected_below)
        i += _PAIRS
    while i < words.size and 2 * found < out.size:
        scaled = np.uint32(words[i]) * square
        i += 1
        if (scaled & low) >= rejected_below:
            pair = scaled >> two
            first = (pair * inverse) >> three
            out[2 * found] = first
            if 2 * found + 1 < out.size:
                out[2 * found + 1] = pair - first * modulus
            found += 1
    return min(2 * found, out.size)


@njit(cache=True, nogil=True)
def reshare_hold(summand, mask, share, mine):
    for i in range(mine.size):
        share[i] = mask[i]
        mine[i] = summand[i] - mask[i]


@njit(cache=True, nogil=True)
def select_deal(held, d0, d1, masks, out):
    for i in range(held.size):
        bit = np.uint64(held[i])
        out[0, i] = bit - masks[0, i]
        out[1, i] = bit * (d0[i] + d1[i]) - masks[1, i]


@njit(cache=True, nogil=True)
def select_hold(held, halves, outer, middle, leads, out):
    lead = np.uint64(leads)
    for i in range(held.size):
        beta = np.uint64(held[i])
        sign = np.uint64(1) - np.uint64(2) * beta
        out[i] = sign * (middle[i] * halves[0, i] + halves[1, i]) + beta * (outer[i] + lead * middle[i])


@njit(cache=True, nogil=True)
def inject_hold(held, half, leads, out):
    lead = np.uint64(leads)
    for i in range(held.size):
        beta = np.uint64(held[i])
        out[i] = (np.uint64(1) - np.uint64(2) * beta) * half[i] + lead * beta


@njit(cache=True, nogil=True)
def inject_deal(held, first, second, share_0, share_1, to_next, to_previous):
    for i in range(held.size):
        bit = np.uint64(held[i])
        outer = first[0, i] + second[0, i]
        share_0[i] = second[0, i]
        share_1[i] = first[0, i]
        for beta in range(2):
            middle = (bit ^ np.uint64(beta)) - outer
            to_next[beta, i] = middle + second[1 + beta, i]
            to_previous[beta, i] = middle + first[1 + beta, i]


@njit(cache=True, nogil=True)
def inject_key(held, masks, share, key):
    for i in range(held.size):
        chosen = np.uint64(0) - np.uint64(held[i])
        share[i] = masks[0, i]
        key[i] = (chosen & masks[2, i]) | (~chosen & masks[1, i])


@njit(cache=True, nogil=True)
def inject_result(held, offers, key, out):
    for i in range(held.size):
        chosen = np.uint64(0) - np.uint64(held[i])
        out[i] = ((chosen & offers[1, i]) | (~chosen & offers[0, i])) - key[i]


@njit(cache=True, nogil=True)
def weigh_hold(held, half, weights, leads, out):
    lead = np.uint64(leads)
    bits, count = half.shape
    terms = np.empty(count, dtype=np.uint64)
    out[:] = np.uint64(0)
    for k in range(bits):
        for i in range(count):
            beta = np.uint64(held[k, i])
            terms[i] = (np.uint64(1) - np.uint64(2) * beta) * half[k, i] + lead * beta
        for o in range(out.shape[0]):
            weight = weights[o, k]
            for i in range(count):
                out[o, i] += weight * terms[i]
