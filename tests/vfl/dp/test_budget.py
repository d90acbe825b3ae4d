"""The ledger: exact composition, refusal, resuming, damage, concurrency."""

import dataclasses
import json
import math
import multiprocessing
import stat

import pytest

from accel.files import read_json
from vfl.dp import (
    BudgetExceededError,
    PrivacyBudget,
    calibrate_matrix_factorisation,
    factorise,
    gaussian_epsilon,
    labels_only_claim,
    shuffled_claim,
    subsampled_claim,
)
from vfl.dp.budget import composed_epsilon

F = factorise("bisr", 100, bands=5)


def claim(epsilon=1.0, delta=1e-6):
    return calibrate_matrix_factorisation(epsilon, delta, 1.0, F, 5, 20).claim


def test_gaussian_runs_compose_exactly(tmp_path):
    budget = PrivacyBudget(tmp_path / "ledger.json", 3.0, 1e-5)
    assert budget.spent_epsilon() == 0.0
    one = claim()
    assert budget.spend("first", one) == pytest.approx(gaussian_epsilon(one.noise_multiplier, 1e-5))
    both = budget.spend("second", one)
    assert both == pytest.approx(gaussian_epsilon(one.noise_multiplier / math.sqrt(2), 1e-5))
    assert both < 2 * gaussian_epsilon(one.noise_multiplier, 1e-5)  # tighter than basic composition
    assert PrivacyBudget(tmp_path / "ledger.json", 3.0, 1e-5).spent_epsilon() == pytest.approx(both)


def test_a_run_over_the_budget_is_refused_and_nothing_is_charged(tmp_path):
    path = tmp_path / "ledger.json"
    budget = PrivacyBudget(path, 1.2, 1e-5)
    budget.spend("first", claim())
    before = path.read_bytes()
    with pytest.raises(BudgetExceededError, match=r"run 'second' .* must stay within 1.2 \(1 earlier runs"):
        budget.spend("second", claim())
    assert path.read_bytes() == before
    budget.spend("small", claim(0.2))


def test_resuming_costs_nothing_but_must_keep_its_claim(tmp_path):
    budget = PrivacyBudget(tmp_path / "ledger.json", 1.2, 1e-5)
    spent = budget.spend("run", claim())
    assert budget.spend("run", claim()) == spent
    with pytest.raises(ValueError, match="a resumed run must keep its claim"):
        budget.spend("run", claim(0.5))
    assert len(budget.runs()) == 1


def test_unproven_claims_are_charged_what_is_proven():
    shuffled = shuffled_claim(1.0, 1e-6, 1.0, 1000, 100, 4)
    assert composed_epsilon([shuffled], 1e-6) == pytest.approx(gaussian_epsilon(0.5, 1e-6))
    assert composed_epsilon([shuffled], 1e-6) > shuffled.epsilon
    sampled = subsampled_claim(1.0, 1e-6, 1.0, 1000, 100, 40)
    assert composed_epsilon([sampled], 1e-6) == sampled.figures[0].epsilon
    assert composed_epsilon([sampled, sampled], 2e-6) == 2 * sampled.figures[0].epsilon  # basic
    assert composed_epsilon([sampled, claim()], 1e-6) == math.inf  # no δ left for the Gaussian


def test_distances_cost_delta_at_the_total_epsilon():
    base = claim()
    eta = 1e-8
    runs = [dataclasses.replace(base, statistical_distance=eta, epsilon_addition=0.01) for _ in range(3)]
    total = composed_epsilon(runs, 1e-5)
    left = 1e-5 - (1 + math.exp(total)) * 3 * eta
    assert total == pytest.approx(0.03 + gaussian_epsilon(base.noise_multiplier / math.sqrt(3), left), rel=1e-9)
    far = [dataclasses.replace(base, statistical_distance=1e-6)] * 3
    assert composed_epsilon(far, 1e-5) == math.inf


def test_different_neighbours_are_not_mixed(tmp_path):
    budget = PrivacyBudget(tmp_path / "ledger.json", 20.0, 1e-5)
    budget.spend("features", claim())
    with pytest.raises(ValueError, match=r"claim.neighbouring = .*keep a second budget file"):
        budget.spend("labels", labels_only_claim(claim()))


def test_the_file_is_private_and_damage_is_reported(tmp_path):
    path = tmp_path / "ledger.json"
    budget = PrivacyBudget(path, 3.0, 1e-5)
    budget.spend("run", claim())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    with pytest.raises(ValueError, match=r"total_epsilon, total_delta = \(9.0, 1e-05\): must be \(3.0, 1e-05\)"):
        PrivacyBudget(path, 9.0, 1e-5)
    content = read_json(path)
    path.write_text(path.read_text()[:100])
    with pytest.raises(ValueError, match="must be a privacy ledger"):
        budget.spend("again", claim(0.1))
    content["version"] = 7
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="version = 7"):
        budget.runs()


def test_a_crash_while_writing_leaves_the_old_ledger(tmp_path, monkeypatch):
    path = tmp_path / "ledger.json"
    budget = PrivacyBudget(path, 3.0, 1e-5)
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        budget.spend("run", claim())
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ledger.json", "ledger.json.lock"]


def _spend(path, name):
    try:
        PrivacyBudget(path, 2.6, 1e-5).spend(name, claim())
    except BudgetExceededError:
        return "refused"
    return "spent"


def test_two_processes_cannot_both_take_the_last_piece(tmp_path):
    path = tmp_path / "ledger.json"
    PrivacyBudget(path, 2.6, 1e-5)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        outcomes = pool.starmap(_spend, [(path, f"run {i}") for i in range(8)])
    runs = PrivacyBudget(path, 2.6, 1e-5).runs()
    assert outcomes.count("spent") == len(runs)
    assert composed_epsilon(list(runs.values()), 1e-5) <= 2.6
    assert "refused" in outcomes


def test_bad_totals_are_named(tmp_path):
    with pytest.raises(ValueError, match="total_epsilon = 0"):
        PrivacyBudget(tmp_path / "x", 0, 1e-5)
    with pytest.raises(ValueError, match=r"total_delta = 1.0"):
        PrivacyBudget(tmp_path / "x", 1, 1.0)
