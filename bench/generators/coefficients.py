"""Makes the integers of ``refmpc/mathematics/coefficients.py``: ``python -m bench.generators.coefficients`` prints
them.

They are stored, not computed at start, because two servers must agree on them to the last bit, and least squares does
not give the same last bit everywhere.
"""

from __future__ import annotations

import numpy as np

from refmpc.mathematics.coefficients import CENTRE, COEFFICIENT_BITS, LOG_DEGREE
from refmpc.mathematics.normalise import MANTISSA_HIGH, MANTISSA_LOW

__all__ = ["minimax", "stored_form"]


def minimax(degree: int) -> tuple[np.ndarray, float]:
    """Coefficients in t = x − centre of the polynomial nearest to log(x) (in absolute error) on the mantissa's range,
    and that error. Lawson's iteration: reweighted least squares."""
    middle, half = (MANTISSA_HIGH + MANTISSA_LOW) / 2, (MANTISSA_HIGH - MANTISSA_LOW) / 2
    x = np.cos(np.linspace(0, np.pi, 2001)) * half + middle
    target = np.log(x)
    matrix = np.vander(x - CENTRE, degree + 1, increasing=True)
    weight = np.ones_like(x)
    best: np.ndarray = np.zeros(degree + 1)
    least = np.inf
    for _ in range(300):
        root = np.sqrt(weight)
        solution = np.linalg.lstsq(matrix * root[:, np.newaxis], target * root, rcond=None)[0]
        error = np.abs(matrix @ solution - target)
        if error.max() < least:
            best, least = solution, float(error.max())
        weight *= error
        weight /= weight.sum()
    return best, least


def stored_form(coefficients: np.ndarray) -> tuple[int, ...]:
    """Rounded to the bits they are used with."""
    return tuple(round(float(value) * 2**COEFFICIENT_BITS) for value in coefficients)


if __name__ == "__main__":
    found, error = minimax(LOG_DEGREE)
    print(f"log, degree {LOG_DEGREE}, error 2^{np.log2(error):.2f}: {stored_form(found)}")
