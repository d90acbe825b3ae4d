"""From logits to clipped updates in 16 rounds: right, never above the clip, whatever rounds how; and its plan."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import refmpc
from protocols.plan.low_round_scales import LowRoundScales, plan_low_round
from protocols.step.low_round import clipped_updates, clipped_updates_cost
from refmpc.primitives.arithmetic import matmul_summand
from tests.refmpc.harness import Secret, evaluate
from tests.refmpc.rounding import down, forced, forced_openings, up

NORM_BOUND, LOGIT_BOUND = 129.0, 31467.3


def plan(classes, logit_bits=46, logit_bound=LOGIT_BOUND):
    return plan_low_round(classes, logit_bits, logit_bound, NORM_BOUND, 700.0)


def rows(seed, count, classes, scales):
    """Logits of all sizes, labels, norms from none to the bound."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(count, classes)) * rng.choice([0.1, 1, 3, 10, scales.logit_bound / 6], size=(count, 1))
    z[:3] = scales.logit_bound * rng.choice([-1, 1], (3, classes))
    z = np.clip(z, -scales.logit_bound, scales.logit_bound)
    labels = np.eye(classes, dtype=np.int64)[rng.integers(0, classes, count)]
    norms = np.floor(np.exp2(rng.uniform(-3, np.log2(NORM_BOUND), count)) * 2.0**scales.norm_bits).astype(np.int64)
    norms[:2] = 0, int(NORM_BOUND * 2**scales.norm_bits)
    return np.trunc(z * 2.0**scales.logit_bits).astype(np.int64), labels, norms


def true_updates(z, labels, norms):
    e = np.exp(z - z.max(axis=1, keepdims=True))
    delta = e / e.sum(axis=1, keepdims=True) - labels
    q = norms * (delta**2).sum(axis=1)
    return delta / np.sqrt(np.maximum(1.0, q))[:, np.newaxis]


def run(z, labels, norms, scales, *, opens, **options):
    def program(party, z, labels, norms):
        logits = refmpc.summands(party, z.first, scales.logit_bits) if opens else z
        with party.phase("counted"):
            return party.complete(clipped_updates(logits, labels, norms, scales))

    secrets = Secret(z, scales.logit_bits), Secret(labels), Secret(norms, scales.norm_bits)
    return evaluate(program, *secrets, **options)


def assert_clipped(u, norms, scales):
    """n·‖u‖² ≤ 1, in integers."""
    for row, n in zip(u.tolist(), norms.tolist(), strict=True):
        assert n * sum(x * x for x in row) <= 1 << (2 * scales.update_bits + scales.norm_bits)


def assert_near(u, z, labels, norms, scales):
    want = true_updates(z * 2.0**-scales.logit_bits, labels, norms * 2.0**-scales.norm_bits)
    got = u * 2.0**-scales.update_bits
    # δ within 2^-14.5; where it is clipped its direction moves by as much, and c falls short by the stated loss
    assert np.abs(got - want).max() <= 2.0**-14 + scales.clip_loss


@pytest.mark.parametrize("classes", [2, 10, 12, 13, 26, 64])
@pytest.mark.parametrize("opens", [True, False])
def test_updates_are_right_and_never_above_the_clip(classes, opens):
    scales = plan(classes)
    z, labels, norms = rows(classes, 128, classes, scales)
    result = run(z, labels, norms, scales, opens=opens)
    u = result.opened
    assert u.scale == scales.update_bits == 37
    assert_clipped(u.signed, norms, scales)
    assert_near(u.signed, z, labels, norms, scales)
    ledgers = [ledger.phases["counted"] for ledger in result.run.ledgers]
    declared = clipped_updates_cost(128, scales, opens=opens)
    assert {ledger.rounds for ledger in ledgers} == {declared.rounds} == {16 if classes <= 12 else 19}
    sent = [ledger.bytes_sent for ledger in ledgers]
    assert sum(sent) == declared.bytes and max(sent) < 1.03 * min(sent)


@pytest.mark.parametrize("choose", [up, down])
@pytest.mark.parametrize("classes", [2, 10, 26])
def test_the_clip_holds_when_everything_rounds_one_way(choose, classes, monkeypatch):
    forced(monkeypatch, choose)
    forced_openings(monkeypatch, choose is up)
    scales = plan(classes)
    z, labels, norms = rows(7, 60, classes, scales)
    u = run(z, labels, norms, scales, opens=True).opened.signed
    assert_clipped(u, norms, scales)
    assert_near(u, z, labels, norms, scales)


@pytest.mark.parametrize("choose", [up, down])
def test_the_clip_holds_where_a_unit_of_the_factor_counts(choose, monkeypatch):
    """Few bits of C and long rows that are sure of the wrong class: one unit more would be above the clip."""
    forced(monkeypatch, choose)
    forced_openings(monkeypatch, choose is up)
    scales = plan_low_round(2, 30, 100.0, 2.0**12, 5000.0)
    assert scales.clip_bits == 20
    norms = np.random.default_rng(6).integers(2**8, 2**12, 128) << scales.norm_bits
    z, labels = np.tile([90 << 30, -(90 << 30)], (128, 1)), np.tile([0, 1], (128, 1))
    u = run(z, labels, norms, scales, opens=True).opened.signed
    assert_clipped(u, norms, scales)
    assert_near(u, z, labels, norms * 1.0, scales)


@pytest.mark.parametrize("logit_bits, bound", [(30, 12.0), (26, 500.0), (44, 1000.0)])
def test_a_smaller_bound_of_this_step_makes_it_cheaper(logit_bits, bound):
    scales = plan(10, logit_bits, bound)
    z, labels, norms = rows(3, 60, 10, scales)
    u = run(z, labels, norms, scales, opens=False).opened.signed
    assert_clipped(u, norms, scales)
    assert_near(u, z, labels, norms, scales)
    cheap, dear = (clipped_updates_cost(128, s, opens=False).bytes for s in (scales, plan(10)))
    assert cheap < dear


def test_the_bytes_of_the_benchmarks_step():
    """128 × 10: what ROUNDS 1 to 16 take; 1.51 MB a step less 0.77 MB of the backward product."""
    cost = clipped_updates_cost(128, plan(10), opens=True)
    assert cost.rounds == 16 and 730_000 < cost.bytes < 740_000
    assert clipped_updates_cost(128, plan(10), opens=False).bytes == cost.bytes - 16 * 1280


def test_summands_of_a_product_go_in_as_they_are():
    scales = plan(4, 34, 200.0)
    rng = np.random.default_rng(5)
    h, w = rng.integers(-(2**14), 2**14, (30, 8)), rng.integers(-(2**22), 2**22, (8, 4))
    labels, norms = np.eye(4, dtype=np.int64)[rng.integers(0, 4, 30)], np.full(30, 3 << scales.norm_bits)

    def program(party, h, w, labels, norms):
        product = party.machine.memory((30, 4))
        matmul_summand(h, w, None, product)
        logits = refmpc.summands(party, product, 34, of=[h, w])
        return clipped_updates(logits, labels, norms, scales)

    secrets = Secret(h, 14), Secret(w, 20), Secret(labels), Secret(norms, scales.norm_bits)
    u = evaluate(program, *secrets).opened.signed
    assert_near(u, h @ w, labels, norms, scales)


def test_every_check_of_the_debug_mode_passes_within_the_bounds():
    scales = plan(10)
    z, labels, norms = rows(4, 30, 10, scales)
    run(z, labels, norms, scales, opens=True, insecure_check_ranges=True)


# the plan ----------------------------------------------------------------------------------------


def test_the_plan_of_the_benchmark():
    scales = plan(10)
    assert (scales.delta_bits, scales.norm_bits, scales.clip_bits) == (15, 12, 22)
    assert (scales.update_bits, scales.gradient_bits, scales.q_bits) == (37, 51, 42)
    assert scales.order_bits == (18, 12) and scales.gradient_room == 2048
    assert scales.clip_loss < 2.0**-15.6


def test_less_room_for_the_gradient_takes_bits_from_the_clip_then_from_the_errors():
    bits: list[tuple[int, int] | None] = []
    for bound in (700.0, 3000.0, 5000.0, 9000.0, 20_000.0, 60_000.0):
        try:
            scales = plan_low_round(10, 46, LOGIT_BOUND, NORM_BOUND, bound)
        except ValueError as error:
            assert "gradient_bound" in str(error) and "epsilon" in str(error)
            bits.append(None)
            continue
        assert bound < scales.gradient_room
        bits.append((scales.delta_bits, scales.clip_bits))
    assert bits == [(15, 22), (15, 21), (15, 20), (14, 20), (13, 20), None]


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"classes": 65}, "classes"),
        ({"classes": 1}, "classes"),
        ({"logit_bits": 47}, "logit_bits"),
        ({"logit_bits": 20, "logit_bound": 2.0**36}, "spread"),
        ({"clip_bound": 2.0**25}, "high"),
        ({"norm_bits": 1}, "norm_bits"),
        ({"delta_bits": 12}, "delta_bits"),
        ({"clip_bits": 19}, "clip_bits"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changed, named):
    good: dict[str, Any] = {
        "classes": 10, "logit_bits": 46, "logit_bound": 31000.0, "norm_bits": 12, "clip_bound": 260.0, "clip_bits": 22,
    }  # fmt: skip
    LowRoundScales(**good)
    with pytest.raises(ValueError, match=named):
        LowRoundScales(**{**good, **changed})


@pytest.mark.parametrize("norm_bound", [0.3, 1.0, 130.0, 1e4, 2.0**18])
def test_the_stated_loss_follows_from_the_integers_of_the_plan(norm_bound):
    """Recomputed with exact fractions: root_k against 2^(−k/2), one octave after another."""
    scales = plan_low_round(10, 46, 1000.0, norm_bound, 1.0)
    for k, root in enumerate(scales.clip.roots):
        square = Fraction(root, 2**24) ** 2 * 2**k  # (root·2^(k/2))²
        assert square < (1 - Fraction(1, 2**17)) ** 2 + Fraction(1, 10**12)
        floor = (1 - float(square) ** 0.5) + 2.0**-17.94
        assert floor < scales.clip_loss
