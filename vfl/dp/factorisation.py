"""Factorisations of the SGD workload: which correlated noise is added, and what it costs.

The workload A of SGD with weight decay α and momentum β is lower-triangular Toeplitz with generating function
1/((1−αx)(1−βx)); Ω = A^{1/2} has c(x) = ((1−αx)(1−βx))^{-1/2} and Ω⁻¹ has d(x) = 1/c(x). Releasing
G + Ω⁻¹Z is the matrix-factorisation mechanism. Four kinds:

* ``bisr``: the first p coefficients of d, quantised (ω_0 = 2^tap_bits): a FIR filter (arXiv 2505.12128);
* ``bsr``: the first p coefficients of c, at 2^strategy_bits: y = z − round(Σ c_j y) (arXiv 2405.13763);
* ``toeplitz``: p coefficients that minimise sensitivity × error (``vfl.dp.toeplitz``): of d as a filter, or of c as a
  recursion where that may round, whichever is better;
* ``identity``: Ω = 1, independent noise in each step (DP-SGD).

Quantising comes first: every number below belongs to the quantised mechanism that runs, not to the ideal one.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from scipy.signal import lfilter

from accel.validate import require, require_choice, require_integer, require_real
from vfl.dp.certificate_cache import cached
from vfl.dp.sensitivity import Sensitivity, participation_sensitivity
from vfl.dp.toeplitz import optimised_strategy, optimised_taps

__all__ = [
    "DEFAULT_BANDS",
    "DEFAULT_TAP_BITS",
    "KINDS",
    "Factorisation",
    "default_bands",
    "factorise",
    "root_coefficients",
    "workload_factorisation",
]

KINDS = ("bisr", "bsr", "toeplitz", "identity")
DEFAULT_BANDS = 256
DEFAULT_TAP_BITS = 16
LONGEST_FILTER = 128  # taps of an optimised filter: beyond, a thousandth is left to gain at b = 390


@dataclass(frozen=True)
class Factorisation:
    """A quantised strategy Ω̂, made by ``factorise``. All norms are O(num_steps·bands)."""

    kind: str
    num_steps: int
    bands: int
    weight_decay: float
    momentum: float
    tap_bits: int
    strategy_bits: int
    integer_taps: np.ndarray | None = field(compare=False, repr=False)
    integer_strategy: np.ndarray | None = field(compare=False, repr=False)

    @property
    def is_recursive(self) -> bool:
        """True when each server rounds inside the filter (bsr, some toeplitz): two further grid steps of slack."""
        return self.integer_strategy is not None

    @cached_property
    def digest(self) -> str:
        """Digest of the integers that run: participants whose optimiser found others are told apart."""
        integers = self.integer_taps if self.integer_taps is not None else self.integer_strategy
        return hashlib.sha256(np.ascontiguousarray(integers, dtype="<i8").tobytes()).hexdigest()[:32]

    @cached_property
    def noising_taps(self) -> np.ndarray:
        """First column of Ω̂⁻¹: ``bands`` long for FIR kinds, ``num_steps`` (full) for bsr."""
        if self.integer_taps is not None:
            return _readonly(self.integer_taps / 2.0**self.tap_bits)
        return _readonly(lfilter([1.0], self._quantised_strategy, _impulse(self.num_steps)))

    @cached_property
    def _quantised_strategy(self) -> np.ndarray:
        assert self.integer_strategy is not None
        return self.integer_strategy / 2.0**self.strategy_bits

    @cached_property
    def _strategy(self) -> np.ndarray:
        if self.integer_strategy is not None:
            column = np.zeros(self.num_steps)
            column[: self.bands] = self._quantised_strategy
            return _readonly(column)
        return _readonly(lfilter([1.0], self.noising_taps, _impulse(self.num_steps)))

    def strategy_coefficients(self, length: int | None = None) -> np.ndarray:
        """First column of Ω̂, the first ``length`` entries (all ``num_steps`` when not given)."""
        length = self.num_steps if length is None else require_integer("length", length, 1, self.num_steps)
        return self._strategy[:length]

    def sensitivity(self, max_participations: int, min_separation: int) -> float:
        """l2 sensitivity for contributions of norm ≤ 1; ``sensitivity_report`` says whether it is exact."""
        return self.sensitivity_report(max_participations, min_separation).value

    def sensitivity_report(self, max_participations: int, min_separation: int) -> Sensitivity:
        """The sensitivity with how it was found and whether it is exact."""
        return participation_sensitivity(self._strategy, max_participations, min_separation)

    @cached_property
    def strategy_norm(self) -> float:
        """Σ|ĉ|, an upper bound on the operator norm of Ω̂ (and of every leading block of it)."""
        return float(np.abs(self._strategy).sum())

    def noise_norms(self) -> np.ndarray:
        """‖Ω̂⁻¹[t,:]‖ for t = 0..num_steps−1: the noise at step t has this many times the std of z."""
        squares = np.zeros(self.num_steps)
        squares[: len(self.noising_taps)] = self.noising_taps**2
        return np.sqrt(np.cumsum(squares))

    def velocity_norm(self, momentum: float) -> float:
        """The noise of v_t = β·v_{t−1} + y_t at the last step, the largest, per unit std of z."""
        column = np.zeros(self.num_steps)
        column[: len(self.noising_taps)] = self.noising_taps
        return float(np.linalg.norm(lfilter([1.0], [1.0, -momentum], column)))

    def workload_error(
        self, quantity: str = "final", *, weight_decay: float | None = None, momentum: float | None = None
    ) -> float:
        """Noise of the training iterates, per unit std of z: row norms of A·Ω̂⁻¹.

        ``final``: the last iterate (the largest row); ``mean``: root mean square over all iterates. A is the
        workload of the given α, β (those of the factorisation when not given). Times sensitivity·γ·σ it
        is the standard deviation of a coordinate of the weights at learning rate 1 and batch size 1.
        """
        require_choice("quantity", quantity, ("final", "mean"))
        alpha = self.weight_decay if weight_decay is None else weight_decay
        beta = self.momentum if momentum is None else momentum
        column = np.zeros(self.num_steps)
        column[: len(self.noising_taps)] = self.noising_taps
        column = lfilter([1.0], [1.0, -(alpha + beta), alpha * beta], column)
        rows = np.cumsum(column**2)  # squared norm of row t: the filter reversed, cut to t+1 entries
        return float(math.sqrt(rows[-1] if quantity == "final" else rows.mean()))


def factorise(
    kind: str,
    num_steps: int,
    *,
    weight_decay: float = 1.0,
    momentum: float = 0.0,
    bands: int | None = None,
    tap_bits: int = DEFAULT_TAP_BITS,
    strategy_bits: int = 20,
    min_separation: int | None = None,
    linear: bool = False,
    own: float = 1.0,
) -> Factorisation:
    """The quantised factorisation of the workload A_{α,β}; O(bands), the norms are computed when asked for.

    Domain: 0 ≤ momentum < weight_decay ≤ 1 (weight decay 1 is none; ``identity`` takes any momentum below 1),
    1 ≤ bands ≤ num_steps. ``bands`` defaults to min(num_steps, 256); ``workload_factorisation`` chooses it for b.
    Last coefficients that round to zero are dropped: ``Factorisation.bands`` counts those that run.

    For ``toeplitz`` alone: b = ``min_separation`` steps between participations, ``linear`` for a filter that does not
    round (joint noise, a secret order), ``own`` as in ``vfl.dp.toeplitz``. Under a second for 1,000 steps, seconds for
    10,000; kept on disk.
    """
    require_choice("kind", kind, KINDS)
    steps = require_integer("num_steps", num_steps, 1)
    alpha = require_real("weight_decay", weight_decay, 0, 1, open_low=True, way_out="1 means no weight decay")
    beta = require_real("momentum", momentum, 0, 1, open_high=True)
    require(
        kind == "identity" or beta < alpha,
        "momentum",
        beta,
        f"below weight_decay = {alpha:g}",
        "the square root of the workload needs β < α",
    )
    tap_bits = require_integer("tap_bits", tap_bits, 1, 20)
    strategy_bits = require_integer("strategy_bits", strategy_bits, 1, 24)
    if kind == "identity":
        require(bands in (None, 1), "bands", bands, "1 (or left out) for kind 'identity'")
        p = 1
    else:
        p = require_integer(
            "bands",
            min(steps, DEFAULT_BANDS) if bands is None else bands,
            1,
            steps,
            way_out="a strategy has at most as many bands as there are steps",
        )
    made = _Maker(kind, steps, p, alpha, beta, tap_bits, strategy_bits)
    if kind == "toeplitz":
        separation = require_integer("min_separation", min_separation, 1, steps, way_out="toeplitz is optimised for it")
        return made.optimised(separation, linear, require_real("own", own, 0, 1, open_low=True))
    if kind == "bsr":
        return made.recursion(root_coefficients(alpha, beta, p))
    return made.filter(root_coefficients(alpha, beta, p, inverse=True))


@dataclass(frozen=True)
class _Integers:
    """What was found, as it is kept on disk."""

    taps: list[int]
    strategy: list[int]


@dataclass(frozen=True)
class _Maker:
    """Coefficients to integers, for one workload."""

    kind: str
    steps: int
    bands: int
    alpha: float
    beta: float
    tap_bits: int
    strategy_bits: int

    def filter(self, taps: np.ndarray) -> Factorisation:
        return self._made(_without_zeros(_quantise(taps, self.tap_bits)), None)

    def recursion(self, strategy: np.ndarray) -> Factorisation:
        integers = _quantise(strategy, self.strategy_bits)
        return self._made(None, _without_zeros(integers) if self.kind == "toeplitz" else integers)

    def _made(self, taps: np.ndarray | None, strategy: np.ndarray | None) -> Factorisation:
        found = taps if taps is not None else strategy
        assert found is not None
        return Factorisation(
            self.kind, self.steps, len(found), self.alpha, self.beta, self.tap_bits, self.strategy_bits, taps, strategy
        )

    def optimised(self, separation: int, linear: bool, own: float) -> Factorisation:
        """Kept by everything it depends on; read back, it is checked like what was just found."""
        name = (self, separation, linear, own)
        kept = cached("toeplitz", name, lambda: _integers(self._search(separation, linear, own)), _Integers)
        taps, strategy = (
            _readonly(np.array(words, dtype=np.int64)) if words else None for words in (kept.taps, kept.strategy)
        )
        found = self._made(taps, strategy)
        first = 1 << (self.tap_bits if taps is not None else self.strategy_bits)
        coefficients = found.strategy_coefficients()
        require(
            int((taps if taps is not None else strategy)[0]) == first  # type: ignore[index]
            and bool(np.all(coefficients >= 0)),
            "toeplitz",
            f"{found.bands} coefficients of which the smallest gives {coefficients.min():.3g}",
            "a strategy without negative coefficients that begins with 1",
            "a file of the cache was changed: remove it (PPVFL_CACHE)",
        )
        return found

    def _search(self, separation: int, linear: bool, own: float) -> Factorisation:
        """The best of what was optimised and of the truncated square roots, after rounding: so it is never worse than
        these."""
        workload = {"weight_decay": self.alpha, "momentum": self.beta}
        root = root_coefficients(self.alpha, self.beta, self.bands)
        inverse = root_coefficients(self.alpha, self.beta, self.bands, inverse=True)
        best = self.filter(optimised_taps(inverse[:LONGEST_FILTER], self.steps, separation, own=own, **workload))
        if own < 1:  # another aim than the product below
            return best
        found = [best, self.filter(inverse)]
        if not linear:
            strategy = optimised_strategy(root, self.steps, separation, **workload)
            found += [self.recursion(strategy), self.recursion(root)]
        participations = -(-self.steps // separation)
        found = [f for f in found if np.all(f.strategy_coefficients() >= 0)]
        return min(found, key=lambda f: f.sensitivity(participations, separation) * f.workload_error("mean"))


def _integers(found: Factorisation) -> _Integers:
    words = [[] if a is None else [int(word) for word in a] for a in (found.integer_taps, found.integer_strategy)]
    return _Integers(*words)


def workload_factorisation(
    kind: str,
    num_steps: int,
    min_separation: int,
    *,
    weight_decay: float = 1.0,
    momentum: float = 0.0,
    bands: int | None = None,
    linear: bool = False,
    own: float = 1.0,
) -> Factorisation:
    """``factorise`` for a run whose records return after b = ``min_separation`` steps: the only place that chooses
    bands.

    Unless ``bands`` are given: BISR ``default_bands(b)``, BSR p = b as in the paper and so toeplitz, whose filters need
    no more than ``LONGEST_FILTER``. ``identity`` has none to choose.
    """
    if kind == "identity":
        bands = None
    elif bands is None:
        bands = default_bands(min_separation) if kind == "bisr" else min_separation
        if kind == "toeplitz" and linear:
            bands = min(bands, LONGEST_FILTER)
    return factorise(
        kind,
        num_steps,
        weight_decay=weight_decay,
        momentum=momentum,
        bands=bands,
        min_separation=min_separation if kind == "toeplitz" else None,
        linear=linear,
        own=own,
    )


def default_bands(min_separation: int) -> int:
    """Bands of BISR to take for b: min(b, max(256, 0.6·b)).

    BISR passes the paper's BSR (p = b) at p ≈ b/2 whatever b is; fewer than 256 bands save no time worth
    having.
    """
    b = require_integer("min_separation", min_separation, 1)
    return min(b, max(DEFAULT_BANDS, math.ceil(0.6 * b)))


def root_coefficients(weight_decay: float, momentum: float, length: int, *, inverse: bool = False) -> np.ndarray:
    """First ``length`` coefficients of ((1−αx)(1−βx))^{∓1/2} (+ for ``inverse``), unquantised; O(length).

    Three-term recurrence of the Gegenbauer generating function: n·u_n = (α+β)(n−1+λ)u_{n−1} −
    αβ(n−2+2λ)u_{n−2}, λ = ±1/2; the wanted solution is the dominant one, so it is stable. Equal to
    Kalinin & Lampert's Theorem 1.
    """
    lam = -0.5 if inverse else 0.5
    total, product = weight_decay + momentum, weight_decay * momentum
    u = np.zeros(length)
    u[0] = 1.0
    for n in range(1, length):
        older = u[n - 2] if n > 1 else 0.0
        u[n] = (total * (n - 1 + lam) * u[n - 1] - product * (n - 2 + 2 * lam) * older) / n
    return u


def _quantise(values: np.ndarray, bits: int) -> np.ndarray:
    return _readonly(np.round(values * 2.0**bits).astype(np.int64))


def _without_zeros(integers: np.ndarray) -> np.ndarray:
    """What rounds to zero at the end need not be multiplied."""
    return integers[: np.flatnonzero(integers)[-1] + 1]


def _impulse(length: int) -> np.ndarray:
    column = np.zeros(length)
    column[0] = 1.0
    return column


def _readonly(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
