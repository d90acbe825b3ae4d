"""Monte-Carlo accounting of a secret order: a certificate that some noise is enough, and the search for that noise.

δ(ε) of an ``Allocation`` is an expectation of a number in [0, 1], of privacy losses that can be sampled exactly. *Certificate*: N
plain samples; their mean must be at most ``base``. Were the true δ above τ·base, that would happen with probability at most
exp(−N·KL(base‖τ·base)) (Chernoff), which is added to δ, once for each of ``ATTEMPTS``: so the claim is
min_τ τ·base + ATTEMPTS·exp(−N·KL). Samples come from a fixed public seed, a hash of everything the certificate is about, so
that all participants find the same noise; σ lies on a coarse grid for the same reason.

*Search* by importance sampling: losses that matter are rare, so samples are moved along (1+θ)·m_J + φ·m̄. A defensive mixture
of several (θ, φ), the plain one among them, keeps all weights bounded. Its result is no proof and needs none.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import optimize
from scipy.special import logsumexp

from accel import kernels
from accel.errors import InvalidArgument
from accel.validate import require, require_real
from vfl.dp.allocation import Allocation
from vfl.dp.certificate_cache import cached
from vfl.progress import progress_bar

__all__ = ["Certificate", "certified_noise", "deltas", "sample_losses", "samples_for", "search_delta", "search_sigma"]

ATTEMPTS = 4
SAMPLES_TIMES_DELTA = 110  # N = 110/δ: the certificate then costs about 4 % of σ
LEAST_SAMPLES, MOST_SAMPLES = 200_000, 400_000_000
CHUNK = 1 << 14
_AIM = 0.86  # of base: so that the certificate succeeds at once nearly always
_STEP = 1.01  # what a further attempt adds to σ
_ROUNDING = 1 + 1e-6  # float64 in losses of 10^-12, random numbers uniform to 10^-5 relative
_SIGMA_BITS = 10
_THETAS = (1.0, 2.0, 4.0)  # 1 comes first
_TILTS = tuple((theta, phi) for theta in _THETAS for phi in (0.0, 0.4, 0.8, 1.2))


@dataclass(frozen=True)
class Certificate:
    """(ε, δ) holds for noise σ, but for the stated part of δ by which the sampling may mislead."""

    epsilon: float
    delta: float
    sigma: float
    samples: int
    base: float  # what the mean of the samples had to stay below
    present: float  # the mean with the record there (remove)
    absent: float  # and without it (add)
    misled: float  # the part of δ that is the certificate's own chance of being wrong
    attempts: int
    seconds: float


def samples_for(delta: float) -> int:
    """N."""
    count = max(LEAST_SAMPLES, math.ceil(SAMPLES_TIMES_DELTA / delta))
    require(
        count <= MOST_SAMPLES,
        "delta",
        delta,
        f"at least {SAMPLES_TIMES_DELTA / MOST_SAMPLES:.3g} with a secret order, whose certificate needs {SAMPLES_TIMES_DELTA}/delta"
        " samples",
        "raise delta, or choose order = 'fixed' (G-BMF)",
    )
    return -(-count // CHUNK) * CHUNK


def _confidence(base: float, samples: int) -> tuple[float, float]:
    """(δ, its part by which sampling may mislead) when the mean of the samples is at most ``base``."""

    def total(log_tau: float) -> float:
        return _parts(base, samples, math.exp(log_tau))[0]

    most = math.log(min(50.0, 0.999 / base))
    best = optimize.minimize_scalar(total, bounds=(1e-4, most), method="bounded", options={"xatol": 1e-6})
    return _parts(base, samples, math.exp(float(best.x)))


def _parts(base: float, samples: int, tau: float) -> tuple[float, float]:
    high = tau * base
    divergence = base * math.log(base / high) + (1 - base) * math.log((1 - base) / (1 - high))
    misled = ATTEMPTS * math.exp(-samples * divergence)
    return high + misled, misled


@lru_cache(maxsize=64)
def _base(delta: float, samples: int) -> float:
    """The largest base with which (ε, δ) is certified, in thousandths of δ."""
    low, high = 1, 999
    while low < high:
        middle = (low + high + 1) // 2
        if _confidence(middle * delta / 1000, samples)[0] <= delta:
            low = middle
        else:
            high = middle - 1
    return low * delta / 1000


def _key(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


# losses ------------------------------------------------------------------------------------------


def sample_losses(
    allocation: Allocation, sigma: float, key: int, first: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Privacy losses log(dP/dQ) of samples first..first+count−1: with the record there, and without it.

    Cost: count·b² multiply-adds for an allocation that is drawn once, about 6 ns·count·epochs·b for one drawn in every epoch.
    """
    a = allocation
    present, absent = np.empty(count), np.empty(count)
    if a.every_epoch:
        edges, chances = a.cells(sigma)
        kernels.allocation_losses(
            key, first, a.epochs, a.bins, a.slots, a.free, sigma, *a.counts_table, edges, chances, present, absent
        )
        return present, absent
    counts, own = _allocated(a, key, first, count)
    normal = np.random.Generator(np.random.Philox(key=[key, first])).standard_normal((count, a.bins))
    v = normal @ (a.cholesky.T / sigma)
    v -= np.diag(a.gram) / (2 * sigma**2)
    shares = counts / a.free
    absent[:] = np.log(np.einsum("ij,ij->i", shares, np.exp(v)))
    v += a.gram[own] / sigma**2
    present[:] = np.log(np.einsum("ij,ij->i", shares, np.exp(v)))
    return present, absent


def _allocated(a: Allocation, key: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    counts, own = np.empty((count, a.bins), dtype=np.int64), np.empty(count, dtype=np.int64)
    kernels.allocate(key, first, a.slots, a.free, *a.counts_table, counts, own)
    return counts, own


def deltas(
    allocation: Allocation, sigma: float, epsilon: float, samples: int, key: int, *, progress: bool = False
) -> tuple[float, float]:
    """Means of (1 − e^(ε−ℓ))₊ with the record there and of (1 − e^(ε+ℓ))₊ without it, of plain samples."""
    totals = np.zeros(2)
    with progress_bar("certificate of a secret order", samples, progress) as advance:
        for first in range(0, samples, CHUNK):
            present, absent = sample_losses(allocation, sigma, key, first, min(CHUNK, samples - first))
            totals += (
                -np.expm1(np.minimum(0.0, epsilon - present)).sum(),
                -np.expm1(np.minimum(0.0, epsilon + absent)).sum(),
            )
            advance(len(present))
    return float(totals[0] / samples), float(totals[1] / samples)


# search ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Draws:
    """Common random numbers of a search: normals (samples, epochs or 1, bins), shares of free slots, own bins, tilts."""

    normal: np.ndarray
    shares: np.ndarray
    own: np.ndarray
    tilt: np.ndarray


def _draws(a: Allocation, most: int) -> _Draws:
    rounds = a.epochs if a.every_epoch else 1
    count = max(2048, min(1 << 15, most // (rounds * a.bins)))
    key = _key("search", a.identity)
    counts, own = _allocated(a, key, 0, count * rounds)
    normal = np.random.Generator(np.random.Philox(key=[key, 0])).standard_normal((count, rounds, a.bins))
    shape = count, rounds, a.bins
    tilt = np.arange(count) % len(_TILTS)
    return _Draws(normal, (counts / a.free).reshape(shape), own.reshape(shape[:2]), tilt)


def search_delta(a: Allocation, sigma: float, epsilon: float, draws: _Draws | None = None) -> float:
    """δ(ε) at σ, the larger of both directions, by importance sampling: within a few percent, proved by nothing."""
    draws = _draws(a, 1 << 22) if draws is None else draws
    gram, variance = a.gram, sigma**2
    to_mean = gram.mean(axis=1)  # ⟨m_i, m̄⟩
    mean_square = float(to_mean.mean())
    rounds = draws.normal.shape[1]
    reach = epsilon * variance / (mean_square * rounds)  # along m̄ this far, and ℓ is about ε
    thetas, phis = np.array([t for t, _ in _TILTS]), np.array([p for _, p in _TILTS]) * reach
    plain = draws.normal if a.every_epoch else draws.normal @ a.cholesky.T
    base = plain / sigma
    half = np.diag(gram) / (2 * variance)

    # the record is there
    v = base + phis[draws.tilt][:, None, None] * to_mean / variance
    v += thetas[draws.tilt][:, None, None] * gram[draws.own] / variance
    along = v.mean(axis=2).sum(axis=1)  # ⟨m̄, x⟩/σ²
    proposals = []
    for theta in _THETAS:
        exponent = theta * v - theta**2 * half
        top = exponent.max(axis=2)
        terms = np.exp(exponent - top[:, :, None]) * draws.shares
        if theta == 1.0:
            loss = (np.log(terms.sum(axis=2)) + top).sum(axis=1)
        for phi in phis[thetas == theta]:
            inner = (np.log(terms @ np.exp(-theta * phi * to_mean / variance)) + top).sum(axis=1)
            proposals.append(inner + phi * along - rounds * phi**2 * mean_square / (2 * variance))
    density = logsumexp(np.stack(proposals), axis=0) - math.log(len(_TILTS))
    present = np.exp(loss - density) * -np.expm1(np.minimum(0.0, epsilon - loss))

    # the record is not there
    v = base - phis[draws.tilt][:, None, None] * to_mean / variance
    v -= half
    top = v.max(axis=2)
    loss = (np.log((np.exp(v - top[:, :, None]) * draws.shares).sum(axis=2)) + top).sum(axis=1)
    along = (v + half).mean(axis=2).sum(axis=1)
    terms = -phis[:, None] * along - rounds * phis[:, None] ** 2 * mean_square / (2 * variance)
    density = logsumexp(terms, axis=0) - math.log(len(_TILTS))
    absent = np.exp(-density) * -np.expm1(np.minimum(0.0, epsilon + loss))
    return float(max(present.mean(), absent.mean()))


def search_sigma(a: Allocation, epsilon: float, delta: float, *, effort: int = 1 << 22) -> float:
    """σ, in units of the longest mode, at which δ(ε) is about ``delta``: importance sampling, to half a percent."""
    draws = _draws(a, effort)

    def excess(log_sigma: float) -> float:
        return math.log(max(1e-300, search_delta(a, math.exp(log_sigma), epsilon, draws))) - math.log(delta)

    low = high = math.log(1.0)
    while excess(high) > 0:
        low, high = high, high + 0.7
        if high > 12:
            raise _nothing_found(epsilon, delta)
    while low == high or excess(low) < 0:
        low, high = low - 0.7, min(high, low)
        if low < -5:
            break
    return math.exp(float(optimize.brentq(excess, low, high, xtol=1e-4))) if low > -5 else math.exp(low)


def _nothing_found(epsilon: float, delta: float) -> InvalidArgument:
    return InvalidArgument(
        f"epsilon = {epsilon:g}, delta = {delta:g}: no noise was certified for a secret order; raise either, or choose order = 'fixed'"
    )


def _on_grid(sigma: float) -> float:
    """Rounded up to ten binary digits, so that last bits of a machine do not matter."""
    unit = 2.0 ** (math.floor(math.log2(sigma)) - _SIGMA_BITS)
    return math.ceil(sigma / unit) * unit


# certificate -------------------------------------------------------------------------------------


def certified_noise(allocation: Allocation, epsilon: float, delta: float, *, progress: bool = True) -> Certificate:
    """The noise for (ε, δ), and its certificate: found once and kept on disk, by everything that it depends on.

    Cost: 110/δ samples, see ``sample_losses``. With δ = 10^-5: seconds for 20 batches, about a minute for 100.
    """
    epsilon = require_real("epsilon", epsilon, 0, open_low=True)
    delta = require_real("delta", delta, 0, 1, open_low=True, open_high=True)
    samples = samples_for(delta)
    name = (allocation.identity, epsilon, delta, samples)

    def find() -> Certificate:
        return _find(allocation, epsilon, delta, samples, progress)

    return cached("allocation", name, find, Certificate)


def _find(allocation: Allocation, epsilon: float, delta: float, samples: int, progress: bool) -> Certificate:
    started = time.perf_counter()
    base = _base(delta, samples)
    sigma = search_sigma(allocation, epsilon, _AIM * base)
    for attempt in range(1, ATTEMPTS + 1):
        sigma = _on_grid(sigma)
        key = _key("certificate", allocation.identity, epsilon, delta, samples, sigma)
        present, absent = deltas(allocation, sigma, epsilon, samples, key, progress=progress)
        if max(present, absent) * _ROUNDING <= base:
            _, misled = _confidence(base, samples)
            seconds = time.perf_counter() - started
            return Certificate(epsilon, delta, sigma, samples, base, present, absent, misled, attempt, seconds)
        sigma *= _STEP
    raise _nothing_found(epsilon, delta)
