"""Noise kernels in plain numpy: attempts of the grid Gaussian, FIR taps, the recursion of a banded Ω."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from accel.gaussian import StripTable

__all__ = ["fir_fits_ring", "fir_ring", "fir_takes_blas", "fir_taps", "grid_gaussian_attempts", "recursive_filter"]

_LOW_BITS = 24


def grid_gaussian_attempts(
    words: np.ndarray, table: StripTable, out: np.ndarray
) -> tuple[int, int, np.ndarray, np.ndarray]:
    """Attempts of ``accel.gaussian``: from word pairs the first values kept into ``out``, until it is full. Returns how
    many attempts that took, how many values were kept, the undecided places in them, and their attempts.

    First word: column (9 bits), alias coin (23), acceptance coin (32). Second: sign (1), place in strip (63).
    """
    first, second = words[0::2], words[1::2]
    column = (first & np.uint64(511)).astype(np.int64)
    coin = (first >> np.uint64(9)) & np.uint64((1 << 23) - 1)
    strip = np.where(coin < table.thresholds[column], column, table.aliases[column].astype(np.int64))
    accept = (first >> np.uint64(32)).astype(np.float64)
    place = second >> np.uint64(1)
    fraction = place.astype(np.float64) * 2.0**-63
    level = table.ceilings[strip] * np.exp(-table.curvature * fraction * (2 * strip + fraction))
    sure = (accept + 1 <= table.floors[strip]) | (accept + 1 <= level - table.guard)
    possible = sure | (accept < level + table.guard)
    half_units = (strip << table.strip_bits) | (place >> np.uint64(63 - table.strip_bits)).astype(np.int64)
    magnitude = (half_units + 1) >> 1
    values = np.where(second & np.uint64(1), -magnitude, magnitude)
    taken = np.flatnonzero(possible)[: out.size]
    out[: taken.size] = values[taken]
    tried = int(taken[-1]) + 1 if taken.size == out.size and taken.size else first.size
    undecided = np.flatnonzero((possible & ~sure)[:tried])
    places = np.cumsum(possible)[undecided] - 1
    return tried, taken.size, places, undecided


def fir_fits_ring(taps: np.ndarray, largest: int) -> bool:
    """Whether ``fir_ring`` is exact for integers within ±largest, a public bound: Σ|taps|·largest ≤ 2^53 without the
    first tap."""
    return max(1, sum(abs(tap) for tap in taps[1:].tolist())) * largest <= 1 << 53


def fir_takes_blas(rows: int, columns: int) -> bool:
    """Whether ``fir_ring`` of so many rows and columns is a product of the BLAS library, which may start threads."""
    return False


def fir_ring(ring: np.ndarray, position: int, rows: np.ndarray, taps: np.ndarray, out: np.ndarray) -> None:
    """``fir_taps`` of int64 ``rows`` into ``out`` (which may be ``rows``), where ``fir_fits_ring`` says that floats are
    enough.

    ``ring`` holds the last rows as float64, at least len(taps)−1 and as many as ``rows`` has: those before
    ``position``, around its end. The new ones are put there from ``position`` on, so nothing is moved, and every row is
    converted once.
    """
    depth, around = len(taps) - 1, len(ring)
    history = ring[np.arange(position - depth, position) % around].astype(np.int64)
    ring[np.arange(position, position + len(rows)) % around] = rows
    out[:] = fir_taps(history, rows, taps)


def fir_taps(history: np.ndarray, rows: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """out[t] = Σ_j taps[j]·z[t−j] mod 2^64 for int64 ``rows``, after the len(taps)−1 rows of ``history``.

    Cost: len(taps) multiplications per entry, in 64-bit integers, so exact whatever the sizes.
    """
    z = np.concatenate([history, rows]).view(np.uint64)
    out = np.zeros(rows.shape, dtype=np.uint64)
    for j, tap in enumerate(taps.view(np.uint64)):
        start = len(taps) - 1 - j
        out += tap * z[start : start + len(rows)]
    return out.view(np.int64)


def recursive_filter(history: np.ndarray, rows: np.ndarray, coefficients: np.ndarray, bits: int) -> np.ndarray:
    """y[t] = z[t] − ⌊Σ_{j≥1} coefficients[j]·y[t−j]/2^bits + 1/2⌋, exact; ``history`` holds the last y.

    Domain: bits ≤ 24, |y| < 2^48, Σ|coefficients| < 2^28 (checked: raises OverflowError). y is split at 24
    bits, so that both halves of the sum stay exact.
    """
    if sum(abs(c) for c in coefficients.tolist()) >= 1 << 28:
        raise OverflowError("recursive_filter: Σ|coefficients| must stay below 2^28; use fewer bits")
    depth = len(coefficients) - 1
    weights = coefficients[:0:-1]  # coefficient 1 belongs to the row just before
    y = np.concatenate([history, rows])
    half = np.int64(1 << bits >> 1)
    for t in range(depth, len(y)):
        past = y[t - depth : t]
        high = weights @ (past >> _LOW_BITS)
        low = weights @ (past & ((1 << _LOW_BITS) - 1))
        y[t] -= (high << (_LOW_BITS - bits)) + ((low + half) >> bits)
    out = y[depth:]
    if out.size and max(-int(out.min()), int(out.max())) >= 1 << 48:
        raise OverflowError("recursive_filter: a filtered value left ±2^48; use smaller noise or fewer noise bits")
    return out
