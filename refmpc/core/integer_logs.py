"""Numbers that two servers compute for themselves and must agree on to the last bit.

If a public constant differs in its last digit between two servers, their shares no longer fit and the result is
garbage. Libraries' exp, log and least squares do differ, between processors as well as versions. Python's integers,
fractions and decimals do not, nor do single additions, multiplications and roundings of IEEE doubles: only these are
used here.
"""

from __future__ import annotations

import functools
import math
from decimal import Context, Decimal
from fractions import Fraction

import numpy as np

__all__ = ["LOG2_E", "LOG_4", "agreed_exp_constant", "ceil_log2", "exp_table", "floor_log2", "reciprocal_start"]

LOG2_E = 1.4426950408889634
LOG_4 = 1.3862943611198906

_PRECISE = Context(prec=40)
_TABLE_BITS = 8  # the table has a step of 2^-8, the series does the rest


def floor_log2(value: float) -> int:
    """⌊log2 value⌋, exactly."""
    return math.frexp(value)[1] - 1


def ceil_log2(value: float) -> int:
    """⌈log2 value⌉, exactly."""
    mantissa, exponent = math.frexp(value)
    return exponent - 1 if mantissa == 0.5 else exponent


@functools.cache
def agreed_exp_constant(value: float) -> float:
    """e^value, correctly rounded."""
    return float(Decimal(value).exp(_PRECISE))


@functools.cache
def exp_table(below: int) -> np.ndarray:
    """e^(i·2^-8) for the multiples of 2^-8 below ``below``: what ``accel``'s exp_hold starts from."""
    return np.array([agreed_exp_constant(i * 2.0**-_TABLE_BITS) for i in range(below << _TABLE_BITS)])


@functools.cache
def reciprocal_start(low: float, high: float, degree: int, centre: float) -> tuple[tuple[float, ...], float]:
    """Coefficients in t = x − centre of the polynomial nearest to 1/x on [low, high] in relative error, and that error.

    Exact: p(x) = (1 − T(l(x))/T(l(0)))/x with T the Chebyshev polynomial of degree + 1 and l the map of [low, high] to
    [−1, 1]; 1 − x·p(x) is then the equioscillating polynomial that is 1 at zero, and its size is 1/|T(l(0))|.
    """
    a, b, c = Fraction(low), Fraction(high), Fraction(centre)
    line = [(2 * c - a - b) / (b - a), 2 / (b - a)]  # l as a polynomial in t
    previous, present = [Fraction(1)], line
    for _ in range(degree):
        doubled = [2 * term for term in _times(line, present)]
        for index, term in enumerate(previous):
            doubled[index] -= term
        previous, present = present, doubled
    at_zero = sum((term * (-c) ** index for index, term in enumerate(present)), Fraction(0))
    residual = [-term / at_zero for term in present]
    residual[0] += 1  # 1 − T(l)/T(l(0)), which vanishes at x = 0, that is t = −c
    quotient: list[Fraction] = []
    carry = Fraction(0)
    for term in reversed(residual):  # division by t + c, from the highest power
        carry = term - c * carry
        quotient.append(carry)
    assert quotient.pop() == 0
    return tuple(float(term) for term in reversed(quotient)), float(1 / abs(at_zero))


def _times(left: list[Fraction], right: list[Fraction]) -> list[Fraction]:
    product = [Fraction(0)] * (len(left) + len(right) - 1)
    for i, x in enumerate(left):
        for j, y in enumerate(right):
            product[i + j] += x * y
    return product
