"""Polynomials with public coefficients, and minimax start values for Newton's method."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from accel.validate import require, require_integer
from refmpc.arithmetic import multiply_truncate
from refmpc.fixed import encode
from refmpc.protocol import Cost, protocol
from refmpc.tensor import ArithmeticTensor, concatenate
from refmpc.truncation import truncate, truncated_product_cost

__all__ = ["minimax", "polynomial"]

COEFFICIENT_BITS = 20


def _power_levels(degree: int) -> list[int]:
    """How many new powers each level computes: from t..t^k it reaches up to t^2k."""
    levels, known = [], 1
    while known < degree:
        levels.append(min(known, degree - known))
        known += levels[-1]
    return levels


def _polynomial_cost(t: ArithmeticTensor, coefficients: Sequence[float]) -> Cost:
    total = Cost(0, 0)
    for new in _power_levels(len(coefficients) - 1):
        total += truncated_product_cost(new * t.size, t.fraction_bits)
    return total + truncate.cost(t, COEFFICIENT_BITS)


@protocol(cost=_polynomial_cost, source="powers by doubling")
async def polynomial(t: ArithmeticTensor, coefficients: Sequence[float]) -> ArithmeticTensor:
    """Σ coefficients[i]·t^i at the scale of t, for |t| of the order of 1.

    2·⌈log2 degree⌉ + 1 rounds; 24 + 3/8·fraction_bits bytes for each power from the second on, and 23. Domain: |t^i|
    and the result below 2^(41 − fraction_bits). Error for |t| ≤ 1: i − 1 units times coefficient i, 2^-21 for each
    coefficient (they are rounded to 20 bits), and one unit.
    """
    bits = t.fraction_bits
    require_integer("fraction bits of t", bits, 1, 40)
    require(len(coefficients) >= 2, "coefficients", coefficients, "at least two (degree 1)")
    powers = t.reshape(1, *t.shape)
    for new in _power_levels(len(coefficients) - 1):
        powers = concatenate([powers, await multiply_truncate(powers[-1:], powers[:new], bits)])
    words = encode(np.asarray(coefficients[1:]), COEFFICIENT_BITS, "coefficients").view(np.int64)
    terms = powers.scale_by_integers(words.reshape(-1, *(1,) * t.ndim))
    total = terms.sum(axis=0).reinterpret(bits + COEFFICIENT_BITS) + float(coefficients[0])
    return await truncate(total, COEFFICIENT_BITS)


@functools.cache
def minimax(function: str, low: float, high: float, degree: int, centre: float) -> tuple[tuple[float, ...], float]:
    """Coefficients in t = x − centre of the polynomial nearest to 1/x, 1/sqrt(x) (in relative error) or log(x) (in
    absolute error) on [low, high], and that error. Lawson's iteration: reweighted least squares."""
    x = np.cos(np.linspace(0, np.pi, 301)) * (high - low) / 2 + (high + low) / 2
    target = {"reciprocal": 1 / x, "inverse_sqrt": x**-0.5, "log": np.log(x)}[function]
    unit = np.ones_like(x) if function == "log" else np.abs(target)
    matrix = np.vander(x - centre, degree + 1, increasing=True) / unit[:, np.newaxis]
    weight = np.ones_like(x)
    best: tuple[tuple[float, ...], float] = ((), np.inf)
    for _ in range(200):
        root = np.sqrt(weight)
        solution = np.linalg.lstsq(matrix * root[:, np.newaxis], target / unit * root, rcond=None)[0]
        error = np.abs(matrix @ solution - target / unit)
        if error.max() < best[1]:
            best = tuple(map(float, solution)), float(error.max())
        weight *= error
        weight /= weight.sum()
    return best
