"""Local steps of the exponential: the dealer's e^−ρ_low at the place of its digit, the holders' weights.

Both holders must come to the same weights to the last bit: only table look-ups and single additions, multiplications,
divisions and roundings of IEEE doubles are used for them, in this order (``refmpc.core.integer_logs``).
"""

from __future__ import annotations

import numpy as np

__all__ = ["exp_deal", "exp_hold"]

TABLE_BITS = 8


def exp_deal(
    x0: np.ndarray, x1: np.ndarray, fraction_bits: int, step: int, dealt_bits: int, masks: np.ndarray, out: np.ndarray
) -> None:
    """The dealer, ρ = −x0 − x1: the second half of the vectors (n, places) that hold e^−ρ_low·2^dealt_bits at the place
    of ρ's digit and zero elsewhere. A digit counts steps of ``step`` (a power of two), ρ_low is below one."""
    rho = np.uint64(0) - x0 - x1
    low_bits = fraction_bits + step.bit_length() - 1
    below = np.uint64((1 << low_bits) - 1)
    low = np.bitwise_and(rho, below).astype(np.float64) * 2.0**-fraction_bits
    digit = ((rho >> np.uint64(low_bits)) & np.uint64(out.shape[1] - 1)).astype(np.int64)
    np.subtract(np.uint64(0), masks, out=out)
    out[np.arange(rho.size), digit] += np.rint(np.exp(-low) * 2.0**dealt_bits).astype(np.uint64)


def exp_hold(
    c: np.ndarray,
    half: np.ndarray,
    fraction_bits: int,
    step: int,
    table: np.ndarray,
    factors: np.ndarray,
    scale: float,
    out: np.ndarray,
) -> None:
    """A holder's summand Σ_place half·weight, weight = e^c_low·factors[digit of c − place]·scale, rounded."""
    places = half.shape[1]
    low_bits = fraction_bits + step.bit_length() - 1
    exact = agreed_exp(np.bitwise_and(c, np.uint64((1 << low_bits) - 1)), fraction_bits, table)
    digit = (c >> np.uint64(low_bits))[:, np.newaxis]
    distance = np.bitwise_and(digit - np.arange(places, dtype=np.uint64), np.uint64(places - 1))
    weights = np.rint(exact[:, np.newaxis] * factors[distance.astype(np.int64)] * scale).astype(np.uint64)
    np.sum(half * weights, axis=1, dtype=np.uint64, out=out)


def agreed_exp(words: np.ndarray, fraction_bits: int, table: np.ndarray) -> np.ndarray:
    """e^(words·2^-fraction_bits) as doubles, relative error below 2^-50, from the table of e^(i·2^-8).

    A table look-up for the bits above 2^-8, and 1 + r(1 + r/2(1 + r/3(1 + r/4(1 + r/5)))) for the rest: what is left
    out is r⁶/720 < 2^-57.
    """
    if fraction_bits <= TABLE_BITS:
        return table[(words << np.uint64(TABLE_BITS - fraction_bits)).astype(np.int64)]
    shift = fraction_bits - TABLE_BITS
    r = (words & np.uint64((1 << shift) - 1)).astype(np.float64) * 2.0**-fraction_bits
    series = r * (1 / 5) + 1.0
    for divisor in (4.0, 3.0, 2.0, 1.0):
        series = series * r
        series = series / divisor
        series = series + 1.0
    return table[(words >> np.uint64(shift)).astype(np.int64)] * series
