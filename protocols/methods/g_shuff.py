"""G-Shuff: train the global model on frozen local models, rows shuffled in secret every epoch (paper, first protocol).

    python -m protocols.g_shuff

Rows and dummies are shuffled, so that nobody knows which batch a record is in even if they know everybody else's: that
makes the claim a theorem (proofs §9.6). Independent noise in every step; open weights by default, which a run that is
resumed within an epoch continues in the same secret order (``protocols.state.shuffled_rows``). ``--accounting paper``
shows the paper's number.
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
from vfl.methods import FACTS, G_SHUFF
from vfl.twins import train_g_shuff

__all__ = ["METHOD", "servers", "train"]


async def servers(party: Party, job: ServerJob) -> list[np.ndarray]:
    """What each server runs."""
    with training_run(party, job) as run, RowFolder(run.directory.path) as folder:
        return await train(run, await receive_rows(party, job.plan, folder, run.directory))


async def train(run: TrainingRun, rows: SharedRows | StoredRows) -> list[np.ndarray]:
    """Train on rows that are shared, and release the model."""
    plan = run.plan
    for step in run.steps():
        epoch, batch = divmod(step, plan.schedule.num_batches)
        if batch == 0:  # nobody has opened anything of this epoch
            with run.party.phase("shuffle"):
                rows = await shuffle_rows(rows)
            run.keep_shuffled(epoch, rows)
        elif step == run.first_step:  # its order is drawn once
            rows = run.kept_shuffled(epoch, rows)
        await run.gradient_step(rows.batch(plan.schedule.rows(step)))
    return await run.release()


METHOD = Method(
    FACTS[G_SHUFF],
    plan=plan_of(G_SHUFF),
    servers=servers,
    train=train,
    twin=train_g_shuff,
    twin_takes_noise=False,  # its secret order lies nowhere
    **frozen_rows,
)
