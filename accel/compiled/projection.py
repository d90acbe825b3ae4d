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


def project_signs(x: np.ndarray, coins: np.ndarray, out: np.ndarray) -> None:
    """See ``accel.reference.projection.project_signs``."""
    _project_signs(np.ascontiguousarray(x), np.ascontiguousarray(coins), out)
