"""1/sqrt, sqrt and the clip factor 1/sqrt(max(1, q))."""

from __future__ import annotations

import functools

import numpy as np

from accel.validate import require_integer
from refmpc.core.exact import ceil_log2
from refmpc.core.protocol import Cost, protocol
from refmpc.core.rounds import gather
from refmpc.core.tensor import ArithmeticTensor
from refmpc.mathematics.coefficients import CENTRE, COEFFICIENT_BITS, INVERSE_SQRT
from refmpc.mathematics.normalise import (
    MANTISSA_BITS,
    Exponents,
    normalise,
    normalise_cost,
    require_room,
)
from refmpc.mathematics.polynomial import polynomial
from refmpc.primitives.arithmetic import multiply_truncate
from refmpc.primitives.comparison import thermometer
from refmpc.primitives.truncation import truncated_product_cost
from refmpc.primitives.two_holder import weigh_bits

__all__ = ["clip_factor", "inverse_sqrt", "sqrt"]

ROOT_BITS = MANTISSA_BITS + 1  # Newton's halving is a change of scale
MARGIN_BITS = 18
LAST_UNIT = 2.0**-MANTISSA_BITS  # what the last truncation of a clip factor may add


def _newton_cost(x: ArithmeticTensor, degree: int) -> Cost:
    mantissa = ArithmeticTensor(x.party, x.shares, MANTISSA_BITS, x.history)
    start = polynomial.cost(mantissa, [0.0] * (degree + 1))
    return (
        start
        + truncated_product_cost(x.size, MANTISSA_BITS).beside(truncated_product_cost(x.size, MANTISSA_BITS))
        + truncated_product_cost(x.size, MANTISSA_BITS)
    )


async def _inverse_sqrt_of_mantissa(m: ArithmeticTensor, degree: int) -> ArithmeticTensor:
    """1/sqrt(m) for m in [15/16, 4], up to one unit, at 26 bits; the result has 27.

    Newton's step y1 = (3y0 − (m·y0)(y0²))/2 never exceeds 1/sqrt(m), whatever y0 > 0 is (arithmetic and geometric
    mean). With u = 2^-26 and every truncation off by less than u either way, the cube is above
    (y0² − u)(m·y0 − u) − u, so y1 < 1/sqrt(m) + u(y0² + m·y0 + 1)/2 < 1/sqrt(m) + 2.2u because y0 < 1.1 and m·y0 < 2.1.
    Likewise y1 > (1 − 3e²/2 − e³/2)/sqrt(m) − 2.2u with e the error of the start (0.0084 at degree 3, 0.0027 at 4).
    """
    y0 = await polynomial(m - CENTRE, [word * 2.0**-COEFFICIENT_BITS for word in INVERSE_SQRT[degree]])
    square, times_m = await gather(multiply_truncate(y0, y0, MANTISSA_BITS), multiply_truncate(m, y0, MANTISSA_BITS))
    cube = await multiply_truncate(square, times_m, MANTISSA_BITS)
    return (y0.scale_by_integers(3) - cube).reinterpret(ROOT_BITS)


def _root_scale(exponents: Exponents, fraction_bits: int) -> int:
    require_integer("fraction_bits", fraction_bits, 1, 48)
    scale = max(0, exponents.last, fraction_bits - ROOT_BITS + 1)
    require_room(ROOT_BITS + 1 + scale - exponents.first, "fraction_bits", fraction_bits, "ask for fewer fraction bits")
    return scale


def _inverse_sqrt_cost(x: ArithmeticTensor, low: float, high: float, fraction_bits: int = 26, degree: int = 3) -> Cost:
    bits = ROOT_BITS + _root_scale(Exponents.of(low, high, x.fraction_bits), fraction_bits) - fraction_bits
    return normalise_cost(x, low, high, 1) + _newton_cost(x, degree) + truncated_product_cost(x.size, bits)


@protocol(cost=_inverse_sqrt_cost, source="this project, proofs §3.2; Newton's method")
async def inverse_sqrt(
    x: ArithmeticTensor, low: float, high: float, fraction_bits: int = 26, degree: int = 3
) -> ArithmeticTensor:
    """1/sqrt(x) for low ≤ x ≤ high (public bounds).

    17 rounds, about 250 bytes and 17 for each factor 4 between the bounds. Relative error below 2^-13.2 (degree 3) or
    2^-16.5 (degree 4, 34 bytes more), plus one unit of the result. Outside the bounds the result is arbitrary
    (``insecure_check_ranges`` finds such inputs).
    """
    return await _inverse_sqrt(x, low, high, fraction_bits, degree, "inverse_sqrt", zero=False)


async def _inverse_sqrt(
    x: ArithmeticTensor, low: float, high: float, fraction_bits: int, degree: int, name: str, *, zero: bool
) -> ArithmeticTensor:
    require_integer("degree", degree, min(INVERSE_SQRT), max(INVERSE_SQRT))
    exponents = Exponents.of(low, high, x.fraction_bits)
    scale = _root_scale(exponents, fraction_bits)
    m, (power,) = await normalise(x, low, high, [(lambda k: 2.0**-k, scale)], name, zero=zero)
    y = await _inverse_sqrt_of_mantissa(m, degree)
    return await multiply_truncate(y, power, ROOT_BITS + scale - fraction_bits)


def _sqrt_cost(x: ArithmeticTensor, low: float, high: float, fraction_bits: int = 16) -> Cost:
    return inverse_sqrt.cost(x, low, high) + truncated_product_cost(x.size, x.fraction_bits + 26 - fraction_bits)


@protocol(cost=_sqrt_cost, source="x · inverse_sqrt(x)")
async def sqrt(x: ArithmeticTensor, low: float, high: float, fraction_bits: int = 16) -> ArithmeticTensor:
    """sqrt(x) for low ≤ x ≤ high, and exactly 0 for x = 0.

    19 rounds, the bytes of ``inverse_sqrt`` + 24 + 3/8·(fraction bits of x + 26 − fraction_bits). Relative error below
    2^-13.2 + sqrt(x)·2^-26 (1/sqrt(x) has 26 bits), plus one unit. Domain: the bounds, and sqrt(x) below 2^(36 −
    fraction bits of x).
    """
    room = MANTISSA_BITS + x.fraction_bits + -(-ceil_log2(high) // 2)
    require_room(room, "high", high, "use fewer fraction bits")
    inverse = await _inverse_sqrt(x, low, high, MANTISSA_BITS, 3, "sqrt", zero=True)
    return await multiply_truncate(x, inverse, x.fraction_bits + MANTISSA_BITS - fraction_bits)


# the clip factor ---------------------------------------------------------------------------------


@functools.cache
def _clip_plan(fraction_bits: int, high: float) -> tuple[Exponents, list[int], list[int], np.ndarray, int]:
    """Exponents, thresholds, low bits, weights (rows: 4^-k or 0; (1−2^-18)·2^-k; [q ≥ 1]) and the scale of row 1."""
    exponents = Exponents.of(1.0, high, fraction_bits)
    scale = exponents.last + MARGIN_BITS
    require_room(ROOT_BITS + 1 + scale, "high", high, "scale q down: only min(q, 2^30) matters to a clip")
    margin = 2**MARGIN_BITS - 1  # (1 − 2^-18) at 18 bits
    normaliser = [0, *exponents.words(lambda k: 4.0**-k, exponents.scale())]
    root = [word * margin for word in exponents.words(lambda k: 2.0**-k, exponents.last)]
    reached = [1] + [0] * len(exponents.inner)
    weights = np.array([np.diff(normaliser), [0, *np.diff(root)], reached], dtype=np.int64)
    unit = 1 << fraction_bits
    return exponents, [unit, *exponents.thresholds], [0, *exponents.low_bits], weights, scale


def _clip_cost(q: ArithmeticTensor, high: float, degree: int = 4) -> Cost:
    exponents, thresholds, low_bits, weights, scale = _clip_plan(q.fraction_bits, high)
    return (
        thermometer.cost(q, thresholds, low_bits, exponents.high_bit)
        + Cost(2, (8 * len(thresholds) + 16 * len(weights)) * q.size)
        + truncated_product_cost(q.size, q.fraction_bits + exponents.scale() - MANTISSA_BITS)
        + _newton_cost(q, degree)
        + truncated_product_cost(q.size, ROOT_BITS + scale - MANTISSA_BITS)
    )


@protocol(cost=_clip_cost, source="this project, proofs §3.3 and §4.1")
async def clip_factor(q: ArithmeticTensor, high: float, degree: int = 4) -> ArithmeticTensor:
    """1/sqrt(max(1, q)) at 26 bits for q ≤ high, never more than that.

    17 rounds, about 420 bytes and 15 for each factor 4 up to ``high`` (552 at 2^20). It may be too small by
    2^-16 + 2^-25·sqrt(q), relative (2^-14 up to q = 2^20, 2^-12 up to 2^25), never too large, for *every* way the
    truncations may round. Everything below 1, negative values too, counts as 1. Domain: −high ≤ q ≤ high ≤ 2^32.

    Write u = 2^-26, k for the exponent and m* = q·4^-k. A truncation is off by less than one unit either way.

    * [q ≥ 1] is compared exactly. If q < 1 then k = 0, and the mantissa is exactly 1: a product with zero truncates to
      zero. Below, put m = m* = 1 for these, and the true factor is 1 = m*^-1/2.
    * Otherwise 15/16 ≤ m* ≤ 4 and m > m* − u, so m^-1/2 < m*^-1/2·(1 + 0.6u).
    * Newton: y1 < m^-1/2 + 2.2u < m*^-1/2·(1 + 0.6u + 2.2u·sqrt(4)) = m*^-1/2·(1 + 5u), whatever the start was.
    * The factor (1 − 2^-18)·2^-k is an exact integer at its scale, and 5u < 2^-18 = 256u, so before the last
      truncation the product is below m*^-1/2·2^-k, the true factor.
    * That truncation gives ⌊z⌋ or ⌊z⌋ + 1, exactly z if z is an integer: less than z + 1. One unit is subtracted again.

    Too small by: the margin 2^-18, Newton's 3e²/2 < 2^-16.5 (degree 4), 5u, and at the end two units of the result,
    2u·sqrt(q) of it.
    """
    exponents, thresholds, low_bits, weights, scale = _clip_plan(q.fraction_bits, high)
    if q.party.insecure_check_ranges:
        from refmpc.core.debug import check_bounds

        await check_bounds(q, -high, high, "clip_factor")
    bits = await thermometer(q, thresholds, low_bits, exponents.high_bit)
    normaliser, root, reached = await weigh_bits(bits, weights)
    shift = q.fraction_bits + exponents.scale() - MANTISSA_BITS
    m = await multiply_truncate(q, normaliser.reinterpret(exponents.scale()), shift)
    m = m + 1.0 - reached.reinterpret(0)
    y = await _inverse_sqrt_of_mantissa(m, degree)
    power = (root + (2**MARGIN_BITS - 1) * 2**exponents.last).reinterpret(scale)
    factor = await multiply_truncate(y, power, ROOT_BITS + scale - MANTISSA_BITS)
    return factor - LAST_UNIT
