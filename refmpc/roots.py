"""1/sqrt, sqrt and the clip factor 1/sqrt(max(1, q))."""

from __future__ import annotations

import math

import numpy as np

from accel.validate import require_integer
from refmpc.arithmetic import multiply_truncate
from refmpc.comparison import thermometer
from refmpc.holders import weigh_bits
from refmpc.normalise import MANTISSA_BITS, MANTISSA_HIGH, MANTISSA_LOW, Exponents, normalise, normalise_cost
from refmpc.polynomial import minimax, polynomial
from refmpc.protocol import Cost, protocol
from refmpc.rounds import gather
from refmpc.tensor import ArithmeticTensor
from refmpc.truncation import truncated_product_cost

__all__ = ["clip_factor", "inverse_sqrt", "sqrt"]

CENTRE = 2.5
ROOT_BITS = MANTISSA_BITS + 1  # Newton's halving is a change of scale
MARGIN_BITS = 18


def _newton_cost(x: ArithmeticTensor, degree: int) -> Cost:
    mantissa = ArithmeticTensor(x.party, x.shares, MANTISSA_BITS)
    start = polynomial.cost(mantissa, [0.0] * (degree + 1))
    return (
        start
        + truncated_product_cost(x.size, MANTISSA_BITS).beside(truncated_product_cost(x.size, MANTISSA_BITS))
        + truncated_product_cost(x.size, MANTISSA_BITS)
    )


async def _inverse_sqrt_of_mantissa(m: ArithmeticTensor, degree: int) -> ArithmeticTensor:
    """1/sqrt(m) for m in [15/16, 4.25] at 26 bits; the result has 27.

    Newton's step y1 = (3y0 − (m·y0)(y0²))/2 never exceeds 1/sqrt(m), whatever y0 > 0 is (arithmetic and geometric
    mean). With u = 2^-26 and every truncation off by at most u either way, y1 ≤ 1/sqrt(m) + u(y0² + m·y0 + 1)/2, which
    is below 1/sqrt(m) + 4u because y0 < 1.1.
    """
    coefficients, _ = minimax("inverse_sqrt", MANTISSA_LOW, MANTISSA_HIGH, degree, CENTRE)
    y0 = await polynomial(m - CENTRE, coefficients)
    square, times_m = await gather(multiply_truncate(y0, y0, MANTISSA_BITS), multiply_truncate(m, y0, MANTISSA_BITS))
    cube = await multiply_truncate(square, times_m, MANTISSA_BITS)
    return (y0.scale_by_integers(3) - cube).reinterpret(ROOT_BITS)


def _root_scale(exponents: Exponents, fraction_bits: int) -> int:
    return max(exponents.last, fraction_bits - ROOT_BITS + 1)


def _inverse_sqrt_cost(x: ArithmeticTensor, low: float, high: float, fraction_bits: int = 26, degree: int = 3) -> Cost:
    bits = ROOT_BITS + _root_scale(Exponents.of(low, high, x.fraction_bits), fraction_bits) - fraction_bits
    return normalise_cost(x, low, high, 1) + _newton_cost(x, degree) + truncated_product_cost(x.size, bits)


@protocol(cost=_inverse_sqrt_cost, source="this project, PROTOCOLS §3; Newton's method")
async def inverse_sqrt(
    x: ArithmeticTensor, low: float, high: float, fraction_bits: int = 26, degree: int = 3
) -> ArithmeticTensor:
    """1/sqrt(x) for low ≤ x ≤ high (public bounds).

    17 rounds, about 250 bytes and 17 for each factor 4 between the bounds. Relative error below 2^-12.7 (degree 3) or
    2^-16 (degree 4), plus one unit of the result. Outside the bounds the result is arbitrary.
    """
    require_integer("degree", degree, 1, 8)
    exponents = Exponents.of(low, high, x.fraction_bits)
    scale = _root_scale(exponents, fraction_bits)
    m, (power,) = await normalise(x, low, high, [(lambda k: 2.0**-k, scale)])
    y = await _inverse_sqrt_of_mantissa(m, degree)
    return await multiply_truncate(y, power, ROOT_BITS + scale - fraction_bits)


def _sqrt_cost(x: ArithmeticTensor, low: float, high: float, fraction_bits: int = 16) -> Cost:
    return inverse_sqrt.cost(x, low, high) + truncated_product_cost(x.size, x.fraction_bits + 26 - fraction_bits)


@protocol(cost=_sqrt_cost, source="x · inverse_sqrt(x)")
async def sqrt(x: ArithmeticTensor, low: float, high: float, fraction_bits: int = 16) -> ArithmeticTensor:
    """sqrt(x) for low ≤ x ≤ high, and 0 for x = 0. 19 rounds. Relative error below 2^-12.7, plus one unit."""
    return await multiply_truncate(x, await inverse_sqrt(x, low, high), x.fraction_bits + 26 - fraction_bits)


# the clip factor ---------------------------------------------------------------------------------


def _clip_plan(q: ArithmeticTensor, high: float) -> tuple[Exponents, list[int], list[int], np.ndarray, int]:
    """Exponents, thresholds, low bits, weights (rows: 4^-k or 0; (1−2^-18)·2^-k; [q ≥ 1]) and the scale of row 1."""
    exponents = Exponents.of(1.0, high, q.fraction_bits)
    scale = exponents.last + MARGIN_BITS
    margin = 2**MARGIN_BITS - 1  # (1 − 2^-18) at 18 bits
    normaliser = [0, *exponents.words(lambda k: 4.0**-k, exponents.scale)]
    root = [word * margin for word in exponents.words(lambda k: 2.0**-k, exponents.last)]
    reached = [1] + [0] * len(exponents.inner)
    weights = np.array([np.diff(normaliser), [0, *np.diff(root)], reached], dtype=np.int64)
    unit = 1 << q.fraction_bits
    return exponents, [unit, *exponents.thresholds], [0, *exponents.low_bits], weights, scale


def _clip_cost(q: ArithmeticTensor, high: float, degree: int = 4) -> Cost:
    exponents, thresholds, low_bits, weights, scale = _clip_plan(q, high)
    return (
        thermometer.cost(q, thresholds, low_bits, exponents.high_bit)
        + Cost(2, (8 * len(thresholds) + 16 * len(weights)) * q.size)
        + truncated_product_cost(q.size, q.fraction_bits + exponents.scale - MANTISSA_BITS)
        + _newton_cost(q, degree)
        + truncated_product_cost(q.size, ROOT_BITS + scale - MANTISSA_BITS)
    )


@protocol(cost=_clip_cost, source="this project, DESIGN §5 and PROTOCOLS §3")
async def clip_factor(q: ArithmeticTensor, high: float, degree: int = 4) -> ArithmeticTensor:
    """1/sqrt(max(1, q)) at 26 bits for 0 ≤ q ≤ high, never more than that.

    17 rounds, about 420 bytes and 15 for each factor 4 up to ``high``. It may be 2^-14 (relative) too small, never too
    large, for *every* way the truncations may round. Write u = 2^-26, k for the exponent and m* = q·4^-k:

    * k = 0 and [q ≥ 1] is compared exactly; if q < 1 the mantissa is exactly 1 (a product with zero truncates to zero).
    * Otherwise the mantissa m > m* − u, and m* ≥ 15/16, so m^-1/2 ≤ m*^-1/2·(1 + 0.6u).
    * Newton: y1 ≤ m^-1/2 + 4u ≤ m*^-1/2·(1 + 0.6u + 4u·sqrt(4.25)) ≤ m*^-1/2·(1 + 9u).
    * The factor (1 − 2^-18)·2^-k is exact, 9u < 2^-18, so y1·(1 − 2^-18)·2^-k < 1/sqrt(q).
    * Its truncation adds at most one unit, which is subtracted again.
    """
    exponents, thresholds, low_bits, weights, scale = _clip_plan(q, high)
    bits = await thermometer(q, thresholds, low_bits, exponents.high_bit)
    normaliser, root, reached = await weigh_bits(bits, weights)
    shift = q.fraction_bits + exponents.scale - MANTISSA_BITS
    m = await multiply_truncate(q, normaliser.reinterpret(exponents.scale), shift)
    m = m + 1.0 - reached.reinterpret(0)
    y = await _inverse_sqrt_of_mantissa(m, degree)
    power = (root + (2**MARGIN_BITS - 1) * 2**exponents.last).reinterpret(scale)
    factor = await multiply_truncate(y, power, ROOT_BITS + scale - MANTISSA_BITS)
    return factor - math.ldexp(1.0, -MANTISSA_BITS)
