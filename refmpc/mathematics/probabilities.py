"""Softmax of rows from logits that are opened or replicated, up to additive probabilities: nine rounds."""

from __future__ import annotations

from accel.validate import require, require_integer, require_real
from refmpc.core.integer_logs import ceil_log2
from refmpc.core.primitive import Cost, primitive
from refmpc.core.rounds import gather
from refmpc.core.tensor import ArithmeticTensor
from refmpc.core.words import Words
from refmpc.mathematics.exp_below import EXP_BITS, exp_below
from refmpc.mathematics.octave import octave, octave_top
from refmpc.mathematics.scale_rows import scale_rows
from refmpc.mathematics.spline import SPLINE_BITS, spline_times
from refmpc.primitives.arithmetic import multiply
from refmpc.primitives.dealing import FIRST, SECOND, Additive, TwoHolder, nothing, truncate_additive
from refmpc.primitives.order import largest_coarse

__all__ = ["PROBABILITY_BITS", "high_bits", "order_width", "probabilities"]

UNIT_BITS = 2  # logits are ordered to 2^-2
ENTRY_BITS, INVERSE_BITS = 20, 20  # of e and of 1/Σe
PROBABILITY_BITS = ENTRY_BITS + INVERSE_BITS


def high_bits(spread: float) -> int:
    """Bits above the digit of 16, for differences of logits up to ``spread``."""
    require_real("spread of the logits", spread, 0, 2.0**36 - 34, way_out="bound the logits more tightly")
    return max(2, ceil_log2((spread + 34) / 16))


def order_width(spread: float) -> int:
    """Coarse differences are below 2^width; and the maximum reaches as far as the digits of exp."""
    return max(ceil_log2(spread * 2**UNIT_BITS + 3), high_bits(spread) + 3 + UNIT_BITS)


Logits = Additive | ArithmeticTensor | TwoHolder


def _cost(z: Logits, spread: float, columns: int | None = None, weights: ArithmeticTensor | None = None) -> Cost:
    rows, classes = z.shape
    kept = classes if columns is None else columns
    width = order_width(spread)
    words = z.shares[0] if isinstance(z, ArithmeticTensor) else z.words
    opened = TwoHolder(z.party, words, [], z.fraction_bits, 0)
    e, s = (Additive(z.party, each, [], EXP_BITS, 0) for each in (words[:, :kept], words[:, 0]))
    largest = Additive(z.party, words[:, 0], [], UNIT_BITS, 0, width + 1)
    return (
        largest_coarse.cost(z, UNIT_BITS, width)
        + exp_below.cost(opened, largest, high_bits(spread))
        + truncate_additive.cost(e, EXP_BITS - ENTRY_BITS).beside(octave.cost(s, classes))
        + spline_times.cost(s, s, "reciprocal").beside(Cost(1, 0 if weights is None else 24 * rows * kept))
        + Cost(1, 32 * rows + 16 * rows * kept)
    )


@primitive(cost=_cost, source="this project: order, exp_below, octave, spline_times, scale_rows")
async def probabilities(
    z: Logits, spread: float, columns: int | None = None, weights: ArithmeticTensor | None = None
) -> Additive:
    """Softmax of every row of z (rows × classes), additive at 40 bits; logits of a row differ by at most ``spread``.

    ``columns``: of the first so many classes only. ``weights``: secret non-negative numbers, one for each row, by which
    its probabilities are multiplied, at as many bits more; below 2^62 with them. No further round, 24 bytes an entry.

    9 rounds, 12 beyond 12 classes; the first opens z if it is additive. Bytes for 128 × 10 at spread 62,935: 0.46 MB.
    Error of an entry, before any further rounding: 2^-15 + 1.65·(S − 1)·2^-18 at worst, 2^-15.9 found. Domain: the
    spread, at most 2^36 − 34; 2 to 64 classes; logits at 2 to 60 bits.

    *Ranges.* With M' the coarse maximum, x_i = z_i − M'/4 − 1/4 on the grid of 2^-16 is definite: x_i = (x'_i − M')/4 −
    1/4 + (C_lo − R_lo) with the coarse x'_i ≤ M' and |C_lo − R_lo| < 1/4. So x_i < 0 for all i, and the winner has
    x > −1/2: e_i < 1 and 0.606 < Σe < S for every input and mask. Nothing can leave its domain.

    *Errors.* exp: relative 2^-17.9 and absolute 2^-18 an entry (whose sum, over Σe ≥ 0.606, is reached only if ρ_low is
    zero for all classes: it is uniform in 0..16). Grid: each x_i is within 2^-16 of its true value. 1/Σe: 2^-16.5. e
    and 1/Σe are cut to 20 bits. The result is Σe-normalised whatever the errors of e are, so its squared norm stays
    below 1.001.
    """
    require_integer("axes of z", len(z.shape), 2, 2, way_out="reshape it to rows of classes")
    require_integer("fraction bits of z", z.fraction_bits, UNIT_BITS, 60)
    if columns is not None:
        require_integer("columns", columns, 1, z.shape[1])
    if weights is not None:
        require(weights.shape == z.shape[:1], "weights.shape", weights.shape, f"({z.shape[0]},), one for each row")
    width, high = order_width(spread), high_bits(spread)
    if z.party.insecure_check_ranges:
        from refmpc.core.debug import check_spread

        own = _own_summands(z)
        await check_spread(z.party.operation("probabilities", z, spread), own, spread, z.fraction_bits)
    opened, largest = await largest_coarse(z, UNIT_BITS, width)
    e = await exp_below(opened, largest, high)
    wanted = e if columns is None else e.first_columns(columns)
    octaves = octave(e.sum(), z.shape[1])
    entries, (mantissa, power) = await gather(truncate_additive(wanted, EXP_BITS - ENTRY_BITS), octaves)
    if weights is None:
        inverse = await spline_times(mantissa, power, "reciprocal")
    else:
        weighted = multiply(entries, weights.reshape(-1, 1))
        inverse, entries = await gather(spline_times(mantissa, power, "reciprocal"), weighted)
    return await scale_rows(inverse, entries, SPLINE_BITS + octave_top(z.shape[1]) - INVERSE_BITS)


def _own_summands(z: Logits) -> Words:
    """This party's summands of the logits."""
    if not isinstance(z, TwoHolder):
        return z.words if isinstance(z, Additive) else z.first
    words = nothing(z.party, z.shape)
    for segment in z.segments:
        role, at = segment.role(z.party.id), segment.slice
        if role != SECOND:
            z.party.machine.call("copy" if role == FIRST else "negate", z.words[at], words[at])
    return words
