"""MLP global models on shares: the twin's weights within a derived bound, the clip in the worst corners, costs,
resume."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refmpc
from protocols.methods import g_shuff
from protocols.plan.run_plan import Plan, plan_run
from protocols.plan.scales import EMBEDDING_BITS, RELEASE_BITS
from protocols.run.data import make_federation
from protocols.run.options import RunOptions, parse_options
from protocols.run.report import estimate
from protocols.step.cost import step_cost
from protocols.step.secret_step import SharedRows, Weights, gradient_step, squared_norms
from refmpc import ArithmeticTensor
from tests.not_none import not_none
from tests.protocols.conftest import small_federation
from tests.protocols.secure_runs import noise_of_the_servers, released, run_secure, small_training
from tests.protocols.server.crashes import run_until_crash
from tests.protocols.step.agreement import assert_agrees, twin_and_bound
from vfl.gradients import GlobalModel, clipped_gradient, with_ones
from vfl.twins import train_g_bmf, train_g_shuff


@pytest.mark.parametrize(
    ("hidden", "momentum", "weight_decay"), [((6,), 0.0, 1.0), ((6,), 0.9, 0.999), ((5, 4), 0.0, 1.0)]
)
def test_g_bmf_opens_the_twins_layers(federation, tmp_path, hidden, momentum, weight_decay):
    training = small_training(hidden=hidden, momentum=momentum, weight_decay=weight_decay, learning_rate=0.25)
    plan = plan_run("g_bmf", federation, training)
    result = run_secure(plan, federation, tmp_path)
    noise = noise_of_the_servers(plan, tmp_path)
    twin = train_g_bmf(federation, training, noise=noise, norm_limit=plan.scales.norm_limit)
    assert_agrees(plan, federation, released(result), noise, twin)
    for ledger in result.ledgers:
        assert [(r.name, r.receiver, r.elements) for r in ledger.releases] == [
            ("fault in the upload of client 1", "all servers", 1),
            ("fault in the upload of client 2", "all servers", 1),
            ("global model", "client 'client 1'", plan.parameters),
            ("global model", "client 'client 2'", plan.parameters),
        ]


@settings(max_examples=4)
@given(
    widths=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    hidden=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    classes=st.integers(2, 5),
    clip=st.sampled_from([0.3, 1.0]),
)
def test_mlps_of_random_shapes_agree(tmp_path_factory, widths, hidden, classes, clip):
    directory = tmp_path_factory.mktemp("run")
    federation = small_federation(2 * 16 + 3, tuple(widths), classes)
    training = small_training(batch_size=16, clip_norm=clip, hidden=tuple(hidden), learning_rate=0.25, seed=classes)
    plan = plan_run("g_bmf", federation, training)
    result = run_secure(plan, federation, directory)
    noise = noise_of_the_servers(plan, directory)
    layers, gaps = twin_and_bound(plan, federation, noise)
    for layer, ours, gap in zip(layers, released(result), gaps, strict=True):
        assert np.linalg.norm(ours - layer) <= gap


def test_digits_agree_with_the_twin_after_some_steps(tmp_path):
    """Digits as the command trains them, but a few steps: a worst-case bound grows by a factor in each."""
    options = parse_options("g_bmf", None, ["--hidden", "12", "--epochs", "1", "--batch-size", "352"])
    federation = make_federation(options)
    plan = plan_run("g_bmf", federation, options.training)
    result = run_secure(plan, federation, tmp_path)
    noise = noise_of_the_servers(plan, tmp_path)
    twin = train_g_bmf(federation, options.training, noise=noise, norm_limit=plan.scales.norm_limit)
    assert_agrees(plan, federation, released(result), noise, twin)
    found = estimate(plan)
    # bytes depend on the bounds of each step's logits, which are public
    steps = plan.schedule.num_steps
    assert steps * found["bytes_per_step"] >= sum(ledger.phases["training"].bytes_sent for ledger in result.ledgers)
    assert steps * found["rounds_per_step"] == result.ledgers[0].phases["training"].rounds


def test_g_shuff_trains_an_mlp(tmp_path):
    federation = small_federation(32, (4, 3), 3)
    plan = plan_run("g_shuff", federation, small_training(epochs=2, hidden=(5,), learning_rate=0.25))
    result = run_secure(plan, federation, tmp_path, g_shuff.servers)
    noise = noise_of_the_servers(plan, tmp_path)
    twin = train_g_shuff(federation, plan.training, noise=noise, norm_limit=plan.scales.norm_limit)
    assert_agrees(plan, federation, released(result), noise, twin)


@pytest.mark.parametrize("crash_at", [3, 5])
def test_an_mlp_resumes_with_all_its_layers(federation, tmp_path, monkeypatch, crash_at):
    training = small_training(epochs=2, learning_rate=0.1, momentum=0.9, hidden=(5,))
    plan = plan_run("g_bmf", federation, training)
    run_until_crash(plan, federation, tmp_path, monkeypatch, crash_at)
    result = run_secure(plan, federation, tmp_path)
    noise = noise_of_the_servers(plan, tmp_path)
    twin = train_g_bmf(federation, training, noise=noise, norm_limit=plan.scales.norm_limit)
    assert_agrees(plan, federation, released(result), noise, twin)
    steps = plan.schedule.num_steps - crash_at // 2 * 2
    assert result.ledgers[0].phases["training"].rounds == steps * step_cost(plan).rounds


@pytest.mark.parametrize("hidden", [(6,), (6, 5, 4)])
@pytest.mark.parametrize("weight_decay", [1.0, 0.999])
def test_a_dry_run_of_an_mlp_step_counts_what_it_costs(federation, tmp_path, hidden, weight_decay):
    plan = plan_run("g_bmf", federation, small_training(hidden=hidden, weight_decay=weight_decay, learning_rate=0.1))
    result = run_secure(plan, federation, tmp_path)
    counted, steps = step_cost(plan), plan.schedule.num_steps
    assert result.ledgers[0].phases["training"].rounds == steps * counted.rounds
    assert sum(ledger.phases["training"].bytes_sent for ledger in result.ledgers) == steps * counted.bytes


def test_no_operation_of_an_mlp_leaves_its_domain(federation, tmp_path):
    plan = plan_run("g_bmf", federation, small_training(epsilon=0.5, hidden=(6, 5), learning_rate=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_secure(plan, federation, tmp_path, insecure_check_ranges=True)


# one step from any weights -----------------------------------------------------------------------


async def one_step(party, job):
    """The sum of clipped gradients of one batch, opened: weights and rows from outside, no noise."""
    plan, rows, labels, layers = job
    embeddings = await refmpc.input_from_party(party, 0, rows, rows.shape, EMBEDDING_BITS)
    one_hot = await refmpc.input_from_party(party, 0, np.eye(plan.classes)[labels], (len(rows), plan.classes), 0)
    norms = await squared_norms(embeddings, plan.scales)
    bits = plan.scales.weight_bits
    before = [
        Weights(await refmpc.input_from_party(party, 0, layer, layer.shape, bits), nothing(party, layer.shape))
        for layer in layers
    ]
    noise = np.zeros(plan.parameters, dtype=np.int64)
    after = await gradient_step(SharedRows(embeddings, one_hot, norms), before, noise, 1.0, plan.training, plan.scales)
    return [await refmpc.reveal(not_none(layer.velocity), release="test") for layer in after]


def nothing(party, shape) -> ArithmeticTensor:
    return ArithmeticTensor(party, np.zeros((2, *shape), dtype=np.uint64), RELEASE_BITS)


def summed_gradient(plan: Plan, rows: np.ndarray, labels: np.ndarray, layers: list[np.ndarray]) -> np.ndarray:
    result = refmpc.run(one_step, [(plan, rows, labels, layers)] * 3, releases={"test": "a test, no claim"})
    return np.concatenate([part.reshape(-1) for part in result.outputs[0]])


def plan_for_any_weights(hidden: tuple[int, ...], clip_norm: float, batch_size: int, row_bound: float) -> Plan:
    """A run so long that weights of norm 450, and its noise, are within its ranges."""
    federation = small_federation(3 * batch_size, (4, 3), 3, row_bound=row_bound)
    rate = 450 / (300 * clip_norm)
    training = small_training(
        epochs=100, batch_size=batch_size, hidden=hidden, clip_norm=clip_norm, learning_rate=rate, epsilon=20.0
    )
    return plan_run("g_bmf", federation, training)


@pytest.mark.parametrize("hidden", [(6,), (6, 5)])
@pytest.mark.parametrize(("clip_norm", "growth"), [(0.05, 0.5), (0.05, 2.0), (1.0, 2.0)])
def test_one_contribution_is_never_longer_than_the_clip_norm(hidden, clip_norm, growth):
    """Long rows and large weights: every gradient is clipped, and the sum of one is within γ + the slack of the
    claim."""
    plan = plan_for_any_weights(hidden, clip_norm, batch_size=1, row_bound=4.0)  # a sum is one sample's contribution
    rng = np.random.default_rng(len(hidden))
    slack = plan.scales.clip_rounding + np.sqrt(plan.parameters) * 2.0**-RELEASE_BITS
    reached = 0.0
    for _ in range(3):
        layers = [rng.normal(size=shape) * growth / np.sqrt(shape[0]) for shape in plan.layer_shapes]
        row: np.ndarray = rng.normal(size=(1, plan.width))
        row = with_ones(row / np.linalg.norm(row) * 3.99)
        label = np.array([int((GlobalModel(layers).forward(row)[1]).argmin())])  # as wrong as can be
        assert all(
            np.linalg.norm(own, 2) <= layer.weight_bound for own, layer in zip(layers, plan.scales.layers, strict=True)
        )
        total = summed_gradient(plan, row, label, layers)
        exact = clipped_gradient(GlobalModel(layers), row, label, clip_norm, norm_limit=plan.scales.norm_limit).total
        assert np.linalg.norm(total) <= clip_norm + slack
        assert np.linalg.norm(total - exact) <= 0.02 * clip_norm + slack
        reached = max(reached, float(np.linalg.norm(total)))
    assert reached >= 0.98 * clip_norm - slack  # it was the clip that held it


def test_a_sample_beyond_the_norm_limit_contributes_nothing_and_harms_nobody():
    """Activations of one sample, then errors of all, leave the limit by far: sums behind them wrap around the ring."""
    plan = plan_for_any_weights((6, 5), 1.0, batch_size=3, row_bound=1.0)
    limit = plan.scales.norm_limit
    assert limit is not None
    rng = np.random.default_rng(2)
    rows: np.ndarray = rng.normal(size=(3, 7)) * 0.2
    labels = np.array([0, 1, 2])
    rows[:, 0] = 0.0, 0.9, 0.0
    rows = with_ones(np.rint(rows * 2.0**EMBEDDING_BITS) * 2.0**-EMBEDDING_BITS)
    layers = [np.abs(rng.normal(size=shape)) * 0.3 for shape in plan.layer_shapes]

    def within_ranges(layers: list[np.ndarray]) -> bool:
        bounds = [layer.weight_bound for layer in plan.scales.layers]
        return all(np.linalg.norm(own, 2) <= bound for own, bound in zip(layers, bounds, strict=True))

    loud: list[np.ndarray] = [layer.copy() for layer in layers]
    loud[0][0] = 0.99 * plan.scales.layers[0].weight_bound / 6**0.5  # the second row, and no other, meets this
    assert within_ranges(loud) and np.linalg.norm(rows[1] @ loud[0]) > 2 * limit
    labels[1] = int(GlobalModel(loud).forward(rows)[1][1].argmin())  # as wrong as can be: a long gradient
    others = [0, 2]
    expected = clipped_gradient(GlobalModel(loud), rows[others], labels[others], 1.0).total
    assert np.linalg.norm(clipped_gradient(GlobalModel(loud), rows, labels, 1.0).total - expected) > 0.5
    assert np.linalg.norm(summed_gradient(plan, rows, labels, loud) - expected) <= 0.02
    loud = [
        layers[0],
        layers[1] * 1e-3,
        layers[2] * 0.9 * plan.scales.layers[2].weight_bound / np.linalg.norm(layers[2]),
    ]
    loud[1][-1], loud[2][-1] = 0.001, 0.0  # small activations, so that the softmax stays undecided
    assert within_ranges(loud)
    assert not clipped_gradient(GlobalModel(loud), rows, labels, 1.0, norm_limit=limit).total.any()
    assert np.linalg.norm(clipped_gradient(GlobalModel(loud), rows, labels, 1.0).total) > 0.5
    assert np.abs(summed_gradient(plan, rows, labels, loud)).max() <= 2.0**-RELEASE_BITS


# plan and command line ---------------------------------------------------------------------------


def test_the_start_is_public_the_twins_and_part_of_the_plan(federation):
    plans = [plan_run("g_bmf", federation, small_training(hidden=(5,), seed=seed)) for seed in (0, 1)]
    assert plans[0].fingerprint != plans[1].fingerprint
    twin = GlobalModel.initial(plans[0].width, plans[0].classes, (5,), seed=0)
    assert all((ours == theirs).all() for ours, theirs in zip(plans[0].start, twin.layers, strict=True))
    assert "starting weights are public" in plans[0].claim.paragraph()


def test_what_an_mlp_cannot_be_is_refused_in_a_sentence(federation, capsys):
    with pytest.raises(ValueError, match="gradients = 'explicit': must be 'factored' with hidden layers"):
        plan_run("g_bmf", federation, small_training(hidden=(5,), gradients="explicit"))
    with pytest.raises(ValueError, match="leave room for hidden norms up to 16"):
        plan_run("g_bmf", federation, small_training(hidden=(5, 5), learning_rate=1e5))
    with pytest.raises(SystemExit):
        parse_options("g_bmf", None, ["--hidden", "12,x"])
    assert "must be whole numbers separated by commas" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_options("g_bmf", None, ["--hidden", "0"])
    assert "hidden = 0: must be" in capsys.readouterr().err


def test_hidden_layers_on_the_command_line():
    options = parse_options("g_bmf", None, ["--hidden", "128,64"])
    assert options.training.hidden == (128, 64) and options.training.learning_rate == 0.5
    assert parse_options("g_bmf", None, []).training.learning_rate == 2.0
    assert RunOptions.from_dict(options.to_dict()) == options
    plan = plan_run("g_bmf", make_federation(options), options.training)
    found = estimate(plan)
    assert found["rounds_per_step"] == 18 and plan.layer_shapes == [(65, 128), (129, 64), (65, 10)]


def test_one_layer_pays_nothing_for_the_others():
    """B = 128, d = 2000, S = 10: no limit, no cut of ‖δ‖², 18 rounds and 1.5 MB; with open weights 17 and 1.1 MB."""
    federation = small_federation(256, (1000, 1000), 10)
    plan = plan_run("g_bmf", federation, small_training(batch_size=128))
    (layer,) = plan.scales.layers
    assert plan.scales.norm_limit is None and layer.square_bits == 2 * layer.error_bits
    found = estimate(plan)
    assert found["rounds_per_step"] == 18 and found["bytes_per_step"] < 1.55e6
    found = estimate(plan_run("g_bmf", federation, small_training(batch_size=128, weights="open")))
    assert found["rounds_per_step"] == 17 and found["bytes_per_step"] < 1.15e6
