"""Where a training runs: the real protocol at three processes (or threads) of this machine, or its plaintext twin."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import refmpc
from protocols.client.upload import ClientJob, client_program
from protocols.methods.registry import protocol
from protocols.plan.run_plan import Plan
from protocols.server.training import ServerJob
from vfl.dp import Claim
from vfl.federation import Federation
from vfl.twins import train_g_bmf, train_g_shuff

__all__ = ["BACKENDS", "Trained", "train"]

BACKENDS = ("local", "threads", "federation", "twin")


@dataclass(frozen=True)
class Trained:
    """A model and its claim; ``cost`` holds rounds, bytes and seconds of a real run."""

    layers: list[np.ndarray]
    claim: Claim
    cost: dict[str, float] = field(default_factory=dict)


def train(backend: str, plan: Plan, federation: Federation, timeout: float) -> Trained:
    """Run the plan on this machine."""
    return _twin(plan, federation) if backend == "twin" else _local(backend, plan, federation, timeout)


def _twin(plan: Plan, federation: Federation) -> Trained:
    trainers: dict[str, Callable[..., object]] = {"g_bmf": train_g_bmf, "g_shuff": train_g_shuff}
    result = trainers[plan.protocol](federation, plan.training, norm_limit=plan.scales.norm_limit)
    return Trained(result.model.layers, plan.claim)  # type: ignore[attr-defined]


def _local(backend: str, plan: Plan, federation: Federation, timeout: float) -> Trained:
    used = slice(0, plan.schedule.num_samples)
    clients = {
        client.name: (
            client_program,
            ClientJob(
                plan,
                client.embedding_rows(used),
                plan.labels_to_share(client.label_rows(used)) if client.is_label_client else None,
            ),
        )
        for client in federation.clients
    }
    with tempfile.TemporaryDirectory(prefix="ppvfl-") as folder:
        result = refmpc.run(
            protocol(plan.protocol).servers,
            [ServerJob(plan, Path(folder) / f"server-{i}", 0) for i in range(3)],
            parties="processes" if backend == "local" else "threads",
            clients=clients,
            releases=plan.releases,
            parameters=plan.public_parameters(),
            timeout=timeout,
        )
    cost = {"rounds": result.rounds, "bytes": result.bytes, "seconds": result.seconds}
    return Trained(result.client_outputs[plan.client_names[0]], plan.claim, cost)
