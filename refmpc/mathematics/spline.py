"""1/m and 1/sqrt(m) of a mantissa, times a second number, in the one round that opens both."""

from __future__ import annotations

from accel.validate import require, require_choice, require_integer
from refmpc.core.protocol import Cost, protocol
from refmpc.primitives.dealing import Additive, Dealing, check_additive, each_dealer, nothing

__all__ = ["RECIPROCAL_ERROR", "ROOT_ERROR", "SPLINE_BITS", "spline_times"]

HELD_BITS, DEALT_BITS = 22, 16
SPLINE_BITS = HELD_BITS + DEALT_BITS
WORDS = 8 * 5
FUNCTIONS = ("reciprocal", "root")
# relative bounds over [15/16, 2.25): series and words, see spline_times
RECIPROCAL_ERROR, ROOT_ERROR = 2.0**-16.5, 2.0**-17.94


def _cost(m: Additive, t: Additive | None, function: str) -> Cost:
    return Cost(1, (16 + 8 * WORDS) * (1 if t is None else 2) * len(m.words))


@protocol(cost=_cost, source="this project: Taylor pieces with Chebyshev's economisation, powers dealt")
async def spline_times(m: Additive, t: Additive | None, function: str) -> Additive:
    """f(m)·t for 15/16 ≤ m < 2.25 and any integer t, additive at 38 bits above the scale of t; f is 1/m ("reciprocal") or
    1/sqrt(m) ("root"). Without t, f(m) at 38 bits.

    1 round, 672 bytes a row, 336 without t. Relative error of f: below 2^-16.5 for 1/m (2^-17.35 found), 2^-17.94 for 1/sqrt(m); t is exact.
    Domain: the interval; |f(m)·t| below 2^25; m at 5 to 62 bits. (m = 0, as of sqrt(0), gives something arbitrary.)

    m and t are opened, m = c − ρ. In the ring modulo 2 with eight places of ¼, the dealer has a place h and
    τ = (ρ_low − ⅛)/⅛ in [−1, 1); it deals τ^j (16 bits) at h and zeros elsewhere, and all of it times ρ_t: 80 words. For each
    place that could be h the holders know the piece's centre a = X − ⅛, X = c with h taken off, and f(a − τ/8) as a polynomial in
    τ: f(a)·Σ b_j ε^j τ^j, ε = ⅛/a, up to j = 6, of which τ⁵ and τ⁶ are replaced by Chebyshev's lower powers. Σ word·(c_t·g − gρ_t)
    is f(m)·t, exactly linear.

    Root: what the series leaves out is at a ≥ 0.8125 (ε ≤ 0.154) below 2^-18.99 of f; five held words are off by half a unit of 2^-22
    and five dealt ones by half a unit of 2^-16 times Σ|a_j|, together 2^-18.89 over 1/sqrt(2). Reciprocal alike: 2^-17.5
    and 2^-17.6. Views: openings, and 80 words under masks; the dealer gets nothing.
    """
    require(t is None or m.same_dealers(t), "t", t, "of the same rows and dealers as m (one call)")
    adds = m.dealer_adds or (t is not None and t.dealer_adds)
    require(not adds, "m, t", (m, t), "without a summand of the dealer")
    require_choice("function", function, FUNCTIONS)
    scale = require_integer("fraction bits of m", m.fraction_bits, 5, 62)
    if scale < 62:  # there the check's signed words would not do
        await check_additive(m, 15 << (scale - 4), 9 << (scale - 2), "spline_times", zero=t is None)
    out = nothing(m.party, len(m.words))

    async def work(dealing: Dealing) -> None:
        mantissa = dealing.open(m.words[dealing.slice])
        factor = mantissa if t is None else dealing.open(t.words[dealing.slice])
        shape = (dealing.rows, 1 if t is None else 2, WORDS)
        if dealing.role == 2:
            dealing.deal("spline_deal", mantissa.words, factor.words, scale, shape=shape)
            await dealing.turn()
            return
        halves = dealing.deal("spline_deal", shape=shape)
        await dealing.turn()
        result = out[dealing.slice]
        dealing.call("spline_hold", mantissa.words, factor.words, halves, scale, FUNCTIONS.index(function), result)

    operation, _ = await each_dealer("spline_times", m, (t, function), work)
    return Additive(m.party, out, m.segments, SPLINE_BITS + (0 if t is None else t.fraction_bits), operation.history())
