"""People with several rows: ε and δ of all of them together, against brute force and dp_accounting (proofs §9.3)."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement, product

import dp_accounting
import numpy as np
import pytest
from scipy.linalg import toeplitz

from accel.errors import InvalidArgument
from protocols.federation.public_plan import plan_for
from protocols.federation.read import load
from protocols.federation.template import federation_text
from protocols.plan.run_plan import PublicClient, PublicFederation, plan_run
from protocols.run.options import parse_options
from vfl.dp import calibration, for_one_row
from vfl.run_mechanism import calibrate_run, choose_factorisation, choose_schedule
from vfl.training import TrainingConfig


def training(**changes) -> TrainingConfig:
    return TrainingConfig(epochs=2, batch_size=4, learning_rate=0.5, weights="open").with_(**changes)


def strategy(taps: np.ndarray, steps: int) -> np.ndarray:
    column = np.zeros(steps)
    column[: len(taps)] = taps
    return np.asarray(np.linalg.inv(toeplitz(column, np.zeros(steps))))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", ["bisr", "bsr", "toeplitz", "identity"])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_rows_anywhere_move_the_releases_no_further_than_the_claim_says(kind, momentum, rows):
    """Every choice of batches and signs; all in one batch is the worst, and exactly ``rows`` times one row where that
    is exact."""
    config = training(factorisation=kind, momentum=momentum, rows_per_person=rows)
    schedule = choose_schedule("g_bmf", config, 12)
    factorisation = choose_factorisation("g_bmf", config, schedule)
    noise = calibrate_run("g_bmf", config, schedule, factorisation)
    omega, batches = strategy(factorisation.noising_taps, schedule.num_steps), schedule.num_batches
    found = []
    for places in combinations_with_replacement(range(batches), rows):
        for signs in product((1.0, -1.0), repeat=rows * schedule.epochs):
            stream = np.zeros(schedule.num_steps)
            for row, place in enumerate(places):
                stream[place::batches] += signs[row * schedule.epochs : (row + 1) * schedule.epochs]
            found.append(float(np.linalg.norm(omega @ stream)))
    largest = max(found) * config.clip_norm
    assert largest <= noise.sensitivity * (1 + 1e-9)
    if factorisation.sensitivity_report(schedule.epochs, batches).exact:
        assert largest >= noise.sensitivity * (1 - 1e-6)
    exact = dp_accounting.get_epsilon_gaussian(noise.target_std / largest, config.delta)
    assert exact <= noise.claim.epsilon <= config.epsilon
    assert noise.claim.rows_per_person == rows and (rows == 1 or f"up to {rows} rows" in noise.claim.headline())


def test_dividing_epsilon_forgets_delta():
    """What used to be advised: ε/10 at the same δ. Together ten rows are then not (3, 10^-5)."""
    std = calibration.gaussian_sigma(0.3, 1e-5)
    assert dp_accounting.get_epsilon_gaussian(std / 10, 1e-5) == pytest.approx(3.83, abs=0.01)
    assert calibration.gaussian_delta(std / 10, 3.0) == pytest.approx(3.5e-4, rel=0.02)
    federation = PublicFederation((PublicClient("a", 2), PublicClient("b", 2)), 12, 2, 1.0, ())
    plan = plan_run("g_bmf", federation, training(rows_per_person=10, factorisation="identity"))
    moved = 10 * plan.training.clip_norm * math.sqrt(plan.schedule.epochs)
    assert dp_accounting.get_epsilon_gaussian(plan.noise.target_std / moved, 1e-5) <= 3.0
    assert plan.fingerprint != plan_run("g_bmf", federation, training(factorisation="identity")).fingerprint


@pytest.mark.parametrize("rows", [1, 2, 10, 40])
@pytest.mark.parametrize("epsilon, delta", [(0.2, 1e-6), (3.0, 1e-5), (8.0, 1e-7)])
def test_what_one_row_gets_adds_up_to_what_was_asked_for(rows, epsilon, delta):
    """Row by row, and for a Gaussian, whose truth is known, never less than that."""
    one, part = for_one_row(epsilon, delta, rows)
    together = 0.0, 0.0
    for _ in range(rows):  # P_0 <= e^ε P_i + δ and P_i <= e^ε' P_{i+1} + δ'
        together = together[0] + one, together[1] + math.exp(together[0]) * part
    assert together == pytest.approx((epsilon, delta))
    sigma = calibration.gaussian_sigma(one, part)
    assert calibration.gaussian_delta(sigma / rows, epsilon) <= delta * (1 + 1e-9)


@pytest.mark.parametrize("protocol, changes", [("g_bmf", {"order": "secret"}), ("g_shuff", {})])
def test_a_secret_order_is_certified_for_one_row_and_claimed_for_all(protocol, changes):
    federation = PublicFederation((PublicClient("a", 2), PublicClient("b", 2)), 64, 2, 1.0, ())
    changes |= {"factorisation": "identity", "batch_size": 8}
    plan = plan_run(protocol, federation, training(rows_per_person=3, delta=1e-4, **changes))
    one, part = for_one_row(3.0, 1e-4, 3)
    single = plan_run(protocol, federation, training(epsilon=one, delta=part, **changes))
    assert plan.noise.target_std == pytest.approx(
        single.noise.target_std, rel=0.03
    )  # set aside for arithmetic: other parts
    assert plan.noise.noise_multiplier == pytest.approx(plan.noise.target_std / plan.noise.sensitivity)
    assert plan.noise.sensitivity == pytest.approx(3 * single.noise.sensitivity, rel=1e-6)
    (known,) = plan.claim.figures
    steps = math.sqrt(plan.schedule.epochs) if protocol == "g_shuff" else 1.0
    exact = dp_accounting.get_epsilon_gaussian(plan.noise.noise_multiplier / steps, 1e-4)
    assert known.epsilon == pytest.approx(exact, rel=1e-3)
    assert "up to 3 rows" in plan.claim.neighbouring and "group privacy" in dict(plan.claim.sources)["epsilon"]


def test_every_door_asks_for_people(tmp_path):
    options = parse_options("g_bmf", None, ["--rows-per-person", "3"])
    assert options.training.rows_per_person == 3
    text = federation_text(
        "f", [("localhost", 9000 + i) for i in range(3)], [("a", 2, "localhost:1"), ("b", 2, "localhost:2")], 2
    )
    path = tmp_path / "federation.toml"
    for rows in (1, 3):
        path.write_text(text.replace("rows_per_person = 1 ", f"rows_per_person = {rows} "))
        claim = plan_for(load(path, pinned=False), 4000).claim
        assert claim.rows_per_person == rows and claim.sensitivity > 0
    with pytest.raises(InvalidArgument, match="rows_per_person = 2: must be 1 with accounting = 'paper'"):
        training(rows_per_person=2, accounting="paper")
    with pytest.raises(InvalidArgument, match="rows_per_person = 0: must be an integer from 1 to 1000"):
        training(rows_per_person=0)
