"""The mechanism of a run: schedule, bands, factorisation, calibration. Chosen here alone, so that twin and product
cannot differ."""

from __future__ import annotations

from accel.validate import require
from vfl.dp import (
    CalibratedNoise,
    Factorisation,
    FixedPointSlack,
    Padding,
    amplified_factorisation,
    calibrate_matrix_factorisation,
    calibrate_secret_order,
    calibrate_shuffled,
    for_one_row,
    workload_factorisation,
)
from vfl.methods import facts
from vfl.training import Schedule, TrainingConfig

__all__ = ["calibrate_run", "choose_factorisation", "choose_schedule", "has_secret_order"]


def has_secret_order(protocol: str, training: TrainingConfig) -> bool:
    """Whether nobody learns which batch a record is in, and the claim counts on it: padded shuffles (proofs §9.6).

    A dummy must contribute exactly nothing, which holds for one layer with factored gradients.
    """
    simple = not training.hidden and training.gradients == "factored"
    if facts(protocol).takes("a new order in every epoch"):
        return simple and training.accounting == "proven"
    if training.order == "fixed":
        return False
    require(
        facts(protocol).takes("a secret order"),
        "order",
        training.order,
        f"'fixed' in {protocol}",
        "its clients know the batches, so the order cannot be secret",
    )
    require(
        simple,
        "order",
        training.order,
        "'fixed' with hidden layers or explicit gradients",
        "a dummy's rounded gradient is not exactly zero there",
    )
    return True


def choose_schedule(protocol: str, training: TrainingConfig, num_samples: int) -> Schedule:
    """Which rows a step takes: batches of the aligned order, or padded ones of a secret order."""
    if has_secret_order(protocol, training):
        return training.padded_steps(num_samples)
    return training.steps(num_samples)


def _padding(schedule: Schedule) -> Padding:
    return Padding(schedule.num_samples, schedule.num_batches, schedule.batch_size)


def choose_factorisation(protocol: str, training: TrainingConfig, schedule: Schedule) -> Factorisation:
    """Which correlated noise the steps of this run get."""
    correlated = facts(protocol).takes("correlated noise")  # else the noise of one step cannot cancel that of another
    kind = training.factorisation if correlated else "identity"
    workload = {"weight_decay": training.weight_decay, "momentum": training.momentum}
    if schedule.dummies and correlated:
        epsilon, delta = for_one_row(training.epsilon, training.delta, training.rows_per_person)
        return amplified_factorisation(
            kind,
            _padding(schedule),
            schedule.epochs,
            **workload,
            epsilon=epsilon,
            delta=delta,
            bands=training.bands,
        )
    return workload_factorisation(
        kind,
        schedule.num_steps,
        schedule.num_batches,
        **workload,
        bands=training.bands,
        linear=training.noise == "joint",  # shares are filtered, and a recursion would round them
    )


def calibrate_run(
    protocol: str,
    training: TrainingConfig,
    schedule: Schedule,
    factorisation: Factorisation,
    slack: FixedPointSlack | None = None,
) -> CalibratedNoise:
    """The smallest noise for the run's (ε, δ), and its claim. ``slack`` None means real arithmetic: the twin."""
    if schedule.dummies:
        return calibrate_secret_order(
            training.epsilon,
            training.delta,
            training.clip_norm,
            factorisation,
            _padding(schedule),
            schedule.epochs,
            slack,
            training.noise,
            every_epoch=facts(protocol).takes("a new order in every epoch"),
            rows_per_person=training.rows_per_person,
        )
    if facts(protocol).takes("a new order in every epoch"):
        return calibrate_shuffled(
            training.epsilon,
            training.delta,
            training.clip_norm,
            schedule.num_samples,
            schedule.batch_size,
            schedule.epochs,
            slack=slack,
            split=training.noise,
            accounting="paper" if training.accounting == "paper" else "any-order",
            rows_per_person=training.rows_per_person,
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
        training.rows_per_person,
    )
