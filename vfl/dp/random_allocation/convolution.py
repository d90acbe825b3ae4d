"""δ of a secret order with independent noise, by convolution: bounds from above for both directions, without sampling.

One epoch moves the likelihood ratio by a factor S = Σ_i (d_i/f)·w_i, where d_i of the f = D + 1 free slots are in batch
i (hypergeometric) and w_i = exp(x_i/σ − 1/2σ²), x_i standard normal; epochs are independent (proofs §9.6). Both δ are
means of convex functions of the product of all S, and so of each term. *Law of S*: every term is spread over a grid of
numbers, its mean kept, which is larger in convex order; the sum over batches, given Σ d_i = f, is a power of the terms'
transform in (S, Σd), of which one coefficient is taken. *Product*: log S is spread over a second grid, the mean of S
kept, and convolved with itself. Masses that leave a grid on the bad side count as δ, and so do bounds of what floating
point may have lost. So δ is never too small (proofs §9.7).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri
from scipy.stats import binom

from accel.validate import require
from vfl.dp.random_allocation.allocation import Allocation

__all__ = ["COARSE", "FINE", "convolved_deltas", "is_convolvable"]

FINE, COARSE = 2.0**-12, 2.0**-8  # what spreading over a grid may add to the variance of a loss, relative to it
_MOST_CELLS = {FINE: 1 << 15, COARSE: 1 << 13}
_MOST_LOSSES = 1 << 19
_HEAVY = 0.05  # a variance of S from which its values near 0 matter
_BLOCK = 1 << 21  # complex numbers at a time
_UNIT = 2.0**-53
_BEYOND = 20.0  # losses further than this beyond ε count as if they were infinite
_DAMPING = 3.0  # a sum that leaves the grid and comes back at its start has lost all but e^-3 of its mass


def is_convolvable(allocation: Allocation) -> bool:
    """Whether modes are orthogonal and of one length: batches drawn anew in every epoch, or independent noise."""
    return bool(np.array_equal(allocation.gram, allocation.gram[0, 0] * np.eye(allocation.bins)))


def convolved_deltas(
    a: Allocation, sigma: float, epsilon: float, aim: float, *, fineness: float = FINE
) -> tuple[float, float]:
    """Upper bounds of δ_P (the record is there) and δ_Q (it is not), as tight as ``fineness`` lets them be if they are
    about ``aim``.

    Cost: about half a second of CPU for 50 batches, at FINE. Memory below 300 MB. Needs ``is_convolvable``.
    """
    require(is_convolvable(a), "allocation", a.identity, "one with independent noise")
    width = sigma / math.sqrt(float(a.gram[0, 0]))
    epochs = a.epochs if a.every_epoch else 1
    spread = math.expm1(min(700.0, 1 / width**2)) * (1 / a.bins + 1 / a.free)  # the variance of S
    step = math.sqrt(6 * fineness * spread / a.bins)
    # present: far enough that a thousandth of δ is beyond; in the record's own batch x has mean 1/σ
    own = min(a.slots, a.free, a.free / a.bins + 5 * math.sqrt(a.free / a.bins)) / a.free
    tail = -float(ndtri(min(0.1, 1e-3 * aim / epochs)))
    reach = 2.0 + own * math.exp(min(700.0, tail / width + 0.5 / width**2))
    most = _MOST_CELLS[fineness]
    present = _law(a, width, *_grid(step, reach, most), with_record=True)
    # absent: what is near 0 counts, and may need a finer grid if w is far from its mean; what is beyond is only left
    # out
    reach = 1.5 + 14 * math.sqrt(spread)
    near = reach / most if spread > _HEAVY else step
    absent = _law(a, width, *_grid(min(step, near), reach, most), with_record=False)
    losses = _Losses(epsilon, spread, fineness)
    return losses.delta(present, epochs), losses.delta(absent, epochs)


def _grid(step: float, reach: float, most: int) -> tuple[float, int]:
    """(step, cells), at most ``most`` cells: coarser, and so less tight, where a few values reach very far."""
    cells = 1 << max(10, math.ceil(math.log2(reach / step)))
    return (step, cells) if cells <= most else (reach / most, most)


@dataclass(frozen=True)
class _Law:
    """Masses of S on a grid. ``with_record``: under P, dP = S·dQ, else under Q. ``lost``: what is missing, and what
    rounding may hide."""

    values: np.ndarray
    masses: np.ndarray
    with_record: bool
    lost: float


def _law(a: Allocation, sigma: float, step: float, cells: int, *, with_record: bool) -> _Law:
    chance = a.free / (a.bins * a.slots)
    if a.bins == 1:
        counts, weights = np.array([a.free]), np.ones(1)
    else:
        counts = np.arange(min(a.slots, a.free) + 1)
        weights = binom.pmf(counts, a.slots, chance)  # given their sum, independent binomials are hypergeometric
        counts, weights = counts[weights > 1e-24], weights[weights > 1e-24]
    values = step * np.arange(cells)
    damping = np.exp(-(_DAMPING if with_record else 0.0) * np.arange(cells) / cells)
    plain = np.empty((len(counts), cells // 2 + 1), dtype=np.complex128)
    biased = np.empty_like(plain) if with_record else plain
    for row, count in enumerate(counts):
        masses = _spread(count / a.free, sigma, step, cells, keep_top=not with_record)
        plain[row] = np.fft.rfft(masses * damping)
        if with_record:
            biased[row] = np.fft.rfft(masses * values * damping)
    if a.bins == 1:
        transform, error = biased[0], 8 * _UNIT * math.sqrt(cells)
    else:
        transform, error = _power(a, counts, weights, plain, biased, with_record)
    found = np.maximum(np.fft.irfft(transform, cells), 0.0)
    error += 20 * _UNIT * math.log2(cells) * math.sqrt(cells) * float(np.linalg.norm(found))
    found, error = found / damping, error / float(damping[-1])
    missing = max(0.0, 1.0 - float(found.sum())) + error
    return _Law(values, found, with_record, missing / -math.expm1(-_DAMPING) if with_record else missing)


def _power(
    a: Allocation, counts: np.ndarray, weights: np.ndarray, plain: np.ndarray, biased: np.ndarray, with_record: bool
) -> tuple[np.ndarray, float]:
    """The transform of the sum of all batches, given Σd = f, and a bound of its error: coefficient f of a power in
    z."""
    chance, total = a.free / (a.bins * a.slots), a.bins * a.slots
    points = 32 + math.ceil(10 * math.sqrt(a.free))  # other sums than f that alias are 10 deviations away
    z = np.exp(2j * np.pi * np.outer(np.arange(points), counts % points) / points) * weights
    back = np.exp(-2j * np.pi * (np.arange(points) * a.free % points) / points) / (
        points * binom.pmf(a.free, total, chance)
    )
    most = (weights @ np.abs(plain)) ** (a.bins - 1)  # of any z: most frequencies need not be looked at
    used = np.flatnonzero(most > 1e-19)
    transform = np.zeros(plain.shape[1], dtype=np.complex128)
    squares = 0.0
    for block in np.array_split(used, max(1, len(used) * points // _BLOCK)):
        term = z @ plain[:, block]
        power = term ** (a.bins - 1) * (a.bins * (z @ biased[:, block]) if with_record else term)
        transform[block] = back @ power
        squares += float(((np.abs(back) @ np.abs(power) * 16 * a.bins * _UNIT) ** 2).sum())
    left_out = float(most[most <= 1e-19].sum()) * (a.bins if with_record else 1) * abs(back[0]) * points
    return transform, math.sqrt(2 * squares) + left_out


def _spread(scale: float, sigma: float, step: float, cells: int, *, keep_top: bool) -> np.ndarray:
    """Masses of scale·w on the grid, each cell's mass put on its two ends with its mean kept. What lies beyond the grid
    is left out; or (``keep_top``) counts as its last point, which is less: worse if large values are good."""
    masses = np.zeros(cells)
    if scale == 0.0:
        masses[0] = 1.0
        return masses
    ends = sigma * np.log(step * np.arange(1, cells) / scale) + 0.5 / sigma
    mass, mean = _between(ends), scale / step * _between(ends - 1 / sigma)
    upper = np.clip(mean - np.arange(cells - 1) * mass, 0.0, mass)
    masses[:-1] += mass - upper
    masses[1:] += upper
    if keep_top:
        masses[-1] += ndtr(-ends[-1])
    return masses


def _between(ends: np.ndarray) -> np.ndarray:
    """Standard normal masses below ends[0], between ends[0] and ends[1], …: small ones to all digits on both sides."""
    tails = ndtr(-np.abs(ends))
    masses = np.diff(np.where(ends > 0, -tails, tails), prepend=0.0)
    if ends[-1] > 0:
        masses[np.argmax(ends > 0)] += 1.0  # the cell that zero lies in
    return masses


class _Losses:
    """A grid of privacy losses from −(ε + 20) to ε + 20, and sums of independent losses on it."""

    def __init__(self, epsilon: float, spread: float, fineness: float):
        self._epsilon, self._end = epsilon, epsilon + _BEYOND
        step = max(math.sqrt(6 * fineness * min(spread, 4.0)), 2 * self._end / _MOST_LOSSES)
        self._half = math.ceil(self._end / step)
        self._step = self._end / self._half

    def delta(self, law: _Law, epochs: int) -> float:
        """E(1 − e^(ε−loss))₊ of ``epochs`` independent losses, log S or (record absent) −log S, plus what is lost."""
        sign = 1 if law.with_record else -1
        masses, infinite = self._placed(law, sign)
        total, gone, power, left = None, 0.0, masses, epochs
        missing = infinite + law.lost  # of one epoch; counts as δ as often as it may occur
        while left:
            if left & 1:
                total, more = (power, 0.0) if total is None else self._sum(total, power)
                gone += more
            left >>= 1
            if left:
                power, more = self._sum(power, power)
                gone += more * left * 2  # of each use of it
        assert total is not None
        losses = self._step * np.arange(-self._half, self._half + 1)
        value = float(total @ -np.expm1(np.minimum(0.0, self._epsilon - losses)))
        return float(min(1.0, value + gone + epochs * missing))

    def _placed(self, law: _Law, sign: int) -> tuple[np.ndarray, float]:
        """Masses of an epoch's loss on the grid, the mean of S kept, and the mass of an infinite loss."""
        good = law.values > 0
        infinite = 0.0 if law.with_record else float(law.masses[~good].sum())
        s, mass = law.values[good], law.masses[good]
        at = np.log(s) / self._step
        low = np.floor(at)
        ratio = np.exp((at - low) * self._step)  # S over the lower point
        wide = math.expm1(self._step)
        upper = (ratio - 1) / wide  # of Q's mass
        if law.with_record:
            upper *= math.exp(self._step) / ratio  # of P's
        upper = np.clip(upper, 0.0, 1.0)
        masses = np.zeros(2 * self._half + 1)
        for point, share in ((low, 1 - upper), (low + 1, upper)):
            place = sign * point.astype(np.int64) + self._half
            beyond = place > 2 * self._half
            infinite += float((mass * share)[beyond].sum())
            np.add.at(masses, np.maximum(place[~beyond], 0), (mass * share)[~beyond])  # too low counts as lowest: worse
        return masses, infinite

    def _sum(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float]:
        """Masses of the sum of two independent losses, and what is beyond the grid or may be lost in floating point."""
        size = 1 << math.ceil(math.log2(2 * len(x)))
        both = np.maximum(np.fft.irfft(np.fft.rfft(x, size) * np.fft.rfft(y, size), size), 0.0)[: 2 * len(x) - 1]
        error = 20 * _UNIT * math.log2(size) * math.sqrt(size) * float(np.linalg.norm(x) + np.linalg.norm(y))
        masses = both[self._half : self._half + len(x)].copy()
        masses[0] += both[: self._half].sum()
        return masses, float(both[self._half + len(x) :].sum()) + error
