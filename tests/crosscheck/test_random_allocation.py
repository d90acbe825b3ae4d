"""Random allocation against PLD-accounting (Feldman and Shenfeld), an independent implementation with bounds on both sides."""

from __future__ import annotations

import pytest

from vfl.dp import Padding
from vfl.dp.allocation import allocation_every_epoch, allocation_once
from vfl.dp.factorisation import factorise
from vfl.dp.monte_carlo import deltas, search_delta

pld = pytest.importorskip("PLD_accounting", reason="needs the extra crosscheck")


@pytest.mark.heavy  # they take minutes
@pytest.mark.parametrize(
    ("batches", "epochs", "sigma", "delta"), [(10, 1, 0.8, 1e-3), (10, 4, 1.0, 1e-3), (20, 3, 1.0, 1e-5)]
)
def test_independent_noise_lies_within_their_interval(batches, epochs, sigma, delta):
    """With all slots free but for the record's own, π is uniform: the case that they account."""
    allocation = allocation_every_epoch(Padding(1, batches, 3), epochs)
    low, high = pld.gaussian_allocation_epsilon_range(
        delta=delta, sigma=sigma, num_steps=batches, num_epochs=epochs, epsilon_accuracy=0.02
    )
    off = 0.05 if delta >= 1e-3 else 0.15  # of importance sampling
    assert search_delta(allocation, sigma, high) <= (1 + off) * delta
    assert search_delta(allocation, sigma, low) >= (1 - off) * delta
    if delta >= 1e-3:
        assert max(deltas(allocation, sigma, high, 1 << 18, 1)) <= 1.2 * delta
        assert max(deltas(allocation, sigma, low, 1 << 18, 1)) >= 0.8 * delta


@pytest.mark.heavy
def test_the_same_batches_in_every_epoch_are_one_allocation_of_a_larger_shift():
    """Ω = 1 and one order for E epochs: one epoch with σ/√E."""
    batches, epochs, delta = 10, 4, 1e-3
    allocation = allocation_once(Padding(1, batches, 3), epochs, factorise("identity", 40), -60)
    low, high = pld.gaussian_allocation_epsilon_range(
        delta=delta, sigma=0.8, num_steps=batches, num_epochs=1, epsilon_accuracy=0.02
    )
    assert search_delta(allocation, 0.8, high) <= 1.05 * delta
    assert search_delta(allocation, 0.8, low) >= 0.95 * delta
