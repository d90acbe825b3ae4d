"""Local steps of functions that are put together from pieces: exp below zero, the octave of a sum, splines.

Both holders compute their weights for themselves, so only single IEEE additions, multiplications, divisions, square
roots and roundings of doubles are used, never a fused one: the words are the same on every processor. Tables of e^x
come as arguments. Digits of ρ travel as one-hot vectors over GF(2), 64 places to a word. All results go into ``out``.
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "exp_below_argument",
    "exp_below_bits",
    "exp_below_deal",
    "exp_below_take",
    "octave_bits",
    "octave_deal",
    "spline_deal",
    "spline_hold",
    "split_codes",
]

ZERO, ONE = np.uint64(0), np.uint64(1)
LOW_BITS = 20  # of x on the grid of 2^-16: digits of 16
DEALT_SCALE, HELD_SCALE = 2.0**40, 2.0**17
PLACES, DEGREE = 8, 4
SPLINE_DEALT, SPLINE_HELD = 2.0**16, 2.0**22
# (1 − ε)^-1 and (1 − ε)^-1/2 in powers of ε
SERIES = np.array([[1.0] * 7, [1.0, 1 / 2, 3 / 8, 5 / 16, 35 / 128, 63 / 256, 231 / 1024]])


def _low(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def split_codes(codes: np.ndarray, out: np.ndarray) -> None:
    """Bit k of codes (n,) into out (K, n), uint8."""
    out[:] = (codes >> np.arange(len(out), dtype=codes.dtype)[:, np.newaxis]) & codes.dtype.type(1)


# exp below zero ------------------------------------------------------------------------------------


def exp_below_argument(
    z: np.ndarray, largest: np.ndarray, up: int, down: int, unit: int, extra: int, bits: int, out: np.ndarray
) -> None:
    """z (n, k) on the grid of 2^-16 (moved ``up`` or ``down``), minus ``largest`` (n,) of a grid coarser by ``unit``
    bits and ``extra`` fine units: modulo 2^bits."""
    fine = (z << np.uint64(up)) >> np.uint64(down)
    out[:] = (fine - (largest << np.uint64(unit))[:, np.newaxis] - np.uint64(extra)) & _low(bits)


def _digits(x: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    found, at = [], LOW_BITS
    for size in sizes.tolist():
        found.append((x >> np.uint64(at)) & _low(size))
        at += size
    return found


def _hot_words(sizes: np.ndarray) -> list[int]:
    return [max(1, (1 << size) // 64) for size in sizes.tolist()]


def exp_below_deal(
    rho: np.ndarray,
    sizes: np.ndarray,
    mu: np.ndarray,
    falling: np.ndarray,
    falling_fine: np.ndarray,
    hot_halves: np.ndarray,
    value_halves: np.ndarray,
    hot: np.ndarray,
    values: np.ndarray,
) -> None:
    """The dealer of e^(c − ρ), flat over elements: one-hot digits of ρ's high part ⊕ halves, and e^-ρ_low at the place
    mu says, for both targets, minus halves.

    ``falling[i]`` = e^(−i/256), ``falling_fine[i]`` = e^(−i/65536). Bit target·digits + b of ``mu`` belongs to digit b.
    """
    hot[:] = hot_halves
    rows = np.arange(rho.size)
    at = 0
    for digit, words in zip(_digits(rho, sizes), _hot_words(sizes), strict=True):
        hot[rows, at + (digit >> np.uint64(6)).astype(np.int64)] ^= ONE << (digit & np.uint64(63))
        at += words
    low = (rho & _low(LOW_BITS)).astype(np.int64)
    exact = falling[low >> 8] * falling_fine[low & 255]
    g = np.rint(exact * DEALT_SCALE).astype(np.uint64)
    patterns = 1 << sizes.size
    values[:] = ZERO - value_halves
    for target in range(2):
        code = ((mu >> np.uint64(target * sizes.size)) & _low(sizes.size)).astype(np.int64)
        present = code < patterns - target  # the last of the second target follows from the sums
        values[rows[present], target * patterns + code[present]] += g[present]


def exp_below_bits(c: np.ndarray, sizes: np.ndarray, hot: np.ndarray, mu: np.ndarray, out: np.ndarray) -> None:
    """A holder's shares of [digit of ρ = digit of c + target] ⊕ mu, one code (uint8) an element."""
    ring = LOW_BITS + int(sizes.sum())
    rows = np.arange(c.size)
    codes = mu & _low(2 * sizes.size)
    for target in range(2):
        moved = (c + np.uint64(target << LOW_BITS)) & _low(ring)
        at = 0
        for b, (digit, words) in enumerate(zip(_digits(moved, sizes), _hot_words(sizes), strict=True)):
            word = hot[rows, at + (digit >> np.uint64(6)).astype(np.int64)]
            codes = codes ^ (((word >> (digit & np.uint64(63))) & ONE) << np.uint64(target * sizes.size + b))
            at += words
    out[:] = codes.astype(np.uint8)


def exp_below_take(
    c: np.ndarray,
    mine: np.ndarray,
    theirs: np.ndarray,
    digits: int,
    values: np.ndarray,
    rising: np.ndarray,
    rising_fine: np.ndarray,
    out: np.ndarray,
) -> None:
    """A holder's summand of e^x at 57 bits: the dealt words at the opened places times e^c_low and e^(c_low − 16).

    ``rising[target, i]`` = e^(i/256 − 16·target), ``rising_fine[i]`` = e^(i/65536).
    """
    alpha = (mine ^ theirs).astype(np.int64)
    patterns = 1 << digits
    low = (c & _low(LOW_BITS)).astype(np.int64)
    fine = rising_fine[low & 255]
    rows = np.arange(c.size)
    first, second = values[:, :patterns], values[:, patterns:]
    last = first.sum(axis=1, dtype=np.uint64) - second.sum(axis=1, dtype=np.uint64)
    second = np.concatenate([second, last[:, np.newaxis]], axis=1)
    out[:] = 0
    for target, table in enumerate((first, second)):
        place = ~(alpha >> (target * digits)) & (patterns - 1)
        weight = np.rint(rising[target][low >> 8] * fine * HELD_SCALE).astype(np.uint64)
        out += weight * table[rows, place]


# the octave of a sum -------------------------------------------------------------------------------


def octave_deal(rho: np.ndarray, shift: int, places: int, hot_halves: np.ndarray, hot: np.ndarray) -> None:
    """The dealer: the one-hot vector of (ρ≫shift) modulo ``places`` ⊕ halves, (n, words)."""
    digit = (rho >> np.uint64(shift)) & np.uint64(places - 1)
    hot[:] = hot_halves
    hot[np.arange(rho.size), (digit >> np.uint64(6)).astype(np.int64)] ^= ONE << (digit & np.uint64(63))


def octave_bits(
    c: np.ndarray, hot: np.ndarray, pads: np.ndarray, shift: int, places: int, top: int, out: np.ndarray
) -> None:
    """A holder's shares of [s ≥ 2^k] ⊕ pad_k, k = 0..top, as a code (uint8) a row: eighths σ ≥ 8·2^k + 1 of the vector
    turned by c, and σ = 0, which can only be the upper end."""
    start = ((c >> np.uint64(shift)) & np.uint64(places - 1)).astype(np.int64)
    rows = np.arange(c.size)

    def entry(sigma: int) -> np.ndarray:
        at = (start - sigma) % places
        return (hot[rows, at >> 6] >> (at & 63).astype(np.uint64)) & ONE

    parity = entry(0)
    codes = pads & _low(top + 1)
    for sigma in range(places - 1, 8, -1):
        parity = parity ^ entry(sigma)
        below = sigma - 1  # 8·2^k?
        if below & (below - 1) == 0 and below >= 8 and below < 8 << (top + 1):
            codes = codes ^ (parity << np.uint64(below.bit_length() - 4))
    out[:] = codes.astype(np.uint8)


# splines -------------------------------------------------------------------------------------------


def spline_deal(rho: np.ndarray, rho_t: np.ndarray, scale: int, halves: np.ndarray, out: np.ndarray) -> None:
    """The dealer: τ^j at its place of eight, minus halves: (n, 1, 8·5); and times ρ_t: (n, 2, 8·5)."""
    place = ((rho >> np.uint64(scale - 2)) & np.uint64(PLACES - 1)).astype(np.int64)
    low = (rho & _low(scale - 2)).astype(np.float64) * 2.0**-scale
    tau = (low - 0.125) * 8.0
    out[:] = ZERO - halves
    rows = np.arange(rho.size)
    power = np.ones(rho.size)
    for j in range(DEGREE + 1):
        word = np.rint(power * SPLINE_DEALT).astype(np.int64).view(np.uint64)
        out[rows, 0, place * (DEGREE + 1) + j] += word
        if out.shape[1] == 2:
            out[rows, 1, place * (DEGREE + 1) + j] += word * rho_t
        power = power * tau


def spline_hold(c: np.ndarray, c_t: np.ndarray, halves: np.ndarray, scale: int, function: int, out: np.ndarray) -> None:
    """A holder's summand of f(m)·t, or of f(m): f = 1/m (``function`` 0) or 1/sqrt(m) (1), for m in [15/16, 2.25).

    At each place the piece's centre a and ε = ⅛/a give f(a)·Σ b_j ε^j τ^j; τ⁵ and τ⁶ by Chebyshev's lower powers.
    """
    digit = (c >> np.uint64(scale - 2)) & np.uint64(PLACES - 1)
    low = (c & _low(scale - 2)).astype(np.float64) * 2.0**-scale
    total = np.zeros(c.size, dtype=np.uint64)
    for place in range(PLACES):
        x = ((digit - np.uint64(place)) & np.uint64(PLACES - 1)).astype(np.float64) * 0.25 + low
        x = np.where(x < 0.5, x + 2.0, x)
        inside = x >= 0.9375
        centre = np.where(inside, x - 0.125, 1.0)
        ratio = 0.125 / centre
        value = 1.0 / centre if function == 0 else 1.0 / np.sqrt(centre)
        a = []
        for b in SERIES[function]:
            a.append(value * b)
            value = value * ratio
        a[3], a[1] = a[3] + a[5] * 1.25, a[1] - a[5] * 0.3125
        a[4], a[2], a[0] = a[4] + a[6] * 1.5, a[2] - a[6] * 0.5625, a[0] + a[6] * 0.03125
        for j in range(DEGREE + 1):
            word = np.rint(np.where(inside, a[j], 0.0) * SPLINE_HELD).astype(np.int64).view(np.uint64)
            at = place * (DEGREE + 1) + j
            total += word * (c_t * halves[:, 0, at] - halves[:, 1, at] if halves.shape[1] == 2 else halves[:, 0, at])
    out[:] = total
