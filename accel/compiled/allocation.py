"""Samples of a random allocation in numba; ``accel.reference.allocation`` explains them."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

__all__ = ["allocate", "allocation_losses"]

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


@njit(inline="always")
def _uniform(at):
    """In (0, 1), 53 bits."""
    return (np.float64(_mixed(at) >> np.uint64(11)) + 0.5) * 2.0**-53


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


@njit(cache=True, nogil=True)
def allocation_losses(key, first, epochs, bins, slots, free, sigma, accept, alias, edges, chances, present, absent):
    counts = np.empty(bins, dtype=np.int64)
    cells = chances.size
    bits = 0
    while (1 << bits) < cells:
        bits += 1
    shift = np.uint64(64 - bits)
    cut = math.sqrt(2.0) * _tail_start(cells)
    half = 0.5 / (sigma * sigma)
    for i in range(len(present)):
        at = _start(key, first + i)
        with_it, without_it = 0.0, 0.0
        with_product, without_product = 1.0, 1.0  # a logarithm every four epochs
        for epoch in range(epochs):
            own, at = _drawn(at, counts, slots, free, accept, alias)
            total, own_weight = 0.0, 0.0
            for j in range(bins):
                at += _GOLDEN
                word = _mixed(at)
                cell = np.int64(word >> shift)
                weight = edges[cell + np.int64((word & _LOW) < chances[cell])]
                if cell == 0 or cell == cells - 1:
                    while True:
                        at += _GOLDEN
                        x = math.sqrt(cut * cut - 2.0 * math.log(_uniform(at)))
                        at += _GOLDEN
                        if _uniform(at) * x < cut:
                            break
                    weight = math.exp((x if cell > 0 else -x) / sigma - half)
                total += counts[j] * weight
                if j == own:
                    own_weight = weight
            without_product *= total / free
            at += _GOLDEN
            radius = math.sqrt(-2.0 * math.log(_uniform(at)))
            at += _GOLDEN
            x = radius * math.cos(2.0 * math.pi * _uniform(at)) + 1.0 / sigma
            cell = min(cells - 1, np.int64(0.5 * math.erfc(-x / math.sqrt(2.0)) * cells))
            at += _GOLDEN
            choice = _uniform(at)
            if 0 < cell < cells - 1:
                low, high, chance = edges[cell], edges[cell + 1], chances[cell] * 2.0**-32
                weight = high if choice * (low + chance * (high - low)) < chance * high else low
            else:
                weight = math.exp(x / sigma - half)
            with_product *= (total + counts[own] * (weight - own_weight)) / free
            if epoch % 4 == 3 or epoch + 1 == epochs:
                with_it += math.log(with_product)
                without_it += math.log(without_product)
                with_product = without_product = 1.0
        present[i], absent[i] = with_it, without_it


@njit
def _tail_start(cells):
    """a with erfc(a)/2 = 1/cells, by Newton's method."""
    a = 0.0
    for _ in range(60):
        a += (0.5 * math.erfc(a) - 1.0 / cells) / (math.exp(-a * a) / math.sqrt(math.pi))
    return a
