"""Makes the integers of ``refmpc/mathematics/smooth.py`` and ``vfl/bounded_softmax.py``:
``python -m bench.generators.series`` prints them.

They are stored, not computed at start: the servers must agree on them to the last bit, and a linear programme does not
give the same last bit everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.special import erf

from refmpc.mathematics.smooth import FITS, STORED_BITS
from vfl.bounded_softmax import CLIP_PERIOD_BITS, CLIPS, COEFFICIENT_BITS, CRUDE, FINES, LEAST_SHARES
from vfl.hidden import CLIP_BITS, CLIP_EDGE

__all__ = ["EXACT", "clip_below", "clip_numbers", "inverse", "largest_clip", "nearest", "sum_range"]

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


def _columns(x: np.ndarray, period: float, terms: int) -> np.ndarray:
    angle = 2 * np.pi * np.outer(x, np.arange(1, terms + 1)) / period
    return np.hstack([np.ones((len(x), 1)), np.sin(angle), np.cos(angle)])


def sum_range(classes: int) -> tuple[float, float]:
    """Σe of a bounded softmax of so many classes, each of whose e may be off by 0.002."""
    return 1 / 3 - 0.0018 * (classes - 1) - 0.004, (classes - 1) * 1.002 + 1 / 3 + 0.02


def inverse(low: float, high: float, period: float, terms: int, centre: bool = False) -> tuple[np.ndarray, float]:
    """R with x·R(x) at most 1 on low … high and as large as can be, and its least value; or, centred, 1 ± that."""
    x = low + (high - low) * np.linspace(0, 1, 600) ** 2
    columns = _columns(x, period, terms) * x[:, np.newaxis]
    most, count = 2.5 if centre else max(1.9, 0.35 / low), columns.shape[1]
    rows = np.vstack([np.hstack([columns, 0 * x[:, np.newaxis]]), np.hstack([-columns, np.ones((len(x), 1))])])
    right = np.r_[np.ones(len(x)), np.zeros(len(x))]
    bounds = [(-most, most)] * count + [(None, None)]
    found = linprog(np.r_[np.zeros(count), -1.0], A_ub=rows, b_ub=right, bounds=bounds).x
    numbers, least = found[:-1], float(found[-1])
    return (numbers * 2 / (1 + least), (1 - least) / (1 + least)) if centre else (numbers, least)


def largest_clip(threshold: float, terms: int = 4) -> np.ndarray:
    """The largest sum below min(1, b/√q) on 0 … 2.2: rows by norm, badly wrong ones count little."""
    q = np.linspace(0, 1, 300) ** 2 * 2.2
    columns = _columns(q, 2.0**CLIP_PERIOD_BITS, terms)
    top = np.minimum(1, threshold / np.sqrt(np.maximum(q, 1e-12))) * (1 - 2**-8)
    weight = np.gradient(np.sqrt(q)) * np.where(q < 2.02, 1, 0.05) / top
    right, bounds = np.r_[top, 0 * top], [(-2, 2)] * columns.shape[1]
    return np.asarray(linprog(-(weight @ columns), A_ub=np.vstack([columns, -columns]), b_ub=right, bounds=bounds).x)


def _stored(numbers: np.ndarray, bits: int) -> tuple[int, ...]:
    return tuple(round(float(number) * 2**bits) for number in numbers)


def clip_below(x: np.ndarray, turns: int, most: float, edge: float, numbers: np.ndarray | None = None) -> np.ndarray:
    """The clip at x in 0 … edge of a circle of length 1: of the sums of so many turns below min(most/√edge, 1/√x), the
    one that is nearest to it, weighted as if norms √x were uniform."""
    numbers = clip_numbers(turns, most, edge) if numbers is None else numbers
    return np.asarray(_circle(x, turns) @ numbers)


def _circle(x: np.ndarray, turns: int) -> np.ndarray:
    angle = 2 * np.pi * np.outer(x, np.arange(1, turns + 1))
    return np.hstack([np.ones((len(x), 1)), np.cos(angle), np.sin(angle)])


def clip_numbers(turns: int, most: float, edge: float) -> np.ndarray:
    """Constant, cosines, sines; beyond the edge it is free, so that it can turn back."""
    x = np.unique(np.r_[edge * (0.5 - 0.5 * np.cos(np.linspace(0, np.pi, 1000))), np.linspace(0, edge, 500)])
    columns, below = _circle(x, turns), np.minimum(most, 1 / np.sqrt(np.maximum(x / edge, 1e-12)))
    weight = np.gradient(x) / below / np.maximum(np.sqrt(x), 0.02)
    found = linprog(
        -(weight @ columns),
        A_ub=np.vstack([columns, -columns]),
        b_ub=np.r_[0.998 * below, np.zeros(len(x))],
        bounds=[(None, None), *((-3, 3) for _ in range(2 * turns))],
    )
    return np.asarray(found.x / np.sqrt(edge))


if __name__ == "__main__":
    if sys.argv[1:] == ["clip"]:
        print(tuple(round(float(number) * 2**CLIP_BITS) for number in clip_numbers(40, 10.0, float(CLIP_EDGE))))
        raise SystemExit
    for most, bits, stored in CRUDE:
        numbers, least = inverse(*sum_range(most), 2.0**bits, len(stored) // 2)
        print(f"crude, {most} classes, at least {least:.3f}: {_stored(numbers, COEFFICIENT_BITS)}")
    for most, stored in FINES:
        numbers, error = inverse(LEAST_SHARES[most], 1.15, 2.0, len(stored) // 2, centre=True)
        print(f"fine, error 2^{np.log2(error):.2f}: {_stored(numbers, COEFFICIENT_BITS)}")
    for level in range(len(CLIPS)):
        print(f"clip {level}: {_stored(largest_clip(1.46 * 2 ** (-level / 4)), COEFFICIENT_BITS)}")
    for name, (period_bits, turns, kind, low, high) in FITS.items():
        numbers, error = nearest(EXACT[name], low, high, 2.0**period_bits, turns, kind)
        print(f"# {name}: error 2^{np.log2(error):.2f}")
        print(f'"{name}": {_stored(numbers, STORED_BITS)},')
