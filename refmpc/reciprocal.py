"""1/x and division."""

from __future__ import annotations

import math

import numpy as np

from accel.validate import require_real
from refmpc.arithmetic import multiply_truncate
from refmpc.comparison import is_negative
from refmpc.holders import select
from refmpc.normalise import MANTISSA_BITS, MANTISSA_HIGH, MANTISSA_LOW, Exponents, normalise, normalise_cost
from refmpc.polynomial import minimax, polynomial
from refmpc.protocol import Cost, protocol
from refmpc.rounds import gather
from refmpc.tensor import ArithmeticTensor
from refmpc.truncation import truncate, truncated_product_cost

__all__ = ["divide", "reciprocal", "reciprocal_narrow"]

CENTRE = 2.5
DEGREE = 3


def _scale(exponents: Exponents, fraction_bits: int) -> int:
    return max(2 * exponents.last, fraction_bits - MANTISSA_BITS + 1)


def _product(count: int) -> Cost:
    return truncated_product_cost(count, MANTISSA_BITS)


def _reciprocal_cost(x: ArithmeticTensor, low: float, high: float, fraction_bits: int = 26) -> Cost:
    mantissa = ArithmeticTensor(x.party, x.shares, MANTISSA_BITS)
    bits = MANTISSA_BITS + _scale(Exponents.of(low, high, x.fraction_bits), fraction_bits) - fraction_bits
    return (
        normalise_cost(x, low, high, 1)
        + polynomial.cost(mantissa, [0.0] * (DEGREE + 1))
        + _product(x.size)
        + _product(x.size)
        + _product(x.size)
        + truncated_product_cost(x.size, bits)
    )


@protocol(cost=_reciprocal_cost, source="this project; one step of third order from a minimax start")
async def reciprocal(x: ArithmeticTensor, low: float, high: float, fraction_bits: int = 26) -> ArithmeticTensor:
    """1/x for low ≤ x ≤ high (public positive bounds).

    19 rounds, about 260 bytes and 17 for each factor 4 between the bounds. Relative error below 2^-15, plus one unit of
    the result. Outside the bounds the result is arbitrary (``insecure_check_ranges`` finds such inputs).
    """
    exponents = Exponents.of(low, high, x.fraction_bits)
    scale = _scale(exponents, fraction_bits)
    m, (power,) = await normalise(x, low, high, [(lambda k: 4.0**-k, scale)])
    coefficients, _ = minimax("reciprocal", MANTISSA_LOW, MANTISSA_HIGH, DEGREE, CENTRE)
    y = await polynomial(m - CENTRE, coefficients)
    e = 1.0 - await multiply_truncate(m, y, MANTISSA_BITS)
    series = e + 1.0 + await multiply_truncate(e, e, MANTISSA_BITS)
    y = await multiply_truncate(y, series, MANTISSA_BITS)
    return await multiply_truncate(y, power, MANTISSA_BITS + scale - fraction_bits)


# a narrow range needs no normalisation ---------------------------------------------------------------


def _narrow_plan(low: float, high: float) -> tuple[int, float, tuple[float, ...], int]:
    """A power of two to divide by, the centre, the coefficients on the scaled range, and the number of steps."""
    exponent = math.ceil(math.log2(high))
    bounds = low / 2.0**exponent, high / 2.0**exponent
    centre = round(sum(bounds) / 2 * 2**10) / 2**10
    coefficients, error = minimax("reciprocal", *bounds, DEGREE, centre)
    steps = max(1, math.ceil(math.log2(18 / -math.log2(error))))
    return exponent, centre, coefficients, steps


def _narrow_cost(x: ArithmeticTensor, low: float, high: float) -> Cost:
    exponent, _, coefficients, steps = _narrow_plan(low, high)
    mantissa = ArithmeticTensor(x.party, x.shares, MANTISSA_BITS)
    total = polynomial.cost(mantissa, coefficients) + _product(x.size)
    if x.fraction_bits + exponent > MANTISSA_BITS:
        total += truncate.cost(x, x.fraction_bits + exponent - MANTISSA_BITS)
    for step in range(steps):
        total += _product(x.size).beside(_product(x.size)) if step < steps - 1 else _product(x.size)
    return total


@protocol(cost=_narrow_cost, source="Goldschmidt's method from a minimax start")
async def reciprocal_narrow(x: ArithmeticTensor, low: float, high: float) -> ArithmeticTensor:
    """1/x for low ≤ x ≤ high with a small ratio (such as the sum of a softmax): no comparison at all. The scale of the
    result is 26 + ⌈log2 high⌉.

    7 rounds and 2 a step, 3 steps up to high/low = 16. Relative error below 2^-16. Each step squares e = 1 − x·y and
    multiplies y by 1 + e, both in the same round.
    """
    require_real("high", high, low, 64 * low, open_low=True, way_out="use reciprocal for wider ranges")
    exponent, centre, coefficients, steps = _narrow_plan(low, high)
    m = x.reinterpret(x.fraction_bits + exponent)
    if m.fraction_bits > MANTISSA_BITS:
        m = await truncate(m, m.fraction_bits - MANTISSA_BITS)
    m = m.rescale(MANTISSA_BITS)
    y = await polynomial(m - centre, coefficients)
    e = 1.0 - await multiply_truncate(m, y, MANTISSA_BITS)
    for step in range(steps):
        if step < steps - 1:
            y, e = await gather(multiply_truncate(y, e + 1.0, MANTISSA_BITS), multiply_truncate(e, e, MANTISSA_BITS))
        else:
            y = await multiply_truncate(y, e + 1.0, MANTISSA_BITS)
    # 1/x = y / 2^exponent: the same words at a finer scale
    return y.reinterpret(MANTISSA_BITS + exponent)


def _divide_cost(
    numerator: ArithmeticTensor, denominator: ArithmeticTensor, low: float, high: float, signed: bool = False
) -> Cost:
    total = reciprocal.cost(denominator, low, high)
    if signed:
        total += is_negative.cost(denominator, 0, Exponents.of(low, high, denominator.fraction_bits).high_bit)
        total += Cost(2, 32 * denominator.size) + Cost(2, 32 * denominator.size)
    outputs = int(np.prod(np.broadcast_shapes(numerator.shape, denominator.shape)))
    return total + truncated_product_cost(outputs, 26)


@protocol(cost=_divide_cost, source="reciprocal")
async def divide(
    numerator: ArithmeticTensor, denominator: ArithmeticTensor, low: float, high: float, signed: bool = False
) -> ArithmeticTensor:
    """numerator / denominator at the scale of the numerator, for low ≤ |denominator| ≤ high.

    21 rounds, the bytes of ``reciprocal`` + 34; with ``signed`` the denominator may be negative, for 6 rounds and about
    140 bytes more. Error: relative 2^-15 of the quotient, |numerator|·2^-26, and one unit.
    """
    if not signed:
        inverse = await reciprocal(denominator, low, high)
    else:
        high_bit = Exponents.of(low, high, denominator.fraction_bits).high_bit
        negative = await is_negative(denominator, 0, high_bit)
        magnitude = denominator - (await select(negative, denominator)).scale_by_integers(2)
        inverse = await reciprocal(magnitude, low, high)
        inverse = inverse - (await select(negative, inverse)).scale_by_integers(2)
    return await multiply_truncate(numerator, inverse, 26)
