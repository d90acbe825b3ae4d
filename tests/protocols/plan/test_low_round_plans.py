"""Which plans take the 18-round step, at which scales, and that the others still train as they did."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from protocols.plan import run_plan
from protocols.plan.low_round_scales import ERROR_SQUARE, with_low_round
from protocols.plan.run_plan import plan_run
from protocols.plan.scales import GRADIENT_BITS, RELEASE_BITS
from protocols.step.cost import step_cost
from tests.protocols.conftest import small_federation
from tests.protocols.secure_runs import noise_of_the_servers, released, run_secure, small_training
from tests.protocols.step.agreement import twin_and_bound
from vfl.run_mechanism import calibrate_run


def plan(protocol="g_bmf", row_bound=1.0, **changes):
    federation = small_federation(64, (5, 4), 4, row_bound=row_bound)
    return plan_run(protocol, federation, small_training(**changes)), federation


@pytest.mark.parametrize("weights", ["secret", "open"])
@pytest.mark.parametrize("protocol", ["g_bmf", "g_shuff"])
def test_one_layer_takes_the_short_step_and_its_clip_leaves_no_slack(protocol, weights):
    found, _ = plan(protocol, weights=weights, accounting="any-order")
    scales = found.scales
    assert scales.low_round is not None
    assert scales.gradient_bits == scales.low_round.gradient_bits == GRADIENT_BITS + scales.noise_shift
    assert scales.truncated_bits == scales.gradient_bits - RELEASE_BITS
    assert scales.clip_rounding == 0.0 and dict(found.noise.claim.slack)["clip rounding"] == 0.0
    assert scales.norm_bits == scales.low_round.norm_bits


@pytest.mark.parametrize("weights", ["secret", "open"])
def test_the_claim_is_about_the_scales_that_run(monkeypatch, weights):
    slacks = []

    def watched(*arguments):
        slacks.append(arguments[-1])
        return calibrate_run(*arguments)

    monkeypatch.setattr(run_plan, "calibrate_run", watched)
    found, _ = plan(weights=weights, momentum=0.5)
    last = slacks[-1]
    assert (last.noise_shift, last.truncated_bits) == (found.scales.noise_shift, found.scales.truncated_bits)
    assert last.noise_shift > 0 and last.clip_slack == 0.0
    assert last.momentum == (0.0 if weights == "open" else 0.5)


@pytest.mark.parametrize("changes", [{"gradients": "explicit"}, {"hidden": (4, 3), "learning_rate": 0.1}])
def test_other_steps_keep_theirs(changes):
    found, _ = plan(**changes)
    assert found.scales.low_round is None and found.scales.hidden_chain is None
    assert found.scales.gradient_bits == GRADIENT_BITS


def test_one_hidden_layer_has_a_short_step_of_its_own():
    scales = plan(hidden=(4,), learning_rate=0.1, weights="secret")[0].scales
    assert scales.low_round is None and scales.hidden_chain is not None
    assert scales.gradient_bits == scales.hidden_chain.gradient_bits == GRADIENT_BITS + scales.noise_shift


@pytest.mark.parametrize("row_bound, clip_norm", [(0.1, 5.0), (1.0, 1.0), (30.0, 1.0), (300.0, 1.5), (3000.0, 4.0)])
def test_q_stays_below_its_bound_and_the_ring(row_bound, clip_norm):
    found, _ = plan(row_bound=row_bound, clip_norm=clip_norm, learning_rate=1e-4)
    low = found.scales.low_round
    assert low is not None
    longest = (found.scales.layers[0].reach / clip_norm) ** 2
    assert found.scales.norms.largest >= longest
    assert low.clip_bound >= ERROR_SQUARE * found.scales.norms.largest
    assert low.q_bits + math.ceil(math.log2(low.clip_bound)) <= 61


def test_momentum_and_noise_take_bits_from_the_gradient():
    bits = []
    for clip_norm, momentum, weights in [
        (4.0, 0.0, "secret"),
        (16.0, 0.0, "secret"),
        (16.0, 0.9, "open"),
        (16.0, 0.9, "secret"),
        (120.0, 0.9, "secret"),
    ]:
        found, _ = plan(clip_norm=clip_norm, momentum=momentum, weights=weights, row_bound=200.0, learning_rate=2e-5)
        in_sum = momentum if weights == "secret" else 0.0
        std = found.noise.outsider_std * found.factorisation.velocity_norm(in_sum)
        reached = 32 * clip_norm / (1 - in_sum) + 12 * std
        assert reached < 2.0 ** (62 - found.scales.gradient_bits)
        bits.append(found.scales.gradient_bits)
    assert bits[0] > bits[1] == bits[2] > bits[3] > bits[4] == GRADIENT_BITS, bits


@pytest.mark.parametrize("weights", ["secret", "open"])
def test_a_run_without_room_keeps_the_longer_step_and_trains(weights, tmp_path):
    found, federation = plan(clip_norm=1100.0, row_bound=1000.0, learning_rate=2e-5, weights=weights)
    assert found.scales.low_round is None and found.scales.clip_rounding > 0
    short, _ = plan(weights=weights)
    assert step_cost(found).rounds > step_cost(short).rounds
    result = run_secure(found, federation, tmp_path)
    layers, gaps = twin_and_bound(found, federation, noise_of_the_servers(found, tmp_path))
    for layer, ours, gap in zip(layers, released(result), gaps, strict=True):
        assert np.linalg.norm(ours - layer) <= gap


def test_a_clip_factor_that_would_lose_too_much_keeps_the_longer_step():
    found, _ = plan(clip_norm=1.5, row_bound=300.0, learning_rate=1e-4)
    assert found.scales.low_round is not None
    plain = replace(found.scales, low_round=None)
    narrow = with_low_round(plain, found.training, found.schedule.batch_size, noise_std=1300.0, momentum=0.0)
    assert narrow.low_round is None
