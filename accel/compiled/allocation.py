"""Samples of a random allocation in numba; ``accel.reference.allocation`` explains them."""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["allocate"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LOW = np.uint64(0xFFFFFFFF)
_FRACTION = np.uint64((1 << 48) - 1)


@njit(inline="always")
def _mixed(z):
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@njit(inline="always")
def _start(key, index):
    return _mixed(np.uint64(key) ^ _mixed(np.uint64(index) + _GOLDEN))


@njit
def _drawn(at, counts, slots, free, accept, alias):
    """Fill ``counts``; (the bin of one free slot of all, the new state)."""
    bins = counts.size
    total = free + 1
    while total > free:
        total = 0
        for j in range(bins):
            at += _GOLDEN
            word = _mixed(at)
            cell = np.int64(word >> np.uint64(54)) & np.int64(accept.size - 1)
            count = cell if (word & _FRACTION) < accept[cell] else alias[cell]
            counts[j] = count
            total += count
    while total < free:
        at += _GOLDEN
        word = _mixed(at)
        bin_ = np.int64(((word >> np.uint64(32)) * np.uint64(bins)) >> np.uint64(32))
        taken = np.int64(((word & _LOW) * np.uint64(slots)) >> np.uint64(32)) >= counts[bin_]
        counts[bin_] += taken
        total += taken
    at += _GOLDEN
    left = np.int64(((_mixed(at) >> np.uint64(32)) * np.uint64(free)) >> np.uint64(32))
    j = 0
    while left >= counts[j]:
        left -= counts[j]
        j += 1
    return j, at


@njit(cache=True, nogil=True)
def allocate(key, first, slots, free, accept, alias, counts, own):
    for i in range(len(own)):
        own[i], _ = _drawn(_start(key, first + i), counts[i], slots, free, accept, alias)
