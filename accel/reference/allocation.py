"""Samples of a random allocation, for Monte-Carlo accounting (proofs §9.6): which slots are free, and which is the own.

``free`` of the ``bins·slots`` slots are free, a uniformly random set; ``counts`` says how many in each bin, and one
free slot, uniform among them, is the record's own. Counts are drawn as independent binomials (Walker's alias method),
which given their sum have this law, again if they are too many, and filled up slot by slot.

Each sample has its own stream, a function of the key and the sample's number (splitmix64: Steele, Lea and Flood 2014).
So the samples are the same on every machine, whatever their order.
"""

from __future__ import annotations

import numpy as np

__all__ = ["allocate"]

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
    """Fill ``counts`` (samples × bins) and ``own``, the record's bin. One bin's binomial is given as an alias table of
    up to 1024 entries, a power of two: entry k stands for k with probability accept·2^-48, else for alias."""
    lanes = np.arange(len(own))
    counts[:], own[:] = _drawn(_Streams(key, first, len(own)), counts.shape[1], slots, free, accept, alias, lanes)
