"""Samples of a random allocation, for Monte-Carlo accounting (proofs §9.6): which free slots, and what they weigh.

``free`` of the ``bins·slots`` slots are free, a uniformly random set; ``counts`` says how many in each bin, and one free slot,
uniform among them, is the record's own. Counts are drawn as independent binomials (Walker's alias method), which given their
sum have this law, again if they are too many, and filled up slot by slot.

Each sample has its own stream, a function of the key and the sample's number (splitmix64: Steele, Lea and Flood 2014). So the
samples are the same on every machine, whatever their order.
"""

from __future__ import annotations

import numpy as np
from scipy.special import erfc, ndtri

__all__ = ["allocate", "allocation_losses"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LOW = np.uint64(0xFFFFFFFF)
_FRACTION = np.uint64((1 << 48) - 1)


def _mixed(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class _Streams:
    """One stream a sample; ``lanes`` says whose turn it is."""

    def __init__(self, key: int, first: int, count: int):
        index = np.arange(first, first + count, dtype=np.uint64)
        self._at = _mixed(np.full(count, key, dtype=np.uint64) ^ _mixed(index + _GOLDEN))

    def words(self, lanes: np.ndarray) -> np.ndarray:
        self._at[lanes] += _GOLDEN
        return _mixed(self._at[lanes])

    def uniforms(self, lanes: np.ndarray) -> np.ndarray:
        """In (0, 1), 53 bits."""
        return ((self.words(lanes) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _below(words: np.ndarray, bound: int) -> np.ndarray:
    """Words of 32 bits as uniform numbers below ``bound``, each to a relative bound·2^-32."""
    return ((words * np.uint64(bound)) >> np.uint64(32)).astype(np.int64)


def _drawn(
    streams: _Streams, bins: int, slots: int, free: int, accept: np.ndarray, alias: np.ndarray, lanes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(counts, own bin) of every sample."""
    counts = np.zeros((len(lanes), bins), dtype=np.int64)
    again = lanes
    while len(again):
        for j in range(bins):
            word = streams.words(again)
            cell = ((word >> np.uint64(54)) & np.uint64(len(accept) - 1)).astype(np.int64)
            counts[again, j] = np.where((word & _FRACTION) < accept[cell], cell, alias[cell])
        again = again[counts[again].sum(axis=1) > free]
    missing = lanes[counts.sum(axis=1) < free]
    while len(missing):
        word = streams.words(missing)
        bin_ = _below(word >> np.uint64(32), bins)
        taken = _below(word & _LOW, slots) >= counts[missing, bin_]
        counts[missing[taken], bin_[taken]] += 1
        missing = missing[counts[missing].sum(axis=1) < free]
    slot = _below(streams.words(lanes) >> np.uint64(32), free)
    return counts, (counts.cumsum(axis=1) <= slot[:, None]).sum(axis=1)


def allocate(
    key: int,
    first: int,
    slots: int,
    free: int,
    accept: np.ndarray,
    alias: np.ndarray,
    counts: np.ndarray,
    own: np.ndarray,
) -> None:
    """Fill ``counts`` (samples × bins) and ``own``, the record's bin. One bin's binomial is given as an alias table of up to
    1024 entries, a power of two: entry k stands for k with probability accept·2^-48, else for alias."""
    lanes = np.arange(len(own))
    counts[:], own[:] = _drawn(_Streams(key, first, len(own)), counts.shape[1], slots, free, accept, alias, lanes)


def allocation_losses(
    key: int,
    first: int,
    epochs: int,
    bins: int,
    slots: int,
    free: int,
    sigma: float,
    accept: np.ndarray,
    alias: np.ndarray,
    edges: np.ndarray,
    chances: np.ndarray,
    present: np.ndarray,
    absent: np.ndarray,
) -> None:
    """Privacy losses of an allocation that is drawn anew in every epoch, Σ_e log Σ_i (counts_i/free)·w_i, with the record
    there (``present``) and not (``absent``). w = exp(x/σ − 1/2σ²), x standard normal, + 1/σ in the record's own bin.

    w is replaced by something larger in convex order, so that every expectation of a convex function can only grow: in each
    of the ``cells`` quantile cells of x, w lies at one of its two ends, at the upper one with probability chances·2^-32, such
    that the mean of the cell is right; the first and the last cell are left as they are. ``edges`` are the ends.
    """
    lanes, cells = np.arange(len(present)), len(chances)
    streams = _Streams(key, first, len(present))
    shift, cut, half = np.uint64(64 - (cells.bit_length() - 1)), -float(ndtri(1 / cells)), 0.5 / sigma**2
    present[:] = absent[:] = 0.0
    for _ in range(epochs):
        counts, own = _drawn(streams, bins, slots, free, accept, alias, lanes)
        weights = np.empty((len(lanes), bins))
        for j in range(bins):
            word = streams.words(lanes)
            cell = (word >> shift).astype(np.int64)
            weights[:, j] = edges[cell + ((word & _LOW) < chances[cell])]
            outer = lanes[(cell == 0) | (cell == cells - 1)]
            sign = np.where(cell > 0, 1.0, -1.0)
            while len(outer):
                x = np.sqrt(cut * cut - 2.0 * np.log(streams.uniforms(outer)))
                weights[outer, j] = np.exp(sign[outer] * x / sigma - half)
                outer = outer[streams.uniforms(outer) * x >= cut]
        total = (counts * weights).sum(axis=1)
        absent += np.log(total / free)
        radius, angle = streams.uniforms(lanes), streams.uniforms(lanes)
        x = np.sqrt(-2.0 * np.log(radius)) * np.cos(2.0 * np.pi * angle) + 1.0 / sigma
        cell = np.minimum(cells - 1, (0.5 * erfc(-x / np.sqrt(2.0)) * cells).astype(np.int64))
        low, high, chance = edges[cell], edges[cell + 1], chances[cell] * 2.0**-32
        choice = streams.uniforms(lanes)
        inner = np.where(choice * (low + chance * (high - low)) < chance * high, high, low)
        weight = np.where((cell > 0) & (cell < cells - 1), inner, np.exp(x / sigma - half))
        present += np.log((total + counts[lanes, own] * (weight - weights[lanes, own])) / free)
