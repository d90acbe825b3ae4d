"""Plain: the paper's single-server protocol without privacy; the upper end of every table.

``local_training``: ``none`` (frozen local models), or ``lora`` (adapters trained with exact gradients). Full
training of torch local models without privacy is ``vfl.baselines.split`` with ``epsilon=None``.
"""

from __future__ import annotations

import numpy as np

from accel.validate import require, require_choice
from vfl.federation import Federation
from vfl.gradients import GlobalModel
from vfl.training import TrainingConfig
from vfl.twins.engine import TwinResult, adapter_parameters, start_model, train_frozen, train_with_adapters
from vfl.twins.noise import no_noise

__all__ = ["train_plain"]


def train_plain(
    federation: Federation,
    config: TrainingConfig,
    *,
    local_training: str = "none",
    shuffle: bool = True,
    clip: bool = False,
    initial: GlobalModel | None = None,
    evaluate_every: int = 0,
    progress: bool = False,
) -> TwinResult:
    """Train without noise (and, unless ``clip``, without clipping), rows reshuffled each epoch by the
    seed.
    """
    require_choice("local_training", local_training, ("none", "lora"))
    schedule = config.steps(federation.num_samples)
    orders = [
        np.random.default_rng([config.seed, e, 0x706C61696E]).permutation(schedule.num_samples)
        for e in range(schedule.epochs)
    ]

    def rows_of_step(step: int) -> slice | np.ndarray:
        if not shuffle:
            return schedule.rows(step)
        return schedule.permuted_rows(step, orders[schedule.epoch(step)])

    size = start_model(federation, config, initial).num_parameters
    if local_training == "lora":
        require(
            federation.clients[0].is_trainable, "local_training", "lora", "'none' for clients without LoRA",
            "build the federation with lora=True",
        )  # fmt: skip
        size += sum(adapter_parameters(federation.clients))
    trainer = train_frozen if local_training == "none" else train_with_adapters
    return trainer(
        "Plain" if local_training == "none" else "Plain (LoRA)",
        federation,
        config,
        None,
        rows_of_step,
        schedule.num_steps,
        no_noise(size, config.dtype),
        clip=clip,
        initial=initial,
        evaluate_every=evaluate_every,
        progress=progress,
    )
