"""From a wish (ε, δ) to matrix-factorisation noise and its claim: where the parts come together."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

from accel.errors import InvalidArgument
from accel.validate import require, require_choice, require_real
from vfl.dp import calibration
from vfl.dp.claim import WEAK_EPSILON, Claim, Figure, zero_out
from vfl.dp.factorisation import Factorisation
from vfl.dp.slack import DEFAULT_NOISE_BITS, FixedPointSlack

__all__ = [
    "ANALYTIC_GAUSSIAN",
    "FIXED_POINT_THEOREM",
    "TIE",
    "CalibratedNoise",
    "NoiseSplit",
    "calibrate_matrix_factorisation",
    "calibrated_noise",
    "epsilon_with_slack",
    "matrix_factorisation_claim",
    "mechanism_name",
    "no_noise_found",
    "outsider_figure",
    "rows_together",
    "slack_parts",
]

TIE = 1 + 1e-9  # so that the ε found back is not a rounding error above the ε asked for
ANALYTIC_GAUSSIAN = "analytic Gaussian (Balle & Wang 2018, dp_accounting)"
FIXED_POINT_THEOREM = "proofs §6.2 and vfl.dp.slack"


class NoiseSplit(enum.Enum):
    """Who makes the noise of variance σ² that the claim needs.

    ``distributed``: each of three servers adds variance σ²/2; against a corrupted one, which knows its
    own part, the two others give σ²; somebody outside faces 1.5σ². ``joint``: noise unknown to every
    server, σ² for all.
    """

    DISTRIBUTED = "distributed"
    JOINT = "joint"

    @classmethod
    def _missing_(cls, value: object) -> NoiseSplit:
        require_choice("split", value, [member.value for member in cls])
        raise AssertionError("unreachable: every listed choice is a member")

    @property
    def server_variance(self) -> float:
        """Variance each server contributes, in units of σ² (joint: the one shared sample)."""
        return 0.5 if self is NoiseSplit.DISTRIBUTED else 1.0

    @property
    def outsider_variance(self) -> float:
        """Variance of the noise in a release, in units of σ²."""
        return 1.5 if self is NoiseSplit.DISTRIBUTED else 1.0

    @property
    def adversary(self) -> str:
        """Against whom σ² is counted."""
        known = "which knows the noise it added" if self is NoiseSplit.DISTRIBUTED else "to which all noise is unknown"
        return f"everybody who sees the releases and one corrupted server, {known}"


@dataclass(frozen=True)
class CalibratedNoise:
    """Noise for a run: standard deviations of z (before filtering), in the units of the gradients."""

    noise_multiplier: float
    sensitivity: float  # Δ, slack included
    split: NoiseSplit
    noise_bits: int
    claim: Claim

    @property
    def target_std(self) -> float:
        """σ·Δ: what the adversary of the claim faces."""
        return self.noise_multiplier * self.sensitivity

    @property
    def server_std(self) -> float:
        """What each server samples (joint: the shared sample)."""
        return self.target_std * math.sqrt(self.split.server_variance)

    @property
    def server_std_in_grid_units(self) -> float:
        """``server_std`` on the 2^-noise_bits grid, rounded up: the argument of ``sample_grid_gaussian``."""
        return self.server_std * 2.0**self.noise_bits * (1 + 1e-12)

    @property
    def outsider_std(self) -> float:
        """Std of the noise really present in a release per unit noise norm: for ridge λ and logged bounds."""
        return self.target_std * math.sqrt(self.split.outsider_variance)


def calibrate_matrix_factorisation(
    epsilon: float,
    delta: float,
    clip_norm: float,
    factorisation: Factorisation,
    max_participations: int,
    min_separation: int,
    slack: FixedPointSlack | None = None,
    split: NoiseSplit | str = NoiseSplit.DISTRIBUTED,
    rows_per_person: int = 1,
) -> CalibratedNoise:
    """Smallest noise for (ε, δ) with ``factorisation`` in fixed order, the slack of fixed point included.

    ``rows_per_person`` k: the claim is about people with up to k rows, in any batches. Their streams add up, so the
    sensitivity is at most k times that of one row, and k times if they are in one batch (proofs §9.3).

    ``slack`` None means real arithmetic: for the float twin only; the claim says so.
    """
    epsilon = require_real("epsilon", epsilon, 0, open_low=True)
    multiplier = calibration.gaussian_sigma(epsilon, delta) * TIE
    for _ in range(8):  # δ and ε left for the Gaussian depend (weakly) on the noise itself
        claim = matrix_factorisation_claim(
            multiplier,
            delta,
            clip_norm,
            factorisation,
            max_participations,
            min_separation,
            slack,
            split,
            rows_per_person,
        )
        if claim.epsilon <= epsilon:
            return calibrated_noise(multiplier, claim, slack, split)
        left = delta - claim.slack_delta
        for _ in range(20):  # σ and what a joint sampler adds to ε determine each other
            addition = slack.epsilon_addition(multiplier) if slack else 0.0
            require(addition < epsilon, "epsilon", epsilon, f"above {addition:.3g}, the cost of the joint sampler")
            multiplier = calibration.gaussian_sigma(epsilon - addition, left) * TIE
    raise no_noise_found(epsilon, delta)


def no_noise_found(epsilon: float, delta: float) -> InvalidArgument:
    """For a search that found no noise: what overflow takes of δ grows with the noise that it asks for."""
    return InvalidArgument(
        f"epsilon = {epsilon:g}, delta = {delta:g}: must be large enough for what fixed-point arithmetic takes of them;"
        " raise either, or lower the clip norm and the row bound together, the batch size or the momentum"
    )


def matrix_factorisation_claim(
    noise_multiplier: float,
    delta: float,
    clip_norm: float,
    factorisation: Factorisation,
    max_participations: int,
    min_separation: int,
    slack: FixedPointSlack | None = None,
    split: NoiseSplit | str = NoiseSplit.DISTRIBUTED,
    rows_per_person: int = 1,
) -> Claim:
    """What a run with ``noise_multiplier`` may claim (G-BMF, GL-BMF with released updates): exact up to
    the slack.
    """
    sigma = require_real("noise_multiplier", noise_multiplier, 0, open_low=True)
    clip_norm = require_real("clip_norm", clip_norm, 0, open_low=True)
    split = NoiseSplit(split)
    report = factorisation.sensitivity_report(max_participations, min_separation)
    identity = factorisation.kind == "identity"
    if slack is None:
        bound, overflow = rows_per_person * report.value * clip_norm * (1 + 1e-9), 0.0
    else:
        require(
            slack.steps == factorisation.num_steps,
            "slack.steps",
            slack.steps,
            f"num_steps = {factorisation.num_steps} of the factorisation",
        )
        require(
            slack.truncated_bits >= factorisation.tap_bits + slack.noise_shift,
            "slack.truncated_bits",
            slack.truncated_bits,
            f"at least tap_bits = {factorisation.tap_bits}" + (f" + {slack.noise_shift}" if slack.noise_shift else ""),
            "the low bits of filtered noise do not hide the data (proofs §6.1)",
        )
        bound = rows_per_person * slack.sensitivity(
            report.value,
            clip_norm,
            strategy_norm=factorisation.strategy_norm,
            recursive=factorisation.is_recursive,
            affected_steps=max_participations if identity else None,
        )
        noise_norm = factorisation.velocity_norm(slack.momentum)
        worst = sigma * bound * noise_norm * math.sqrt(split.outsider_variance)
        overflow = slack.noise_overflow(worst, clip_norm, factorisation.tap_bits)

    def gaussian(multiplier: float) -> Callable[[float], float]:
        return lambda part: calibration.gaussian_epsilon(multiplier, part)

    epsilon, slack_delta = epsilon_with_slack(gaussian(sigma), delta, slack, overflow, sigma, headline=True)
    replace_one, _ = epsilon_with_slack(gaussian(sigma / 2), delta, slack, overflow, sigma / 2)
    outside = sigma * math.sqrt(split.outsider_variance)
    outsider, _ = epsilon_with_slack(gaussian(outside), delta, slack, overflow, outside)
    exactness = "exact" if report.exact else "upper bound"
    return Claim(
        mechanism=mechanism_name(factorisation),
        epsilon=epsilon,
        delta=delta,
        neighbouring=zero_out(rows_per_person),
        epsilon_replace_one=replace_one,
        participation=(
            f"fixed order, at most {max_participations} participations {min_separation} steps apart, "
            f"{factorisation.num_steps} steps{rows_together(rows_per_person)}"
        ),
        adversary=split.adversary,
        covers="features and labels",
        noise_multiplier=sigma,
        sensitivity=bound,
        gaussian_multiplier=sigma,
        slack_delta=slack_delta,
        statistical_distance=slack.statistical_distance(overflow) if slack else 0.0,
        epsilon_addition=slack.epsilon_addition(sigma) if slack else 0.0,
        row_bound=slack.row_bound if slack else None,
        rows_per_person=rows_per_person,
        figures=outsider_figure(split, outsider, delta, ANALYTIC_GAUSSIAN),
        slack=slack_parts(slack, factorisation, max_participations if identity else None, slack_delta),
        caveats=() if slack else ("Computed for real arithmetic (plaintext twin): no fixed-point slack",),
        sources=(
            ("epsilon", ANALYTIC_GAUSSIAN),
            (
                "sensitivity",
                f"{report.method}, {exactness}, {report.value:.6g} per unit clip norm"
                f"{'' if rows_per_person == 1 else f', times {rows_per_person} rows (proofs §9.3)'}; "
                f"{FIXED_POINT_THEOREM}",
            ),
            ("replace-one", "twice the sensitivity"),
        ),
    )


def calibrated_noise(
    multiplier: float, claim: Claim, slack: FixedPointSlack | None, split: NoiseSplit | str
) -> CalibratedNoise:
    """Put multiplier and claim together on the grid of ``slack``."""
    bits = DEFAULT_NOISE_BITS if slack is None else slack.noise_bits
    return CalibratedNoise(multiplier, claim.sensitivity, NoiseSplit(split), bits, claim)


def epsilon_with_slack(
    epsilon_of_delta: Callable[[float], float],
    delta: float,
    slack: FixedPointSlack | None,
    overflow: float,
    multiplier: float,
    *,
    headline: bool = False,
    participations: int | None = None,
) -> tuple[float, float]:
    """(ε, part of δ that the arithmetic takes): the smallest fixed point of ε = ε(δ − (1+e^ε)·distance), and what an
    inexact sampler adds.

    When δ does not suffice, a headline is an error and any other figure infinite.
    """
    if slack is None:
        return epsilon_of_delta(delta), 0.0
    inexact = slack.epsilon_addition(multiplier, participations)
    epsilon = epsilon_of_delta(delta)
    for _ in range(50):
        addition = slack.delta_addition(min(epsilon + inexact, 700.0), overflow)  # e to the ε of the whole claim
        if addition >= delta:
            break
        following = epsilon_of_delta(delta - addition)
        if following <= epsilon * (1 + 1e-12):
            return epsilon + inexact, addition
        epsilon = following
    if headline and slack.delta_addition(WEAK_EPSILON, overflow) < delta:  # δ would do for a smaller ε
        require(
            False,
            "epsilon",
            float(f"{epsilon:.4g}"),
            f"so small that e^ε times the distance of the arithmetic from real numbers stays below delta = {delta:g}",
            f"lower epsilon: above {WEAK_EPSILON:g} a claim protects next to nothing",
        )
    require(
        not headline,
        "delta",
        delta,
        f"above {addition:.3g}, what sampler distance and overflow take of it",
        "lower the clip norm and the row bound together, the batch size or the momentum, or raise delta",
    )
    return math.inf, addition


def rows_together(rows_per_person: int) -> str:
    """For a participation: that a person may have several rows."""
    return "" if rows_per_person == 1 else f"; up to {rows_per_person} rows of one person, in any batches"


def mechanism_name(factorisation: Factorisation) -> str:
    """The name of the noise, for a claim."""
    if factorisation.kind == "identity":
        return "Gaussian noise, independent in each step"
    name = {
        "bisr": "banded inverse square root (BISR)",
        "bsr": "banded square root (BSR)",
        "toeplitz": f"optimised Toeplitz {'strategy' if factorisation.is_recursive else 'filter'}",
    }[factorisation.kind]
    return (
        f"matrix factorisation, {name}, {factorisation.bands} bands, "
        f"(α, β) = ({factorisation.weight_decay:g}, {factorisation.momentum:g})"
    )


def outsider_figure(split: NoiseSplit, epsilon: float, delta: float, source: str) -> tuple[Figure, ...]:
    """What outsiders face; no corrupted server is counted, so it never stands in for the claim."""
    if split is NoiseSplit.JOINT:
        return ()
    name = "Against outsiders, who face 1.5 times the variance"
    return (Figure(name, epsilon, delta, True, source, narrower=True),)


def slack_parts(
    slack: FixedPointSlack | None, factorisation: Factorisation, affected: int | None, slack_delta: float
) -> tuple[tuple[str, float], ...]:
    """What fixed point adds, for a claim."""
    if slack is None:
        return ()
    parts = [
        ("clip rounding", slack.clip_slack),
        ("grid", slack.grid_slack(factorisation.strategy_norm, affected)),
        ("δ of sampler and overflow", slack_delta),
    ]
    if slack.slope_error:
        parts.append(("slope of the joint sampler", slack.slope_error))
    return tuple(parts)
