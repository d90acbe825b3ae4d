"""Counter blocks for many streams at once in numba; ``accel.reference.counters`` explains them."""

from __future__ import annotations

import sys

import numpy as np
from numba import njit

__all__ = ["counter_blocks"]

_LITTLE = sys.byteorder == "little"


@njit(cache=True, nogil=True)
def _turned(word):
    """The bytes of a word in the other order."""
    one, two = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
    word = ((word >> np.uint64(8)) & one) | ((word & one) << np.uint64(8))
    word = ((word >> np.uint64(16)) & two) | ((word & two) << np.uint64(16))
    return (word >> np.uint64(32)) | (word << np.uint64(32))


@njit(cache=True, nogil=True)
def counter_blocks(runs, word, out):
    """See ``accel.reference.counters.counter_blocks``."""
    start = np.int64(0)
    for run in range(runs.shape[0]):
        nonce, first = runs[run, 0] + word, runs[run, 1]
        count = np.int64(runs[run, 2])
        for k in range(count):
            number = first + np.uint64(k)
            out[start + k, 0] = nonce
            out[start + k, 1] = _turned(number) if _LITTLE else number
        start += count
