"""Claims of the other protocols: shuffled batches (G-Shuff) and the baselines LDP and GL-Sub."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from scipy.stats import binom

from accel.validate import require, require_choice, require_integer, require_real
from vfl.dp import calibration
from vfl.dp.claim import ZERO_OUT, Claim, Figure, zero_out
from vfl.dp.factorisation import DEFAULT_TAP_BITS
from vfl.dp.mechanism import (
    ANALYTIC_GAUSSIAN,
    FIXED_POINT_THEOREM,
    TIE,
    CalibratedNoise,
    NoiseSplit,
    calibrated_noise,
    epsilon_with_slack,
    no_noise_found,
    outsider_figure,
    rows_together,
)
from vfl.dp.sensitivity import Participation, fixed_order
from vfl.dp.slack import FixedPointSlack

__all__ = [
    "AS_IF_POISSON",
    "AS_IF_UNSEEN",
    "RELEASED_ROWS_ALONE",
    "calibrate_shuffled",
    "example_level",
    "ldp_claim",
    "shuffled_claim",
    "subsampled_claim",
]

_ANY_ORDER = "one Gaussian of sensitivity √epochs: no amplification"
_PAPERS_NUMBER = "As if Poisson-sampled (the paper's number), not proven for shuffled batches"
AS_IF_POISSON = "as if Poisson-sampled, not proven for shuffled batches"
AS_IF_UNSEEN = "as if nobody saw which records take part, not proven against the clients"
RELEASED_ROWS_ALONE = "for a record's own released rows alone, not proven for the run"
_TRAINED_ON_RAW_ROWS = (
    "Clients train their local models on raw rows between releases, so a record moves the later releases of OTHER "
    "rows, "
    "un-noised and without a bound that this counts; the same ε holds for the record's own rows if the local models "
    "did not "
    "depend on it"
)
_SHUFFLE_GAP = (
    "Batches here are shuffled and of fixed size; the as-if-Poisson number is no proven bound for them, and "
    "at low noise the truth can be several times larger (Chua et al. 2024, arXiv 2403.17673 and 2411.04205)"
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
    rows_per_person: int = 1,
) -> CalibratedNoise:
    """Noise for G-Shuff without a certificate: ``paper`` calibrates as if batches were Poisson samples (RDP),
    ``any-order`` for any order of the batches. For its secret order see ``vfl.dp.secret_order``.
    """
    require_choice("accounting", accounting, ("paper", "any-order"))
    run = fixed_order(num_samples, batch_size, epochs)
    rate = batch_size / num_samples
    remaining = require_real("delta", delta, 0, 1, open_low=True, open_high=True)
    wanted = epsilon
    for _ in range(8):
        if accounting == "any-order":
            multiplier = calibration.any_order_sigma(wanted, remaining, epochs) * TIE
        else:
            multiplier = calibration.poisson_sigma(wanted, remaining, rate, run.num_steps)
        claim = shuffled_claim(
            multiplier, delta, clip_norm, num_samples, batch_size, epochs, slack, split, accounting, rows_per_person
        )
        if claim.epsilon <= epsilon:
            return calibrated_noise(multiplier, claim, slack, split)
        remaining = delta - claim.slack_delta
        addition = claim.epsilon_addition * (1 + 1e-6)
        require(addition < epsilon, "epsilon", epsilon, f"above {addition:.3g}, the cost of the joint sampler")
        wanted = epsilon - addition
    raise no_noise_found(epsilon, delta)


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
    rows_per_person: int = 1,
) -> Claim:
    """G-Shuff with noise std ``noise_multiplier``·Δ per step: carries the paper's number and the proven one.

    ``accounting`` says which is the headline; a budget always charges the proven one. ``rows_per_person`` times the
    sensitivity of a row is enough for any order (proofs §9.3); the paper's number knows one row only.
    """
    require_choice("accounting", accounting, ("paper", "any-order"))
    sigma = require_real("noise_multiplier", noise_multiplier, 0, open_low=True)
    split = NoiseSplit(split)
    run = fixed_order(num_samples, batch_size, epochs)
    rate = batch_size / num_samples
    if slack is None:
        bound = rows_per_person * require_real("clip_norm", clip_norm, 0, open_low=True) * (1 + 1e-9)
        overflow = 0.0
    else:
        require(slack.steps == run.num_steps, "slack.steps", slack.steps, f"the {run.num_steps} steps of the run")
        bound = rows_per_person * slack.sensitivity(1.0, clip_norm, strategy_norm=1.0, affected_steps=1)
        worst = sigma * bound * math.sqrt(split.outsider_variance / (1 - slack.momentum**2))
        overflow = slack.noise_overflow(worst, clip_norm, DEFAULT_TAP_BITS)

    def poisson(part: float) -> float:
        return calibration.poisson_epsilon(sigma, part, rate, run.num_steps)

    def any_order(multiplier: float) -> Callable[[float], float]:
        return lambda part: calibration.any_order_epsilon(multiplier, part, epochs)

    headline_proven = accounting == "any-order"

    def with_slack(curve: Callable[[float], float], multiplier: float, headline: bool = False) -> tuple[float, float]:
        return epsilon_with_slack(curve, delta, slack, overflow, multiplier, headline=headline, participations=epochs)

    paper, paper_slack = with_slack(poisson, sigma, not headline_proven)
    proven, proven_slack = with_slack(any_order(sigma), sigma, headline_proven)
    proven_replace_one, _ = with_slack(any_order(sigma / 2), sigma / 2)
    paper_replace_one = math.inf  # takes long, and is asked for only as a headline
    if not headline_proven:
        paper_replace_one, _ = with_slack(lambda part: calibration.group_of_two(poisson, part), sigma / 2)
    outsider, _ = with_slack(any_order(sigma * math.sqrt(split.outsider_variance)), sigma)
    poisson_source = "Poisson-subsampled RDP, Opacus' orders (dp_accounting), as the paper accounts"
    return Claim(
        mechanism="Gaussian noise on shuffled batches (DP-SGD)",
        epsilon=proven if headline_proven else paper,
        delta=delta,
        neighbouring=zero_out(rows_per_person),
        epsilon_replace_one=proven_replace_one if headline_proven else paper_replace_one,
        participation=_shuffled_participation(run) + rows_together(rows_per_person),
        adversary=split.adversary,
        covers="features and labels",
        noise_multiplier=sigma,
        sensitivity=bound,
        proven=headline_proven,
        presumes="" if headline_proven else AS_IF_POISSON,
        gaussian_multiplier=sigma / math.sqrt(epochs),
        slack_delta=proven_slack if headline_proven else paper_slack,
        statistical_distance=slack.statistical_distance(overflow) if slack else 0.0,
        epsilon_addition=slack.epsilon_addition(sigma, epochs) if slack else 0.0,
        row_bound=slack.row_bound if slack else None,
        rows_per_person=rows_per_person,
        figures=(
            *(
                [Figure(_PAPERS_NUMBER, paper, delta, False, poisson_source, paper_replace_one)]
                * (rows_per_person == 1)
            ),
            Figure("Any order of the batches", proven, delta, True, _ANY_ORDER, proven_replace_one),
            *outsider_figure(split, outsider, delta, _ANY_ORDER),
        ),
        slack=()
        if slack is None
        else (
            ("clip rounding", slack.clip_slack),
            ("grid per step", slack.grid_slack(1.0, 1)),
            ("δ of sampler and overflow", proven_slack),
            *((("slope of the joint sampler", slack.slope_error),) if slack.slope_error else ()),
        ),
        caveats=(_SHUFFLE_GAP,),
        sources=(
            ("epsilon", _ANY_ORDER if headline_proven else poisson_source),
            ("sensitivity", FIXED_POINT_THEOREM),
        ),
    )


def ldp_claim(
    noise_multiplier: float, delta: float, clip_norm: float, releases: int, num_clients: int, *, frozen: bool
) -> Claim:
    """LDP baselines: every client clips its embedding row to ``clip_norm`` and noises it before it leaves.

    ``releases`` counts how often a row is sent (1 with ``frozen`` local models, epochs otherwise). Per client;
    the figure gives all clients' releases about one person together. Local models that train on raw rows
    carry a record into the releases of others: then nothing is proven of the whole run.
    """
    sigma = require_real("noise_multiplier", noise_multiplier, 0, open_low=True)
    clip_norm = require_real("clip_norm", clip_norm, 0, open_low=True)
    releases = require_integer("releases", releases, 1)
    num_clients = require_integer("num_clients", num_clients, 1)
    total = releases * num_clients
    name = f"All {num_clients} clients together" + ("" if frozen else ", a record's own released rows alone")
    together = Figure(
        name,
        calibration.any_order_epsilon(sigma, delta, total),
        delta,
        True,
        "sensitivity √(clients·releases)" + ("" if frozen else ", local models held fixed"),
        calibration.any_order_epsilon(sigma / 2, delta, total),
        narrower=not frozen,
    )
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
        proven=frozen,
        presumes="" if frozen else RELEASED_ROWS_ALONE,
        gaussian_multiplier=sigma / math.sqrt(total) if frozen else None,
        figures=(together,),
        caveats=(
            *(() if frozen else (_TRAINED_ON_RAW_ROWS,)),
            "Labels and returned gradients are covered only if they are noised on their own",
            "Noise here is sampled in floating point: a baseline for comparing, not a deployment",
        ),
        sources=(("epsilon", ANALYTIC_GAUSSIAN),),
    )


def example_level(claim: Claim, num_clients: int) -> Claim:
    """An LDP claim about one person: what all clients release of them together is the headline."""
    (together,) = claim.figures
    return dataclasses.replace(
        claim,
        epsilon=together.epsilon,
        epsilon_replace_one=together.epsilon_replace_one,
        covers=f"the features of a record at all {num_clients} clients together",
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
        presumes=AS_IF_UNSEEN,
        figures=(
            Figure(
                "Against the clients, who see the indices",
                seen,
                delta,
                True,
                f"at most {most} participations but for probability δ/2; no amplification",
                calibration.any_order_epsilon(sigma / 2, delta / 2, most),
            ),
        ),
        caveats=("The clients learn the sampled indices: participation is not anonymous (the paper says so too)",),
        sources=(("epsilon", f"dp_accounting {accountant}, Poisson sampling"),),
    )


def _shuffled_participation(run: Participation) -> str:
    dropped = f", {run.dropped} rows left out by a public rule" if run.dropped else ""
    return (
        f"every record once per epoch in shuffled batches of {run.batch_size}, {run.epochs} epochs, "
        f"{run.num_steps} steps{dropped}"
    )
