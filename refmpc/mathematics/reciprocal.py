"""1/x and division."""

from __future__ import annotations

import functools

import numpy as np

from accel.validate import require_integer, require_real
from refmpc.core.integer_logs import ceil_log2, reciprocal_start
from refmpc.core.primitive import Cost, primitive
from refmpc.core.rounds import gather
from refmpc.core.tensor import ArithmeticTensor
from refmpc.mathematics.inverse_power import InversePlan, inverse_power, inverse_power_cost
from refmpc.mathematics.normalise import MANTISSA_BITS
from refmpc.mathematics.polynomial import polynomial
from refmpc.primitives.arithmetic import multiply_truncate
from refmpc.primitives.dealing import Additive, truncate_additive
from refmpc.primitives.truncation import truncate, truncated_product_cost

__all__ = ["divide", "reciprocal", "reciprocal_narrow"]

NARROW_DEGREE = 3
INVERSE_BITS = 26


def _product(count: int) -> Cost:
    return truncated_product_cost(count, MANTISSA_BITS)


def _plan(x: ArithmeticTensor, low: float, high: float, fraction_bits: int, signed: bool) -> tuple[InversePlan, int]:
    """The octaves, and the bits that the result loses."""
    plan = InversePlan.of(x.fraction_bits, low, high, "reciprocal", signed)
    require_integer("fraction_bits", fraction_bits, 1, plan.result_bits - 1, way_out="raise low, or ask for fewer bits")
    return plan, plan.result_bits - fraction_bits


def _reciprocal_cost(
    x: ArithmeticTensor, low: float, high: float, fraction_bits: int = 26, signed: bool = False
) -> Cost:
    plan, cut = _plan(x, low, high, fraction_bits, signed)
    column = Additive(x.party, x.shares[0].reshape(x.size), [], 0, 0)
    return inverse_power_cost(x, plan) + truncate_additive.cost(column, cut)


@primitive(cost=_reciprocal_cost, source="this project: octaves by a thermometer, spline of the mantissa")
async def reciprocal(
    x: ArithmeticTensor, low: float, high: float, fraction_bits: int = 26, signed: bool = False
) -> ArithmeticTensor:
    """1/x for low ≤ x ≤ high (public positive bounds), or for low ≤ |x| ≤ high with ``signed``.

    7 rounds. About 340 bytes and 15 to 20 an octave between the bounds (twice that if signed): 580 for 2^-8..2^8.
    Relative error below 2^-16.4, plus one unit of the result. Domain: besides the bounds, high/low at most 2^37.
    Outside the bounds the result is arbitrary (``insecure_check_ranges`` finds such inputs).

    ``inverse_power``: spline 2^-16.5, its cut 2^-23.9; 2^-k is exact; then the truncation.
    """
    plan, cut = _plan(x, low, high, fraction_bits, signed)
    await _check(x, low, high, "reciprocal", signed)
    found = await inverse_power(x.reshape(x.size), plan)
    return (await truncate_additive(found, cut)).reshape(x.shape)


async def _check(x: ArithmeticTensor, low: float, high: float, name: str, signed: bool) -> None:
    if x.party.insecure_check_ranges:
        from refmpc.core.debug import check_bounds

        await check_bounds(x, low, high, name, signed=signed)


# a narrow range needs no normalisation ---------------------------------------------------------------


@functools.cache
def _narrow_plan(low: float, high: float) -> tuple[int, float, tuple[float, ...], int]:
    """A power of two to divide by, the centre, the coefficients on the scaled range, and the number of steps."""
    exponent = ceil_log2(high)
    bounds = low / 2.0**exponent, high / 2.0**exponent
    centre = round(sum(bounds) / 2 * 2**10) / 2**10
    coefficients, error = reciprocal_start(*bounds, NARROW_DEGREE, centre)
    steps = 1
    while error ** (2**steps) > 2.0**-18:
        steps += 1
    return exponent, centre, coefficients, steps


def _narrow_cost(x: ArithmeticTensor, low: float, high: float) -> Cost:
    exponent, _, coefficients, steps = _narrow_plan(low, high)
    mantissa = ArithmeticTensor(x.party, x.shares, MANTISSA_BITS, x.history)
    total = polynomial.cost(mantissa, coefficients) + _product(x.size)
    if x.fraction_bits + exponent > MANTISSA_BITS:
        total += truncate.cost(x, x.fraction_bits + exponent - MANTISSA_BITS)
    for step in range(steps):
        total += _product(x.size).beside(_product(x.size)) if step < steps - 1 else _product(x.size)
    return total


@primitive(cost=_narrow_cost, source="Goldschmidt's method from a minimax start")
async def reciprocal_narrow(x: ArithmeticTensor, low: float, high: float) -> ArithmeticTensor:
    """1/x for low ≤ x ≤ high with a small ratio (such as the sum of a softmax): no comparison at all. The scale of the
    result is 26 + ⌈log2 high⌉.

    7 rounds and 2 a step (one more if x has to be truncated to 26 bits first); high/low up to 16 takes 3 steps, up to
    128 six. Relative error below 2^-16. Each step squares e = 1 − x·y and multiplies y by 1 + e, both in the same
    round. Domain: the bounds, high/low ≤ 128, 2^-10 ≤ high ≤ 2^30.
    """
    require_real("low", low, 0, open_low=True)
    require_real("high", high, low, 128 * low, open_low=True, way_out="use reciprocal for wider ranges")
    require_real("high", high, 2.0**-10, 2.0**30, way_out="change the scale with reinterpret")
    if x.party.insecure_check_ranges:
        from refmpc.core.debug import check_bounds

        await check_bounds(x, low, high, "reciprocal_narrow")
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
    outputs = int(np.prod(np.broadcast_shapes(numerator.shape, denominator.shape)))
    total = reciprocal.cost(denominator, low, high, INVERSE_BITS, signed)
    return total + truncated_product_cost(outputs, INVERSE_BITS)


@primitive(cost=_divide_cost, source="reciprocal")
async def divide(
    numerator: ArithmeticTensor, denominator: ArithmeticTensor, low: float, high: float, signed: bool = False
) -> ArithmeticTensor:
    """numerator / denominator at the scale of the numerator, for low ≤ denominator ≤ high; with ``signed`` for
    low ≤ |denominator| ≤ high.

    9 rounds, the bytes of ``reciprocal`` + 34. Error: relative 2^-16.4 of the quotient, |numerator|·2^-26, and one
    unit. Domain: the bounds, and |quotient|·(1 + 2^-16.4) + |numerator|·2^-26 (what the inverse may be off by) below
    2^36 in units of the numerator's scale; ``insecure_check_ranges`` finds what lies outside.
    """
    inverse = await reciprocal(denominator, low, high, INVERSE_BITS, signed)
    return await multiply_truncate(numerator, inverse, INVERSE_BITS)
