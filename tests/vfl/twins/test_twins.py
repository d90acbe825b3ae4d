"""The twins: reproducible, equal to a few lines written out by hand, noise as planned, claims attached."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.not_none import not_none
from vfl.data.sets import load_data
from vfl.federation import build_federation
from vfl.gradients import GlobalModel, per_sample_gradients, with_ones
from vfl.local.client import LocalUpdate
from vfl.training import SETTINGS, TrainingConfig
from vfl.twins import (
    epoch_order,
    release_size,
    train_g_bmf,
    train_g_shuff,
    train_gl_bmf,
    train_gl_sub,
    train_ldp_g,
    train_ldp_gl,
    train_plain,
)
from vfl.twins.ldp import ldp_sigma, noised_rows, randomised_response
from vfl.twins.mechanisms import plan_matrix_factorisation
from vfl.twins.noise import filtered_noise

QUICK = TrainingConfig(epochs=3, batch_size=64, epsilon=8.0, accounting="any-order")


@pytest.fixture(scope="module")
def digits():
    return build_federation(load_data("digits"))


@pytest.fixture(scope="module")
def digits_lora():
    return build_federation(load_data("digits"), lora=True, update=LocalUpdate(learning_rate=0.1))


@pytest.fixture(scope="module")
def digits_estimated():
    update = LocalUpdate(kind="estimated", learning_rate=0.1)
    return build_federation(load_data("digits"), lora=True, update=update)


FROZEN = [train_plain, train_g_shuff, train_g_bmf, train_ldp_g]
ADAPTED = [train_gl_bmf, train_gl_sub, train_ldp_gl]


@pytest.mark.parametrize("train", FROZEN + ADAPTED, ids=lambda f: f.__name__)
def test_same_seed_same_model_and_other_seed_other_model(train, digits, digits_lora):
    federation = digits if train in FROZEN else digits_lora
    one, two = train(federation, QUICK), train(federation, QUICK)
    np.testing.assert_array_equal(one.model.flatten(), two.model.flatten())
    assert one.test_accuracy == two.test_accuracy
    if train is not train_plain:
        other = train(federation, QUICK.with_(seed=1))
        assert np.abs(other.model.flatten() - one.model.flatten()).max() > 1e-6
    json.dumps(one.summary())


@pytest.mark.parametrize("hidden", [(), (16,)])
def test_g_bmf_equals_the_algorithm_written_out(digits, hidden):
    """Momentum and weight decay as in the workload, batches in fixed order, clip, noise, 1/B."""
    config = QUICK.with_(epochs=1, momentum=0.9, weight_decay=0.99, hidden=hidden, learning_rate=0.3)
    result = train_g_bmf(digits, config)
    schedule = config.steps(digits.num_samples)
    plan = plan_matrix_factorisation(config, schedule)
    model = GlobalModel.initial(64, 10, hidden, seed=config.seed)
    theta, velocity = model.flatten(), 0.0
    draw = filtered_noise(plan.factorisation, theta.size, plan.std, config.seed)
    for step in range(schedule.num_steps):
        rows = schedule.rows(step)
        model.layers = model.unflatten(theta)
        g = per_sample_gradients(model, with_ones(digits.rows(rows)), digits.labels[rows])
        g = g / np.maximum(1, np.linalg.norm(g, axis=1, keepdims=True) / config.clip_norm)
        velocity = 0.9 * velocity + (g.sum(axis=0) + draw(step)) / config.batch_size
        theta = 0.99 * theta - config.learning_rate * velocity
    np.testing.assert_allclose(result.model.flatten(), theta, atol=1e-10)


def test_given_noise_replaces_the_seed(digits):
    size = 65 * 10
    zeros = np.zeros((66, size))
    without = train_g_bmf(digits, QUICK, noise=zeros)
    plain = train_plain(digits, QUICK, shuffle=False, clip=True)
    np.testing.assert_allclose(without.model.flatten(), plain.model.flatten(), atol=1e-12)
    table = np.random.default_rng(0).normal(size=(66, size))
    by_array = train_g_bmf(digits, QUICK, noise=table, num_steps=5)
    by_function = train_g_bmf(digits, QUICK, noise=lambda t: table[t], num_steps=5)
    np.testing.assert_array_equal(by_array.model.flatten(), by_function.model.flatten())
    assert by_array.num_steps == 5
    with pytest.raises(ValueError, match="noise"):
        train_g_bmf(digits, QUICK, noise=np.zeros((66, 3)))
    with pytest.raises(ValueError, match=r"noise\(0\)"):
        train_g_bmf(digits, QUICK, noise=lambda t: np.zeros(3))


def test_g_shuff_takes_given_permutations(digits):
    rows = QUICK.steps(digits.num_samples).num_samples
    orders = np.stack([epoch_order(0, e, rows) for e in range(3)])
    zero = np.zeros((66, 650))
    ours = train_g_shuff(digits, QUICK, noise=zero)
    given = train_g_shuff(digits, QUICK, noise=zero, orders=orders)
    called = train_g_shuff(digits, QUICK, noise=zero, orders=lambda e: orders[e])
    np.testing.assert_array_equal(ours.model.flatten(), given.model.flatten())
    np.testing.assert_array_equal(ours.model.flatten(), called.model.flatten())
    straight = train_g_shuff(digits, QUICK, noise=zero, orders=lambda e: np.arange(rows))
    fixed = train_g_bmf(digits, QUICK, noise=zero)
    np.testing.assert_allclose(straight.model.flatten(), fixed.model.flatten(), atol=1e-12)
    with pytest.raises(ValueError, match=r"orders\[0\]"):
        train_g_shuff(digits, QUICK, orders=lambda e: np.zeros(rows, dtype=int))


@pytest.mark.parametrize("train", [train_g_bmf, train_g_shuff])
def test_explicit_and_factored_runs_agree(digits, train):
    one = train(digits, QUICK.with_(epochs=1))
    two = train(digits, QUICK.with_(epochs=1, gradients="explicit"))
    np.testing.assert_allclose(one.model.flatten(), two.model.flatten(), atol=1e-10)


@pytest.mark.parametrize("update", ["released", "estimated"])
def test_explicit_and_factored_gl_bmf_agree(digits_lora, digits_estimated, update):
    federation = digits_lora if update == "released" else digits_estimated
    config = QUICK.with_(epochs=1)
    one = train_gl_bmf(federation, config, num_steps=6)
    two = train_gl_bmf(federation, config.with_(gradients="explicit"), num_steps=6)
    np.testing.assert_allclose(one.model.flatten(), two.model.flatten(), atol=1e-9)
    for a, b in zip(one.clients, two.clients, strict=True):
        np.testing.assert_allclose(not_none(a.lora).layers[0].up, not_none(b.lora).layers[0].up, atol=1e-9)
        assert np.abs(not_none(a.lora).layers[0].up).max() > 0


def test_gl_bmf_leaves_the_federation_alone_and_takes_noise(digits_lora):
    size = release_size(digits_lora, QUICK)
    assert size == 650 + 2 * (32 * 8 + 8 * 32)
    noise = np.random.default_rng(1).normal(size=(66, size)) * 0.1
    one = train_gl_bmf(digits_lora, QUICK, noise=noise)
    two = train_gl_bmf(digits_lora, QUICK, noise=noise)
    np.testing.assert_array_equal(one.model.flatten(), two.model.flatten())
    assert np.abs(digits_lora.clients[0].lora.layers[0].up).max() == 0


def test_float32_follows_float64(digits):
    noise = np.random.default_rng(2).normal(size=(66, 650)) * 2
    double = train_g_bmf(digits, QUICK, noise=noise).model.flatten()
    single = train_g_bmf(digits, QUICK.with_(dtype="float32"), noise=noise).model.flatten()
    assert single.dtype == np.float32
    assert np.abs(double - single).max() < 1e-4 * np.abs(double).max()


@pytest.mark.parametrize("setting", [1, 2])
def test_filtered_noise_has_the_planned_deviation_and_correlation(setting):
    config = TrainingConfig(epochs=4, batch_size=100).with_(**SETTINGS[setting])
    plan = plan_matrix_factorisation(config, config.steps(5000))
    steps, width = 200, 4000
    for dtype in ("float64", "float32"):
        draw = filtered_noise(plan.factorisation, width, plan.std, 3, dtype)
        rows = np.stack([draw(t) for t in range(steps)]).astype(np.float64)
        expected = np.array([plan.step_std(t) for t in range(steps)])
        assert np.abs(rows.std(axis=1) / expected - 1).max() < 0.06
        # Undo the filter: Ω̂ applied to the rows must give white noise again.
        c = plan.factorisation.strategy_coefficients(steps)
        omega = sum(np.diag(np.full(steps - k, c[k]), -k) for k in range(steps))
        white = omega @ rows / plan.std
        correlation = white @ white.T / width
        assert np.abs(correlation - np.eye(steps)).max() < 0.12


def test_noise_split_and_claims(digits):
    joint = not_none(train_g_bmf(digits, QUICK.with_(noise="joint"), num_steps=1).plan)
    spread = not_none(train_g_bmf(digits, QUICK, num_steps=1).plan)
    assert spread.std == pytest.approx(joint.std * 1.5**0.5)
    assert spread.claim.epsilon <= 8.0 * (1 + 1e-6)
    assert spread.claim.row_bound == 1.0 and any("stated range 0..16" in p for p in spread.claim.public)
    assert spread.std == pytest.approx(1.5**0.5 * spread.noise_multiplier * spread.sensitivity)
    shuffled = not_none(train_g_shuff(digits, QUICK.with_(accounting="paper"), num_steps=1).plan)
    assert not shuffled.claim.proven and any(f.proven and f.epsilon > 8 for f in shuffled.claim.figures)
    proven = not_none(train_g_shuff(digits, QUICK, num_steps=1).plan)
    assert proven.claim.proven and proven.std > 1.3 * shuffled.std


def test_estimated_updates_claim_labels_only(digits_lora, digits_estimated):
    assert not_none(train_gl_bmf(digits_lora, QUICK, num_steps=1).plan).claim.covers == "features and labels"
    estimated = train_gl_bmf(digits_estimated, QUICK, num_steps=3)
    plan = not_none(estimated.plan)
    assert plan.claim.covers == "labels only"
    log = estimated.clients[0].estimate_log
    assert [r.step for r in log] == [0, 1, 2]
    # λ is the variance of all the noise that is in the release, the 1.5 of `distributed` included.
    assert log[2].regularisation == pytest.approx((plan.step_std(2) / 64) ** 2)


def test_ldp_noise_is_calibrated(digits):
    """Measured noise on the released rows gives back (ε, δ) for all clients' releases together."""
    from vfl.dp import gaussian_epsilon

    config = QUICK.with_(epsilon=2.0)
    sigma = ldp_sigma(config, 2, 1)
    noise = noised_rows(digits, sigma, [0]) - digits.rows()
    std = noise.std()
    # Zero-out of one person: both clients' blocks vanish, a shift of at most √(R_1² + R_2²) = R.
    assert gaussian_epsilon(std / digits.row_bound, config.delta) == pytest.approx(2.0, rel=0.02)
    assert np.abs(np.corrcoef(noise[:, :32].ravel(), noise[:, 32:].ravel())[0, 1]) < 0.02
    assert ldp_sigma(config, 2, 9) == pytest.approx(3 * sigma)
    claim = not_none(train_ldp_g(digits, config).plan).claim
    assert claim.epsilon == pytest.approx(2.0, rel=1e-3)
    local = not_none(train_ldp_gl(build_federation(load_data("digits"), lora=True), config.with_(epochs=4)).plan)
    assert local.noise_multiplier == pytest.approx(2 * sigma)
    assert claim.proven and not local.claim.proven and local.claim.proven_epsilon is None


def test_ldp_gl_moves_the_rows_of_others(monkeypatch):
    """Same noise, one record's blocks replaced: the rows that LDP-GL sends of all others move, beyond what its claim
    counts; with frozen models (LDP-G) nobody else's row moves."""
    import vfl.twins.ldp as ldp

    data = load_data("digits")
    parts = []
    for part in data.train:
        changed = part.copy()
        changed[7] = part.reshape(len(part), -1).max(axis=0).reshape(part.shape[1:])
        parts.append(changed)
    config = QUICK.with_(epochs=4, epsilon=8.0, learning_rate=2.0)
    sent = []
    noised = ldp.noised_rows

    def watched(federation, sigma, seed, rows=slice(None)):
        found = noised(federation, sigma, seed, rows)
        sent.append(np.delete(found, 7, axis=0) if rows in (slice(None), config.steps(1438).rows(0)) else found)
        return found

    monkeypatch.setattr(ldp, "noised_rows", watched)
    moved = {}
    for train in (train_ldp_g, train_ldp_gl):
        runs = []
        for rows in (data.train, tuple(parts)):
            sent.clear()
            update = LocalUpdate("released", learning_rate=10000.0)
            federation = build_federation(replace(data, train=rows), lora=train is train_ldp_gl, update=update)
            result = train(federation, config)
            runs.append(np.concatenate(sent))
        moved[train] = np.linalg.norm(runs[0] - runs[1])
        claim = not_none(result.plan).claim
    allowed = 2 * federation.row_bound * np.sqrt(config.epochs)  # all that the record's own rows may move
    assert moved[train_ldp_g] == 0 and moved[train_ldp_gl] > allowed
    assert "OTHER rows" in claim.paragraph()


def test_randomised_response_keeps_labels_at_the_stated_rate():
    labels = np.arange(200_000) % 10
    noisy = randomised_response(labels, 10, 2.0, 0)
    assert (noisy == labels).mean() == pytest.approx(np.exp(2) / (np.exp(2) + 9), abs=0.01)
    wrong = noisy[(noisy != labels) & (labels == 0)]
    assert np.bincount(wrong, minlength=10)[1:].min() > 0.9 * len(wrong) / 9
    with pytest.raises(ValueError, match="label_epsilon"):
        randomised_response(labels, 10, 0.0, 0)


def test_digits_defaults_make_sense(digits):
    """The reference probe: 90 % at ε = 3, 92 % at ε = 8, 76 % at ε = 1 with exactly σ² of noise."""
    accuracy = {
        e: np.mean(
            [train_g_bmf(digits, TrainingConfig(epsilon=e, noise="joint", seed=s)).test_accuracy for s in range(3)]
        )
        for e in (1.0, 3.0, 8.0)
    }
    assert accuracy[1.0] > 0.70 and accuracy[3.0] > 0.88 and accuracy[8.0] > 0.90
    assert train_plain(digits, TrainingConfig()).test_accuracy > 0.93


def test_mlp_and_schedules_train(digits):
    config = QUICK.with_(epochs=10, hidden=(32,), learning_rate=1.5, schedule="cosine")
    assert train_plain(digits, config).test_accuracy > 0.85
    assert config.learning_rate_factor(0, 10) == 1.0
    assert config.with_(schedule="linear").learning_rate_factor(5, 10) == 0.5


def test_curve_and_notes(digits):
    result = train_g_bmf(digits, QUICK, evaluate_every=1)
    assert [e for e, _ in result.curve] == [1, 2, 3]
    assert result.curve[-1][1] == result.test_accuracy
    assert "dropped" in result.notes[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epsilon", 0.0),
        ("delta", 1.0),
        ("epochs", 0),
        ("batch_size", -1),
        ("learning_rate", float("nan")),
        ("momentum", 1.0),
        ("weight_decay", 0.0),
        ("factorisation", "svd"),
        ("noise", "none"),
        ("accounting", "hope"),
        ("dtype", "float16"),
        ("schedule", "step"),
        ("hidden", (0,)),
    ],
)
def test_bad_options_name_themselves(field, value):
    with pytest.raises(ValueError, match=field):
        TrainingConfig(**{field: value})


def test_runs_that_cannot_work_are_refused(digits):
    with pytest.raises(ValueError, match="batch_size = 5000"):
        train_g_bmf(digits, QUICK.with_(batch_size=5000))
    with pytest.raises(ValueError, match="lora"):
        train_gl_bmf(digits, QUICK)
    with pytest.raises(ValueError, match="local_training"):
        train_plain(digits, QUICK, local_training="lora")
