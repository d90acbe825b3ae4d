"""Sums with public random signs in numba: additions only, a row stays in the cache for all its projections."""

from __future__ import annotations

import numpy as np
from numba import njit

from accel.reference.projection import subset_parities  # a single pass

__all__ = ["project_signs", "subset_parities"]


@njit(cache=True, nogil=True)
def _project_signs(x, coins, out):
    for i in range(x.shape[0]):
        plus, minus = coins[i, 0], coins[i, 1]
        for t in range(out.shape[0]):
            sign = np.int64((plus >> np.uint64(t)) & np.uint64(1)) - np.int64((minus >> np.uint64(t)) & np.uint64(1))
            if sign == 1:
                for j in range(x.shape[1]):
                    out[t, j] += x[i, j]
            elif sign == -1:
                for j in range(x.shape[1]):
                    out[t, j] -= x[i, j]


@njit(cache=True, nogil=True)
def _project_signs_of_few(x, coins, out):
    """The same for few columns: all projections of a number at a time, without a branch."""
    zero, one = np.uint64(0), np.uint64(1)
    sums = np.zeros((x.shape[1], 64), dtype=np.uint64)
    places = np.arange(64).astype(np.uint64)
    for i in range(x.shape[0]):
        plus, minus = coins[i, 0], coins[i, 1]
        for j in range(x.shape[1]):
            number = x[i, j]
            for t in range(64):
                taken = number & (zero - ((plus >> places[t]) & one))
                sums[j, t] += taken - (number & (zero - ((minus >> places[t]) & one)))
    for t in range(out.shape[0]):
        for j in range(x.shape[1]):
            out[t, j] += sums[j, t]


_FEW = 16  # columns


def project_signs(x: np.ndarray, coins: np.ndarray, out: np.ndarray) -> None:
    """See ``accel.reference.projection.project_signs``."""
    project = _project_signs_of_few if x.shape[1] <= _FEW else _project_signs
    project(np.ascontiguousarray(x), np.ascontiguousarray(coins), out)
