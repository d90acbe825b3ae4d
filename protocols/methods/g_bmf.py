"""G-BMF: train the global model on frozen local models with matrix-factorisation noise (paper, second protocol).

    python -m protocols.g_bmf

Correlated noise; batches in a fixed order that everybody knows, or (``--order secret``) in one that is shuffled once,
in secret, and needs less noise.
"""

from __future__ import annotations

import numpy as np

from protocols.methods.method import Method, frozen_rows, plan_of
from protocols.server.intake import receive_rows
from protocols.server.open_training import training_run
from protocols.server.training import ServerJob, TrainingRun
from protocols.state.shuffled_rows import shuffle_rows
from protocols.state.stored_rows import RowFolder, StoredRows
from protocols.step.secret_step import SharedRows
from refmpc import Party
from vfl.methods import FACTS, G_BMF
from vfl.twins import train_g_bmf

__all__ = ["METHOD", "servers", "train"]


async def servers(party: Party, job: ServerJob) -> list[np.ndarray]:
    """What each server runs."""
    with training_run(party, job) as run, RowFolder(run.directory.path) as folder:
        return await train(run, await receive_rows(party, job.plan, folder, run.directory))


async def train(run: TrainingRun, rows: SharedRows | StoredRows) -> list[np.ndarray]:
    """Train on rows that are shared, and release the model."""
    plan = run.plan
    for step in run.steps():
        if plan.secret_order and step == run.first_step:
            if step:  # its order is drawn once
                rows = run.kept_shuffled(0, rows)
            else:
                with run.party.phase("shuffle"):
                    rows = await shuffle_rows(rows)
                run.keep_shuffled(0, rows)
        await run.gradient_step(rows.batch(plan.schedule.rows(step)))
    return await run.release()


METHOD = Method(
    FACTS[G_BMF],
    plan=plan_of(G_BMF),
    servers=servers,
    train=train,
    twin=train_g_bmf,
    **frozen_rows,
)
