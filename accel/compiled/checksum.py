"""A checksum of public words in numba; ``accel.reference.checksum`` explains it."""

from __future__ import annotations

import numpy as np
from numba import njit

from accel.reference.checksum import ACROSS, LANES, STEP

__all__ = ["checksum"]


@njit(cache=True, nogil=True)
def _checksum(words):
    step, total, power = np.uint64(STEP), np.uint64(0), np.uint64(1)
    sums = np.zeros(LANES, dtype=np.uint64)
    whole = words.size - words.size % LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            sums[lane] = sums[lane] * step + words[start + lane]
    for lane in range(LANES):
        if whole < words.size:
            sums[lane] *= step
            if whole + lane < words.size:
                sums[lane] += words[whole + lane]
        total += sums[lane] * power
        power *= np.uint64(ACROSS)
    return total


def checksum(words: np.ndarray) -> int:
    """See ``accel.reference.checksum.checksum``."""
    return int(_checksum(words))
