"""Claims: numbers that belong together, what each paragraph must say, and calibration end to end."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest
from scipy.stats import binom

from tests.not_none import not_none
from vfl.dp import (
    Claim,
    DeltaWarning,
    FixedPointSlack,
    NoiseSplit,
    any_order_epsilon,
    calibrate_matrix_factorisation,
    calibrate_shuffled,
    factorise,
    fixed_order,
    gaussian_epsilon,
    gaussian_sigma,
    labels_only_claim,
    ldp_claim,
    matrix_factorisation_claim,
    shuffled_claim,
    subsampled_claim,
    with_delta_checked,
)
from vfl.dp.budget import composed_epsilon

RUN = fixed_order(50_000, 128, 20)
SLACK = FixedPointSlack(64.0, 10, 2000, RUN.num_steps, batch_size=128)
F = factorise("bisr", RUN.num_steps, bands=256)


def calibrate(epsilon=1.0, delta=1e-5, slack=SLACK, split="distributed", factorisation=F):
    return calibrate_matrix_factorisation(epsilon, delta, 1.2, factorisation, 20, 390, slack, split)


@pytest.mark.parametrize("epsilon", [0.5, 1, 2, 5, 8, 10])
@pytest.mark.parametrize("kind,bands", [("bisr", 256), ("bsr", 390), ("identity", None)])
def test_calibration_meets_the_wish_and_wastes_nothing(epsilon, kind, bands):
    f = factorise(kind, RUN.num_steps, bands=bands)
    noise = calibrate(epsilon, factorisation=f)
    assert epsilon * (1 - 1e-6) < noise.claim.epsilon <= epsilon
    assert noise.sensitivity > f.sensitivity(20, 390) * 1.2  # the slack is in
    assert noise.sensitivity < f.sensitivity(20, 390) * 1.2 * 1.001
    assert noise.noise_multiplier == pytest.approx(gaussian_sigma(epsilon, 1e-5), rel=1e-6)


def test_noise_split_adds_up():
    noise = calibrate()
    assert noise.server_std**2 * 2 == pytest.approx(noise.target_std**2)
    assert noise.outsider_std**2 == pytest.approx(1.5 * noise.target_std**2)
    assert noise.server_std_in_grid_units >= noise.server_std * 2**30
    joint = calibrate(split="joint")
    assert joint.server_std == joint.target_std == joint.outsider_std == noise.target_std
    outsider = noise.claim.figures[0]
    assert "1.5 times" in outsider.name and outsider.proven
    assert outsider.epsilon == pytest.approx(gaussian_epsilon(noise.noise_multiplier * math.sqrt(1.5), 1e-5))
    with pytest.raises(ValueError, match=r"split = 'both': must be one of 'distributed', 'joint'"):
        NoiseSplit("both")


def test_replace_one_doubles_the_sensitivity():
    claim = calibrate().claim
    assert claim.epsilon_replace_one == pytest.approx(gaussian_epsilon(claim.noise_multiplier / 2, 1e-5))
    assert f"ε is {claim.epsilon_replace_one:.4g}" in claim.paragraph()


def test_overflow_takes_its_part_of_delta():
    risky = dataclasses.replace(SLACK, overflow_probability=1e-6)
    noise = calibrate(slack=risky)
    assert noise.claim.slack_delta == pytest.approx((1 + math.e) * 1e-6, rel=1e-3)
    assert noise.claim.epsilon <= 1.0
    left = 1e-5 - noise.claim.slack_delta
    assert 1 <= noise.noise_multiplier / gaussian_sigma(1.0, left) < 1.002
    assert noise.noise_multiplier > calibrate().noise_multiplier * 1.01
    assert noise.claim.epsilon_replace_one == math.inf  # e^ε·distance eats all of δ there
    assert "ε is unbounded" in noise.claim.paragraph()
    hopeless = dataclasses.replace(SLACK, overflow_probability=1e-3)
    with pytest.raises(ValueError, match=r"delta = 1e-05: must be above .* sampler distance and overflow"):
        calibrate(slack=hopeless)


def test_an_inexact_joint_sampler_costs_epsilon():
    slope = dataclasses.replace(SLACK, slope_error=2.0**-14)
    noise = calibrate(slack=slope, split="joint")
    assert noise.claim.epsilon <= 1.0
    assert noise.noise_multiplier > 1.1 * calibrate(split="joint").noise_multiplier
    addition = slope.epsilon_addition(noise.noise_multiplier)
    assert gaussian_epsilon(noise.noise_multiplier, 1e-5) + addition == pytest.approx(1.0, abs=1e-4)


def test_a_claim_says_everything_a_reader_needs():
    text = calibrate().claim.paragraph()
    for needed in (
        "(1, 1e-05)-differentially private",
        "features and labels",
        "zero-out",
        "replaced by another",
        "one corrupted server",
        "BISR",
        "20 participations 390 steps apart",
        "grid",
        "norm 64",
        "public or come from other data",
        "tuning on the private data",
    ):
        assert needed in text, needed
    assert len(text) < 1600
    twin = calibrate(slack=None).claim
    assert "no fixed-point slack" in twin.paragraph()


def test_json_keeps_the_claim():
    claims = [
        calibrate().claim,
        labels_only_claim(calibrate().claim),
        shuffled_claim(1.0, 1e-5, 1.2, 50_000, 128, 20, SLACK),
        ldp_claim(3.0, 1e-5, 1.0, 1, 2, frozen=True),
        ldp_claim(3.0, 1e-5, 1.0, 5, 2, frozen=False),
        dataclasses.replace(calibrate().claim, epsilon_replace_one=math.inf),
    ]
    for claim in claims:
        assert Claim.from_json(claim.to_json()) == claim
        assert json.loads(claim.to_json())["epsilon"] == claim.epsilon
    with pytest.raises(dataclasses.FrozenInstanceError):
        claims[0].epsilon = 0.1


def test_a_shuffled_claim_carries_both_numbers():
    paper = calibrate_shuffled(1.0, 1e-5, 1.2, 50_000, 128, 20, SLACK)
    assert not paper.claim.proven and paper.claim.epsilon <= 1.0
    assert paper.noise_multiplier == pytest.approx(1.167, abs=2e-3)
    names = {figure.name.split(" (")[0]: figure for figure in paper.claim.figures}
    assert not names["As if Poisson-sampled"].proven
    assert names["Any order of the batches"].proven
    assert names["Any order of the batches"].epsilon == pytest.approx(23.0, abs=0.1)
    text = paper.claim.paragraph()
    assert text.startswith("NOT a proven bound") and "Chua" in text and "80 rows left out" in text
    proven = calibrate_shuffled(1.0, 1e-5, 1.2, 50_000, 128, 20, SLACK, accounting="any-order")
    assert proven.claim.proven and proven.claim.epsilon <= 1.0
    assert proven.noise_multiplier == pytest.approx(math.sqrt(20) * gaussian_sigma(1, 1e-5), rel=1e-6)
    # the same mechanism as matrix factorisation with Ω = 1 in fixed order
    fixed = calibrate(factorisation=factorise("identity", RUN.num_steps))
    assert proven.target_std == pytest.approx(fixed.target_std, rel=1e-6)
    # against a corrupted server too: the outsiders' figure (17.6) never stands in for it
    epsilon, delta = not_none(paper.claim.proven_pair())
    assert epsilon == pytest.approx(23.0, abs=0.1) and delta == 1e-5


def test_an_unproven_epsilon_never_stands_alone():
    paper = calibrate_shuffled(1.0, 1e-5, 1.2, 50_000, 128, 20, SLACK).claim
    line = paper.headline()
    assert line.startswith("proven ε = 23.01, δ = 1e-05 (any order of the batches)")
    assert "ε = 1 as if Poisson-sampled, not proven for shuffled batches" in line
    assert line in paper.paragraph()
    content = json.loads(paper.to_json())
    assert content["proven_epsilon"] == pytest.approx(23.0, abs=0.1)
    assert content["presumes"] == "as if Poisson-sampled, not proven for shuffled batches"
    proven = calibrate().claim
    assert proven.headline().startswith("ε = 1, δ = 1e-05; zero-out") and proven.proven_epsilon == proven.epsilon


def test_a_delta_of_one_over_n_is_warned_of():
    claim = calibrate().claim
    assert with_delta_checked(claim, 99_999) is claim
    with pytest.warns(DeltaWarning, match=r"delta = 1e-05 .* n = 100000 .* choose delta = 1e-06 or less"):
        warned = with_delta_checked(claim, 100_000)
    assert "WARNING: delta = 1e-05" in warned.paragraph()


def test_labels_only_for_estimated_updates():
    full = calibrate().claim
    labels = labels_only_claim(full)
    assert labels.epsilon == full.epsilon_replace_one and labels.covers == "labels only"
    assert labels.gaussian_multiplier == full.noise_multiplier / 2
    assert "Features are NOT covered" in labels.paragraph()
    assert labels.sensitivity == 2 * full.sensitivity and labels.noise_multiplier == full.noise_multiplier / 2
    assert labels.figures == ()  # the outsiders' figure is for a record that is there or is not
    with pytest.raises(ValueError, match="covers features and labels"):
        labels_only_claim(labels)
    with pytest.raises(ValueError, match="local_update = 'released'"):
        labels_only_claim(full, "released")


def test_baseline_claims_name_their_caveats():
    local = ldp_claim(gaussian_sigma(1, 1e-5), 1e-5, 1.0, 1, 4, frozen=True)
    assert local.epsilon == pytest.approx(1.0)
    assert local.figures[0].epsilon == pytest.approx(gaussian_epsilon(gaussian_sigma(1, 1e-5) / 2, 1e-5))
    sampled = subsampled_claim(1.0, 1e-5, 1.2, 50_000, 128, 7800)
    assert not sampled.proven and "not anonymous" in sampled.paragraph()
    assert sampled.figures[0].proven and sampled.figures[0].epsilon > 10 * sampled.epsilon
    labels = labels_only_claim(sampled)  # a changed label moves a contribution twice as far: in every figure
    assert labels.proven_epsilon == pytest.approx(
        any_order_epsilon(0.5, 5e-6, max(1, int(binom.isf(5e-6, 7800, 128 / 50_000))))
    )
    assert not_none(labels.proven_epsilon) > 2 * not_none(sampled.proven_epsilon)
    trained = ldp_claim(gaussian_sigma(1, 1e-5), 1e-5, 1.0, 1, 4, frozen=False)
    assert not trained.proven and trained.proven_epsilon is None and trained.gaussian_multiplier is None
    assert composed_epsilon([trained], 1e-5) == math.inf  # no budget takes it
    assert trained.headline().startswith("no ε is proven for all that is released; ε = 1 for a record's own")
    with pytest.raises(ValueError, match="batch_size = 200"):
        subsampled_claim(1.0, 1e-5, 1.2, 100, 200, 10)


@pytest.mark.parametrize(
    "call,match",
    [
        (lambda: calibrate(0.0), r"epsilon = 0.0"),
        (lambda: calibrate(delta=1.0), r"delta = 1.0"),
        (
            lambda: calibrate(slack=dataclasses.replace(SLACK, steps=10)),
            r"slack.steps = 10: must be num_steps = 7800",
        ),
        (
            lambda: calibrate(slack=dataclasses.replace(SLACK, truncated_bits=15)),
            r"truncated_bits = 15: must be at least tap_bits = 16; the low bits of filtered noise",
        ),
        (
            lambda: calibrate(slack=dataclasses.replace(SLACK, truncated_bits=20, noise_shift=5)),
            r"truncated_bits = 20: must be at least tap_bits = 16 \+ 5; the low bits of filtered noise",
        ),
        (lambda: calibrate_matrix_factorisation(1, 1e-5, 0.0, F, 20, 390), r"clip_norm = 0.0"),
        (lambda: calibrate_matrix_factorisation(1, 1e-5, 1.2, F, 21, 390), r"max_participations = 21"),
        (lambda: matrix_factorisation_claim(-1, 1e-5, 1.2, F, 20, 390), r"noise_multiplier = -1"),
        (lambda: calibrate_shuffled(1, 1e-5, 1.2, 100, 128, 20), r"batch_size = 128: .* from 1 to 100"),
        (lambda: shuffled_claim(1, 1e-5, 1.2, 500, 128, 2, accounting="hope"), r"accounting = 'hope'"),
    ],
)
def test_bad_input_is_named(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_the_default_job_does_not_import_torch():
    code = "import sys, vfl.dp; print(any(m in sys.modules for m in ('torch', 'opacus', 'matplotlib')))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
