"""Optimised Toeplitz coefficients: the smallest sensitivity × error that a band can give, instead of a truncated square
root.

With κ participations b apart and ĉ ≥ 0, the sensitivity is the norm of column 0 + column b + … (proofs §5.2), and the
error of the iterates is a quadratic form of the taps d = 1/c. Two families of p coefficients, both with c ≥ 0 by
construction (proofs §5.5):

* ``optimised_taps``: d = (1, −a_1, …, −a_{p−1}) with a ≥ 0, a short filter of fresh noise: c = 1/(1 − a(x)) has no
  negative coefficient, whatever a ≥ 0 is, and rounding keeps it so;
* ``optimised_strategy``: c = (1, c_1, …, c_{p−1}) with c ≥ 0, run as a recursion.

The minimum is found by L-BFGS-B with exact gradients, O(T log T) an evaluation: under a second for a thousand steps,
seconds for ten thousand. Nothing is proved by it: the claim is that of the rounded coefficients, whatever they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize
from scipy.signal import fftconvolve, lfilter

from accel.validate import require, require_integer, require_real

__all__ = ["optimised_strategy", "optimised_taps"]

Floats = npt.NDArray[np.float64]

_WALL = 1e3  # coefficients beyond this belong to a filter that explodes: the search turns back
_OPTIONS = {"maxiter": 1000, "maxfun": 1500, "ftol": 1e-11, "gtol": 1e-8}
_RESTARTS = 8  # its model of the curvature misleads it now and then, at a bound: without it, on it goes


class NoiseObjective:
    """log(sensitivity²) + log(mean squared error) of a strategy c and its inverse d, with gradients. T = ``steps``.

    ``own`` < 1 mixes the square of the mean over all b batches, b·‖m̄‖², into the sensitivity: what a record moves if
    nobody knows its batch.
    """

    def __init__(self, steps: int, separation: int, weight_decay: float, momentum: float, own: float) -> None:
        self.steps, self.separation, self.own = steps, separation, own
        self._denominator = [1.0, -(weight_decay + momentum), weight_decay * momentum]
        self._shares = (steps - np.arange(steps)) / steps  # entry t of the filtered taps is in T − t iterates of T
        self.impulse = np.zeros(steps)
        self.impulse[0] = 1.0

    def error(self, taps: Floats) -> tuple[float, Floats]:
        """Mean squared error of the iterates, and its gradient in the taps."""
        filtered = lfilter([1.0], self._denominator, taps)
        weighted = self._shares * filtered
        gradient = 2 * lfilter([1.0], self._denominator, weighted[::-1])[::-1]
        return float(weighted @ filtered), gradient

    def sensitivity(self, strategy: Floats) -> tuple[float, Floats]:
        """Squared norm of columns 0, b, 2b, … together (mixed with that of all columns), and its gradient in the
        strategy."""
        columns = self._folded_sums(strategy)
        square, gradient = float(columns @ columns), 2 * self._folded_sums(columns[::-1], backwards=True)[::-1]
        if self.own < 1:
            every, rest = np.cumsum(strategy), (1 - self.own) / self.separation
            square = self.own * square + rest * float(every @ every)
            gradient = self.own * gradient + rest * 2 * np.cumsum(every[::-1])[::-1]
        return square, gradient

    def inverse_gradient(self, inverse: Floats, gradient: Floats) -> Floats:
        """From a gradient in 1/u to one in u: d(1/u) = −(1/u)² du."""
        square = fftconvolve(inverse, inverse)[: self.steps]
        found: Floats = -fftconvolve(square[::-1], gradient)[self.steps - 1 : 2 * self.steps - 1]
        return found

    def _folded_sums(self, values: Floats, *, backwards: bool = False) -> Floats:
        """Running sums in steps of b; ``backwards`` for values in reverse order, whose last row may be short."""
        rows = -(-self.steps // self.separation)
        folded = np.zeros(rows * self.separation)
        empty = len(folded) - self.steps
        if backwards:
            folded[empty:] = values
            return np.cumsum(folded.reshape(rows, -1), axis=0).reshape(-1)[empty:]
        folded[: self.steps] = values
        return np.cumsum(folded.reshape(rows, -1), axis=0).reshape(-1)[: self.steps]


def _minimum(evaluate: Callable[[Floats], tuple[float, Floats]], start: Floats) -> Floats:
    """argmin over non-negative coefficients, from ``start``; each measured in a tenth of its start, so that first steps
    are small."""
    units = 0.1 * np.maximum(np.abs(start), 1e-3)

    def scaled(x: Floats) -> tuple[float, Floats]:
        value, gradient = evaluate(x * units)
        return value, gradient * units

    here, value = np.maximum(start, 0.0) / units, math.inf
    bounds: Any = optimize.Bounds(0.0, math.inf)
    for _ in range(_RESTARTS):
        found = optimize.minimize(scaled, here, jac=True, method="L-BFGS-B", bounds=bounds, options=_OPTIONS)
        here, before, value = found.x, value, float(found.fun)
        if value > before - 1e-8:
            break
    return np.asarray(here * units)


def _wall(x: Floats) -> tuple[float, Floats]:
    return _WALL + float(x.sum()), np.ones_like(x)


def _checked(start: Floats, num_steps: int, min_separation: int, own: float) -> tuple[int, int, float]:
    steps = require_integer("num_steps", num_steps, 1)
    require(
        1 <= len(start) <= steps and float(start[0]) == 1.0,
        "start",
        f"{len(start)} coefficients",
        f"from 1 to num_steps = {steps}, the first of them 1",
    )
    separation = require_integer("min_separation", min_separation, 1, steps)
    return steps, separation, require_real("own", own, 0, 1, open_low=True)


def optimised_taps(
    start: Floats,
    num_steps: int,
    min_separation: int,
    *,
    weight_decay: float = 1.0,
    momentum: float = 0.0,
    own: float = 1.0,
) -> Floats:
    """The first column of Ω⁻¹, as long as ``start``: 1, then nothing positive. ``start`` is usually that of the square
    root.

    ``own`` from 0 (exclusive) to 1: how much a record's own batch counts in the sensitivity, against the mean over all
    batches. 1 is a known order.
    """
    steps, separation, own = _checked(start, num_steps, min_separation, own)
    if len(start) == 1:
        return np.ones(1)
    objective, count = NoiseObjective(steps, separation, weight_decay, momentum, own), len(start)

    def evaluate(x: Floats) -> tuple[float, Floats]:
        taps = np.zeros(steps)
        taps[0], taps[1:count] = 1.0, -x
        strategy = lfilter([1.0], taps[:count], objective.impulse)
        if not strategy.max() < _WALL:
            return _wall(x)
        error, by_taps = objective.error(taps)
        square, by_strategy = objective.sensitivity(strategy)
        through = objective.inverse_gradient(strategy, by_strategy)
        return math.log(error) + math.log(square), -(by_taps / error + through / square)[1:count]

    return np.concatenate([[1.0], -_minimum(evaluate, -start[1:])])


def optimised_strategy(
    start: Floats, num_steps: int, min_separation: int, *, weight_decay: float = 1.0, momentum: float = 0.0
) -> Floats:
    """The first coefficients of Ω, as many as ``start`` has and zero from there on: 1, then nothing negative."""
    steps, separation, _ = _checked(start, num_steps, min_separation, 1.0)
    if len(start) == 1:
        return np.ones(1)
    objective, count = NoiseObjective(steps, separation, weight_decay, momentum, 1.0), len(start)

    def evaluate(x: Floats) -> tuple[float, Floats]:
        strategy = np.zeros(steps)
        strategy[0], strategy[1:count] = 1.0, x
        taps = lfilter([1.0], strategy[:count], objective.impulse)
        if not np.abs(taps).max() < _WALL:
            return _wall(x)
        error, by_taps = objective.error(taps)
        through = objective.inverse_gradient(taps, by_taps)
        square, by_strategy = objective.sensitivity(strategy)
        return math.log(error) + math.log(square), (through / error + by_strategy / square)[1:count]

    return np.concatenate([[1.0], _minimum(evaluate, start[1:])])
