"""Monte-Carlo accounting of a secret order: samples that certify that some noise is enough, and the search for that
noise.

δ(ε) of an ``Allocation`` is an expectation of a number in [0, 1], of privacy losses that can be sampled exactly.
*Certificate*: N plain samples; their mean must be at most ``base``. Were the true δ above τ·base, that would happen
with probability at most exp(−N·KL(base‖τ·base)) (Chernoff), which is added to δ, once for each of the ``CHANCES`` that
a run has to be misled: so the claim is min_τ τ·base + CHANCES·exp(−N·KL). ``vfl.dp.random_allocation.certificate`` uses
it where noise is correlated.

*Search* by importance sampling: losses that matter are rare, so samples are moved along (1+θ)·m_J + φ·m̄. A defensive
mixture of several (θ, φ), the plain one among them, keeps all weights bounded. Its result is no proof and needs none.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import optimize
from scipy.special import logsumexp

from accel import kernels
from accel.errors import InvalidArgument
from accel.validate import require
from vfl.dp.random_allocation.allocation import Allocation
from vfl.progress import progress_bar

__all__ = [
    "ATTEMPTS",
    "CHANCES",
    "MARGINS",
    "confidence",
    "deltas",
    "largest_base",
    "least_sigma",
    "nothing_found",
    "public_key",
    "sample_losses",
    "samples_for",
    "sampling_error",
    "search_delta",
    "search_sigma",
]

ATTEMPTS = 4  # values of σ that are tried for one (ε, δ)
MARGINS = (
    2.0**-10,
    2.0**-6,
    2.0**-3,
    0.5,
)  # parts of ε and δ that a run tries to set aside for its arithmetic, in this order
CHANCES = ATTEMPTS * len(MARGINS)  # each looks at samples of its own, and which is used depends on them
SAMPLES_TIMES_DELTA = 110  # N = 110/δ: the certificate then costs about 4 % of σ
LEAST_SAMPLES, MOST_SAMPLES = 200_000, 400_000_000
CHUNK = 1 << 14
_THETAS = (1.0, 2.0, 4.0)  # 1 comes first
_TILTS = tuple((theta, phi) for theta in _THETAS for phi in (0.0, 0.4, 0.8, 1.2))


def samples_for(delta: float) -> int:
    """N."""
    count = max(LEAST_SAMPLES, math.ceil(SAMPLES_TIMES_DELTA / delta))
    require(
        count <= MOST_SAMPLES,
        "delta",
        delta,
        f"at least {SAMPLES_TIMES_DELTA / MOST_SAMPLES:.3g} with a secret order, whose certificate needs "
        f"{SAMPLES_TIMES_DELTA}/delta"
        " samples",
        "raise delta, or choose order = 'fixed' (G-BMF)",
    )
    return -(-count // CHUNK) * CHUNK


def confidence(base: float, samples: int) -> tuple[float, float]:
    """(δ, its part by which sampling may mislead) when the mean of the samples is at most ``base``."""

    def total(log_tau: float) -> float:
        return _parts(base, samples, math.exp(log_tau))[0]

    most = math.log(min(50.0, 0.999 / base))
    best = optimize.minimize_scalar(total, bounds=(1e-4, most), method="bounded", options={"xatol": 1e-6})
    return _parts(base, samples, math.exp(float(best.x)))


def _parts(base: float, samples: int, tau: float) -> tuple[float, float]:
    high = tau * base
    divergence = base * math.log(base / high) + (1 - base) * math.log((1 - base) / (1 - high))
    misled = CHANCES * math.exp(-samples * divergence)
    return high + misled, misled


@lru_cache(maxsize=64)
def largest_base(delta: float, samples: int) -> float:
    """The largest base with which (ε, δ) is certified, in thousandths of δ."""
    low, high = 1, 999
    while low < high:
        middle = (low + high + 1) // 2
        if confidence(middle * delta / 1000, samples)[0] <= delta:
            low = middle
        else:
            high = middle - 1
    return low * delta / 1000


def sampling_error(a: Allocation) -> tuple[float, float]:
    """(relative, absolute): by how much a mean of samples in [0, 1] may be too small because samples are made of finite
    words.

    Relative: words of 32 bits choose a slot (of ``free``) and fill up free slots, at most 13.5·√free of them but for
    10^-30, each in a batch and a slot of it, rejections included; 10^-9 for float64. Absolute: alias tables of 48 bits
    and normals of 52.
    """
    filled = min(float(a.free), 13.5 * math.sqrt(a.free))
    relative = math.expm1((a.free + 2 * filled * (a.bins + a.slots)) * 2.0**-32) + 1e-9
    return relative, a.bins * (len(a.counts_table[0]) + 1) * 2.0**-48


def public_key(*parts: object) -> int:
    """The key of a generator: a hash of all that its numbers are for."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


# losses ------------------------------------------------------------------------------------------


def sample_losses(
    allocation: Allocation, sigma: float, key: int, first: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Privacy losses log(dP/dQ) of samples first..first+count−1: with the record there, and without it.

    Cost: count·b² multiply-adds, for each epoch if the batches are drawn anew in each.
    """
    a = allocation
    rounds = a.epochs if a.every_epoch else 1
    present, absent = np.zeros(count), np.zeros(count)
    normals = np.random.Generator(np.random.Philox(key=[key, first]))
    factor, half, pulled = a.cholesky.T / sigma, np.diag(a.gram) / (2 * sigma**2), np.exp(a.gram / sigma**2)
    for number in range(rounds):
        counts, own = _allocated(a, key, first * rounds + number * count, count)
        weights = np.exp(normals.standard_normal((count, a.bins)) @ factor - half)
        weights *= counts / a.free
        absent += np.log(weights.sum(axis=1))
        present += np.log(np.einsum("ij,ij->i", weights, pulled[own]))
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
    """Common random numbers of a search: normals (samples, bins), shares of free slots, own bins, tilts."""

    normal: np.ndarray
    shares: np.ndarray
    own: np.ndarray
    tilt: np.ndarray


def _draws(a: Allocation, most: int) -> _Draws:
    count = max(2048, min(1 << 15, most // a.bins))
    key = public_key("search", a.identity)
    counts, own = _allocated(a, key, 0, count)
    normal = np.random.Generator(np.random.Philox(key=[key, 0])).standard_normal((count, a.bins))
    return _Draws(normal, counts / a.free, own, np.arange(count) % len(_TILTS))


def search_delta(a: Allocation, sigma: float, epsilon: float, draws: _Draws | None = None) -> float:
    """δ(ε) at σ of one order for all epochs, the larger of both directions: importance sampling, a few percent off, no
    proof."""
    require(not a.every_epoch, "allocation", a.identity, "drawn once")
    draws = _draws(a, 1 << 22) if draws is None else draws
    gram, variance = a.gram, sigma**2
    to_mean = gram.mean(axis=1)  # ⟨m_i, m̄⟩
    mean_square = float(to_mean.mean())
    reach = epsilon * variance / mean_square  # along m̄ this far, and ℓ is about ε
    thetas, phis = np.array([t for t, _ in _TILTS]), np.array([p for _, p in _TILTS]) * reach
    base = draws.normal @ a.cholesky.T / sigma
    half = np.diag(gram) / (2 * variance)

    # the record is there
    v = base + phis[draws.tilt][:, None] * to_mean / variance
    v += thetas[draws.tilt][:, None] * gram[draws.own] / variance
    along = v.mean(axis=1)  # ⟨m̄, x⟩/σ²
    proposals = []
    for theta in _THETAS:
        exponent = theta * v - theta**2 * half
        top = exponent.max(axis=1)
        terms = np.exp(exponent - top[:, None]) * draws.shares
        if theta == 1.0:
            loss = np.log(terms.sum(axis=1)) + top
        for phi in phis[thetas == theta]:
            inner = np.log(terms @ np.exp(-theta * phi * to_mean / variance)) + top
            proposals.append(inner + phi * along - phi**2 * mean_square / (2 * variance))
    density = logsumexp(np.stack(proposals), axis=0) - math.log(len(_TILTS))
    present = np.exp(loss - density) * -np.expm1(np.minimum(0.0, epsilon - loss))

    # the record is not there
    v = base - phis[draws.tilt][:, None] * to_mean / variance
    v -= half
    top = v.max(axis=1)
    loss = np.log((np.exp(v - top[:, None]) * draws.shares).sum(axis=1)) + top
    along = (v + half).mean(axis=1)
    terms = -phis[:, None] * along - phis[:, None] ** 2 * mean_square / (2 * variance)
    density = logsumexp(terms, axis=0) - math.log(len(_TILTS))
    absent = np.exp(-density) * -np.expm1(np.minimum(0.0, epsilon + loss))
    return float(max(present.mean(), absent.mean()))


def search_sigma(a: Allocation, epsilon: float, delta: float, *, effort: int = 1 << 22) -> float:
    """σ, in units of the longest mode, at which δ(ε) is about ``delta``: importance sampling, to half a percent."""
    draws = _draws(a, effort)

    def excess(log_sigma: float) -> float:
        return math.log(max(1e-300, search_delta(a, math.exp(log_sigma), epsilon, draws))) - math.log(delta)

    return least_sigma(excess, nothing_found(epsilon, delta), tolerance=1e-4)


def least_sigma(excess: Callable[[float], float], refusal: InvalidArgument, *, tolerance: float) -> float:
    """σ at which ``excess``, of log σ and falling, is zero; ``refusal`` if that is not between e^-5 and e^12."""
    low = high = 0.0
    while excess(high) > 0:
        low, high = high, high + 0.7
        if high > 12:
            raise refusal
    while low == high or excess(low) < 0:
        low, high = low - 0.7, min(high, low)
        if low < -5:
            raise refusal
    return math.exp(float(optimize.brentq(excess, low, high, xtol=tolerance)))


def nothing_found(epsilon: float, delta: float) -> InvalidArgument:
    """What is said if no noise is enough."""
    return InvalidArgument(
        f"epsilon = {epsilon:g}, delta = {delta:g}: no noise was certified for a secret order; raise either, or "
        f"choose order = 'fixed'"
    )
