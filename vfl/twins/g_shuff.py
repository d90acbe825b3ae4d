"""G-Shuff: frozen local models, rows shuffled each epoch, independent Gaussian noise (paper, Fig. 1)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from accel.validate import require
from vfl.federation import Federation
from vfl.gradients import GlobalModel
from vfl.training import TrainingConfig
from vfl.twins.engine import TwinResult, start_model, train_frozen
from vfl.twins.mechanisms import plan_shuffled
from vfl.twins.noise import GivenNoise, filtered_noise, given_noise

__all__ = ["epoch_order", "train_g_shuff"]

Order = npt.NDArray[np.int64]


def epoch_order(seed: int, epoch: int, num_samples: int) -> Order:
    """The permutation of one epoch from the twin's seed (the secure shuffle draws its own from pair keys)."""
    return np.random.default_rng([seed, epoch, 0x7368756666]).permutation(num_samples)


def train_g_shuff(
    federation: Federation,
    config: TrainingConfig,
    *,
    noise: GivenNoise | None = None,
    orders: npt.ArrayLike | Callable[[int], Order] | None = None,
    norm_limit: float | None = None,
    initial: GlobalModel | None = None,
    num_steps: int | None = None,
    evaluate_every: int = 0,
    progress: bool = False,
) -> TwinResult:
    """The twin of G-Shuff.

    ``noise``: rows to add to the sum of each step instead of the seed's. ``orders``: the permutations, an
    array (epochs, M) or a function of the epoch. ``norm_limit``: see ``vfl.gradients.clipped_gradient``. ``num_steps`` stops early (comparison after k steps).
    """
    schedule = config.steps(federation.num_samples)
    plan = plan_shuffled(config, schedule)
    steps = schedule.num_steps if num_steps is None else min(num_steps, schedule.num_steps)
    size = start_model(federation, config, initial).num_parameters
    source = (
        filtered_noise(plan.factorisation, size, plan.std, config.seed, config.dtype)
        if noise is None
        else given_noise(noise, steps, size, config.dtype)
    )
    cache: dict[int, Order] = {}

    def rows_of_step(step: int) -> Order:
        epoch = schedule.epoch(step)
        if epoch not in cache:
            cache.clear()
            cache[epoch] = _order_of(orders, config.seed, epoch, schedule.num_samples)
        return schedule.permuted_rows(step, cache[epoch])

    return train_frozen(
        "G-Shuff",
        federation,
        config,
        plan,
        rows_of_step,
        steps,
        source,
        norm_limit=norm_limit,
        initial=initial,
        evaluate_every=evaluate_every,
        progress=progress,
    )


def _order_of(orders: npt.ArrayLike | Callable[[int], Order] | None, seed: int, epoch: int, num_samples: int) -> Order:
    if orders is None:
        return epoch_order(seed, epoch, num_samples)
    order = np.asarray(orders(epoch) if callable(orders) else np.asarray(orders)[epoch])
    require(
        order.shape == (num_samples,) and np.array_equal(np.sort(order), np.arange(num_samples)),
        f"orders[{epoch}]",
        order.shape,
        f"a permutation of {num_samples} rows",
    )
    return order
