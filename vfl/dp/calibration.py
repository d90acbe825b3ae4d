"""σ for (ε, δ) and back: one Gaussian, zCDP, Poisson subsampling, and any order of batches.

σ (``noise_multiplier``) is the standard deviation of the noise divided by the l2 sensitivity. Numbers
come from ``dp_accounting``; "exact" and "upper bound" are said where they hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import dp_accounting
import numpy as np
from dp_accounting import pld, rdp
from scipy import optimize
from scipy.stats import norm

from accel.validate import require_choice, require_integer, require_real

__all__ = [
    "ACCOUNTANTS",
    "OPACUS_ORDERS",
    "any_order_epsilon",
    "any_order_sigma",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_sigma",
    "group_of_two",
    "opacus_epsilon",
    "poisson_epsilon",
    "poisson_sigma",
    "zcdp_epsilon",
    "zcdp_sigma",
]

ACCOUNTANTS = ("rdp", "pld")
OPACUS_ORDERS = tuple([1 + x / 10.0 for x in range(1, 100)] + [float(x) for x in range(12, 64)])


def _epsilon(value: float) -> float:
    return require_real("epsilon", value, 0, 1000, open_low=True, way_out="typical values lie between 0.1 and 10")


def _delta(value: float) -> float:
    return require_real(
        "delta", value, 0, 1, open_low=True, open_high=True, way_out="choose it well below 1/num_samples"
    )


def _sigma(value: float) -> float:
    return require_real("noise_multiplier", value, 0, open_low=True)


def _sensitivity(value: float) -> float:
    return require_real("sensitivity", value, 0, open_low=True)


def gaussian_sigma(epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    """Smallest noise std that makes one Gaussian mechanism (ε, δ)-DP: exact (Balle & Wang 2018)."""
    epsilon, delta, sensitivity = _epsilon(epsilon), _delta(delta), _sensitivity(sensitivity)
    return sensitivity * float(dp_accounting.get_sigma_gaussian(epsilon, delta))


def gaussian_epsilon(noise_multiplier: float, delta: float, sensitivity: float = 1.0) -> float:
    """Exact ε of one Gaussian mechanism with noise std ``noise_multiplier``; inverts ``gaussian_sigma``."""
    sigma, delta, sensitivity = _sigma(noise_multiplier), _delta(delta), _sensitivity(sensitivity)
    return float(dp_accounting.get_epsilon_gaussian(sigma / sensitivity, delta))


def gaussian_delta(noise_multiplier: float, epsilon: float, sensitivity: float = 1.0) -> float:
    """Exact δ of one Gaussian mechanism at ``epsilon`` ≥ 0 (Balle & Wang 2018, equation 6)."""
    mu = _sensitivity(sensitivity) / _sigma(noise_multiplier)
    epsilon = require_real("epsilon", epsilon, 0)
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu)))


def zcdp_epsilon(noise_multiplier: float, delta: float, sensitivity: float = 1.0) -> float:
    """Upper bound on ε from ρ = Δ²/2σ² zCDP alone: holds for discrete Gaussians on any grid, shifts in
    any order.

    Canonne, Kamath & Steinke 2020, Proposition 12: minimises over Rényi orders α. Costs 6–8 % of σ
    against the analytic Gaussian.
    """
    rho = (_sensitivity(sensitivity) / _sigma(noise_multiplier)) ** 2 / 2
    log_delta = math.log(_delta(delta))

    def bound(log_order: float) -> float:
        above = math.exp(log_order)  # α − 1
        order = 1 + above
        return order * rho + math.log(above / order) - (log_delta + math.log(order)) / above

    best = optimize.minimize_scalar(bound, bounds=(math.log(1e-6), math.log(1e6)), method="bounded")
    grid = np.linspace(math.log(1e-6), math.log(1e6), 400)
    return max(0.0, min(float(best.fun), min(map(bound, grid))))


def zcdp_sigma(epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    """Noise std that is enough for (ε, δ) by zCDP alone (an upper bound on the smallest one)."""
    epsilon, sensitivity = _epsilon(epsilon), _sensitivity(sensitivity)
    low = gaussian_sigma(epsilon, delta) / 4
    high = 2 * low
    while zcdp_epsilon(high, delta) > epsilon:
        low, high = high, 2 * high
    root = optimize.brentq(lambda s: zcdp_epsilon(s, delta) - epsilon, low, high, xtol=1e-10 * high)
    return sensitivity * float(root) * (1 + 1e-9)


def poisson_epsilon(
    noise_multiplier: float, delta: float, sampling_rate: float, steps: int, accountant: str = "rdp"
) -> float:
    """ε of ``steps`` Gaussian releases on independent Poisson samples; zero-out (or add/remove) neighbours.

    ``rdp``: as Opacus and the paper do (Opacus' orders); ``pld``: tighter. Both are upper bounds *for Poisson
    sampling*; for shuffled batches of fixed size they prove nothing (Chua et al. 2024).
    """
    sigma, delta, rate, steps = _poisson_arguments(noise_multiplier, delta, sampling_rate, steps)
    require_choice("accountant", accountant, ACCOUNTANTS)
    return _composed_epsilon(sigma, delta, rate, steps, accountant)


def poisson_sigma(epsilon: float, delta: float, sampling_rate: float, steps: int, accountant: str = "rdp") -> float:
    """Noise multiplier per step that makes ``poisson_epsilon`` at most ``epsilon`` (to 10^-6 relative)."""
    epsilon = _epsilon(epsilon)
    _, delta, rate, steps = _poisson_arguments(1.0, delta, sampling_rate, steps)
    require_choice("accountant", accountant, ACCOUNTANTS)
    return _calibrated_sigma(epsilon, delta, rate, steps, accountant)


def opacus_epsilon(noise_multiplier: float, delta: float, sampling_rate: float, steps: int) -> float:
    """The same RDP number computed by Opacus itself (imports torch; needs the extra ``vision``)."""
    from opacus.accountants.analysis import rdp as opacus_rdp

    sigma, delta, rate, steps = _poisson_arguments(noise_multiplier, delta, sampling_rate, steps)
    orders = list(OPACUS_ORDERS)
    curve = opacus_rdp.compute_rdp(q=rate, noise_multiplier=sigma, steps=steps, orders=orders)
    return float(opacus_rdp.get_privacy_spent(orders=orders, rdp=curve, delta=delta)[0])


def any_order_epsilon(noise_multiplier: float, delta: float, epochs: int) -> float:
    """ε when every record is used once per epoch, in any order that does not depend on data.

    ``epochs`` releases touch a record, each with sensitivity 1: one Gaussian of sensitivity √epochs. A
    proven upper bound for shuffled batches, which it treats as if the permutation were public (no
    amplification).
    """
    return gaussian_epsilon(noise_multiplier, delta, math.sqrt(require_integer("epochs", epochs, 1)))


def any_order_sigma(epsilon: float, delta: float, epochs: int) -> float:
    """Noise multiplier per step that makes ``any_order_epsilon`` equal ``epsilon``."""
    return gaussian_sigma(epsilon, delta, math.sqrt(require_integer("epochs", epochs, 1)))


def group_of_two(epsilon_of_delta: Callable[[float], float], delta: float) -> float:
    """Replace-one ε from the zero-out curve ε(δ), by group privacy (2ε, (1+e^ε)δ'): an upper bound.

    Tries δ' = δ/2, δ/4, ... δ/2^60 and takes the first that fits; infinite when none does.
    """
    _delta(delta)
    for halvings in range(1, 61):
        part = delta / 2.0**halvings
        epsilon = epsilon_of_delta(part)
        if epsilon < 500 and (1 + math.exp(epsilon)) * part <= delta:
            return 2 * epsilon
    return math.inf


def _poisson_arguments(sigma: float, delta: float, rate: float, steps: int) -> tuple[float, float, float, int]:
    rate = require_real(
        "sampling_rate",
        rate,
        0,
        1,
        open_low=True,
        way_out="it is batch_size / num_samples, at most the whole data",
    )
    return _sigma(sigma), _delta(delta), rate, require_integer("steps", steps, 1)


def _accountant(name: str) -> dp_accounting.PrivacyAccountant:
    relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL  # zero-out
    if name == "pld":
        return pld.PLDAccountant(relation)
    return rdp.RdpAccountant(OPACUS_ORDERS, relation)


def _event(sigma: float, rate: float, steps: int) -> dp_accounting.DpEvent:
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    return dp_accounting.SelfComposedDpEvent(step, steps)


@lru_cache(maxsize=64)
def _composed(sigma: float, rate: float, steps: int, name: str) -> dp_accounting.PrivacyAccountant:
    return _accountant(name).compose(_event(sigma, rate, steps))


def _composed_epsilon(sigma: float, delta: float, rate: float, steps: int, name: str) -> float:
    return float(_composed(sigma, rate, steps, name).get_epsilon(delta))


@lru_cache(maxsize=128)
def _calibrated_sigma(epsilon: float, delta: float, rate: float, steps: int, name: str) -> float:
    def excess(log_sigma: float) -> float:
        return _composed_epsilon(math.exp(log_sigma), delta, rate, steps, name) - epsilon

    low, high = math.log(0.3), math.log(2.0)
    while excess(high) > 0:
        low, high = high, high + 1
    while excess(low) < 0 and low > math.log(0.01):
        low, high = low - 0.5, low
    root = optimize.brentq(excess, low, high, xtol=1e-7)
    while excess(root) > 0:
        root += 2e-7
    return math.exp(root)
