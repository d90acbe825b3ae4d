"""Noise and claims of a secret order: G-BMF with one padded shuffle, G-Shuff with one in every epoch.

The noise comes from ``vfl.dp.random_allocation.certificate``, which is part of the claim. What arithmetic takes of ε
and δ is set aside in coarse parts first, so that last bits of a plan do not ask for another certificate, and the twin
needs none of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from accel.validate import require, require_real
from vfl.dp import calibration
from vfl.dp.certificate_cache import cached
from vfl.dp.claim import Claim, Figure, zero_out
from vfl.dp.factorisation import Factorisation, factorise, workload_factorisation
from vfl.dp.mechanism import (
    ANALYTIC_GAUSSIAN,
    FIXED_POINT_THEOREM,
    CalibratedNoise,
    NoiseSplit,
    calibrated_noise,
    epsilon_with_slack,
    mechanism_name,
    no_noise_found,
    rows_together,
    slack_parts,
)
from vfl.dp.random_allocation.allocation import Allocation, Padding, allocation_every_epoch, allocation_once
from vfl.dp.random_allocation.certificate import Certificate, certified_noise, require_certifiable
from vfl.dp.random_allocation.monte_carlo import MARGINS, search_sigma
from vfl.dp.slack import FixedPointSlack

__all__ = ["amplified_factorisation", "calibrate_secret_order", "for_one_row"]

RANDOM_ALLOCATION = "random allocation (proofs §9.6)"
_LEAST_GRID = -16  # what rounding adds in a step, at least: as an exponent, relative to a contribution
_FIRST_BANDS = 2
_MOST_TAPS = 32
_OWN = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 1.0)  # tried: how much a record's own batch counts


@dataclass(frozen=True)
class _Bands:
    bands: int


@dataclass(frozen=True)
class _Own:
    own: float


def calibrate_secret_order(
    epsilon: float,
    delta: float,
    clip_norm: float,
    factorisation: Factorisation,
    shape: Padding,
    epochs: int,
    slack: FixedPointSlack | None = None,
    split: NoiseSplit | str = NoiseSplit.DISTRIBUTED,
    *,
    every_epoch: bool = False,
    rows_per_person: int = 1,
) -> CalibratedNoise:
    """Noise for (ε, δ) when nobody knows which batch a record is in: ``every_epoch`` anew (G-Shuff), or once (G-BMF).

    ``rows_per_person``: the certificate is about one row, at the (ε', δ') of ``for_one_row``; noise multiplier and
    sensitivity of what is returned are those of all rows of a person.

    Cost: that of ``certified_noise``, the first time. ``slack`` None means real arithmetic: for the float twin only.
    """
    epsilon = require_real("epsilon", epsilon, 0, open_low=True)
    delta = require_real("delta", delta, 0, 1, open_low=True, open_high=True)
    clip_norm = require_real("clip_norm", clip_norm, 0, open_low=True)
    split = NoiseSplit(split)
    require(
        not factorisation.is_recursive,
        "factorisation",
        factorisation.kind,
        "bisr, identity or a toeplitz filter with a secret order",
        "a recursion rounds at each server, which the accounting of a secret order does not cover",
    )
    allocation, sensitivity = _allocation(clip_norm, factorisation, shape, epochs, slack, every_epoch)
    one_epsilon, one_delta = for_one_row(epsilon, delta, rows_per_person)
    require_certifiable(allocation, one_delta)
    participations = epochs if every_epoch else None
    for margin in MARGINS:
        set_aside = margin if split is NoiseSplit.JOINT else 0.0
        found = certified_noise(allocation, one_epsilon * (1 - set_aside), one_delta * (1 - margin))
        overflow = _overflow(found.sigma * sensitivity, clip_norm, factorisation, slack, split)
        sigma = found.sigma / rows_per_person
        to_delta = slack.delta_addition(epsilon, overflow) if slack else 0.0
        to_epsilon = slack.epsilon_addition(sigma, participations) if slack else 0.0
        if to_delta <= margin * delta and to_epsilon <= set_aside * epsilon:
            claim = _claim(
                epsilon,
                delta,
                found,
                allocation,
                sensitivity,
                factorisation,
                shape,
                slack,
                split,
                overflow,
                to_delta,
                rows_per_person,
            )
            return calibrated_noise(sigma, claim, slack, split)
    raise no_noise_found(epsilon, delta)


def for_one_row(epsilon: float, delta: float, rows_per_person: int) -> tuple[float, float]:
    """(ε', δ') of one row that give k rows together (ε, δ): ε' = ε/k, δ' = δ/(1 + e^ε' + … + e^((k−1)ε')) (proofs
    §9.3)."""
    part = epsilon / rows_per_person
    return part, delta / sum(math.exp(part * times) for times in range(rows_per_person))


def _allocation(
    clip_norm: float,
    factorisation: Factorisation,
    shape: Padding,
    epochs: int,
    slack: FixedPointSlack | None,
    every_epoch: bool,
) -> tuple[Allocation, float]:
    """The allocation, and how far the longest of its modes moves the releases."""
    if slack is not None:
        require(slack.steps == factorisation.num_steps, "slack.steps", slack.steps, "those of the factorisation")
        require(
            slack.truncated_bits >= factorisation.tap_bits + slack.noise_shift,
            "slack.truncated_bits",
            slack.truncated_bits,
            f"at least tap_bits + noise_shift = {factorisation.tap_bits + slack.noise_shift}",
            "the low bits of filtered noise do not hide the data (proofs §6.1)",
        )
    if every_epoch:
        bound = clip_norm * (1 + 1e-9)
        if slack is not None:
            bound = slack.sensitivity(1.0, clip_norm, strategy_norm=1.0, affected_steps=1)
        return allocation_every_epoch(shape, epochs), bound
    clipped = clip_norm + (slack.clip_slack if slack else 0.0)
    grid = slack.grid_slack(factorisation.strategy_norm, 1) / clipped if slack else 0.0
    exponent = max(_LEAST_GRID, math.ceil(math.log2(grid))) if grid > 0 else _LEAST_GRID
    allocation = allocation_once(shape, epochs, factorisation, exponent)
    return allocation, allocation.scale * clipped


def _overflow(
    std: float, clip_norm: float, factorisation: Factorisation, slack: FixedPointSlack | None, split: NoiseSplit
) -> float:
    if slack is None:
        return 0.0
    worst = std * factorisation.velocity_norm(slack.momentum) * math.sqrt(split.outsider_variance)
    return slack.noise_overflow(worst, clip_norm, factorisation.tap_bits)


def _claim(
    epsilon: float,
    delta: float,
    found: Certificate,
    allocation: Allocation,
    sensitivity: float,
    factorisation: Factorisation,
    shape: Padding,
    slack: FixedPointSlack | None,
    split: NoiseSplit,
    overflow: float,
    to_delta: float,
    rows_per_person: int,
) -> Claim:
    epochs, sigma = allocation.epochs, found.sigma / rows_per_person
    participations = epochs if allocation.every_epoch else None

    def order_known(times: float) -> float:
        """ε if everybody knew the order, a person counting ``times``: one Gaussian, and what the arithmetic takes at
        that ε."""
        public = sigma / times / (math.sqrt(epochs) if allocation.every_epoch else 1.0)
        curve = partial(calibration.gaussian_epsilon, public)
        return epsilon_with_slack(curve, delta, slack, overflow, sigma / times, participations=participations)[0]

    replace_one, known = order_known(2.0), order_known(1.0)
    when = "anew in every epoch" if allocation.every_epoch else "once, the same batches in every epoch"
    certificate = f"{RANDOM_ALLOCATION}, {found.words}"
    group = "" if rows_per_person == 1 else f"; {rows_per_person} rows by group privacy (proofs §9.3)"
    return Claim(
        mechanism=f"{mechanism_name(factorisation)}, secret order",
        epsilon=epsilon,
        delta=delta,
        neighbouring=zero_out(rows_per_person),
        epsilon_replace_one=replace_one,
        participation=(
            f"{shape.num_samples} records and {shape.dummies} dummies shuffled in secret {when}; {shape.bins} "
            f"batches of "
            f"{shape.slots} rows, {epochs} epochs{rows_together(rows_per_person)}"
        ),
        adversary=split.adversary,
        covers="features and labels",
        noise_multiplier=sigma,
        sensitivity=rows_per_person * sensitivity,
        gaussian_multiplier=None,
        slack_delta=to_delta,
        statistical_distance=slack.statistical_distance(overflow) if slack else 0.0,
        epsilon_addition=slack.epsilon_addition(sigma, participations) if slack else 0.0,
        row_bound=slack.row_bound if slack else None,
        rows_per_person=rows_per_person,
        figures=(Figure("If everybody knew the order", known, delta, True, ANALYTIC_GAUSSIAN, replace_one),),
        slack=slack_parts(slack, factorisation, 1 if factorisation.kind == "identity" else None, to_delta),
        caveats=(
            "The order is secret to everybody: each server knows two of three permutations, a client none",
            *(() if slack else ("Computed for real arithmetic (plaintext twin): no fixed-point slack",)),
        ),
        sources=(
            ("epsilon", certificate + group),
            ("sensitivity", f"the longest of {shape.bins} modes; {FIXED_POINT_THEOREM}"),
            ("replace-one", "twice the sensitivity, order known"),
        ),
    )


def amplified_factorisation(
    kind: str,
    shape: Padding,
    epochs: int,
    *,
    weight_decay: float,
    momentum: float,
    epsilon: float,
    delta: float,
    bands: int | None = None,
) -> Factorisation:
    """The factorisation for a secret order: coefficients with the smallest σ·RMSE of the iterates, amplification
    included.

    The less a record's own batch stands out, the more is left to the secret order; the more noise cancels between
    steps, the smaller is the error. ``bisr``: bands among powers of two up to b, unless given. ``toeplitz``: how much
    the own batch counts when coefficients are optimised (``own``), for ``bands`` or up to 32 taps. σ by importance
    sampling, a second or two for each; kept on disk. ε and δ are public, and the answer is used by no proof.
    """
    search = BandSearch(kind, shape, epochs, weight_decay, momentum, epsilon, delta)
    if kind == "toeplitz":
        most = min(_MOST_TAPS, shape.bins, search.steps) if bands is None else bands
        own = cached("own", (search, most), lambda: search.best_own(most), _Own).own
        return search.factorisation(most, own)
    if kind == "bisr" and bands is None:
        name = (kind, shape, epochs, weight_decay, momentum, epsilon, delta)
        bands = cached("bands", name, search.best_bands, _Bands).bands
    return workload_factorisation(
        kind, search.steps, shape.bins, weight_decay=weight_decay, momentum=momentum, bands=bands
    )


@dataclass(frozen=True)
class BandSearch:
    kind: str
    shape: Padding
    epochs: int
    weight_decay: float
    momentum: float
    epsilon: float
    delta: float

    @property
    def steps(self) -> int:
        return self.epochs * self.shape.bins

    def factorisation(self, bands: int, own: float) -> Factorisation:
        toeplitz = self.kind == "toeplitz"  # the others have no choice of coefficients
        return factorise(
            self.kind,
            self.steps,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            bands=bands,
            min_separation=self.shape.bins if toeplitz else None,
            linear=toeplitz,
            own=own if toeplitz else 1.0,
        )

    def score(self, factorisation: Factorisation) -> float:
        """σ·RMSE."""
        allocation = allocation_once(self.shape, self.epochs, factorisation, _LEAST_GRID)
        sigma = search_sigma(allocation, self.epsilon, self.delta / 2, effort=1 << 20)
        return sigma * allocation.scale * factorisation.workload_error("mean")

    def best_bands(self) -> _Bands:
        best, scores = 1, []
        bands = min(_FIRST_BANDS, self.steps)
        while True:
            scores.append(self.score(self.factorisation(bands, 1.0)))
            if scores[-1] <= min(scores):
                best = bands
            if bands >= min(self.shape.bins, self.steps) or (len(scores) > 2 and scores[-1] > scores[-2] > scores[-3]):
                return _Bands(best)
            bands = min(2 * bands, self.shape.bins, self.steps)

    def best_own(self, bands: int) -> _Own:
        """Downhill along the grid from its middle."""
        scores: dict[int, float] = {}

        def score(place: int) -> float:
            if not 0 <= place < len(_OWN):
                return math.inf
            if place not in scores:
                scores[place] = self.score(self.factorisation(bands, _OWN[place]))
            return scores[place]

        here = len(_OWN) // 2
        for direction in (1, -1):
            while score(here + direction) < score(here):
                here += direction
        return _Own(_OWN[here])
