"""The mechanism of a run: bands, factorisation, calibration. Chosen here alone, so that twin and product cannot differ."""

from __future__ import annotations

from vfl.dp import (
    CalibratedNoise,
    Factorisation,
    FixedPointSlack,
    calibrate_matrix_factorisation,
    calibrate_shuffled,
    workload_factorisation,
)
from vfl.training import Schedule, TrainingConfig

__all__ = ["calibrate_run", "choose_factorisation"]

_INDEPENDENT = ("g_shuff", "gl_sub")  # batches in no fixed order: noise of one step cannot cancel that of another


def choose_factorisation(protocol: str, training: TrainingConfig, schedule: Schedule) -> Factorisation:
    """Which correlated noise the steps of this run get."""
    return workload_factorisation(
        "identity" if protocol in _INDEPENDENT else training.factorisation,
        schedule.num_steps,
        schedule.num_batches,
        weight_decay=training.weight_decay,
        momentum=training.momentum,
        bands=training.bands,
    )


def calibrate_run(
    protocol: str,
    training: TrainingConfig,
    schedule: Schedule,
    factorisation: Factorisation,
    slack: FixedPointSlack | None = None,
) -> CalibratedNoise:
    """The smallest noise for the run's (ε, δ), and its claim. ``slack`` None means real arithmetic: the twin."""
    if protocol == "g_shuff":
        return calibrate_shuffled(
            training.epsilon,
            training.delta,
            training.clip_norm,
            schedule.num_samples,
            schedule.batch_size,
            schedule.epochs,
            slack=slack,
            split=training.noise,
            accounting=training.accounting,
        )
    return calibrate_matrix_factorisation(
        training.epsilon,
        training.delta,
        training.clip_norm,
        factorisation,
        schedule.epochs,
        schedule.num_batches,
        slack,
        training.noise,
    )
