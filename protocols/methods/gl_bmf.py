"""GL-BMF: train the global model and the clients' LoRA layers together (paper, third protocol).

    python -m protocols.gl_bmf

Fixed order of batches, correlated noise. In every step each client is told the noised gradient of its own layers, and
nothing else; at the end all get the global model. With open weights (default) the noised sums of the global layer are
opened to the three servers in every step. With ``--local-update released`` (default) a client applies just that, and
the claim covers features and labels; with ``estimated`` it does as the paper says, and the claim covers labels only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from protocols.client.gl_client import LayerClientJob, TrainedClient, client_program
from protocols.methods.method import Jobs, Method
from protocols.plan.gl_plan import LayerPlan, plan_layer_run
from protocols.server.gl_training import LayerRun, LayerServerJob, layer_run
from refmpc import Party
from vfl.federation import Federation
from vfl.methods import FACTS, GL_BMF
from vfl.twins import TwinResult, train_gl_bmf

__all__ = ["METHOD", "client_directory", "client_jobs", "server_jobs", "servers", "train"]


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


def server_jobs(plan: LayerPlan, directory: Path, keep: int, synced: bool = True) -> list[LayerServerJob]:
    """What each server gets; ``keep``: whether steps are kept on disk."""
    return [LayerServerJob(plan, directory / f"server-{i}", keep > 0, synced) for i in range(3)]


def client_directory(directory: Path, name: str) -> Path:
    """Where a client of a run on this machine keeps what is its own."""
    return directory / name.replace(" ", "-")


def client_jobs(plan: LayerPlan, federation: Federation, directory: Path | None) -> Jobs:
    """What each client gets: its own columns, blocks and layers."""
    return {
        client.name: LayerClientJob(plan, client.fresh(), directory and client_directory(directory, client.name))
        for client in federation.clients
    }


def _trained(
    plan: LayerPlan, federation: Federation, outputs: Mapping[str, TrainedClient]
) -> tuple[list[Any], Federation]:
    trained = federation.fresh()
    for client in trained.clients:
        client.load_adapter_state(outputs[client.name].layers)
    return [outputs[trained.clients[0].name].model], trained


def _twin(federation: Federation, training: Any, *, noise: Any = None, norm_limit: float | None = None) -> TwinResult:
    return train_gl_bmf(federation, training, noise=noise)


METHOD = Method(
    FACTS[GL_BMF],
    plan=plan_layer_run,
    servers=servers,
    train=train,
    client=client_program,
    server_jobs=server_jobs,
    client_jobs=client_jobs,
    trained=_trained,
    twin=_twin,
)
