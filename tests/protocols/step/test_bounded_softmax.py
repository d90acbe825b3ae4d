"""A bounded softmax: every bound of its chain for every word, no contribution beyond γ for any weights, and its
twin."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from bench.generators.series import inverse, largest_clip, sum_range
from protocols.methods import g_shuff
from protocols.plan.bounded_softmax_scales import BoundedSoftmaxScales
from protocols.plan.run_plan import plan_run
from protocols.step.bounded_softmax import clipped_updates, errors
from protocols.step.cost import step_cost
from protocols.step.public_weights import Head
from refmpc import Cost
from refmpc.primitives import dealing
from tests.protocols.conftest import small_federation
from tests.protocols.secure_runs import noise_of_the_servers, released, run_secure, small_training
from tests.protocols.step.agreement import assert_agrees
from tests.refmpc.harness import Secret, evaluate
from tests.refmpc.transcripts import Case, leaks, watch_streams
from vfl.bounded_softmax import CLIPS, CRUDE, FINES, LEAST_SHARES, BoundedSoftmax, Sines, threshold_of
from vfl.losses import WAVES, half_wave
from vfl.twins import train_g_bmf, train_g_shuff

CLASSES = (2, 3, 6, 10, 16, 26, 40, 64)
NORMS = (5.0, 2.1, 2.0, 1.0, 0.61, 0.5, 0.3, 0.2, 0.11, 0.03, 0.0222)  # of the clip; reach is √2
ALLOWED = 1e-9  # what floating point may be off by
BITS = 30


def scales_of(classes, clip_norm=1.0, more=0):
    """With the fewest bits of the clip factor that are fine, and some more."""
    public = BoundedSoftmax(classes, clip_norm, 2.0**0.5)
    fewest = next(bits for bits in range(16, 50) if BoundedSoftmaxScales(public, bits).is_fine)
    return BoundedSoftmaxScales(public, fewest + more)


@pytest.mark.parametrize("wave", WAVES)
@pytest.mark.parametrize("classes", CLASSES)
def test_every_number_of_the_chain_stays_in_its_interval_for_every_word(classes, wave):
    scales, own = scales_of(classes), scales_of(classes).public
    link = scales.link(wave)
    circle = link(np.arange(2**18) * 2.0 ** (link.period_bits - 18))
    slope = float(sum(np.pi * k * float(link._radius(i)) for i, k in enumerate(link.turns))) / 2**18
    rounding = slope + float(link.error) + 2.0**-14 + ALLOWED
    low, high = circle.min() - rounding, circle.max() + rounding
    assert low > -0.0023 and high < 1.0023  # e, as it is opened
    at_label = link(np.array([-3.0, -2, -1, 0]) * 2.0**-link.fraction_bits)
    label = at_label.min() - rounding, at_label.max() + rounding
    # every s that can be opened: up to two units below s, which is that of the rounded e but for 2^-14 an entry
    unit, off = 2.0**-scales.crude.fraction_bits, classes * 2.0**-14
    s = (
        np.arange(int((label[0] + (classes - 1) * low) / unit) - 3, int((label[1] + (classes - 1) * high) / unit) + 3)
        * unit
    )
    r, r_error = scales.crude(s), float(scales.crude.error) + ALLOWED
    least, most = (s - off) * (r - r_error), (s + off + 2 * unit) * (r + r_error)
    lowest = next(share for most_classes, share in LEAST_SHARES.items() if classes <= most_classes)
    assert least.min() > lowest and most.max() < 1.15  # t, within the fine step's range, with its units below
    t = np.arange(int(lowest * 2**16) - 2, int(1.15 * 2**16) + 3) * 2.0**-16
    fine = scales.fine(t)
    one = np.stack([(t + sign * (off + 2.0**-15)) * (fine + sign * float(scales.fine.error)) for sign in (-1, 1)])
    assert np.abs(one - 1).max() < 0.01 * max(1, classes / 8)
    # e, and so p', of each class: at most what is left of the sum when the others are least
    others = (classes - 1) * -low
    share = np.minimum(high, s + others) * (r + r_error), low * (np.abs(r) + r_error)
    assert share[0].max() < 1.4 and share[1].min() > -0.4
    largest = 1 + np.abs(one - 1).max()
    p_other = share[0] / np.maximum(least, 0.2) * largest
    assert p_other.max() < 2.4 and (share[1] / least).min() * largest > -0.4
    # ‖δ‖²: the other classes are at most ``high`` each and add up to s − e_y, and −low each if they are negative
    positive = np.maximum(0.0, s + 2 * unit + off - label[0] + others)
    squares = (high * positive + others * -low) / np.maximum(s, 0.2) ** 2
    of_label = np.maximum(np.abs(1 - label[0] / np.maximum(s, 0.2)), np.abs(1 - label[1] / np.maximum(s, 0.2)))
    assert (largest**2 * squares + (of_label + largest - 1) ** 2).max() < 2.0
    assert own.classes == classes


@pytest.mark.parametrize("more", [0, 1, 4])
@pytest.mark.parametrize("clip_norm", NORMS)
def test_the_clip_factor_is_never_above_for_every_word(clip_norm, more):
    """For every word that q < 2.2 can be opened as: (|C| + ε)·√(q + 2 units) ≤ b."""
    scales = scales_of(10, clip_norm, more)
    unit = 2.0**-scales.clip.fraction_bits
    words = np.arange(-2, int(2.2 / unit) + 1) * unit
    factor = np.abs(scales.clip(words)) + float(scales.clip.error) + ALLOWED
    worst = (factor * np.sqrt(words + 2 * unit)).max() / float(scales.public.threshold)
    assert worst <= 1 and factor.max() <= 1.001
    hard = np.minimum(1, float(scales.public.threshold) / np.sqrt(np.maximum(words, unit)))
    assert np.average(scales.clip(words) / hard) > (0.9 if clip_norm >= 0.2 else 0.75)


@pytest.mark.parametrize("wave", WAVES)
@pytest.mark.parametrize("classes", [2, 3, 10, 26, 64])
def test_contributions_are_at_most_gamma_exactly_whatever_the_logits_are(classes, wave):
    """Any weights: logits are words of the whole ring, of every size. In exact integers, 10,500 rows in all."""
    rng, rows = np.random.default_rng([classes, wave[0]]), 700
    scales = scales_of(classes, float(rng.choice(NORMS[3:8])), int(rng.integers(0, 3)))
    words = rng.integers(-(2**63), 2**63 - 1, (rows, classes)) >> rng.integers(0, 62, (rows, 1))
    words[:200] = np.rint(rng.normal(size=(200, classes)) * rng.choice([0.1, 2, 6], (200, 1)) * 2.0**BITS).astype(
        np.int64
    )
    labels = rng.integers(0, classes, rows)
    one_hot = np.eye(classes, dtype=np.int64)[labels]

    async def program(party, z, y):
        return [await clipped_updates(z, y, scales, wave), await errors(z, y, scales, wave)]

    u, delta = evaluate(program, Secret(words, BITS), Secret(one_hot)).opened
    assert u.scale == scales.update_bits
    b = scales.public.threshold * 2**scales.update_bits
    sizes = [sum(entry * entry for entry in row) for row in u.signed.tolist()]
    assert max(sizes) <= b**2 and max(sizes) > 0.4 * b**2
    # and it is the twin's function, on its own opened numbers: δ to 2^-8, u to the clip's rounding
    z = words[:200] * 2.0**-BITS
    e = half_wave(z - z[np.arange(200), labels[:200]][:, np.newaxis], wave, 2.0)
    e = e * scales.public.crude(e.sum(axis=1))[:, np.newaxis]
    wanted = e * scales.public.fine(e.sum(axis=1))[:, np.newaxis] - one_hot[:200]
    got = ((delta.words << np.uint64(24)).view(np.int64) >> 24)[:200] * 2.0**-delta.scale
    assert np.abs(got - wanted).max() < 2.0**-7
    assert np.abs(u.value[:200] - scales.public.updates(wanted)).max() < 0.02


def test_stored_numbers_are_as_good_as_what_the_generator_makes():
    for most, bits, numbers in CRUDE:
        low, high = sum_range(most)
        _, least = inverse(low, high, 2.0**bits, len(numbers) // 2)
        s = np.linspace(low, high, 5000)
        product = s * Sines(bits, numbers)(s)
        assert product.max() <= 1.002 and product.min() >= least - 0.005
    for most, numbers in FINES:
        t = np.linspace(LEAST_SHARES[most], 1.15, 5000)
        _, error = inverse(LEAST_SHARES[most], 1.15, 2.0, len(numbers) // 2, centre=True)
        assert np.abs(t * Sines(1, numbers)(t) - 1).max() <= 1.05 * error
    q = np.linspace(0, 2.2, 3001)
    for level, numbers in enumerate(CLIPS):
        b = float(threshold_of(level))
        made, stored = Sines(2, tuple(np.rint(largest_clip(b) * 2**26).astype(int))), Sines(2, numbers)
        assert stored(q).mean() >= 0.99 * made(q).mean()
        assert (stored(q) <= np.minimum(1, b / np.sqrt(np.maximum(q, 1e-9)))).all()


def make_plan(**changes):
    federation = small_federation(96, (5, 4), 3)
    training = small_training(loss="bounded_softmax", **{"epochs": 2, "learning_rate": 0.3, **changes})
    return plan_run("g_bmf", federation, training), federation


@pytest.mark.parametrize("weights", ["open", "secret"])
@pytest.mark.parametrize("changes", [{"momentum": 0.5}, {"clip_norm": 0.3, "weight_decay": 0.99}])
def test_g_bmf_with_a_bounded_softmax_is_its_twin(tmp_path, changes, weights):
    plan, federation = make_plan(weights=weights, **changes)
    result = run_secure(plan, federation, tmp_path)
    noise = noise_of_the_servers(plan, tmp_path)
    twin = train_g_bmf(federation, plan.training, noise=noise)
    assert_agrees(plan, federation, released(result), noise, twin)


def test_g_shuff_with_a_bounded_softmax_is_its_twin(tmp_path):
    federation = small_federation(32, (4, 3), 3)
    plan = plan_run("g_shuff", federation, small_training(loss="bounded_softmax", epochs=2, learning_rate=0.3))
    result = run_secure(plan, federation, tmp_path, g_shuff.servers)
    noise = noise_of_the_servers(plan, tmp_path)
    twin = train_g_shuff(federation, plan.training, noise=noise)
    assert_agrees(plan, federation, released(result), noise, twin)


def test_a_step_has_seven_rounds_or_nine():
    """At the width of the paper; with open weights for each wave that they may ask for."""
    for classes, sizes, secret in (
        (10, (918_695, 963_495, 1_142_695), 1_436_937),
        (64, (7_039_162, 7_350_458, 8_595_642), 10_380_482),
    ):
        federation = small_federation(1280, (1000, 1000), classes)
        training = small_training(loss="bounded_softmax", batch_size=128, learning_rate=1.0)
        plan = plan_run("g_bmf", federation, training.with_(weights="open"))
        heads = [Head(np.zeros((2001, classes), dtype=np.int64), 16, 0.0, wave=wave) for wave in WAVES]
        assert [step_cost(plan, head) for head in heads] == [Cost(7, size) for size in sizes]
        assert step_cost(plan_run("g_bmf", federation, training)) == Cost(9, secret)


def test_what_a_server_sees_of_a_step_is_independent_of_logits_and_labels(monkeypatch):
    watch_streams(monkeypatch)
    monkeypatch.setattr(dealing, "FEWEST_ROWS", 10**9)
    scales = scales_of(3)

    async def call(party: Any, z: Any, y: Any) -> Any:
        scaled = (z * np.array([1, -2, 40])).reinterpret(BITS)
        return await clipped_updates(scaled, y * np.array([0, 0, 1]), scales, WAVES[0])

    secrets = ((3 << 26, 1), (-(40 << 26), 0))
    assert leaks(Case(call, ("arithmetic", "arithmetic"), secrets, composed=True, shape=(3,))) == []


@pytest.mark.parametrize(
    "changes",
    [{"class_weights": (1.0, 2.0, 3.0)}, {"hidden": (4,), "weights": "secret"}, {"gradients": "explicit"}],
)
def test_what_has_another_loss_is_refused_in_a_sentence(changes):
    with pytest.raises(ValueError, match="loss = 'bounded_softmax': must be 'softmax' but for many classes; class"):
        make_plan(**changes)


def test_a_clip_norm_below_the_stored_thresholds_is_refused():
    with pytest.raises(ValueError, match="clip_norm = 0.01: must be at least 0.0"):
        make_plan(clip_norm=0.01)


def test_thresholds_between_stored_ones_and_below_give_a_factor_in_between():
    factors = [BoundedSoftmax(3, norm, 1.0).clip(np.array([0.5]))[0] for norm in (0.5, 0.45, 0.3, 0.1, 0.05)]
    assert all(a > b for a, b in itertools.pairwise(factors))
    assert BoundedSoftmax(3, 1.0, 3.0).threshold <= Fraction(1, 3)
