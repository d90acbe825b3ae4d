"""G-Shuff: frozen local models, rows shuffled each epoch, independent Gaussian noise (paper, Fig. 1)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from accel.validate import require
from vfl.federation import Federation
from vfl.gradients import GlobalModel
from vfl.methods import G_SHUFF
from vfl.run_mechanism import choose_schedule
from vfl.training import Schedule, TrainingConfig
from vfl.twins.engine import TwinResult, start_model, train_frozen
from vfl.twins.mechanisms import plan_shuffled
from vfl.twins.noise import GivenNoise, filtered_noise, given_noise

__all__ = ["Order", "epoch_order", "require_order", "train_g_shuff"]

Order = npt.NDArray[np.int64]


def epoch_order(seed: int, epoch: int, num_rows: int) -> Order:
    """The permutation of one epoch from the twin's seed (the secure shuffle draws its own from pair keys)."""
    return np.random.default_rng([seed, epoch, 0x7368756666]).permutation(num_rows)


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
    array (epochs, rows) or a function of the epoch; numbers from the records on are dummies. ``norm_limit``: see
    ``vfl.gradients.clipped_gradient``. ``num_steps`` stops early (comparison after k steps).
    """
    schedule = choose_schedule(G_SHUFF, config, federation.num_samples)
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
            cache[epoch] = _order_of(orders, config.seed, epoch, schedule)
        return schedule.records(step, cache[epoch])

    return train_frozen(
        "G-Shuff",
        federation,
        config,
        plan,
        rows_of_step,
        steps,
        source,
        schedule=schedule,
        norm_limit=norm_limit,
        initial=initial,
        evaluate_every=evaluate_every,
        progress=progress,
    )


def require_order(order: npt.ArrayLike, schedule: Schedule, name: str = "order") -> Order:
    """``order`` as it is, if it is a permutation of all rows, records and dummies."""
    found = np.asarray(order)
    require(
        found.shape == (schedule.num_rows,) and np.array_equal(np.sort(found), np.arange(schedule.num_rows)),
        name,
        found.shape,
        f"a permutation of {schedule.num_rows} rows",
    )
    return found


def _order_of(
    orders: npt.ArrayLike | Callable[[int], Order] | None, seed: int, epoch: int, schedule: Schedule
) -> Order:
    if orders is None:
        return epoch_order(seed, epoch, schedule.num_rows)
    order = orders(epoch) if callable(orders) else np.asarray(orders)[epoch]
    return require_order(order, schedule, f"orders[{epoch}]")
