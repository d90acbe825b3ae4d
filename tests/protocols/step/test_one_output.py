"""One output: no contribution is beyond γ, whatever the weights are and whatever rounds how; and it is the twin's."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import refmpc
from accel.reference import series as kernels
from protocols.methods import g_shuff
from protocols.plan.gl_plan import plan_layer_run
from protocols.plan.one_output_scales import FEWEST_FUNCTION_BITS, MOST_FUNCTION_BITS, loss_function
from protocols.plan.run_plan import plan_run
from protocols.plan.scales import EMBEDDING_BITS
from protocols.step.class_weights import row_weights, weighted_labels
from protocols.step.cost import step_cost
from protocols.step.one_output import multipliers, open_updates
from protocols.step.public_weights import Head, rounded_head, warn_of_the_range
from refmpc import Cost
from refmpc.mathematics.normalise import MANTISSA_BITS
from refmpc.mathematics.series import ANGLE_ERROR, TABLE_BITS, turns
from refmpc.primitives import dealing
from tests.not_none import not_none
from tests.protocols.conftest import lora_federation, small_federation
from tests.protocols.secure_runs import noise_of_the_servers, released, run_secure, small_training
from tests.protocols.step.agreement import assert_agrees
from tests.refmpc.harness import Secret, evaluate
from tests.refmpc.rounding import down, forced, forced_openings, up
from tests.refmpc.transcripts import Case, leaks, watch_streams
from vfl.losses import CEILING, WAVES, OneOutput, half_wave, relative_weights, weight_words
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


def exact_squares(rows):
    return [Fraction(sum(word * word for word in row), 1 << (2 * EMBEDDING_BITS)) for row in rows.tolist()]


async def held_multipliers(rows, labels, scales):
    return await multipliers(await refmpc.dot(rows, rows), labels, scales)


@pytest.mark.parametrize("choose", [None, up, down])
@pytest.mark.parametrize("weights", [(), (0.25, 5.0)])
@pytest.mark.parametrize("row_bound,clip_norm", [(1.0, 1.0), (40.0, 0.3), (0.2, 700.0)])
def test_a_rows_multiplier_is_never_beyond_what_its_norm_allows(row_bound, clip_norm, weights, choose, monkeypatch):
    changes = {"learning_rate": 0.01, "epsilon": 20.0, "batch_size": 16, "class_weights": weights}
    plan, _ = make_plan("binary", row_bound, clip_norm=clip_norm, **changes)
    scales, rows = plan.scales.one_output, integer_rows(plan, 3)
    labels = np.random.default_rng(1).integers(0, 2, len(rows))
    if choose is not None:
        forced(monkeypatch, choose)
        forced_openings(monkeypatch, choose is up)
    secrets = Secret(rows, EMBEDDING_BITS), Secret(labels.reshape(-1, 1))
    found = evaluate(lambda party, x, y: held_multipliers(x, y, scales), *secrets).opened
    assert found.scale == scales.multiplier_bits
    of_class = relative_weights(weights) / 256 if weights else np.ones(2)
    for square, label, word in zip(exact_squares(rows), labels, found.signed.tolist(), strict=True):
        value = Fraction(word, 1 << scales.multiplier_bits) * (1 - 2 * int(label))
        allowed = Fraction(clip_norm) * Fraction(of_class[label])
        assert value > 0 and value**2 * square <= allowed**2
        assert float(value) >= 0.9999 * float(allowed) / float(square) ** 0.5 - 2.0 ** (1 - scales.multiplier_bits)


def test_a_multiplier_holds_even_if_its_inverse_norm_is_exact_and_the_cut_rounds_up(monkeypatch):
    """``clip_factor`` may be exact, and a truncation may give the next larger number: its unit is taken off."""
    plan, _ = make_plan("regression", 0.2, clip_norm=0.7, learning_rate=0.01, epsilon=20.0, batch_size=16)
    forced(monkeypatch, up)

    async def exact(squares, *bounds):
        return refmpc.ArithmeticTensor.zeros(squares.party, squares.shape, MANTISSA_BITS) + 1.0

    monkeypatch.setattr(refmpc, "clip_factor", exact)
    rows = np.zeros((16, plan.width + 1), dtype=np.int64)
    rows[:, -1] = 1 << EMBEDDING_BITS  # [0 1]: of norm one exactly
    scales, secrets = plan.scales.one_output, (Secret(rows, EMBEDDING_BITS), Secret(np.zeros((16, 1)), EMBEDDING_BITS))
    found = evaluate(lambda party, x, y: held_multipliers(x, y, scales), *secrets).opened
    assert all(Fraction(word, 1 << scales.multiplier_bits) <= Fraction(0.7) for word in found.signed.tolist())


@pytest.mark.parametrize("wave", WAVES)
@pytest.mark.parametrize("task", CLASSES)
def test_the_function_of_a_step_is_at_most_one_for_every_word_and_every_rounding(task, wave):
    """In rationals: its values on 2^16 points of the circle from exact integers, its slope between them, its
    rounding."""
    points = 2**16
    for threshold in (2.0**-9, 0.1, 0.707, 0.999, 1.0, 3.7):
        for bits in (FEWEST_FUNCTION_BITS, 26, MOST_FUNCTION_BITS):
            function = loss_function(OneOutput(task, 1.0, threshold, 1.0), bits, wave)
            words = np.arange(points, dtype=np.uint64) << np.uint64(4)
            cosines, sines = kernels._harmonics(words, 20, function.odd, function.terms, turns())
            p, q = np.array(function.sine), np.array(function.cosine)
            scale = 1 << (function.coefficient_bits + TABLE_BITS)
            # below 2^63: coefficients are below 2^28 times 2^30 each, and half of them have the other sign
            value = ((sines * p) + (cosines * q)).astype(object).sum(axis=1) + (function.constant << TABLE_BITS)
            off = function.size * ANGLE_ERROR * 2
            slope = sum((Fraction(22, 7) * k * function._radius(i) for i, k in enumerate(function.turns)), Fraction(0))
            largest = Fraction(max(int(abs(value).max()), 0), scale) + off + slope / points + function.error
            assert largest <= 1, float(largest)
            assert task == "regression" or Fraction(min(value), scale) > -Fraction(1, 100)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("task,weights", [("binary", ()), ("binary", (0.5, 9.0)), ("regression", ())])
def test_contributions_are_at_most_gamma_exactly_whatever_the_outputs_are(task, weights, seed):
    """Any weights: outputs are words of the whole ring. In exact integers: ‖[h 1]‖²·u² ≤ γ²."""
    rng = np.random.default_rng(seed)
    row_bound, clip_norm = float(rng.choice([0.3, 1.0, 9.0])), float(rng.choice([0.2, 1.0, 3.0]))
    plan, _ = make_plan(task, row_bound, clip_norm=clip_norm, class_weights=weights, epsilon=20.0, batch_size=16)
    scales, rows = plan.scales.one_output, integer_rows(plan, seed, 1000)
    words = rng.integers(-(2**63), 2**63 - 1, 1000) >> rng.integers(0, 60, 1000)
    labels = rng.integers(0, 2, 1000) if task == "binary" else rng.integers(-(2**14), 2**14 + 1, 1000)
    wave = WAVES[seed % 3]

    async def program(party, x, z, y):
        factor = await held_multipliers(x, y, scales)
        return await open_updates(z, y, factor, scales, wave)

    label_bits = plan.label_bits
    secrets = Secret(rows, EMBEDDING_BITS), Secret(words.reshape(-1, 1), 30), Secret(labels.reshape(-1, 1), label_bits)
    found = evaluate(program, *secrets, seed=seed).opened
    assert found.scale == scales.update_bits
    largest = 0.0
    for square, u in zip(exact_squares(rows), found.signed[:, 0].tolist(), strict=True):
        ratio = square * Fraction(u, 1 << scales.update_bits) ** 2 / Fraction(clip_norm) ** 2
        assert ratio <= 1
        largest = max(largest, float(ratio))
    assert largest > 0.9
    # and it is the function of the twin
    z, y = words * 2.0**-30, labels * 2.0**-label_bits
    near = np.abs(z) < 40
    signs = 1 - 2 * y
    if task == "binary":
        b = scales.public.threshold
        wanted = CEILING * signs * half_wave(signs * z, wave, min(b, 1)) / max(b, 1)
    else:
        wanted = CEILING * (2 * half_wave(2 * (z - y) / scales.public.threshold, wave) - 1)
    if weights:
        wanted = wanted * relative_weights(weights)[labels] / 256
    norms = np.sqrt([float(square) for square in exact_squares(rows)])
    got = found.signed[:, 0] * 2.0**-scales.update_bits * norms / clip_norm
    assert np.abs(got - wanted)[near].max() < 0.02  # λ of nine bits, F on its grid
    assert near.sum() > 200


def test_the_wave_of_a_step_follows_the_weights(caplog):
    plan, _ = make_plan("binary", 1.0, weights="open")
    public, reach = plan.scales.one_output.public, plan.scales.layers[-1].reach
    warn_of_the_range.cache_clear()
    for size, period in ((1.0, 64), (23.9, 64), (24.5, 128), (55.0, 128), (57.0, 256), (1e6, 256)):
        weights = np.zeros((plan.width + 1, 1), dtype=np.int64)
        weights[0] = round(size / reach * 2**26)
        assert not_none(rounded_head(weights, 26, reach, public).wave)[0] == period
    assert (
        OneOutput("regression", 1.0, 0.5, 1.0).wave(4.9)[0] == 64
        and OneOutput("regression", 1.0, 0.5, 1.0).wave(5.1)[0] == 128
    )


def test_weights_of_rows_and_labels_are_local_and_exact():
    weights = (1.0, 0.125, 64.0, 3.3)
    labels = np.random.default_rng(0).integers(0, len(weights), 30)
    shared = np.eye(4, dtype=np.int64)[labels]

    def program(party, y):
        with party.phase("counted"):
            return refmpc.concatenate(
                [not_none(row_weights(y, weights)).reshape(-1, 1), weighted_labels(y, weights)], axis=1
            )

    result = evaluate(program, Secret(shared))
    words = weight_words(weights)
    assert (result.opened.signed[:, 0] == words[labels]).all()
    assert (result.opened.signed[:, 1:] == shared * words).all()
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


@pytest.mark.parametrize("task", CLASSES)
def test_a_step_with_one_output_has_three_rounds_or_four(task):
    """At the width of the paper: bytes with secret weights, and with open weights for each wave that they may ask
    for."""
    federation = small_federation(1280, (1000, 1000), CLASSES[task])
    training = small_training(task=task, batch_size=128, learning_rate=1.0)
    plan = plan_run("g_bmf", federation, training.with_(weights="open"))
    heads = [Head(np.zeros((2001, 1), dtype=np.int64), 16, 0.0, wave=wave) for wave in WAVES]
    assert [step_cost(plan, head) for head in heads] == [Cost(3, 85_242), Cost(3, 101_626), Cost(3, 167_162)]
    secret = {"binary": Cost(4, 132_408), "regression": Cost(4, 148_792)}[task]
    assert step_cost(plan_run("g_bmf", federation, training)) == secret
    weighted = plan_run("g_bmf", federation, training.with_(class_weights=(1.0, 3.0) if task == "binary" else ()))
    assert step_cost(weighted) == secret


def test_one_logit_takes_half_the_bytes_of_two():
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
def test_what_a_server_sees_of_a_step_is_independent_of_outputs_and_labels(task, monkeypatch):
    watch_streams(monkeypatch)
    monkeypatch.setattr(dealing, "FEWEST_ROWS", 10**9)
    plan, _ = make_plan(task, clip_norm=0.5)
    scales = plan.scales.one_output

    async def call(party, z, y, multiplier):
        column = (z.reshape(-1, 1).reinterpret(30), y.reshape(-1, 1).reinterpret(plan.label_bits))
        return await open_updates(*column, multiplier.reinterpret(scales.multiplier_bits), scales, WAVES[0])

    secrets = ((3 << 26, 1, 700), (-(40 << 26), 0, -55))
    assert leaks(Case(call, ("arithmetic",) * 3, secrets)) == []


@pytest.mark.parametrize("task", CLASSES)
def test_dummies_of_a_secret_order_stay_in_every_domain(tmp_path, task):
    """Rows of zeros fill the batches: ‖[h 1]‖ is 0 there, and their bound is γ, not infinite."""
    federation = small_federation(40, (4, 3), CLASSES[task])
    plan = plan_run("g_bmf", federation, small_training(task=task, order="secret", batch_size=40, weights="open"))
    assert plan.schedule.num_rows > plan.schedule.num_samples
    with pytest.warns(UserWarning, match="insecure_"):
        run_secure(plan, federation, tmp_path, insecure_check_ranges=True)
    zeros, scales = np.zeros((3, plan.width + 1), dtype=np.int64), not_none(plan.scales.one_output)
    secrets = Secret(zeros, EMBEDDING_BITS), Secret(zeros[:, :1], plan.label_bits)
    found = evaluate(lambda party, x, y: held_multipliers(x, y, scales), *secrets).opened
    assert (found.value > 0).all() and (found.value <= plan.training.clip_norm).all()
