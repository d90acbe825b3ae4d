"""GL-BMF: train the global model and the clients' LoRA layers together (paper, third protocol).

    python -m protocols.gl_bmf

Fixed order of batches, correlated noise. In every step each client is told the noised gradient of its own layers, and
nothing else; at the end all get the global model. With open weights (default) the noised sums of the global layer are opened
to the three servers in every step. With ``--local-update released`` (default) a client applies just
that, and the claim covers features and labels; with ``estimated`` it does as the paper says, and the claim covers
labels only.
"""

from __future__ import annotations

import numpy as np

from protocols.server.gl_training import LayerRun, LayerServerJob, layer_run
from refmpc import Party

__all__ = ["servers", "train"]


async def servers(party: Party, job: LayerServerJob) -> list[np.ndarray]:
    """What each server runs."""
    with layer_run(party, job) as run:
        return await train(run)


async def train(run: LayerRun) -> list[np.ndarray]:
    """Train with the clients, step by step, and release the model."""
    run.greet_clients()
    labels = await run.receive_labels()
    for step in run.steps():
        embeddings, clients = await run.receive_batch(step)
        openings = await run.step(embeddings, labels[run.plan.schedule.rows(step)], clients)
        await run.release_gradients(step, openings)
    return await run.release()
