"""GL-BMF: global model and the clients' LoRA layers together (paper, Fig. 3), and its variant GL-Sub.

The clients' ``LocalUpdate`` (see ``vfl.local.client``) decides between ``released`` (all layers, claim covers
features and labels) and ``estimated`` (the paper's: one layer, claim covers labels only).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from accel.validate import require
from vfl.federation import Federation
from vfl.gradients import GlobalModel
from vfl.methods import GL_BMF
from vfl.run_mechanism import choose_schedule
from vfl.training import TrainingConfig
from vfl.twins.engine import TwinResult, adapter_parameters, start_model, train_with_adapters
from vfl.twins.mechanisms import plan_matrix_factorisation, plan_subsampled
from vfl.twins.noise import GivenNoise, filtered_noise, given_noise

__all__ = ["is_estimated", "release_size", "train_gl_bmf", "train_gl_sub"]

Rows = npt.NDArray[np.int64]


def release_size(federation: Federation, config: TrainingConfig, initial: GlobalModel | None = None) -> int:
    """n: coordinates of the concatenated gradient (global model, then each client's shared layers)."""
    size = start_model(federation, config, initial).num_parameters
    return size + sum(adapter_parameters(federation.clients))


def is_estimated(federation: Federation) -> bool:
    """Whether clients estimate per-sample gradients; every client must have trainable layers."""
    for client in federation.clients:
        require(
            client.is_trainable,
            f"{client.name}: lora",
            None,
            "present",
            "build the federation with lora=True",
        )
    return any(c.update.kind == "estimated" for c in federation.clients)


def train_gl_bmf(
    federation: Federation,
    config: TrainingConfig,
    *,
    noise: GivenNoise | None = None,
    initial: GlobalModel | None = None,
    num_steps: int | None = None,
    evaluate_every: int = 0,
    progress: bool = False,
) -> TwinResult:
    """The twin of GL-BMF. The federation is copied: its adapters stay as they are, the result holds the
    trained.
    """
    estimated = is_estimated(federation)
    schedule = choose_schedule(GL_BMF, config, federation.num_samples)
    plan = plan_matrix_factorisation(config, schedule, labels_only=estimated)
    steps = schedule.num_steps if num_steps is None else min(num_steps, schedule.num_steps)
    size = release_size(federation, config, initial)
    source = (
        filtered_noise(plan.factorisation, size, plan.std, config.seed, config.dtype)
        if noise is None
        else given_noise(noise, steps, size, config.dtype)
    )
    return train_with_adapters(
        f"GL-BMF ({'estimated' if estimated else 'released'})",
        federation,
        config,
        plan,
        schedule.rows,
        steps,
        source,
        initial=initial,
        evaluate_every=evaluate_every,
        progress=progress,
    )


def train_gl_sub(
    federation: Federation,
    config: TrainingConfig,
    *,
    noise: GivenNoise | None = None,
    rows_of_step: Callable[[int], Rows] | None = None,
    initial: GlobalModel | None = None,
    evaluate_every: int = 0,
    progress: bool = False,
) -> TwinResult:
    """GL-Sub: GL-BMF's steps on Poisson samples with independent noise. A baseline, not a protocol.

    Every row takes part with probability B/M in each step, and the sum is divided by B, the expected size.
    The clients see who takes part, so the amplification holds only against others (the claim says so).
    """
    estimated = is_estimated(federation)
    schedule = choose_schedule(GL_BMF, config, federation.num_samples)
    plan = plan_subsampled(config, schedule, labels_only=estimated)
    size = release_size(federation, config, initial)
    source = (
        filtered_noise(plan.factorisation, size, plan.std, config.seed, config.dtype)
        if noise is None
        else given_noise(noise, schedule.num_steps, size, config.dtype)
    )
    random = np.random.default_rng([config.seed, 0x706F6973])
    rate = schedule.batch_size / schedule.num_samples

    def poisson_rows(step: int) -> Rows:
        return np.flatnonzero(random.random(schedule.num_samples) < rate)

    return train_with_adapters(
        f"GL-Sub ({'estimated' if estimated else 'released'})",
        federation,
        config,
        plan,
        rows_of_step or poisson_rows,
        schedule.num_steps,
        source,
        initial=initial,
        evaluate_every=evaluate_every,
        progress=progress,
    )
