"""G-BMF: frozen local models, batches in a fixed or a secret order, matrix-factorisation noise (paper, Fig. 2)."""

from __future__ import annotations

from vfl.federation import Federation
from vfl.gradients import GlobalModel
from vfl.methods import G_BMF
from vfl.run_mechanism import choose_schedule
from vfl.training import TrainingConfig
from vfl.twins.engine import Rows, TwinResult, start_model, train_frozen
from vfl.twins.g_shuff import Order, epoch_order, require_order
from vfl.twins.mechanisms import plan_matrix_factorisation
from vfl.twins.noise import GivenNoise, filtered_noise, given_noise

__all__ = ["train_g_bmf"]


def train_g_bmf(
    federation: Federation,
    config: TrainingConfig,
    *,
    noise: GivenNoise | None = None,
    order: Order | None = None,
    norm_limit: float | None = None,
    initial: GlobalModel | None = None,
    num_steps: int | None = None,
    evaluate_every: int = 0,
    progress: bool = False,
) -> TwinResult:
    """The twin of G-BMF; ``noise`` given from outside is the *filtered* noise of each step.

    ``order``: with a secret order, the permutation of records and dummies instead of the seed's. ``norm_limit``: see
    ``vfl.gradients.clipped_gradient``. ``num_steps`` stops early, for comparing weights with a secure run after k
    steps; the noise is that of the full run.
    """
    schedule = choose_schedule(G_BMF, config, federation.num_samples)
    plan = plan_matrix_factorisation(config, schedule)
    steps = schedule.num_steps if num_steps is None else min(num_steps, schedule.num_steps)
    size = start_model(federation, config, initial).num_parameters
    source = (
        filtered_noise(plan.factorisation, size, plan.std, config.seed, config.dtype)
        if noise is None
        else given_noise(noise, steps, size, config.dtype)
    )
    if schedule.dummies:
        drawn = epoch_order(config.seed, 0, schedule.num_rows) if order is None else require_order(order, schedule)

    def rows_of_step(step: int) -> Rows:
        return schedule.records(step, drawn) if schedule.dummies else schedule.rows(step)

    return train_frozen(
        "G-BMF",
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
