"""Integers of a step with open weights: summands that are cut, words that are added up, and the public weights.

Everything is exact, so all servers come to the same numbers. The weights are public: kernels on them may return
numbers.
"""

from __future__ import annotations

import numpy as np

from accel.reference.bits import unpack_bits

__all__ = [
    "add_packed",
    "centred_rounded",
    "checksum",
    "cut_words",
    "largest_absolute",
    "largest_square_sum",
    "lifted",
    "moved_weights",
]

LANES = 8  # of a checksum
STEP, ACROSS = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03  # odd: no bit of a word is lost


def cut_words(
    z: np.ndarray, plus: np.ndarray, minus: np.ndarray, own: np.ndarray | None, bits: int, out: np.ndarray
) -> None:
    """⌊(z + plus − minus + own)/2^bits⌋ modulo the width of ``out``, flat; ``own`` may be missing."""
    out[:] = (z + plus - minus + (np.uint64(0) if own is None else own)) >> np.uint64(bits)


def add_packed(mine: np.ndarray, first: np.ndarray, second: np.ndarray, width: int, out: np.ndarray) -> None:
    """The sum modulo 2^width, as a signed number (int64), of ``mine`` and of two packed arrays (``pack_bits``)."""
    total = mine.astype(np.uint64) + unpack_bits(first, width, out.size) + unpack_bits(second, width, out.size)
    out[:] = (total << np.uint64(64 - width)).view(np.int64) >> np.int64(64 - width)


def centred_rounded(values: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Every row minus its rounded mean, over 2^bits, to the nearest integer (int64); |values| below 2^61 over
    columns."""
    columns = values.shape[1]
    mean = np.floor_divide(2 * values.sum(axis=1, keepdims=True) + columns, 2 * columns)
    out[:] = values - mean if bits == 0 else (values - mean + (1 << (bits - 1))) >> bits


def largest_absolute(values: np.ndarray) -> int:
    """The largest absolute value of a matrix of integers (int64) above −2^63; 0 if there are none."""
    return int(np.abs(values).max(initial=0))


def largest_square_sum(rows: np.ndarray, shift: int) -> int:
    """The largest Σ ⌈|x|/2^shift⌉² of a row, if it is below 2^63."""
    rounded = (np.abs(rows) + ((1 << shift) - 1)) >> shift
    return int((rounded * rounded).sum(axis=1).max(initial=0))


def lifted(noise: np.ndarray, shift: int, constant: int, count: int, out: np.ndarray) -> None:
    """noise·2^shift (int64) as words, the first ``count`` plus a constant."""
    out[:] = noise.view(np.uint64) << np.uint64(shift)
    out[:count] += np.uint64(constant)


def moved_weights(
    values: np.ndarray,
    velocity: np.ndarray | None,
    sums: np.ndarray,
    momentum: tuple[int, int],
    decay: tuple[int, int],
    rate: int,
    out: np.ndarray,
) -> int:
    """out = round(α·values/2^a) − rate·v with v = round(β·velocity/2^b) + sums, which takes the place of ``velocity``;
    (β, b) = ``momentum``, (α, a) = ``decay``. All int64, flat. Returns the largest |out|."""
    change = sums
    if velocity is not None:
        beta, bits = momentum
        velocity[:] = ((beta * velocity + (1 << bits >> 1)) >> bits) + sums
        change = velocity
    alpha, bits = decay
    out[:] = ((alpha * values + (1 << bits >> 1)) >> bits) - rate * change
    return largest_absolute(out)


def checksum(words: np.ndarray) -> int:
    """A checksum of public words against mistakes, as fast as they can be read, not cryptographic: Σ_r
    x_{r,l}·STEP^(R−1−r) modulo 2^64 for each of eight lanes of R rows (the last filled up with zeros), and over the
    lanes Σ_l s_l·ACROSS^l, 64 bits, of flat uint64 ``words``. One word that differs changes it for certain."""
    rows = -(-words.size // LANES)
    filled = np.zeros(rows * LANES, dtype=np.uint64)
    filled[: words.size] = words
    powers = np.ones(rows, dtype=np.uint64)
    powers[1:] = np.uint64(STEP)
    powers = np.multiply.accumulate(powers)[::-1]
    sums = (filled.reshape(rows, LANES) * powers[:, np.newaxis]).sum(axis=0, dtype=np.uint64)
    return sum(int(s) * ACROSS**lane for lane, s in enumerate(sums)) % 2**64
