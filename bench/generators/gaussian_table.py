"""Makes refmpc/mathematics/gaussian_table.py, the polynomials of ``joint_gaussian``: python -m
bench.generators.gaussian_table > FILE

Segment k < 60 holds tail probabilities 2^-(k+1)·(1/2, 1]. There |Z| = Q^-1(2^-(k+1)·(3−T)/4) is analytic in T up to
T = 3, so Chebyshev series converge like 5.83^-degree. Coefficients are rounded from the highest down, and those below
are fitted again to what each rounding left, which keeps nearly all of the accuracy of the unrounded polynomial.
Float64 is enough: scipy's ``ndtri`` is within 10^-15 here (checked against mpmath), the coefficients need 2^-34.
"""

from __future__ import annotations

import numpy as np
from numpy.polynomial import chebyshev
from scipy.special import ndtri

SEGMENTS, DEGREE = 61, 10
COEFFICIENT_BITS, CENTRE_BITS = 32, 34  # of the coefficients of T, T², …, and of the constant
NODES = 256


def magnitude(segment: int, t: np.ndarray) -> np.ndarray:
    """|Z| as a function of T in [−1, 1] on a segment."""
    return -ndtri(2.0 ** -(segment + 1) * (3 - t) / 4)


def rounded_polynomial(segment: int) -> list[int]:
    """The coefficients of 1, T, T², … as integers at their scales."""
    nodes = np.cos(np.pi * (np.arange(NODES) + 0.5) / NODES)
    rest = magnitude(segment, nodes)
    words = []
    for power in range(DEGREE, -1, -1):
        fitted = chebyshev.cheb2poly(chebyshev.chebfit(nodes, rest, power))
        bits = COEFFICIENT_BITS if power else CENTRE_BITS
        words.append(round(float(fitted[power]) * 2.0**bits))
        rest = rest - words[-1] * 2.0**-bits * nodes**power
    return words[::-1]


def main() -> None:
    """Print the module."""
    print(
        '"""|Z| on 61 segments as polynomials; made by ``python -m bench.generators.gaussian_table``, tested, not '
        'edited."""\n'
    )
    print("# stored rather than computed: the three servers must use the same integers, whatever their libm does")
    print(f"CENTRE_BITS, COEFFICIENT_BITS = {CENTRE_BITS}, {COEFFICIENT_BITS}\n")
    print("# one row per segment: the constant at 34 bits, then the coefficients of T, T², … at 32 bits")
    print("TABLE: tuple[tuple[int, ...], ...] = (")
    for segment in range(SEGMENTS):
        print(f"    ({', '.join(map(str, rounded_polynomial(segment)))}),")
    print(")")


if __name__ == "__main__":
    main()
