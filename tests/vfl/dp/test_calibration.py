"""Calibration: inverses, published values, and the neighbouring relations."""

import math

import pytest
from scipy import integrate
from scipy.stats import norm

from vfl.dp import calibration as cal


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 2.0, 5.0, 8.0, 10.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_gaussian_sigma_and_epsilon_are_inverse(epsilon, delta):
    sigma = cal.gaussian_sigma(epsilon, delta)
    assert cal.gaussian_epsilon(sigma, delta) == pytest.approx(epsilon, rel=1e-9)
    assert cal.gaussian_delta(sigma, epsilon) == pytest.approx(delta, rel=1e-6)
    assert cal.gaussian_sigma(epsilon, delta, 3.0) == pytest.approx(3 * sigma)
    assert cal.gaussian_epsilon(3 * sigma, delta, 3.0) == pytest.approx(epsilon, rel=1e-9)


def test_gaussian_delta_is_the_hockey_stick_divergence():
    sigma, epsilon = 1.3, 0.7

    def excess(x):
        return max(0.0, norm.pdf(x, 1, sigma) - math.exp(epsilon) * norm.pdf(x, 0, sigma))

    start = epsilon * sigma**2 + 0.5
    divergence = integrate.quad(excess, start, 15, epsabs=1e-12)[0]
    assert cal.gaussian_delta(sigma, epsilon) == pytest.approx(divergence, rel=1e-6)


def test_zcdp_costs_six_to_eight_percent():
    """Proofs §6.4: ε = 1 needs 4.045 by zCDP against 3.731."""
    assert cal.gaussian_sigma(1, 1e-5) == pytest.approx(3.731, abs=5e-4)
    assert cal.zcdp_sigma(1, 1e-5) == pytest.approx(4.045, abs=5e-4)
    for epsilon in (0.5, 1, 2, 5, 10):
        sigma = cal.zcdp_sigma(epsilon, 1e-5)
        assert cal.zcdp_epsilon(sigma, 1e-5) == pytest.approx(epsilon, rel=1e-6)
        assert 1.05 < sigma / cal.gaussian_sigma(epsilon, 1e-5) < 1.1


def test_zcdp_matches_the_rdp_accountant():
    import dp_accounting
    from dp_accounting import rdp

    orders = [1 + 2.0 ** (k / 8) for k in range(-40, 60)]
    accountant = rdp.RdpAccountant(orders).compose(dp_accounting.ZCDpEvent(1 / (2 * 2.5**2)))
    theirs = accountant.get_epsilon(1e-6)
    assert theirs * 0.995 <= cal.zcdp_epsilon(2.5, 1e-6) <= theirs + 1e-9


def test_poisson_figures_of_the_references():
    """Proofs §9.2: n = 50,000, B = 512, 20 epochs, δ = 1e-5."""
    rate, steps = 512 / 50_000, 1960
    for epsilon, by_rdp, by_pld in ((1, 2.006, 1.865), (2, 1.229, 1.160), (8, 0.675, 0.646)):
        assert cal.poisson_sigma(epsilon, 1e-5, rate, steps) == pytest.approx(by_rdp, rel=2e-3)
        assert cal.poisson_epsilon(by_pld, 1e-5, rate, steps, "pld") == pytest.approx(epsilon, rel=5e-3)
    sigma = cal.poisson_sigma(2, 1e-5, rate, steps)
    assert 2 - 1e-5 < cal.poisson_epsilon(sigma, 1e-5, rate, steps) <= 2
    assert cal.any_order_epsilon(sigma, 1e-5, 20) == pytest.approx(21.5, abs=0.1)
    assert cal.any_order_sigma(1, 1e-5, 20) == pytest.approx(16.68, abs=0.01)


@pytest.mark.heavy
def test_poisson_sigma_by_pld():
    assert cal.poisson_sigma(1, 1e-5, 512 / 50_000, 1960, "pld") == pytest.approx(1.865, rel=2e-3)


def test_sampling_everything_is_no_amplification():
    """At rate 1 the subsampled bound must agree with composed Gaussians, up to the looseness of RDP."""
    exact = cal.any_order_epsilon(8.0, 1e-5, 50)
    assert exact <= cal.poisson_epsilon(8.0, 1e-5, 1.0, 50) <= 1.1 * exact
    assert cal.poisson_epsilon(8.0, 1e-5, 1.0, 50, "pld") == pytest.approx(exact, rel=1e-2)


def test_group_of_two_covers_twice_the_sensitivity():
    """For one Gaussian the exact replace-one ε is known: group privacy must lie above, not absurdly."""
    exact = cal.gaussian_epsilon(4.0, 1e-5, 2.0)
    bound = cal.group_of_two(lambda delta: cal.gaussian_epsilon(4.0, delta), 1e-5)
    assert exact < bound < 1.6 * exact
    assert cal.group_of_two(lambda delta: 600.0, 1e-5) == math.inf


def test_opacus_gives_the_same_number():
    pytest.importorskip("opacus")
    ours = cal.poisson_epsilon(1.1, 1e-5, 128 / 50_000, 7800)
    assert cal.opacus_epsilon(1.1, 1e-5, 128 / 50_000, 7800) == pytest.approx(ours, rel=1e-6)


@pytest.mark.parametrize(
    "call,match",
    [
        (lambda: cal.gaussian_sigma(0, 1e-5), r"epsilon = 0: must be a finite number in \(0, 1000\]"),
        (lambda: cal.gaussian_sigma(-1, 1e-5), r"epsilon = -1"),
        (lambda: cal.gaussian_sigma(1, 1.0), r"delta = 1.0: must be a finite number in \(0, 1\); choose it"),
        (lambda: cal.gaussian_sigma(1, 0), r"delta = 0"),
        (lambda: cal.gaussian_sigma(1, 1e-5, 0), r"sensitivity = 0"),
        (lambda: cal.gaussian_epsilon(0, 1e-5), r"noise_multiplier = 0"),
        (
            lambda: cal.poisson_sigma(1, 1e-5, 1.5, 10),
            r"sampling_rate = 1.5: .* it is batch_size / num_samples",
        ),
        (lambda: cal.poisson_epsilon(1, 1e-5, 0.1, 0), r"steps = 0"),
        (
            lambda: cal.poisson_epsilon(1, 1e-5, 0.1, 5, "moments"),
            r"accountant = 'moments': must be one of 'rdp'",
        ),
        (lambda: cal.any_order_epsilon(1, 1e-5, 0), r"epochs = 0"),
    ],
)
def test_bad_input_is_named(call, match):
    with pytest.raises(ValueError, match=match):
        call()
