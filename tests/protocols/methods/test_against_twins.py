"""The secure protocols compute what their plaintext twins compute, given the same noise and the same order."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.methods import g_bmf, g_shuff
from protocols.plan.run_plan import plan_run
from protocols.plan.scales import PROBABILITY_BITS, RELEASE_BITS
from protocols.step.cost import step_cost
from tests.protocols.conftest import small_federation
from tests.protocols.secure_runs import noise_of_the_servers, released, run_secure, small_training, weight_bound
from vfl.twins import train_g_bmf, train_g_shuff


@pytest.mark.parametrize("gradients", ["factored", "explicit"])
@pytest.mark.parametrize("momentum", [0.0, 0.9], ids=["setting 1", "setting 2"])
def test_g_bmf_opens_the_twins_weights(federation, tmp_path, momentum, gradients):
    plan = plan_run("g_bmf", federation, small_training(momentum=momentum, gradients=gradients))
    result = run_secure(plan, federation, tmp_path)
    noise = noise_of_the_servers(plan, tmp_path)
    twin = train_g_bmf(federation, plan.training, noise=noise)
    bound = weight_bound(plan)
    difference = np.abs(released(result)[0] - twin.model.layers[0]).max()
    assert difference <= bound
    assert bound < 0.25 * np.abs(twin.model.layers[0]).max()  # the bound says something


@settings(max_examples=5)
@given(
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    classes=st.integers(2, 5),
    batch=st.sampled_from([8, 24]),
    clip=st.sampled_from([0.3, 1.0]),
)
def test_g_bmf_agrees_for_random_shapes(tmp_path_factory, widths, classes, batch, clip):
    directory = tmp_path_factory.mktemp("run")
    federation = small_federation(2 * batch + 3, tuple(widths), classes)
    plan = plan_run("g_bmf", federation, small_training(batch_size=batch, clip_norm=clip, epsilon=4.0))
    result = run_secure(plan, federation, directory)
    twin = train_g_bmf(federation, plan.training, noise=noise_of_the_servers(plan, directory))
    assert np.abs(released(result)[0] - twin.model.layers[0]).max() <= weight_bound(plan)


def test_g_shuff_of_one_batch_an_epoch_is_its_twin_in_any_order(tmp_path):
    """With one batch the secret order does not matter, so the twin needs none."""
    federation = small_federation(32, (4, 3), 3)
    plan = plan_run("g_shuff", federation, small_training(epochs=2))
    result = run_secure(plan, federation, tmp_path, g_shuff.servers)
    twin = train_g_shuff(federation, plan.training, noise=noise_of_the_servers(plan, tmp_path))
    assert np.abs(released(result)[0] - twin.model.layers[0]).max() <= weight_bound(plan)


def test_the_ledger_holds_exactly_the_declared_releases(federation, tmp_path):
    for name, servers in (("g_bmf", g_bmf.servers), ("g_shuff", g_shuff.servers)):
        plan = plan_run(name, federation, small_training())
        result = run_secure(plan, federation, tmp_path / name, servers)
        for ledger in result.ledgers:
            *faults, to_first, to_second = ledger.releases
            model = [to_first, to_second]
            assert [(fault.name, fault.receiver, fault.elements) for fault in faults] == [
                (f"fault in the upload of {client}", "all servers", 1) for client in plan.client_names
            ]
            assert [(r.name, r.receiver) for r in model] == [
                ("global model", "client 'client 1'"),
                ("global model", "client 'client 2'"),
            ]
            assert {r.elements for r in model} == {plan.parameters}
            assert all("differentially private" in r.claim or "NOT a proven bound" in r.claim for r in model)


@pytest.mark.parametrize("gradients", ["factored", "explicit"])
@pytest.mark.parametrize("weight_decay", [1.0, 0.999])
def test_a_dry_run_of_a_step_counts_what_it_costs(federation, tmp_path, gradients, weight_decay):
    plan = plan_run("g_bmf", federation, small_training(gradients=gradients, weight_decay=weight_decay))
    result = run_secure(plan, federation, tmp_path)
    steps = plan.schedule.num_steps
    counted = step_cost(plan)
    assert result.ledgers[0].phases["training"].rounds == steps * counted.rounds
    assert sum(ledger.phases["training"].bytes_sent for ledger in result.ledgers) == steps * counted.bytes


def test_no_operation_leaves_its_domain(federation, tmp_path):
    """The debug mode opens every operand and raises at the first that leaves its domain."""
    plan = plan_run("g_bmf", federation, small_training(epsilon=0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_secure(plan, federation, tmp_path, insecure_check_ranges=True)


def test_the_contribution_of_every_sample_is_clipped(tmp_path):
    """Rows of the largest norm and a tiny clip norm: without noise the sum of B gradients has norm at most B·γ."""
    federation = small_federation(32, (6, 6), 4, row_bound=8.0)
    plan = plan_run("g_bmf", federation, small_training(clip_norm=0.05, learning_rate=0.1))
    result = run_secure(plan, federation, tmp_path)
    noise = noise_of_the_servers(plan, tmp_path)[0].reshape(plan.width + 1, plan.classes)
    rate = plan.scales.learning_rate_used(plan.training.learning_rate)
    total = -released(result)[0] * plan.training.batch_size / rate - noise
    rounding = np.sqrt(plan.parameters) * 2.0**-RELEASE_BITS
    assert np.linalg.norm(total) <= plan.training.batch_size * plan.training.clip_norm + rounding
    assert np.linalg.norm(total) >= 0.1 * plan.training.batch_size * plan.training.clip_norm  # it did train


def test_a_clip_norm_above_every_gradient_clips_nothing(federation, tmp_path):
    plan = plan_run("g_bmf", federation, small_training(clip_norm=20.0))
    assert plan.scales.norms.ratio < 0.25
    result = run_secure(plan, federation, tmp_path)
    twin = train_g_bmf(federation, plan.training, noise=noise_of_the_servers(plan, tmp_path))
    assert np.abs(released(result)[0] - twin.model.layers[0]).max() <= weight_bound(plan)
    assert twin.clipped_share == 0


def test_the_ranges_of_independent_noise_count_momentum(federation):
    """v = Σ β^k y_{t−k}, so the noise of one step reaches W up to 1/(1−β) times."""
    training = small_training(momentum=0.9, epochs=20, learning_rate=0.1, accounting="any-order", batch_size=96)
    plan = plan_run("g_shuff", federation, training)
    weights, velocity = np.zeros(20), np.zeros(20)  # response of W to the noise of each step
    for step in range(20):
        velocity *= 0.9
        velocity[step] += 1.0
        weights += velocity
    deviation = 0.1 / 96 * plan.noise.outsider_std * np.linalg.norm(weights)
    drift = 0.1 * 20 / (1 - 0.9)
    assert plan.scales.logit_bound >= np.hypot(plan.scales.row_bound, 1) * (drift + 12 * deviation) * (1 - 1e-6)


def test_scales_of_the_paper_fit_and_absurd_ones_are_refused(federation):
    assert PROBABILITY_BITS == 18
    with pytest.raises(ValueError, match="learning_rate = 1000000000.0: must be small enough"):
        plan_run("g_bmf", federation, small_training(learning_rate=1e9))
    with pytest.raises(ValueError, match="clip_norm = 1e-06: must be at least"):
        plan_run("g_bmf", federation, small_training(clip_norm=1e-6, learning_rate=0.5))
    with pytest.raises(ValueError, match="learning_rate = 1e-12: must be at least"):
        plan_run("g_bmf", federation, small_training(learning_rate=1e-12))
