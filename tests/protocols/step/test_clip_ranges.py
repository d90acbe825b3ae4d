"""Clip norms and row bounds at the edge of the ring: refused in a sentence, or clipped as the claim says."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import pytest

import refmpc
from protocols.plan import gl_scales
from protocols.plan.gl_plan import plan_layer_run
from protocols.plan.run_plan import Plan, plan_run
from protocols.plan.squared_norm_ratio import MOST_CLIP_BOUND, OverClip, norms_over_clip
from protocols.run.launch import main
from protocols.run.options import parse_options
from refmpc.mathematics.normalise import MANTISSA_BITS
from tests.protocols.conftest import lora_federation, small_federation
from tests.protocols.step.worst_rows import contributions, extreme_step, extreme_weights, worst_rows
from tests.refmpc.harness import Secret, opened


def plan_of(arguments: str, classes: int = 3, widths: tuple[int, ...] = (3, 2)) -> Plan:
    """The plan that the command line leads to, for a small federation: β·v is part of what is truncated."""
    options = parse_options("g_bmf", None, [*arguments.split(), "--weights", "secret"])
    federation = small_federation(options.training.batch_size, widths, classes, row_bound=options.row_bound)
    return plan_run("g_bmf", federation, options.training)


def assert_clips(plan: Plan) -> None:
    """No contribution of the worst rows is longer than γ', every operand stays in its domain, and some are clipped."""
    rng, gamma = np.random.default_rng(0), plan.training.clip_norm
    rows, longest = worst_rows(plan, rng, 64), 0.0
    for layers in extreme_weights(plan, rng):
        found = contributions(plan, rows, layers)
        assert found.max() <= gamma + plan.scales.clip_rounding
        longest = max(longest, found.max())
        extreme_step(plan, rows, layers)
    reachable = min(gamma, math.sqrt(2) * plan.scales.row_bound)
    assert longest >= 0.9 * reachable  # the clip is not far too strict either


@pytest.mark.parametrize(
    ("row_bound", "clip_norm", "rest"),
    [
        (1990, 2100, ""),
        (2400, 2600, ""),
        (4000, 4000, "--batch-size 4"),
        (7950, 2000, ""),
        (3550, 1800, ""),
        (100, 100, "--gradients explicit --learning-rate 1e-3"),
    ],
)
def test_large_clip_norms_are_kept(row_bound, clip_norm, rest):
    """Found by review: 1/γ² was rounded up to 1 or nearly, and contributions of up to 2,000γ went into the sum."""
    arguments = f"--batch-size 8 --epochs 1 --learning-rate 1e-6 --epsilon 8 --row-bound {row_bound}"
    assert_clips(plan_of(f"{arguments} --clip-norm {clip_norm} {rest}"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--row-bound 217000 --clip-norm 151", r"row_bound = 217000.0: must be at most 1.139e\+04 .*scale the rows"),
        ("--row-bound 30 --clip-norm 20000 --batch-size 1 --epsilon 14 --delta 0.1", r"clip_norm = 20000.0: must be "
                                                                                     r"at most 1.141e\+04"),
        ("--row-bound 20000 --clip-norm 90 --hidden 4", r"row_bound = 20000.0: must be at most 1.139e\+04"),
        ("--row-bound 4000 --clip-norm 4000 --batch-size 2 --gradients explicit", "row_bound = 4000.0: .*use factored"),
        ("--row-bound 90 --clip-norm 300 --gradients explicit", "clip_norm = 300.0: must be at most 178.3 .*use "
                                                                "factored"),
    ],
)  # fmt: skip
def test_what_leaves_one_over_the_clip_norm_too_few_bits_is_refused(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        plan_of(f"--batch-size 8 --epochs 1 --learning-rate 1e-6 --epsilon 8 {arguments}")


def test_the_command_refuses_before_anything_is_shared(capsys):
    arguments = "--estimate --row-bound 217000 --clip-norm 151 --batch-size 8 --epochs 1 --learning-rate 1e-6"
    with pytest.raises(SystemExit, match="g_bmf: row_bound = 217000.0: must be at most"):
        main("g_bmf", None, arguments.split())
    assert "differentially private" not in capsys.readouterr().out


def test_momentum_counts_in_the_range_of_what_is_truncated():
    """Found by review: β·v was left out, and a weight came out as 0.167 where the twin had 0.693."""
    arguments = "--momentum 0.9 --epochs 3 --learning-rate 0.001"
    with pytest.raises(ValueError, match=r"clip_norm = 14.0: must be .*momentum\) = 5.734e\+05"):
        plan_of(f"{arguments} --batch-size 4096 --clip-norm 14")
    assert_clips(plan_of(f"{arguments} --batch-size 32 --clip-norm 14 --row-bound 20"))


def test_a_decayed_weight_stays_in_the_ring():
    """α·W has 16 bits more than W: a run whose logits nearly fill the ring left no room for them."""
    arguments = "--epochs 30 --batch-size 16 --learning-rate 2000 --row-bound 0.1 --clip-norm 0.1 --epsilon 20"
    for hidden in ("", "--hidden 4"):
        rate = "--learning-rate 20" if hidden else ""
        decayed = plan_of(f"{arguments} {rate} {hidden} --weight-decay 0.999")
        plain = plan_of(f"{arguments} {rate} {hidden}")
        assert decayed.scales.weight_bits <= plain.scales.weight_bits
        rng = np.random.default_rng(1)
        for layers in extreme_weights(decayed, rng):
            extreme_step(decayed, worst_rows(decayed, rng), layers)


def test_a_search_that_finds_no_noise_is_refused_in_a_sentence():
    """Found by review: an ArithmeticError that no command caught."""
    arguments = "--estimate --row-bound 1990 --clip-norm 2100 --batch-size 8 --epochs 1 --learning-rate 1e-5"
    with pytest.raises(
        SystemExit, match=r"g_bmf: epsilon = 3, delta = 1e-05: must be large enough .*lower the clip norm"
    ):
        main("g_bmf", None, arguments.split())


# GL-BMF ------------------------------------------------------------------------------------------


def test_the_bound_of_q_in_gl_bmf_is_the_domain_of_the_clip_factor():
    """Found by review: plans with a bound between 2^32 and 2^34 were accepted and failed in step 0, after the
    upload."""
    seen, nobody = set(), cast("refmpc.Party", None)
    secret = refmpc.ArithmeticTensor(nobody, np.zeros((2, 1), np.uint64), 26)
    for exponent in np.arange(-4.0, 1.0, 0.25):
        federation = lora_federation(8, (3, 2), ((3,), (2,)), 3, local_learning_rate=10.0**exponent * 3)
        options = parse_options("gl_bmf", None, ["--batch-size", "8", "--epochs", "40", "--clip-norm", "0.02"])
        training = options.training.with_(learning_rate=10.0**exponent)
        try:
            plan = plan_layer_run(federation, training, gl_scales.FactorBounds(1.0, 1.0, 4.0, 60.0))
        except ValueError as error:
            assert "learning_rate" in str(error)
            seen.add("refused")
            continue
        assert plan.adapters.clip_bound <= MOST_CLIP_BOUND
        refmpc.clip_factor.cost(secret, plan.adapters.clip_bound)
        seen.add("accepted")
    assert seen == {"accepted", "refused"}


# the formula -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [0.3, 1.0, 50.0, 8000.0])
@pytest.mark.parametrize("clip_norm", [0.01, 0.7, 1.0, 3.3, 180.0, 8000.0])
@pytest.mark.parametrize("fraction_bits", [14, 20])
def test_norms_over_the_clip_norm_are_never_below_and_at_most_the_declared_largest(bound, clip_norm, fraction_bits):
    over = OverClip(clip_norm, bound, fraction_bits, MANTISSA_BITS if fraction_bits == 20 else 8)
    if not over.is_fine:
        with pytest.raises(ValueError, match=r"(row_bound|clip_norm) = .*: must be at most"):
            over.require_fine("row_bound", bound, "")
        return
    assert over.bound**2 * 2.0 ** (2 * fraction_bits) * over.inverse < 2.0**61
    assert 1.0 <= over.inverse * clip_norm**2 / 2.0**over.inverse_bits <= 1 + 2.0**-5 + 1e-12
    rows = np.zeros((16, 3))
    rows[:, 0] = np.linspace(0, bound, 16)
    words = np.trunc(rows * 2.0**fraction_bits).astype(np.int64)
    exact = (words[:, 0] * 2.0**-fraction_bits / clip_norm) ** 2
    found = opened(lambda party, x: norms_over_clip(x, over), Secret(words, fraction_bits), insecure_check_ranges=True)
    assert (found.value >= exact * (1 - 1e-12)).all() and found.value.max() <= over.largest
    assert (found.value <= exact * (1 + 2.0**-5) + 2 * 2.0**-over.bits).all()
