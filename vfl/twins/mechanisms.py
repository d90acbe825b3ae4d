"""Which noise a method needs, and what it may then claim: the twins' only door to the DP engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from vfl.dp import (
    CalibratedNoise,
    Claim,
    Factorisation,
    NoiseSplit,
    labels_only_claim,
    poisson_sigma,
    subsampled_claim,
    with_delta_checked,
)
from vfl.federation import Federation
from vfl.methods import G_BMF, G_SHUFF, GL_SUB
from vfl.run_mechanism import calibrate_run, choose_factorisation
from vfl.training import Schedule, TrainingConfig

__all__ = ["NoisePlan", "plan_matrix_factorisation", "plan_method", "plan_shuffled", "plan_subsampled"]


@dataclass(frozen=True)
class NoisePlan:
    """Noise of a run: ``std`` is that of one coordinate of z really present (1.5σ² under `distributed`).

    The noise added to the sum at step t is the filtered row (Ω̂⁻¹z)[t] and has ``step_std(t)``.
    """

    noise_multiplier: float
    sensitivity: float
    std: float
    factorisation: Factorisation
    claim: Claim
    _row_norms: npt.NDArray[np.float64] = field(repr=False, compare=False)

    def row_norm(self, step: int) -> float:
        """‖Ω̂⁻¹[t,:]‖."""
        return float(self._row_norms[step])

    def step_std(self, step: int) -> float:
        """Standard deviation of the noise in one coordinate of the sum at this step."""
        return self.std * self.row_norm(step)

    def about(self, federation: Federation) -> NoisePlan:
        """The same plan, its claim naming this federation's row bound and what it took as public."""
        claim = replace(
            self.claim,
            row_bound=federation.row_bound,
            public=(*self.claim.public, *federation.public_inputs),
        )
        return replace(self, claim=claim)


def plan_matrix_factorisation(config: TrainingConfig, schedule: Schedule, *, labels_only: bool = False) -> NoisePlan:
    """G-BMF and GL-BMF: one mechanism over the whole run, the schedule's order, real arithmetic.

    ``labels_only``: the claim of GL-BMF with estimated local updates (same noise, narrower claim).
    """
    factorisation = choose_factorisation(G_BMF, config, schedule)
    noise = calibrate_run(G_BMF, config, schedule, factorisation)
    claim = labels_only_claim(noise.claim) if labels_only else noise.claim
    claim = with_delta_checked(claim, schedule.num_samples)
    return _noise_plan(noise, factorisation, claim)


def plan_shuffled(config: TrainingConfig, schedule: Schedule) -> NoisePlan:
    """G-Shuff: independent noise, accounted as ``config.accounting`` says."""
    factorisation = choose_factorisation(G_SHUFF, config, schedule)
    noise = calibrate_run(G_SHUFF, config, schedule, factorisation)
    claim = with_delta_checked(noise.claim, schedule.num_samples)
    return _noise_plan(noise, factorisation, claim)


def plan_method(method: str, config: TrainingConfig, schedule: Schedule) -> NoisePlan:
    """G-BMF's or G-Shuff's."""
    return (plan_shuffled if method == G_SHUFF else plan_matrix_factorisation)(config, schedule)


def plan_subsampled(config: TrainingConfig, schedule: Schedule, *, labels_only: bool = False) -> NoisePlan:
    """GL-Sub: Poisson samples of rate B/M redrawn each step; the clients see who takes part (a caveat)."""
    config.require_single_rows("GL-Sub")
    rate = schedule.batch_size / schedule.num_samples
    sigma = poisson_sigma(config.epsilon, config.delta, rate, schedule.num_steps, config.accountant)
    claim = subsampled_claim(
        sigma,
        config.delta,
        config.clip_norm,
        schedule.num_samples,
        schedule.batch_size,
        schedule.num_steps,
        config.accountant,
    )
    spread = NoiseSplit(config.noise).outsider_variance ** 0.5
    std = sigma * config.clip_norm * spread
    if labels_only:
        claim = labels_only_claim(claim)
    claim = with_delta_checked(claim, schedule.num_samples)
    factorisation = choose_factorisation(GL_SUB, config, schedule)
    return NoisePlan(sigma, config.clip_norm, std, factorisation, claim, factorisation.noise_norms())


def _noise_plan(noise: CalibratedNoise, factorisation: Factorisation, claim: Claim) -> NoisePlan:
    norms = factorisation.noise_norms()
    return NoisePlan(noise.noise_multiplier, noise.sensitivity, noise.outsider_std, factorisation, claim, norms)
