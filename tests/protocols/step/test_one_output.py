"""One output: the clip is a clamp that never lets a contribution through, whatever rounds how; and it is the twin's."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import refmpc
from protocols.methods import g_shuff
from protocols.plan.gl_plan import plan_layer_run
from protocols.plan.run_plan import plan_run
from protocols.plan.scales import EMBEDDING_BITS, UPDATE_BITS
from protocols.step.class_weights import row_weights, weighted_labels
from protocols.step.cost import step_cost
from protocols.step.one_output import clamped_updates, clip_bounds
from refmpc import Cost
from refmpc.mathematics.normalise import MANTISSA_BITS
from tests.not_none import not_none
from tests.protocols.conftest import lora_federation, small_federation
from tests.protocols.secure_runs import noise_of_the_servers, released, run_secure, small_training
from tests.protocols.step.agreement import assert_agrees
from tests.refmpc.harness import Secret, evaluate
from tests.refmpc.rounding import down, forced, forced_openings, up
from vfl.losses import weight_words
from vfl.twins import train_g_bmf, train_g_shuff

CLASSES = {"binary": 2, "regression": 1}


def make_plan(task, row_bound=1.0, **changes):
    federation = small_federation(96, (5, 4), CLASSES[task], row_bound=row_bound)
    return plan_run("g_bmf", federation, small_training(task=task, **changes)), federation


def integer_rows(plan, seed, count=64):
    """[h 1] at 14 bits, of every length up to the bound."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, plan.width))
    longest = plan.scales.row_bound - np.sqrt(plan.width) * 2.0**-EMBEDDING_BITS
    rows *= longest * rng.choice([1.0, 1.0, 0.3, 0.0], size=(count, 1)) / np.linalg.norm(rows, axis=1, keepdims=True)
    words = np.trunc(rows * 2.0**EMBEDDING_BITS).astype(np.int64)
    return np.concatenate([words, np.full((count, 1), 1 << EMBEDDING_BITS)], axis=1)


@pytest.mark.parametrize("choose", [None, up, down])
@pytest.mark.parametrize("row_bound,clip_norm", [(1.0, 1.0), (40.0, 0.3), (0.2, 700.0)])
def test_a_rows_bound_is_never_above_what_its_norm_allows(row_bound, clip_norm, choose, monkeypatch):
    plan, _ = make_plan("binary", row_bound, clip_norm=clip_norm, learning_rate=0.01, epsilon=20.0, batch_size=16)
    rows = integer_rows(plan, 3)
    if choose is not None:
        forced(monkeypatch, choose)
        forced_openings(monkeypatch, choose is up)
    found = evaluate(lambda party, x: clip_bounds(x, plan.scales.one_output), Secret(rows, EMBEDDING_BITS)).opened
    assert found.scale == UPDATE_BITS
    for words, bound in zip(rows.tolist(), found.signed.tolist(), strict=True):
        square = Fraction(sum(word * word for word in words), 1 << (2 * EMBEDDING_BITS))
        held = Fraction(bound, 1 << UPDATE_BITS)
        assert held > 0 and held**2 * square <= Fraction(clip_norm) ** 2
        assert float(held) >= 0.999 * clip_norm / float(square) ** 0.5


def test_a_rows_bound_holds_even_if_its_inverse_norm_is_exact_and_the_cut_rounds_up(monkeypatch):
    """``clip_factor`` may be exact, and a truncation may give the next larger number: its unit is taken off."""
    plan, _ = make_plan("binary", 0.2, clip_norm=0.7, learning_rate=0.01, epsilon=20.0, batch_size=16)
    forced(monkeypatch, up)

    async def exact(squares, *bounds):
        return refmpc.ArithmeticTensor.zeros(squares.party, squares.shape, MANTISSA_BITS) + 1.0

    monkeypatch.setattr(refmpc, "clip_factor", exact)
    rows = np.zeros((16, plan.width + 1), dtype=np.int64)
    rows[:, -1] = 1 << EMBEDDING_BITS  # [0 1]: of norm one exactly
    found = evaluate(lambda party, x: clip_bounds(x, plan.scales.one_output), Secret(rows, EMBEDDING_BITS)).opened
    assert all(Fraction(bound, 1 << UPDATE_BITS) <= Fraction(0.7) for bound in found.signed.tolist())


@pytest.mark.parametrize("choose", [None, up, down])
@pytest.mark.parametrize("task,weights", [("binary", ()), ("binary", (0.5, 9.0)), ("regression", ())])
def test_errors_are_clamped_exactly_and_right(task, weights, choose, monkeypatch):
    plan, _ = make_plan(task, 4.0, clip_norm=0.7, class_weights=weights)
    scales, rng, count = plan.scales.one_output, np.random.default_rng(5), 60
    bound = plan.scales.logit_bound
    z = np.concatenate([[bound, -bound, 0.0], rng.normal(size=count - 3) * rng.choice([0.3, 3, 30], count - 3)])
    z = np.clip(z, -bound, bound)
    words = np.trunc(z * 2.0**30).astype(np.int64).reshape(-1, 1)
    b = rng.integers(1 << 20, int(0.7 * 2**UPDATE_BITS), count)
    labels = rng.integers(0, 2, count) if task == "binary" else np.trunc(rng.uniform(-1, 1, count) * 2.0**14)
    output = words if task == "regression" else np.concatenate([words, np.zeros_like(words)], axis=1)
    if choose is not None:
        forced(monkeypatch, choose)
        forced_openings(monkeypatch, choose is up)

    async def program(party, output, labels, b):
        return await clamped_updates(output, labels, b, scales, bound, weights)

    secrets = (
        Secret(output, 30),
        Secret(labels.astype(np.int64).reshape(-1, 1), plan.label_bits),
        Secret(b, UPDATE_BITS),
    )
    found = evaluate(program, *secrets).opened
    assert found.scale == UPDATE_BITS and (np.abs(found.signed[:, 0]) <= b).all()
    if task == "regression":
        delta = z - labels * 2.0**-14
    else:
        own = np.array(weights or (1.0, 1.0))[labels]
        delta = own * (1 / (1 + np.exp(-z)) - labels)
    want = np.clip(delta, -b * 2.0**-UPDATE_BITS, b * 2.0**-UPDATE_BITS)
    assert np.abs(found.signed[:, 0] * 2.0**-UPDATE_BITS - want).max() <= max(1.0, *weights, 0.0) * 2.0**-14


@pytest.mark.parametrize("shape", [1, 4])
def test_weights_of_rows_and_labels_are_local_and_exact(shape):
    weights = (0.5, 2.25) if shape == 1 else (1.0, 0.125, 64.0, 3.3)
    labels = np.random.default_rng(0).integers(0, len(weights), 30)
    shared = labels.reshape(-1, 1) if shape == 1 else np.eye(shape, dtype=np.int64)[labels]

    def program(party, y):
        with party.phase("counted"):
            return refmpc.concatenate(
                [not_none(row_weights(y, weights)).reshape(-1, 1), weighted_labels(y, weights)], axis=1
            )

    result = evaluate(program, Secret(shared))
    words = weight_words(weights)
    assert (result.opened.signed[:, 0] == words[labels]).all()
    assert (result.opened.signed[:, 1:] == shared * words[-shape:]).all()
    assert result.run.ledgers[0].phases["counted"].rounds == 0


@pytest.mark.parametrize("weights", ["open", "secret"])
@pytest.mark.parametrize(
    "task,changes",
    [
        ("binary", {"momentum": 0.5}),
        ("binary", {"class_weights": (1.0, 4.0), "clip_norm": 0.6, "epochs": 1}),
        ("regression", {"clip_norm": 0.2}),
        ("regression", {"weight_decay": 0.99}),
    ],
)
def test_g_bmf_with_one_output_is_its_twin(tmp_path, task, changes, weights):
    plan, federation = make_plan(task, **{"epochs": 2, "learning_rate": 0.3, "weights": weights, **changes})
    result = run_secure(plan, federation, tmp_path)
    noise = noise_of_the_servers(plan, tmp_path)
    twin = train_g_bmf(federation, plan.training, noise=noise)
    assert released(result)[0].shape == (plan.width + 1, 1)
    assert_agrees(plan, federation, released(result), noise, twin)
    for name in plan.client_names:
        assert (result.client_outputs[name][0] == released(result)[0]).all()


@pytest.mark.parametrize("weights", ["open", "secret"])
def test_class_weights_of_many_classes_are_the_twins(tmp_path, weights):
    federation = small_federation(64, (5, 4), 3)
    training = small_training(class_weights=(0.5, 1.0, 6.0), weights=weights, clip_norm=0.8)
    plan = plan_run("g_bmf", federation, training)
    result = run_secure(plan, federation, tmp_path)
    noise = noise_of_the_servers(plan, tmp_path)
    twin = train_g_bmf(federation, training, noise=noise)
    assert_agrees(plan, federation, released(result), noise, twin)
    other = train_g_bmf(federation, training.with_(class_weights=()), noise=noise)
    assert np.linalg.norm(twin.model.layers[0] - other.model.layers[0]) > 0.01  # they do something


@pytest.mark.parametrize("task", CLASSES)
def test_g_shuff_with_one_output_is_its_twin(tmp_path, task):
    federation = small_federation(32, (4, 3), CLASSES[task])
    plan = plan_run("g_shuff", federation, small_training(task=task, epochs=2))
    result = run_secure(plan, federation, tmp_path, g_shuff.servers)
    noise = noise_of_the_servers(plan, tmp_path)
    assert_agrees(plan, federation, released(result), noise, train_g_shuff(federation, plan.training, noise=noise))


def test_no_operation_leaves_its_domain(tmp_path):
    for task in CLASSES:
        plan, federation = make_plan(task, epsilon=0.5, class_weights=(3.0, 1.0) if task == "binary" else ())
        with pytest.warns(UserWarning, match="insecure_"):
            run_secure(plan, federation, tmp_path / task, insecure_check_ranges=True)


COSTS = {  # with secret weights, with open weights
    "binary": (Cost(17, 35895), Cost(16, 34730)),
    "binary weighted": (Cost(17, 36823), Cost(16, 35658)),
    "regression": (Cost(8, 5257), Cost(5, 4132)),
}


@pytest.mark.parametrize("name", COSTS)
def test_a_step_with_one_output_costs_no_more_than_before(name):
    task = name.split()[0]
    for weights, cost in zip(("secret", "open"), COSTS[name], strict=True):
        changes = {"class_weights": (1.0, 3.0)} if "weighted" in name else {}
        plan, _ = make_plan(task, weights=weights, learning_rate=0.1, **changes)
        assert step_cost(plan) == cost


def test_one_logit_takes_half_the_bytes_of_two():
    """At the width of the paper: what does not shrink is the sigmoid, of one row as before."""
    federation = small_federation(64, (1000, 1000), 2)
    training = small_training(weights="open", learning_rate=0.1)
    two, one = (step_cost(plan_run("g_bmf", federation, training.with_(task=t))) for t in ("classification", "binary"))
    assert one.bytes < 0.55 * two.bytes and one.rounds < two.rounds


REFUSED: dict[str, tuple[int, dict[str, Any]]] = {
    "task = 'binary': must be classification: there are 3": (3, {"task": "binary"}),
    "task = 'regression': must be classification: the labels are 2": (2, {"task": "regression"}),
    "task = 'classification': must be regression": (1, {}),
    r"class_weights = \(1.0, 2.0\): must be 3, one for each class": (3, {"class_weights": (1.0, 2.0)}),
    "task = 'binary': must be 'classification' with hidden": (2, {"task": "binary", "hidden": (4,)}),
    "with hidden layers or explicit": (2, {"class_weights": (1.0, 2.0), "gradients": "explicit"}),
    "clip_norm = 1e-05: must be": (1, {"task": "regression", "clip_norm": 1e-5}),
    "learning_rate = .*: must be small enough": (1, {"task": "regression", "learning_rate": 1e8}),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_does_not_fit_is_refused_in_a_sentence(sentence):
    classes, changes = REFUSED[sentence]
    with pytest.raises(ValueError, match=sentence):
        plan_run("g_bmf", small_federation(64, (3, 2), classes), small_training(**changes))


def test_more_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="class_weights = .*: must be empty in a regression"):
        small_training(task="regression", class_weights=(1.0,))
    with pytest.raises(ValueError, match="class_weights = 1000.0: must be"):
        small_training(class_weights=(1.0, 1000.0))
    with pytest.raises(ValueError, match="task = 'binary': must be 'classification' in GL-BMF"):
        plan_layer_run(lora_federation(64, (3, 2), ((2,), (2,)), 2), small_training(task="binary"))


def test_the_claim_says_what_is_taken_as_public():
    plan, _ = make_plan("binary", class_weights=(1.0, 2.0))
    assert any("class weights are public" in line for line in plan.claim.public)
    plan, _ = make_plan("regression")
    assert any("range of the target is public" in line for line in plan.claim.public)
    assert plan.scales.clip_rounding == 0.0


@pytest.mark.parametrize("task", CLASSES)
def test_dummies_of_a_secret_order_stay_in_every_domain(tmp_path, task):
    """Rows of zeros fill the batches: ‖[h 1]‖ is 0 there, and their bound is γ, not infinite."""
    federation = small_federation(40, (4, 3), CLASSES[task])
    plan = plan_run("g_bmf", federation, small_training(task=task, order="secret", batch_size=40, weights="open"))
    assert plan.schedule.num_rows > plan.schedule.num_samples
    with pytest.warns(UserWarning, match="insecure_"):
        run_secure(plan, federation, tmp_path, insecure_check_ranges=True)
    zeros, scales = np.zeros((3, plan.width + 1), dtype=np.int64), not_none(plan.scales.one_output)
    bounds = evaluate(lambda party, x: clip_bounds(x, scales), Secret(zeros, EMBEDDING_BITS)).opened
    assert (bounds.value > 0).all() and (bounds.value <= plan.training.clip_norm).all()
