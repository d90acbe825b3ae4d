"""Makes the integers of ``refmpc/mathematics/smooth.py``: ``python -m bench.generators.series`` prints them.

They are stored, not computed at start: the servers must agree on them to the last bit, and a linear programme does not
give the same last bit everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.special import erf

from refmpc.mathematics.smooth import FITS, STORED_BITS

__all__ = ["EXACT", "nearest"]

Function = Callable[[np.ndarray], Any]

# the true functions; what is smooth already by its formula is not here
EXACT: dict[str, Function] = {
    "softplus": lambda x: np.logaddexp(0, x),
    "gelu": lambda x: x * (1 + erf(x / np.sqrt(2))) / 2,
    "huber": lambda x: np.where(np.abs(x) < 1, x * x / 2, np.abs(x) - 0.5),
    "clamp": lambda x: np.clip(x, -1, 1),
    "exp": np.exp,
    "reciprocal": lambda x: 1 / x,
    "inverse_sqrt": lambda x: 1 / np.sqrt(x),
}
MOST = 5.5  # of a sine or cosine: each of them costs error; the constant is free


def nearest(
    exact: Function, low: float, high: float, period: float, turns: range, kind: str
) -> tuple[np.ndarray, float]:
    """Constant, sines, cosines of the sum nearest to a function on low … high in absolute error, and that error."""
    x = (low + high) / 2 - (high - low) / 2 * np.cos(np.linspace(0, np.pi, 1500))
    angle = 2 * np.pi * np.outer(x, np.array(turns)) / period
    wanted = {"sine": (0, 1, 0), "cosine": (1, 0, 1), "both": (1, 1, 1)}[kind]
    columns = np.hstack([np.ones((len(x), 1)), np.sin(angle), np.cos(angle)])
    free = np.repeat(np.array(wanted), (1, len(turns), len(turns))).astype(bool)
    slack, values = -np.ones((len(x), 1)), exact(x)
    found = linprog(
        np.r_[np.zeros(free.size), 1.0],
        A_ub=np.vstack([np.hstack([columns, slack]), np.hstack([-columns, slack])]),
        b_ub=np.r_[values, -values],
        bounds=[(None, None) if free[0] else (0, 0), *((-MOST * each, MOST * each) for each in free[1:]), (0, None)],
    )
    return found.x[:-1], float(found.x[-1])


if __name__ == "__main__":
    for name, (period_bits, turns, kind, low, high) in FITS.items():
        numbers, error = nearest(EXACT[name], low, high, 2.0**period_bits, turns, kind)
        print(f"# {name}: error 2^{np.log2(error):.2f}")
        print(f'"{name}": {tuple(round(float(number) * 2**STORED_BITS) for number in numbers)},')
