"""1/m and 1/sqrt(m) of a mantissa, times a second number, in the one round that opens both."""

from __future__ import annotations

import numpy as np

from accel import kernels
from accel.validate import require, require_choice, require_integer
from refmpc.core.primitive import Cost, primitive
from refmpc.core.words import Words
from refmpc.primitives.dealing import (
    DEALER,
    FIRST,
    SECOND,
    Additive,
    Dealing,
    check_additive,
    each_dealer,
    nothing,
    row_sizes,
)

__all__ = ["FUNCTION_BITS", "RECIPROCAL_ERROR", "ROOT_ERROR", "SPLINE_BITS", "spline_times"]

HELD_BITS, DEALT_BITS = 22, 16
SPLINE_BITS = HELD_BITS + DEALT_BITS
RING_BITS = SPLINE_BITS + 2  # of f(m) alone, below 2^39: what is dealt for it has no more bits
FUNCTION_BITS = SPLINE_BITS + 64 - RING_BITS  # and it is moved up to the full ring
WORDS = 8 * 5
FUNCTIONS = ("reciprocal", "root")
# relative bounds over [15/16, 2.25): series and words, see spline_times
RECIPROCAL_ERROR, ROOT_ERROR = 2.0**-16.5, 2.0**-17.94


def _cost(m: Additive, t: Additive | None, function: str) -> Cost:
    rows = len(m.words)
    if t is None:
        return Cost(1, 16 * rows + sum(kernels.packed_size(n * WORDS, RING_BITS) for n in row_sizes(rows)))
    return Cost(1, (16 + 8 * WORDS) * 2 * rows)


@primitive(cost=_cost, source="this project: Taylor pieces with Chebyshev's economisation, powers dealt")
async def spline_times(m: Additive, t: Additive | None, function: str) -> Additive:
    """f(m)·t for 15/16 ≤ m < 2.25 and any integer t, additive at 38 bits above the scale of t; f is 1/m ("reciprocal")
    or 1/sqrt(m) ("root"). Without t, f(m) at 62 bits.

    1 round, 672 bytes a row, 216 without t. Relative error of f: below 2^-16.5 for 1/m (2^-17.35 found), 2^-17.94 for
    1/sqrt(m); t is exact. Domain: the interval; |f(m)·t| below 2^25; m at 5 to 62 bits. (m = 0, as of sqrt(0), gives
    something arbitrary.)

    m and t are opened, m = c − ρ. In the ring modulo 2 with eight places of ¼, the dealer has a place h and
    τ = (ρ_low − ⅛)/⅛ in [−1, 1); it deals τ^j (16 bits) at h and zeros elsewhere, and all of it times ρ_t: 80 words.
    For each place that could be h the holders know the piece's centre a = X − ⅛, X = c with h taken off, and f(a − τ/8)
    as a polynomial in τ: f(a)·Σ b_j ε^j τ^j, ε = ⅛/a, up to j = 6, of which τ⁵ and τ⁶ are replaced by Chebyshev's lower
    powers. Σ word·(c_t·g − gρ_t) is f(m)·t, exactly linear.

    Root: what the series leaves out is at a ≥ 0.8125 (ε ≤ 0.154) below 2^-18.99 of f; five held words are off by half a
    unit of 2^-22 and five dealt ones by half a unit of 2^-16 times Σ|a_j|, together 2^-18.89 over 1/sqrt(2). Reciprocal
    alike: 2^-17.5 and 2^-17.6. Without t all of it happens modulo 2^40, where f(m) < 2^39 has room: 40 words of 5
    bytes; times 2^24 the summands are such of f(m)·2^24 modulo 2^64. Views: openings, and 80 words under masks; the
    dealer gets nothing.
    """
    require(t is None or m.same_dealers(t), "t", t, "of the same rows and dealers as m (one call)")
    adds = m.dealer_adds or (t is not None and t.dealer_adds)
    require(not adds, "m, t", (m, t), "without a summand of the dealer")
    require_choice("function", function, FUNCTIONS)
    scale = require_integer("fraction bits of m", m.fraction_bits, 5, 62)
    if scale < 62:  # there the check's signed words would not do
        await check_additive(m, 15 << (scale - 4), 9 << (scale - 2), "spline_times", zero=t is None)
    out = nothing(m.party, len(m.words))
    if t is None:
        return await _spline_alone(m, function, out)

    async def work(dealing: Dealing) -> None:
        mantissa = dealing.open(m.words[dealing.slice])
        factor = dealing.open(t.words[dealing.slice])
        shape = (dealing.rows, 2, WORDS)
        if dealing.role == DEALER:
            dealing.deal("spline_deal", mantissa.words, factor.words, scale, shape=shape)
            await dealing.turn()
            return
        halves = dealing.deal("spline_deal", shape=shape)
        await dealing.turn()
        result = out[dealing.slice]
        dealing.call("spline_hold", mantissa.words, factor.words, halves, scale, FUNCTIONS.index(function), result)

    operation, _ = await each_dealer("spline_times", m, (t, function), work)
    return Additive(m.party, out, m.segments, SPLINE_BITS + t.fraction_bits, operation.history())


async def _spline_alone(m: Additive, function: str, out: Words) -> Additive:
    """f(m) alone, at ``FUNCTION_BITS``."""
    scale, machine = m.fraction_bits, m.party.machine

    async def work(dealing: Dealing) -> None:
        opening = dealing.open(m.words[dealing.slice])
        shape = (dealing.rows, 1, WORDS)
        if dealing.role == DEALER:
            halves, rest = dealing.masks(FIRST, *shape), dealing.memory(shape)
            dealing.call("spline_deal", opening.words, opening.words, scale, halves, rest)
            dealing.send_packed(SECOND, rest, RING_BITS)
            await dealing.turn()
            return
        if dealing.role == FIRST:
            halves = dealing.masks(DEALER, *shape)
        else:
            arriving = dealing.expect_packed(DEALER, shape, RING_BITS)
        await dealing.turn()
        if dealing.role == SECOND:
            halves = arriving.words
        result = out[dealing.slice]
        dealing.call("spline_hold", opening.words, opening.words, halves, scale, FUNCTIONS.index(function), result)

    operation, _ = await each_dealer("spline_times", m, (None, function), work)
    raised = machine.binary("multiply", out, np.uint64(1 << (64 - RING_BITS)))
    return Additive(m.party, raised, m.segments, FUNCTION_BITS, operation.history())
