"""A checksum of public words against mistakes, as fast as they can be read; nothing here is cryptographic."""

from __future__ import annotations

import numpy as np

__all__ = ["checksum"]

LANES = 8
STEP, ACROSS = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03  # odd: no bit of a word is lost


def checksum(words: np.ndarray) -> int:
    """Σ_r x_{r,l}·STEP^(R−1−r) modulo 2^64 for each of eight lanes of R rows (the last filled up with zeros), and over the lanes
    Σ_l s_l·ACROSS^l, 64 bits, of flat uint64 ``words``. One word that differs changes it for certain."""
    rows = -(-words.size // LANES)
    filled = np.zeros(rows * LANES, dtype=np.uint64)
    filled[: words.size] = words
    powers = np.ones(rows, dtype=np.uint64)
    powers[1:] = np.uint64(STEP)
    powers = np.multiply.accumulate(powers)[::-1]
    sums = (filled.reshape(rows, LANES) * powers[:, np.newaxis]).sum(axis=0, dtype=np.uint64)
    return sum(int(s) * ACROSS**lane for lane, s in enumerate(sums)) % 2**64
