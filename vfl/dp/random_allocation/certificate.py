"""How much noise a secret order needs, with a certificate: computed where noise is independent, sampled where it is
correlated.

Everything is a function of public parameters, so that all participants find the same noise by themselves: samples come
from a generator keyed by a hash of all that the certificate is about, and σ lies on a coarse grid, so that last bits of
a machine do not matter.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from accel.validate import require_real
from vfl.dp.certificate_cache import cached
from vfl.dp.random_allocation.allocation import Allocation
from vfl.dp.random_allocation.convolution import COARSE, convolved_deltas, is_convolvable
from vfl.dp.random_allocation.monte_carlo import (
    ATTEMPTS,
    CHANCES,
    confidence,
    deltas,
    largest_base,
    least_sigma,
    nothing_found,
    public_key,
    samples_for,
    sampling_error,
    search_sigma,
)

__all__ = ["Certificate", "certified_noise", "require_certifiable"]

_AIM = 0.86  # of base: so that the certificate succeeds at once nearly always
_STEP = 1.01  # what a further attempt adds to σ
_SIGMA_BITS = 10


@dataclass(frozen=True)
class Certificate:
    """(ε, δ) holds for noise σ, but for the stated part of δ by which the sampling may mislead."""

    epsilon: float
    delta: float
    sigma: float
    samples: int  # 0: computed, not sampled
    base: float  # what both of the following had to stay below
    present: float  # δ with the record there (remove): a bound, or the mean of the samples
    absent: float  # and without it (add)
    misled: float  # the part of δ that is the certificate's own chance of being wrong
    attempts: int
    seconds: float

    @property
    def words(self) -> str:
        """For the claim."""
        worst = max(self.present, self.absent)
        if not self.samples:
            return f"convolution (proofs §9.7): δ is at most {worst:.4g} ≤ {self.base:.4g}, both directions"
        return (
            f"Monte-Carlo certificate (proofs §9.7): {self.samples:.3g} samples, mean {worst:.3g} ≤ {self.base:.3g}; "
            f"that they mislead has a probability of {self.misled:.2g}, which is part of δ"
        )


def require_certifiable(allocation: Allocation, delta: float) -> None:
    """Refuse a δ for which the samples would be too many."""
    if not is_convolvable(allocation):
        samples_for(delta)


def certified_noise(allocation: Allocation, epsilon: float, delta: float, *, progress: bool = True) -> Certificate:
    """The noise for (ε, δ), and its certificate: found once and kept on disk, by everything that it depends on.

    Cost: a few seconds with independent noise. Otherwise 110/δ samples, see ``sample_losses``: with δ = 10^-5, seconds
    for 20 batches, about a minute for 100.
    """
    epsilon = require_real("epsilon", epsilon, 0, open_low=True)
    delta = require_real("delta", delta, 0, 1, open_low=True, open_high=True)
    if is_convolvable(allocation):
        computed = (allocation.identity, epsilon, delta, "convolution, damped")
        return cached("allocation", computed, lambda: _computed(allocation, epsilon, delta), Certificate)
    samples = samples_for(delta)
    name = (allocation.identity, epsilon, delta, samples, CHANCES)
    return cached("allocation", name, lambda: _sampled(allocation, epsilon, delta, samples, progress), Certificate)


def _unit(sigma: float) -> float:
    return 2.0 ** (math.floor(math.log2(sigma)) - _SIGMA_BITS)


def _on_grid(sigma: float) -> float:
    """Rounded up to ten binary digits."""
    unit = _unit(sigma)
    return math.ceil(sigma / unit) * unit


def _computed(allocation: Allocation, epsilon: float, delta: float) -> Certificate:
    """The least σ of the grid for which both bounds are at most δ: near the one that is enough on a coarser grid of
    losses."""
    started = time.perf_counter()

    def excess(log_sigma: float) -> float:
        found = max(convolved_deltas(allocation, math.exp(log_sigma), epsilon, delta, fineness=COARSE))
        return math.log(max(found, 1e-300)) - math.log(delta)

    sigma = _on_grid(least_sigma(excess, nothing_found(epsilon, delta), tolerance=2e-4))
    found = convolved_deltas(allocation, sigma, epsilon, delta)
    while max(found) > delta:
        sigma = _on_grid(sigma + _unit(sigma) / 2)
        found = convolved_deltas(allocation, sigma, epsilon, delta)
    while max(less := convolved_deltas(allocation, sigma - _unit(sigma), epsilon, delta)) <= delta:
        sigma, found = sigma - _unit(sigma), less
    seconds = time.perf_counter() - started
    return Certificate(epsilon, delta, sigma, 0, delta, *found, 0.0, 1, seconds)


def _sampled(allocation: Allocation, epsilon: float, delta: float, samples: int, progress: bool) -> Certificate:
    started = time.perf_counter()
    base = largest_base(delta, samples)
    relative, absolute = sampling_error(allocation)
    most = (base - absolute) / (1 + relative)
    sigma = search_sigma(allocation, epsilon, _AIM * base)
    for attempt in range(1, ATTEMPTS + 1):
        sigma = _on_grid(sigma)
        key = public_key("certificate", allocation.identity, epsilon, delta, samples, sigma)
        present, absent = deltas(allocation, sigma, epsilon, samples, key, progress=progress)
        if present <= most and absent <= most:  # not max(): one that is no number must not pass
            _, misled = confidence(base, samples)
            seconds = time.perf_counter() - started
            return Certificate(epsilon, delta, sigma, samples, base, present, absent, misled, attempt, seconds)
        sigma *= _STEP
    raise nothing_found(epsilon, delta)
