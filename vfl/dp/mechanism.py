"""From a wish (ε, δ) to noise and its claim, for each protocol: where the parts come together."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

from scipy.stats import binom

from accel.validate import require, require_choice, require_integer, require_real
from vfl.dp import calibration
from vfl.dp.claim import ZERO_OUT, Claim, Figure
from vfl.dp.factorisation import DEFAULT_TAP_BITS, Factorisation
from vfl.dp.sensitivity import Participation, fixed_order
from vfl.dp.slack import DEFAULT_NOISE_BITS, FixedPointSlack

__all__ = [
    "CalibratedNoise",
    "NoiseSplit",
    "calibrate_matrix_factorisation",
    "calibrate_shuffled",
    "ldp_claim",
    "matrix_factorisation_claim",
    "shuffled_claim",
    "subsampled_claim",
]

_TIE = 1 + 1e-9  # so that the ε found back is not a rounding error above the ε asked for
_BALLE_WANG = "analytic Gaussian (Balle & Wang 2018, dp_accounting)"
_THEOREM = "PROTOCOLS §5.1 and vfl.dp.slack"
_ANY_ORDER = "one Gaussian of sensitivity √epochs: no amplification"
_SHUFFLE_GAP = (
    "Batches here are shuffled and of fixed size; the as-if-Poisson number is no proven bound for them, and "
    "at low noise the truth can be several times larger (Chua et al. 2024, arXiv 2403.17673 and 2411.04205)"
)


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
        known = (
            "which knows the noise it added"
            if self is NoiseSplit.DISTRIBUTED
            else "to which all noise is unknown"
        )
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
) -> CalibratedNoise:
    """Smallest noise for (ε, δ) with ``factorisation`` in fixed order, the slack of fixed point included.

    ``slack`` None means real arithmetic: for the float twin only; the claim says so.
    """
    epsilon = require_real("epsilon", epsilon, 0, open_low=True)
    multiplier = calibration.gaussian_sigma(epsilon, delta) * _TIE
    for _ in range(8):  # δ and ε left for the Gaussian depend (weakly) on the noise itself
        claim = matrix_factorisation_claim(
            multiplier, delta, clip_norm, factorisation, max_participations, min_separation, slack, split
        )
        if claim.epsilon <= epsilon:
            return _calibrated(multiplier, claim, slack, split)
        left = delta - claim.slack_delta
        for _ in range(20):  # σ and what a joint sampler adds to ε determine each other
            addition = slack.epsilon_addition(multiplier) if slack else 0.0
            require(
                addition < epsilon, "epsilon", epsilon, f"above {addition:.3g}, the cost of the joint sampler"
            )
            multiplier = calibration.gaussian_sigma(epsilon - addition, left) * _TIE
    raise ArithmeticError(
        f"no noise found for epsilon = {epsilon}, delta = {delta}: the slack takes most of it"
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
) -> Claim:
    """What a run with ``noise_multiplier`` may claim (G-BMF, GL-BMF with released updates): exact up to
    the slack.
    """
    sigma = require_real("noise_multiplier", noise_multiplier, 0, open_low=True)
    clip_norm = require_real("clip_norm", clip_norm, 0, open_low=True)
    split = NoiseSplit(split)
    report = factorisation.sensitivity_report(max_participations, min_separation)
    identity = factorisation.kind == "identity"
    largest_norm = float(factorisation.noise_norms()[-1])
    if slack is None:
        bound, overflow = report.value * clip_norm * (1 + 1e-9), 0.0
    else:
        require(
            slack.steps == factorisation.num_steps,
            "slack.steps",
            slack.steps,
            f"num_steps = {factorisation.num_steps} of the factorisation",
        )
        bound = slack.sensitivity(
            report.value,
            clip_norm,
            strategy_norm=factorisation.strategy_norm,
            recursive=factorisation.is_recursive,
            affected_steps=max_participations if identity else None,
        )
        worst = sigma * bound * largest_norm * math.sqrt(split.outsider_variance)
        overflow = slack.noise_overflow(worst, clip_norm, factorisation.tap_bits)

    def gaussian(multiplier: float) -> Callable[[float], float]:
        return lambda part: calibration.gaussian_epsilon(multiplier, part)

    epsilon, slack_delta = _with_slack(gaussian(sigma), delta, slack, overflow, sigma, headline=True)
    replace_one, _ = _with_slack(gaussian(sigma / 2), delta, slack, overflow, sigma / 2)
    outside = sigma * math.sqrt(split.outsider_variance)
    outsider, _ = _with_slack(gaussian(outside), delta, slack, overflow, outside)
    exactness = "exact" if report.exact else "upper bound"
    return Claim(
        mechanism=_mechanism_name(factorisation),
        epsilon=epsilon,
        delta=delta,
        neighbouring=ZERO_OUT,
        epsilon_replace_one=replace_one,
        participation=(
            f"fixed order, at most {max_participations} participations {min_separation} steps apart, "
            f"{factorisation.num_steps} steps"
        ),
        adversary=split.adversary,
        covers="features and labels",
        noise_multiplier=sigma,
        sensitivity=bound,
        gaussian_multiplier=sigma,
        slack_delta=slack_delta,
        row_bound=slack.row_bound if slack else None,
        figures=_outsider_figure(split, outsider, delta, _BALLE_WANG),
        slack=_slack_parts(slack, factorisation, max_participations if identity else None, slack_delta),
        caveats=() if slack else ("Computed for real arithmetic (plaintext twin): no fixed-point slack",),
        sources=(
            ("epsilon", _BALLE_WANG),
            (
                "sensitivity",
                f"{report.method}, {exactness}, {report.value:.6g} per unit clip norm; {_THEOREM}",
            ),
            ("replace-one", "twice the sensitivity"),
        ),
    )


def calibrate_shuffled(
    epsilon: float,
    delta: float,
    clip_norm: float,
    num_samples: int,
    batch_size: int,
    epochs: int,
    slack: FixedPointSlack | None = None,
    split: NoiseSplit | str = NoiseSplit.DISTRIBUTED,
    accounting: str = "paper",
) -> CalibratedNoise:
    """Noise for G-Shuff: ``paper`` calibrates as if batches were Poisson samples (RDP), ``proven`` for
    any order.
    """
    require_choice("accounting", accounting, ("paper", "proven"))
    run = fixed_order(num_samples, batch_size, epochs)
    rate = batch_size / num_samples
    remaining = require_real("delta", delta, 0, 1, open_low=True, open_high=True)
    for _ in range(8):
        if accounting == "proven":
            multiplier = calibration.any_order_sigma(epsilon, remaining, epochs) * _TIE
        else:
            multiplier = calibration.poisson_sigma(epsilon, remaining, rate, run.num_steps)
        claim = shuffled_claim(
            multiplier, delta, clip_norm, num_samples, batch_size, epochs, slack, split, accounting
        )
        if claim.epsilon <= epsilon:
            return _calibrated(multiplier, claim, slack, split)
        remaining = delta - claim.slack_delta
    raise ArithmeticError(
        f"no noise found for epsilon = {epsilon}, delta = {delta}: the slack takes most of it"
    )


def shuffled_claim(
    noise_multiplier: float,
    delta: float,
    clip_norm: float,
    num_samples: int,
    batch_size: int,
    epochs: int,
    slack: FixedPointSlack | None = None,
    split: NoiseSplit | str = NoiseSplit.DISTRIBUTED,
    accounting: str = "paper",
) -> Claim:
    """G-Shuff with noise std ``noise_multiplier``·Δ per step: carries the paper's number and the proven one.

    ``accounting`` says which is the headline; a budget always charges the proven one.
    """
    require_choice("accounting", accounting, ("paper", "proven"))
    sigma = require_real("noise_multiplier", noise_multiplier, 0, open_low=True)
    split = NoiseSplit(split)
    run = fixed_order(num_samples, batch_size, epochs)
    rate = batch_size / num_samples
    if slack is None:
        bound, overflow = require_real("clip_norm", clip_norm, 0, open_low=True) * (1 + 1e-9), 0.0
    else:
        require(
            slack.steps == run.num_steps, "slack.steps", slack.steps, f"the {run.num_steps} steps of the run"
        )
        bound = slack.sensitivity(1.0, clip_norm, strategy_norm=1.0, affected_steps=1)
        worst = sigma * bound * math.sqrt(split.outsider_variance)
        overflow = slack.noise_overflow(worst, clip_norm, DEFAULT_TAP_BITS)

    def poisson(part: float) -> float:
        return calibration.poisson_epsilon(sigma, part, rate, run.num_steps)

    def any_order(multiplier: float) -> Callable[[float], float]:
        return lambda part: calibration.any_order_epsilon(multiplier, part, epochs)

    headline_proven = accounting == "proven"
    paper, paper_slack = _with_slack(poisson, delta, slack, overflow, sigma, headline=not headline_proven)
    proven, proven_slack = _with_slack(
        any_order(sigma), delta, slack, overflow, sigma, headline=headline_proven
    )
    if headline_proven:
        replace_one, _ = _with_slack(any_order(sigma / 2), delta, slack, overflow, sigma / 2)
    else:
        replace_one, _ = _with_slack(
            lambda part: calibration.group_of_two(poisson, part), delta, slack, overflow, sigma
        )
    outsider, _ = _with_slack(
        any_order(sigma * math.sqrt(split.outsider_variance)), delta, slack, overflow, sigma
    )
    poisson_source = "Poisson-subsampled RDP, Opacus' orders (dp_accounting), as the paper accounts"
    return Claim(
        mechanism="Gaussian noise on shuffled batches (DP-SGD)",
        epsilon=proven if headline_proven else paper,
        delta=delta,
        neighbouring=ZERO_OUT,
        epsilon_replace_one=replace_one,
        participation=_shuffled_participation(run),
        adversary=split.adversary,
        covers="features and labels",
        noise_multiplier=sigma,
        sensitivity=bound,
        proven=headline_proven,
        gaussian_multiplier=sigma / math.sqrt(epochs),
        slack_delta=proven_slack if headline_proven else paper_slack,
        row_bound=slack.row_bound if slack else None,
        figures=(
            Figure("As if Poisson-sampled (the paper's number)", paper, delta, False, poisson_source),
            Figure("Any order of the batches", proven, delta, True, _ANY_ORDER),
            *_outsider_figure(split, outsider, delta, _ANY_ORDER),
        ),
        slack=()
        if slack is None
        else (
            ("clip rounding", slack.clip_slack),
            ("grid per step", slack.grid_slack(1.0, 1)),
            ("δ of sampler and overflow", proven_slack),
        ),
        caveats=(_SHUFFLE_GAP,),
        sources=(("epsilon", _ANY_ORDER if headline_proven else poisson_source), ("sensitivity", _THEOREM)),
    )


def ldp_claim(
    noise_multiplier: float, delta: float, clip_norm: float, releases: int, num_clients: int
) -> Claim:
    """LDP baselines: every client clips its embedding row to ``clip_norm`` and noises it before it leaves.

    ``releases`` counts how often a row is sent (1 with frozen models, epochs otherwise). Per client; the
    figure gives all clients' releases about one person together.
    """
    sigma = require_real("noise_multiplier", noise_multiplier, 0, open_low=True)
    clip_norm = require_real("clip_norm", clip_norm, 0, open_low=True)
    releases = require_integer("releases", releases, 1)
    num_clients = require_integer("num_clients", num_clients, 1)
    together = calibration.any_order_epsilon(sigma, delta, releases * num_clients)
    return Claim(
        mechanism="local Gaussian noise on each embedding row",
        epsilon=calibration.any_order_epsilon(sigma, delta, releases),
        delta=delta,
        neighbouring=ZERO_OUT,
        epsilon_replace_one=calibration.any_order_epsilon(sigma / 2, delta, releases),
        participation=f"each row is released {releases} times",
        adversary="everybody, all servers and the other clients included",
        covers="one client's features of a record",
        noise_multiplier=sigma,
        sensitivity=clip_norm,
        gaussian_multiplier=sigma / math.sqrt(releases * num_clients),
        figures=(
            Figure(
                f"All {num_clients} clients together",
                together,
                delta,
                True,
                "sensitivity √(clients·releases)",
            ),
        ),
        caveats=(
            "Labels and returned gradients are covered only if they are noised on their own",
            "Noise here is sampled in floating point: a baseline for comparing, not a deployment",
        ),
        sources=(("epsilon", _BALLE_WANG),),
    )


def subsampled_claim(
    noise_multiplier: float,
    delta: float,
    clip_norm: float,
    num_samples: int,
    batch_size: int,
    steps: int,
    accountant: str = "rdp",
) -> Claim:
    """GL-Sub: indices drawn afresh each step and told to the clients, so they know who takes part.

    The headline presumes Poisson sampling that the adversary does not see; the figure is proved against the
    clients, who see it: participations at most the (1−δ/2)-quantile of Binomial(steps, rate), no
    amplification.
    """
    run = fixed_order(num_samples, batch_size, 1)
    sigma = require_real("noise_multiplier", noise_multiplier, 0, open_low=True)
    rate = run.batch_size / run.num_samples
    epsilon = calibration.poisson_epsilon(sigma, delta, rate, steps, accountant)
    most = max(1, int(binom.isf(delta / 2, steps, rate)))
    seen = calibration.any_order_epsilon(sigma, delta / 2, most)
    return Claim(
        mechanism=f"Poisson-subsampled Gaussian, {accountant.upper()} accounting",
        epsilon=epsilon,
        delta=delta,
        neighbouring=ZERO_OUT,
        epsilon_replace_one=calibration.group_of_two(
            lambda part: calibration.poisson_epsilon(sigma, part, rate, steps, accountant), delta
        ),
        participation=f"independent samples of rate {rate:.4g}, {steps} steps",
        adversary="somebody who does NOT see which records take part",
        covers="features and labels",
        noise_multiplier=sigma,
        sensitivity=require_real("clip_norm", clip_norm, 0, open_low=True),
        proven=False,
        figures=(
            Figure(
                "Against the clients, who see the indices",
                seen,
                delta,
                True,
                f"at most {most} participations but for probability δ/2; no amplification",
            ),
        ),
        caveats=(
            "The clients learn the sampled indices: participation is not anonymous (the paper says so too)",
        ),
        sources=(("epsilon", f"dp_accounting {accountant}, Poisson sampling"),),
    )


def _calibrated(
    multiplier: float, claim: Claim, slack: FixedPointSlack | None, split: NoiseSplit | str
) -> CalibratedNoise:
    bits = DEFAULT_NOISE_BITS if slack is None else slack.noise_bits
    return CalibratedNoise(multiplier, claim.sensitivity, NoiseSplit(split), bits, claim)


def _with_slack(
    epsilon_of_delta: Callable[[float], float],
    delta: float,
    slack: FixedPointSlack | None,
    overflow: float,
    multiplier: float,
    *,
    headline: bool = False,
) -> tuple[float, float]:
    """(ε, part of δ that the arithmetic takes): the smallest fixed point of ε = ε(δ − (1+e^ε)·distance).

    When δ does not suffice, a headline is an error and any other figure infinite.
    """
    if slack is None:
        return epsilon_of_delta(delta), 0.0
    epsilon = epsilon_of_delta(delta)
    for _ in range(20):
        addition = slack.delta_addition(min(epsilon, 700.0), overflow)
        require(
            addition < delta or not headline,
            "delta",
            delta,
            f"above {addition:.3g}, what sampler distance and overflow take of it",
            "widen the ranges or use fewer noise bits",
        )
        if addition >= delta:
            return math.inf, addition
        following = epsilon_of_delta(delta - addition)
        if following <= epsilon * (1 + 1e-12):
            break
        epsilon = following
    return epsilon + slack.epsilon_addition(multiplier), addition


def _mechanism_name(factorisation: Factorisation) -> str:
    if factorisation.kind == "identity":
        return "Gaussian noise, independent in each step"
    name = {"bisr": "banded inverse square root", "bsr": "banded square root"}[factorisation.kind]
    return (
        f"matrix factorisation, {name} ({factorisation.kind.upper()}), {factorisation.bands} bands, "
        f"(α, β) = ({factorisation.weight_decay:g}, {factorisation.momentum:g})"
    )


def _outsider_figure(split: NoiseSplit, epsilon: float, delta: float, source: str) -> tuple[Figure, ...]:
    if split is NoiseSplit.JOINT:
        return ()
    return (Figure("Against outsiders, who face 1.5 times the variance", epsilon, delta, True, source),)


def _slack_parts(
    slack: FixedPointSlack | None, factorisation: Factorisation, affected: int | None, slack_delta: float
) -> tuple[tuple[str, float], ...]:
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


def _shuffled_participation(run: Participation) -> str:
    dropped = f", {run.dropped} rows left out by a public rule" if run.dropped else ""
    return (
        f"every record once per epoch in shuffled batches of {run.batch_size}, {run.epochs} epochs, "
        f"{run.num_steps} steps{dropped}"
    )
