"""Noise kernels in numba and BLAS: the same names, arguments and results as ``accel.reference.noise``."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from accel.compiled import fir
from accel.reference import noise as _reference

if TYPE_CHECKING:
    from accel.gaussian import StripTable

__all__ = ["fir_fits_ring", "fir_ring", "fir_takes_blas", "fir_taps", "grid_gaussian_attempts", "recursive_filter"]

_COLUMNS = 512  # columns per piece: the float64 halves of p + 64 rows then stay in the cache of one core
_STEPS = 64  # rows per block: the triangle of the Toeplitz matrix that BLAS multiplies in vain stays small


def grid_gaussian_attempts(
    words: np.ndarray, table: StripTable, out: np.ndarray
) -> tuple[int, int, np.ndarray, np.ndarray]:
    """See ``accel.reference.noise``: one pass, and exp only where the floor of the strip does not decide."""
    return _attempts(
        words,
        table.thresholds,
        table.aliases,
        table.ceilings,
        table.floors,
        table.curvature,
        table.strip_bits,
        table.guard,
        out,
    )


@njit(cache=True, nogil=True)
def _attempts(words, thresholds, aliases, ceilings, floors, curvature, strip_bits, guard, values):
    attempts = words.size // 2
    places = np.empty(attempts, dtype=np.int64)
    undecided = np.empty(attempts, dtype=np.int64)
    kept, open_count = 0, 0
    shift = np.uint64(63 - strip_bits)
    for a in range(attempts):
        if kept == values.size:
            attempts = a
            break
        first, second = words[2 * a], words[2 * a + 1]
        strip = first & np.uint64(511)
        if ((first >> np.uint64(9)) & np.uint64(0x7FFFFF)) >= thresholds[strip]:
            strip = aliases[strip]
        accept = np.float64(first >> np.uint64(32))
        place = second >> np.uint64(1)
        if accept + 1.0 > floors[strip]:
            fraction = np.float64(place) * 2.0**-63
            level = ceilings[strip] * math.exp(-curvature * fraction * (2.0 * np.float64(strip) + fraction))
            if accept + 1.0 > level - guard:
                if accept >= level + guard:
                    continue
                places[open_count] = kept
                undecided[open_count] = a
                open_count += 1
        half_units = (np.int64(strip) << strip_bits) | np.int64(place >> shift)
        magnitude = (half_units + 1) >> 1
        values[kept] = -magnitude if second & np.uint64(1) else magnitude
        kept += 1
    return attempts, kept, places[:open_count].copy(), undecided[:open_count].copy()


def fir_taps(history: np.ndarray, rows: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """See ``accel.reference.noise.fir_taps``: exact mod 2^64 for every int64 input.

    z = 2^32·high + low with |high|, |low| < 2^32, each half through a float64 product, if Σ|taps|·2^32 ≤ 2^53. Larger
    taps go to the reference. The choice depends on public numbers only.
    """
    depth = len(taps) - 1
    size, _ = _sizes(taps.tobytes())
    if size > 1 << 21:
        return _reference.fir_taps(history, rows, taps)
    out = np.empty(rows.shape, dtype=np.int64)
    z = np.concatenate([history, rows])
    toeplitz = _toeplitz(taps.astype(np.float64), min(_STEPS, len(rows)))
    for top in range(0, len(rows), _STEPS):
        steps = min(_STEPS, len(rows) - top)
        band = np.ascontiguousarray(toeplitz[:steps, : steps + depth])
        for left in range(0, rows.shape[1], _COLUMNS):
            piece = z[top : top + steps + depth, left : left + _COLUMNS]
            high, low = _split(piece, 32)
            _join(band @ high, band @ low, 32, out[top : top + steps, left : left + _COLUMNS])
    return out


@functools.lru_cache(maxsize=8)
def _sizes(taps: bytes) -> tuple[int, int]:
    """Σ|taps|, and the same without the first."""
    sizes = [abs(tap) for tap in np.frombuffer(taps, dtype=np.int64).tolist()]
    return sum(sizes), sum(sizes[1:])


def fir_fits_ring(taps: np.ndarray, largest: int) -> bool:
    """See ``accel.reference.noise.fir_fits_ring``."""
    return max(1, _sizes(taps.tobytes())[1]) * largest <= 1 << 53


def fir_takes_blas(rows: int, columns: int) -> bool:
    """See ``accel.reference.noise.fir_takes_blas``."""
    return not fir.is_worth_it(rows, columns)


def fir_ring(ring: np.ndarray, position: int, rows: np.ndarray, taps: np.ndarray, out: np.ndarray) -> None:
    """See ``accel.reference.noise.fir_ring``: one float64 matrix product, by tiles (``accel.compiled.fir``) or BLAS.
    All its sums are integers below 2^53, hence exact in any order; the first tap, usually half of all, is multiplied in
    integers."""
    depth, steps, around = len(taps) - 1, len(rows), len(ring)
    _into_ring(rows, ring, position)
    start = (position - depth) % around
    beside = rows.strides[1] == out.strides[1] == rows.itemsize  # as a tile takes neighbours in a row to be
    if beside and fir.is_worth_it(*rows.shape):
        fir.filter_by_tiles(_kept_taps(taps.tobytes()), taps[0], ring, start, rows, out)
        return
    band = _kept_toeplitz(taps.tobytes(), steps)
    before = min(depth + steps, around - start)
    product = band[:, :before] @ ring[start : start + before]
    if before < depth + steps:
        product += band[:, before:] @ ring[: depth + steps - before]
    _add_first(product, rows, taps[0], out)


@functools.lru_cache(maxsize=8)
def _kept_toeplitz(taps: bytes, steps: int) -> np.ndarray:
    """The filter of all taps but the first."""
    later = np.frombuffer(taps, dtype=np.int64).astype(np.float64)
    later[0] = 0.0
    return _toeplitz(later, steps)


@functools.lru_cache(maxsize=8)
def _kept_taps(taps: bytes) -> np.ndarray:
    return fir.padded_taps(np.frombuffer(taps, dtype=np.int64).astype(np.float64))


@njit(cache=True, nogil=True)
def _into_ring(integers, ring, position):
    """Rows into the ring from ``position`` on and around."""
    for t in range(integers.shape[0]):
        at = (position + t) % ring.shape[0]
        for c in range(integers.shape[1]):
            ring[at, c] = np.float64(integers[t, c])


@njit(cache=True, nogil=True)
def _add_first(later, rows, first, out):
    for t in range(out.shape[0]):
        for c in range(out.shape[1]):
            out[t, c] = np.int64(later[t, c]) + first * rows[t, c]


def recursive_filter(history: np.ndarray, rows: np.ndarray, coefficients: np.ndarray, bits: int) -> np.ndarray:
    """See ``accel.reference.noise``: old rows by BLAS, the rows of the same block in numba."""
    if len(coefficients) == 1:
        return rows.copy()
    if sum(abs(c) for c in coefficients.tolist()) >= 1 << 28:
        raise OverflowError("recursive_filter: Σ|coefficients| must stay below 2^28; use fewer bits")
    depth = len(coefficients) - 1
    weights = coefficients.astype(np.float64)
    y = np.concatenate([history, rows])
    shifted = weights.copy()
    shifted[0] = 0.0
    toeplitz = _toeplitz(shifted, min(_STEPS, len(rows)))
    for top in range(0, len(rows), _STEPS):
        steps = min(_STEPS, len(rows) - top)
        # only old rows: those of the block itself come in by the recursion
        band = np.ascontiguousarray(toeplitz[:steps, :depth])
        for left in range(0, y.shape[1], _COLUMNS):
            columns = slice(left, left + _COLUMNS)
            high, low = _split(y[top : top + depth, columns], 24)
            block = y[depth + top : depth + top + steps, columns]
            if not _recurse(block, band @ high, band @ low, weights, bits):
                raise OverflowError(
                    "recursive_filter: a filtered value left ±2^48; use smaller noise or fewer noise bits"
                )
    return y[depth:]


def _toeplitz(taps: np.ndarray, steps: int) -> np.ndarray:
    """Row t holds the taps so that it meets the rows t..t+len(taps)−1 of (history, block)."""
    matrix = np.zeros((steps, steps + len(taps) - 1))
    for t in range(steps):
        matrix[t, t : t + len(taps)] = taps[::-1]
    return matrix


@njit(cache=True, nogil=True)
def _split(z, bits):
    high = np.empty(z.shape, dtype=np.float64)
    low = np.empty(z.shape, dtype=np.float64)
    mask = (np.int64(1) << bits) - 1
    for t in range(z.shape[0]):
        for c in range(z.shape[1]):
            high[t, c] = np.float64(z[t, c] >> bits)
            low[t, c] = np.float64(z[t, c] & mask)
    return high, low


@njit(cache=True, nogil=True)
def _join(high, low, bits, out):
    for t in range(out.shape[0]):
        for c in range(out.shape[1]):
            out[t, c] = (np.int64(high[t, c]) << bits) + np.int64(low[t, c])


@njit(cache=True, nogil=True)
def _recurse(block, high, low, weights, bits):
    steps, columns = block.shape
    half = np.int64(1) << bits >> 1
    limit = np.int64(1) << 48
    new_high = np.empty((steps, columns), dtype=np.float64)
    new_low = np.empty((steps, columns), dtype=np.float64)
    for t in range(steps):
        for j in range(1, min(t, weights.size - 1) + 1):
            w = weights[j]
            for c in range(columns):
                high[t, c] += w * new_high[t - j, c]
                low[t, c] += w * new_low[t - j, c]
        for c in range(columns):
            total = (np.int64(high[t, c]) << (24 - bits)) + ((np.int64(low[t, c]) + half) >> bits)
            y = block[t, c] - total
            if y >= limit or y <= -limit:
                return False
            block[t, c] = y
            new_high[t, c] = np.float64(y >> 24)
            new_low[t, c] = np.float64(y & 0xFFFFFF)
    return True
