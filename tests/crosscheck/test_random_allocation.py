"""Random allocation against two independent implementations: PLD-accounting (Feldman and Shenfeld), whose interval is
proven on both sides, and jax_privacy's samplers of balls in bins, for correlated noise.

With all slots free but for the record's own, batches are equally likely: the case that both of them account.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from vfl.dp import Padding
from vfl.dp.factorisation import factorise
from vfl.dp.random_allocation.allocation import Allocation, allocation_every_epoch, allocation_once
from vfl.dp.random_allocation.convolution import convolved_deltas
from vfl.dp.random_allocation.monte_carlo import CHANCES, confidence, deltas


def require_within(allocation: Allocation, sigma: float, delta: float, interval: tuple[float, float]) -> None:
    """Their true ε lies between two proven bounds, so the true δ at the lower one is at least ``delta`` and ours, a
    bound from above, too; at the upper one it is at most ``delta``, and ours hardly more. Neither needs a tolerance."""
    upper, lower = interval  # in this order
    assert lower < upper < 1.01 * lower
    assert max(convolved_deltas(allocation, sigma, lower, delta)) >= delta
    assert max(convolved_deltas(allocation, sigma, upper, delta)) <= delta


@pytest.mark.heavy  # they take up to minutes, we a second
@pytest.mark.parametrize(
    ("batches", "epochs", "sigma", "delta"), [(10, 1, 0.8, 1e-3), (10, 4, 1.0, 1e-3), (20, 3, 1.0, 1e-5)]
)
def test_a_batch_drawn_in_every_epoch_lies_within_their_interval(batches, epochs, sigma, delta):
    pld = pytest.importorskip("PLD_accounting", reason="needs the extra crosscheck")
    allocation = allocation_every_epoch(Padding(1, batches, 3), epochs)
    interval = pld.gaussian_allocation_epsilon_range(
        delta=delta, sigma=sigma, num_steps=batches, num_epochs=epochs, epsilon_accuracy=0.02
    )
    require_within(allocation, sigma, delta, interval)


@pytest.mark.heavy
def test_the_same_batches_in_every_epoch_are_one_allocation_of_a_larger_shift():
    """Ω = 1 and one order for E epochs: one epoch with σ/√E."""
    pld = pytest.importorskip("PLD_accounting", reason="needs the extra crosscheck")
    batches, epochs, delta = 10, 4, 1e-3
    allocation = allocation_once(Padding(1, batches, 3), epochs, factorise("identity", 40), -60)
    interval = pld.gaussian_allocation_epsilon_range(
        delta=delta, sigma=0.8, num_steps=batches, num_epochs=1, epsilon_accuracy=0.02
    )
    require_within(allocation, 0.8, delta, interval)


@pytest.mark.parametrize(("kind", "bands"), [("bisr", 3), ("bisr", 6), ("bsr", 6), ("identity", 1)])
def test_correlated_noise_has_the_privacy_losses_of_jax_privacy(kind, bands):
    """The same mean of (1 − e^(ε−ℓ))₊ in both directions, from samples of the whole sequence instead of the Gram
    matrix."""
    selection = pytest.importorskip("jax_privacy.batch_selection", reason="needs the extra crosscheck")
    from jax_privacy.experimental.monte_carlo import sample_generation

    batches, epochs, epsilon, ours, theirs = 6, 3, 1.5, 1 << 17, 4_000
    factorisation = factorise(kind, epochs * batches, bands=bands)
    allocation = allocation_once(Padding(1, batches, 3), epochs, factorisation, -60)
    sigma = 0.8
    found = deltas(allocation, sigma, epsilon, ours, 3)
    strategy = selection.BallsInBinsSampling(iterations=epochs * batches, cycle_length=batches)
    for mean, present in zip(found, (True, False), strict=True):
        random = np.random.default_rng(5)
        losses = [
            sample_generation.get_privacy_loss_sample(
                strategy,
                sigma * allocation.scale,
                factorisation.strategy_coefficients(),
                random,
                positive_sample=present,
            )[0]
            for _ in range(theirs)
        ]
        values = -np.expm1(np.minimum(0.0, epsilon - np.array(losses)))
        assert abs(values.mean() - mean) < 5 * math.sqrt(values.var() * (1 / theirs + 1 / ours))
    assert max(found) > 0.01  # so that dozens of samples count, and many of ours


@pytest.mark.parametrize("delta", [1e-3, 1e-5])
def test_the_certificate_is_no_bolder_than_jax_privacys(delta):
    """For one attempt both state τβ + exp(−N·KL) at its minimum; ours counts ``CHANCES`` of them."""
    calculation = pytest.importorskip(
        "jax_privacy.experimental.monte_carlo.delta_calculation", reason="needs the extra crosscheck"
    )
    samples, base = math.ceil(110 / delta), 0.45 * delta
    theirs, (ours, misled) = calculation.get_overall_delta(samples, base), confidence(base, samples)
    assert theirs <= ours <= theirs * 1.2
    assert ours - misled + misled / CHANCES <= theirs * 1.2
