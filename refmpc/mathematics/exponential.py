"""exp, log and softmax.

exp of a two-holder number is almost local: e^(c−ρ) = e^c · e^−ρ with c known to two parties and ρ to the dealer. Only
the wrap-around of c − ρ is in the way, so the window of 32 is cut into four digits of 8: the dealer shares the vector
that holds e^−ρ_low at the place of its digit and zero elsewhere, and the holders take the inner product with
e^c_low · T[digit of c − place]. That is one message of four words and one truncation.
"""

from __future__ import annotations

import math

import numpy as np

from accel.validate import require, require_integer, require_real
from refmpc.core.integer_logs import LOG2_E, LOG_4, agreed_exp_constant, exp_table
from refmpc.core.party import Segment
from refmpc.core.primitive import Cost, primitive
from refmpc.core.rounds import gather
from refmpc.core.tensor import ArithmeticTensor
from refmpc.core.words import Words
from refmpc.mathematics.coefficients import CENTRE, COEFFICIENT_BITS, LOG, LOG_DEGREE
from refmpc.mathematics.normalise import normalise, normalise_cost
from refmpc.mathematics.polynomial import polynomial
from refmpc.mathematics.probabilities import PROBABILITY_BITS, probabilities
from refmpc.primitives.comparison import is_negative
from refmpc.primitives.dealing import Additive, truncate_additive
from refmpc.primitives.truncation import truncate_summands, truncated_product_cost
from refmpc.primitives.two_holder import deal_halves, select

__all__ = ["exp", "log", "softmax"]

DEALT_BITS, HELD_BITS = 32, 29  # scales of e^−ρ_low and of e^c_low·T
PLACES, STEP = 4, 8  # four digits of 8 make the window of 32
REACH = 24.0  # below upper − 24 the window is left


def _exp_plan(upper: float, fraction_bits: int) -> tuple[int, int]:
    """(scale of the holders' weights, bits to truncate) for results up to e^upper."""
    growth = max(0, math.ceil(upper * LOG2_E))
    held_bits = HELD_BITS - growth
    bits = DEALT_BITS + held_bits - fraction_bits
    require(held_bits >= 8 and bits >= 1, "upper", upper, "at most 14, with fraction_bits at most 60 − log2(e^upper)")
    return held_bits, bits


def _on_grid(upper: float, fraction_bits: int) -> float:
    """``upper`` rounded up to the grid of x, so that x − upper is exact."""
    return math.ldexp(math.ceil(math.ldexp(upper, fraction_bits)), -fraction_bits)


async def _exp_window(x: ArithmeticTensor, upper: float, fraction_bits: int) -> ArithmeticTensor:
    """e^x for upper − 24 ≤ x ≤ upper: 3 rounds, 32 + 24 + 3·bits/8 bytes."""
    held_bits, bits = _exp_plan(upper, fraction_bits)
    shifted = x - upper
    operation = x.party.operation("exp", shifted, upper, fraction_bits)
    machine, me, flat, f = operation.machine, x.party.id, shifted.flat, x.fraction_bits
    table, factors = machine.public(exp_table(STEP)), machine.public(_factors(upper))
    segments = operation.segments(x.size)

    def deal(segment: Segment, masks: Words, out: Words) -> None:
        machine.call("exp_deal", flat[0, segment.slice], flat[1, segment.slice], f, STEP, DEALT_BITS, masks, out)

    halves = await deal_halves(operation, segments, lambda n: (n, PLACES), deal)
    summand = machine.memory(x.size)
    for segment, half in zip(segments, halves, strict=True):
        at = segment.slice
        if half is None:
            machine.call("copy", np.uint64(0), summand[at])
        else:
            c = flat[1 - segment.role(me), at]
            machine.call("exp_hold", c, half, f, STEP, table, factors, 2.0**held_bits, summand[at])
    shares = await truncate_summands(operation, summand, bits)
    return ArithmeticTensor(x.party, shares.reshape(2, *x.shape), fraction_bits, operation.history())


def _factors(upper: float) -> list[float]:
    """e^(8d − 32 + upper) for the distances d = 1..3, e^upper for 0."""
    return [agreed_exp_constant(upper + (STEP * d - PLACES * STEP if d else 0)) for d in range(PLACES)]


def _range_bits(x: ArithmeticTensor, high_bit: int) -> tuple[int, int]:
    """Low and high bit of the comparison of x − upper + 20 with zero: resolution 4, which the window allows, and room
    for 20 itself."""
    return x.fraction_bits + 2, max(high_bit, x.fraction_bits + 5)


def _exp_cost(
    x: ArithmeticTensor, upper: float = 0.0, lower: float | None = None, fraction_bits: int = 22, high_bit: int = 61
) -> Cost:
    upper = _on_grid(upper, x.fraction_bits)
    window = Cost(1, 8 * PLACES * x.size) + truncated_product_cost(x.size, _exp_plan(upper, fraction_bits)[1])
    if lower is not None and lower >= upper - REACH:
        return window
    return window.beside(is_negative.cost(x, *_range_bits(x, high_bit))) + Cost(2, 32 * x.size)


@primitive(cost=_exp_cost, source="this project: product of the two holders' exponentials")
async def exp(
    x: ArithmeticTensor, upper: float = 0.0, lower: float | None = None, fraction_bits: int = 22, high_bit: int = 61
) -> ArithmeticTensor:
    """e^x for x ≤ upper.

    5 rounds, about 170 bytes (112 at high_bit = 28); 3 rounds and 71 bytes if a public ``lower`` ≥ upper − 24 is given.
    Error: 2^-21 relative, max(1, e^upper)·2^-28 absolute, and one unit of the result. Saturates: the result is exactly
    0 for x ≤ upper − 24, and may be 0 below upper − 20. Domain: x ≤ upper and |x − upper| < 2^(high_bit − fraction bits
    of x); above ``upper`` the result is arbitrary (``insecure_check_ranges`` finds such inputs).

    The dealer's word is off by half a unit of at least e^-8·2^32: 2^-21.4 relative. The holders' weight is off by half
    a unit of 2^-29·2^⌈log2 e^upper⌉, times at most 1.
    """
    require_real("upper", upper, -1e6, 14.0)
    require_integer("fraction bits of x", x.fraction_bits, 1, 40)
    require_integer("high_bit", high_bit, 2, 63)
    upper = _on_grid(upper, x.fraction_bits)
    if lower is not None:
        require_real("lower", lower, high=upper)
    if x.party.insecure_check_ranges:
        from refmpc.core.debug import check_range

        floor = -(2**high_bit) if lower is None else math.ceil(math.ldexp(lower, x.fraction_bits))
        await check_range(x, floor, round(math.ldexp(upper, x.fraction_bits)) + 1, "exp")
    if lower is not None and lower >= upper - REACH:
        return await _exp_window(x, upper, fraction_bits)
    middle = x - upper + (REACH - 4.0)
    value, below = await gather(_exp_window(x, upper, fraction_bits), is_negative(middle, *_range_bits(x, high_bit)))
    return await select(~below, value)


def _log_cost(x: ArithmeticTensor, low: float, high: float) -> Cost:
    mantissa = ArithmeticTensor(x.party, x.shares, 26, x.history)
    return normalise_cost(x, low, high, 1) + polynomial.cost(mantissa, [0.0] * (LOG_DEGREE + 1))


@primitive(cost=_log_cost, source="this project: mantissa by a thermometer, minimax polynomial")
async def log(x: ArithmeticTensor, low: float, high: float) -> ArithmeticTensor:
    """ln x at 26 bits for low ≤ x ≤ high (public positive bounds).

    13 rounds, about 350 bytes and 17 for each factor 4 between the bounds. Absolute error below 2^-13.7: 2^-15.7 from
    the polynomial, 2^-14.4 if all eight coefficients are off by half a unit of 2^-20, 2^-20 from truncations.
    Outside the bounds the result is arbitrary (``insecure_check_ranges`` finds such inputs).
    """
    m, (offset,) = await normalise(x, low, high, [(lambda k: k * LOG_4, 26)], "log")
    return offset + await polynomial(m - CENTRE, [word * 2.0**-COEFFICIENT_BITS for word in LOG])


# softmax -----------------------------------------------------------------------------------------

SPREAD = 2.0**20 - 34  # of logits, unless high_bit says otherwise


def _spread(logits: ArithmeticTensor, high_bit: int | None) -> float:
    require_integer("classes (last axis)", logits.shape[-1], 2, 64)
    require_integer("fraction bits of the logits", logits.fraction_bits, 8, 30)
    if high_bit is None:
        return SPREAD
    require_integer("high_bit", high_bit, logits.fraction_bits, 63)
    return math.ldexp(1.0, high_bit - logits.fraction_bits)


def _softmax_cost(logits: ArithmeticTensor, fraction_bits: int = 18, high_bit: int | None = None) -> Cost:
    rows = logits.reshape(logits.size // logits.shape[-1], logits.shape[-1])
    entries = Additive(logits.party, rows.shares[0], [], PROBABILITY_BITS, 0)
    cut = truncate_additive.cost(entries, PROBABILITY_BITS - fraction_bits)
    return probabilities.cost(rows, _spread(logits, high_bit)) + cut


@primitive(cost=_softmax_cost, source="probabilities")
async def softmax(logits: ArithmeticTensor, fraction_bits: int = 18, high_bit: int | None = None) -> ArithmeticTensor:
    """Softmax along the last axis.

    11 rounds, 14 beyond 12 classes. Bytes for 128×10: 614 kB, or 474 kB at high_bit = 28 (16 fraction bits). Error of
    an entry at most 2^-15 + 1.65·(S − 1)·2^-18 (``probabilities``) and one unit of 2^-18; rows sum to 1 within (1.5·S +
    6)·2^-18. Domain: differences of logits at most 2^(high_bit − fraction bits) ≤ 2^36 − 34, by default 2^20 − 34; 2 to
    64 classes. Debug mode checks that domain.
    """
    spread = _spread(logits, high_bit)
    require_integer("fraction_bits", fraction_bits, 1, PROBABILITY_BITS - 1)
    classes = logits.shape[-1]
    found = await probabilities(logits.reshape(logits.size // classes, classes), spread)
    return (await truncate_additive(found, PROBABILITY_BITS - fraction_bits)).reshape(logits.shape)
