"""The audit: it must leave the claim standing, refute it with half the noise, and see planted faults."""

import json

import numpy as np
import pytest
from scipy.stats import norm

from accel.gaussian import GridGaussian
from vfl.dp.audit import audit, epsilon_lower_bound, main
from vfl.dp.factorisation import factorise

KEY = bytes(range(32))


@pytest.mark.parametrize("kind,bands", [("bisr", 6), ("bsr", 6), ("identity", None), ("bisr", 12)])
def test_both_directions(kind, bands):
    f = factorise(kind, 24, momentum=0.9, bands=bands)
    kept, refuted = (
        audit(f, 3, 8, epsilon=1.0, delta=1e-3, trials=120_000, noise_scale=scale, key=KEY) for scale in (1.0, 0.5)
    )
    assert kept.within_claim and 0.5 < kept.epsilon_lower_bound <= 1.0
    assert not refuted.within_claim and refuted.epsilon_lower_bound > 1.5


@pytest.mark.heavy
@pytest.mark.parametrize("epsilon,delta", [(0.5, 1e-3), (2.0, 1e-4), (5.0, 1e-5)])
def test_both_directions_at_a_million_trials(epsilon, delta):
    f = factorise("bisr", 24, bands=6)
    kept, refuted = (
        audit(f, 3, 8, epsilon=epsilon, delta=delta, trials=1_000_000, noise_scale=scale, key=KEY)
        for scale in (1.0, 0.5)
    )
    assert 0.6 * epsilon < kept.epsilon_lower_bound <= epsilon < refuted.epsilon_lower_bound


def test_a_sensitivity_of_the_wrong_formula_is_refuted():
    """√κ‖c‖ for p > b: the claim would be wrong, and the audit shows it on the running noise."""
    f = factorise("bsr", 24, momentum=0.9, bands=24)
    true = f.sensitivity(12, 2)
    naive = np.sqrt(12) * np.linalg.norm(f.strategy_coefficients())
    assert naive < 0.5 * true
    result = audit(f, 12, 2, epsilon=1.0, delta=1e-3, trials=60_000, noise_scale=naive / true, key=KEY)
    assert not result.within_claim


def test_a_server_that_forgets_its_noise_is_refuted(monkeypatch):
    """Noise of one honest server instead of two: 1/√2 of the std."""
    sample = GridGaussian.sample
    calls = {"count": 0}

    def every_other(self, stream, count):
        calls["count"] += 1
        return sample(self, stream, count) * (calls["count"] % 2)

    monkeypatch.setattr(GridGaussian, "sample", every_other)
    f = factorise("bisr", 24, bands=6)
    result = audit(f, 3, 8, epsilon=1.0, delta=1e-3, trials=200_000, key=KEY)
    assert not result.within_claim


def test_the_lower_bound_lies_below_the_truth_and_near_it():
    """Coverage on known Gaussians: below the truth, and near it with many trials."""
    rng = np.random.default_rng(5)
    mu, delta = 1.0, 1e-3
    thresholds = np.linspace(-4, 5, 2000)
    truth = np.max(np.log(np.maximum(norm.sf(thresholds - mu) - delta, 1e-300) / norm.sf(thresholds)))
    bound, false_positive, true_positive = epsilon_lower_bound(
        rng.normal(size=400_000), rng.normal(mu, size=400_000), delta
    )
    assert 0.7 * truth < bound < truth
    assert 0 < false_positive < true_positive < 1
    assert epsilon_lower_bound(rng.normal(size=5000), rng.normal(size=5000), delta)[0] < 0.5


def test_the_command_prints_json_and_its_exit_status(capsys):
    assert main(["--trials", "60000", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["as_wanted"] and len(output["results"]) == 2
    assert output["results"][0]["epsilon_lower_bound"] < 1 < output["results"][1]["epsilon_lower_bound"]
    assert main(["--epsilon", "-1", "--trials", "60000"]) == 2
    assert "epsilon = -1.0" in capsys.readouterr().out


def test_bad_input_is_named():
    f = factorise("bisr", 24, bands=6)
    with pytest.raises(ValueError, match="trials = 10"):
        audit(f, 3, 8, epsilon=1.0, delta=1e-3, trials=10)
    with pytest.raises(ValueError, match="noise_scale = 0"):
        audit(f, 3, 8, epsilon=1.0, delta=1e-3, noise_scale=0)
