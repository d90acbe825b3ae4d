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


@njit(cache=True, nogil=True)
def uniform_below(random, bound, out):
    limit = np.uint32(256 - 256 % bound)  # what is not below it is rejected
    inverse = np.uint32((1 << 16) // bound + 1)  # exact quotient for bytes
    modulus = np.uint32(bound)
    residues, kept = np.empty(32, dtype=np.uint8), np.empty(32, dtype=np.uint8)
    found = np.int64(0)
    i = 0
    while i + 32 <= random.size and found + 32 <= out.size:
        rejected = np.uint8(0)
        for k in range(32):  # LLVM turns this into vector code
            byte = np.uint32(random[i + k])
            residues[k] = byte - modulus * ((byte * inverse) >> np.uint32(16))
            kept[k] = np.uint8(byte < limit)
            rejected |= np.uint8(byte >= limit)
        if rejected == 0:
            for k in range(32):
                out[found + k] = residues[k]
            found += 32
        else:
            for k in range(32):
                out[found] = residues[k]
                found += np.int64(kept[k])
        i += 32
    while i < random.size and found < out.size:
        byte = np.uint32(random[i])
        out[found] = byte - modulus * ((byte * inverse) >> np.uint32(16))
        found += np.int64(byte < limit)
        i += 1
    return found


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
