"""Public coefficients, as integers at 20 bits, in t = m − 2.5 for the mantissa m in [15/16, 4).

Stored because the servers must agree on them to the last bit; ``python -m bench.generators.coefficients`` makes them,
and a test compares.
"""

from __future__ import annotations

__all__ = ["CENTRE", "COEFFICIENT_BITS", "LOG", "LOG_DEGREE"]

CENTRE = 2.5
COEFFICIENT_BITS = 20
LOG_DEGREE = 8

LOG: tuple[int, ...] = (960787, 419353, -83661, 22789, -7309, 1556, -179, 530, -262)  # absolute error 2^-15.74
