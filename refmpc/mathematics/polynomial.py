"""Polynomials with public coefficients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from accel.validate import require, require_integer
from refmpc.core.fixed import encode
from refmpc.core.primitive import Cost, primitive
from refmpc.core.tensor import ArithmeticTensor, concatenate
from refmpc.mathematics.coefficients import COEFFICIENT_BITS
from refmpc.primitives.arithmetic import multiply_truncate
from refmpc.primitives.truncation import truncate, truncated_product_cost

__all__ = ["polynomial", "power_levels"]


def power_levels(degree: int) -> list[int]:
    """How many new powers each level computes: from t..t^k it reaches up to t^2k."""
    levels, known = [], 1
    while known < degree:
        levels.append(min(known, degree - known))
        known += levels[-1]
    return levels


def _polynomial_cost(t: ArithmeticTensor, coefficients: Sequence[float]) -> Cost:
    total = Cost(0, 0)
    for new in power_levels(len(coefficients) - 1):
        total += truncated_product_cost(new * t.size, t.fraction_bits)
    return total + truncate.cost(t, COEFFICIENT_BITS)


@primitive(cost=_polynomial_cost, source="powers by doubling")
async def polynomial(t: ArithmeticTensor, coefficients: Sequence[float]) -> ArithmeticTensor:
    """Σ coefficients[i]·t^i at the scale of t, for |t| of the order of 1.

    2·⌈log2 degree⌉ + 1 rounds; 24 + 3/8·fraction_bits bytes for each power from the second on, and 23. Domain: powers
    |t^i| with i ≥ 2 below 2^(62 − 2·fraction_bits), as products have twice the fraction bits (so at most 30 of them
    from degree 2 on), and the result below 2^(41 − fraction_bits); ``insecure_check_ranges`` finds what lies outside.
    Error for |t| ≤ 1: i − 1 units times coefficient i, 2^-21 for each coefficient (they are rounded to 20 bits), and
    one unit. All servers must pass the same coefficients to the last bit (see ``refmpc.core.integer_logs``).
    """
    bits = t.fraction_bits
    require(len(coefficients) >= 2, "coefficients", coefficients, "at least two (degree 1)")
    require_integer("fraction bits of t", bits, 1, 40 if len(coefficients) == 2 else 30)
    powers = t.reshape(1, *t.shape)
    for new in power_levels(len(coefficients) - 1):
        powers = concatenate([powers, await multiply_truncate(powers[-1:], powers[:new], bits)])
    words = encode(np.asarray(coefficients[1:]), COEFFICIENT_BITS, "coefficients").view(np.int64)
    terms = powers.scale_by_integers(words.reshape(-1, *(1,) * t.ndim))
    total = terms.sum(axis=0).reinterpret(bits + COEFFICIENT_BITS) + float(coefficients[0])
    return await truncate(total, COEFFICIENT_BITS)
