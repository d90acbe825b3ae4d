"""What a method is: who plans it, what servers and clients run, and the plaintext twin that tests hold it against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocols.client.upload import ClientJob, client_program
from protocols.plan.run_plan import Plan, plan_run
from protocols.server.training import ServerJob
from vfl.federation import Federation
from vfl.methods import Facts
from vfl.training import TrainingConfig
from vfl.twins import TwinResult

__all__ = ["Jobs", "Method", "frozen_rows", "plan_of", "upload_jobs"]

Jobs = dict[str, Any]  # what each client is given


@dataclass(frozen=True)
class Method:
    """``plan`` makes the public plan of a federation and a training. ``servers`` is what each server runs on its entry
    of ``server_jobs`` (plan, folder, checkpoints, synced), ``train`` the loop in it, given a run; ``client_jobs``
    (plan, federation, folder) is what each client runs. ``trained``: the layers, and the federation with what its
    clients learnt. ``twin`` trains in the clear, given the servers' noise if ``twin_takes_noise``."""

    facts: Facts
    plan: Callable[[Federation, TrainingConfig], Plan]
    servers: Callable[..., Any]
    train: Callable[..., Any]
    client: Callable[..., Any]
    server_jobs: Callable[[Any, Path, int, bool], list[Any]]
    client_jobs: Callable[[Any, Federation, Path | None], Jobs]
    trained: Callable[[Any, Federation, Mapping[str, Any]], tuple[list[Any], Federation]]
    twin: Callable[..., TwinResult]
    twin_takes_noise: bool = True

    @property
    def stays(self) -> bool:
        """Whether clients stay while it runs: they train layers of their own."""
        return self.facts.takes("layers")

    def clients(self, plan: Any, federation: Federation, directory: Path | None = None) -> dict[str, Any]:
        """For each client its program and what it is given."""
        return {name: (self.client, job) for name, job in self.client_jobs(plan, federation, directory).items()}


# methods that train on rows that were uploaded once ------------------------------------------------


def plan_of(name: str) -> Callable[[Federation, TrainingConfig], Plan]:
    """``plan_run`` for a method."""
    return lambda federation, training: plan_run(name, federation, training)


def _server_jobs(plan: Plan, directory: Path, every: int, synced: bool) -> list[ServerJob]:
    return [ServerJob(plan, directory / f"server-{i}", plan.resumable(every), synced) for i in range(3)]


def upload_jobs(plan: Plan, federation: Federation, directory: Path | None = None) -> Jobs:
    """What each client gets: its own columns, and the label client its labels."""
    used = slice(0, plan.schedule.num_samples)
    return {
        client.name: ClientJob(
            plan,
            client.embedding_rows(used),
            plan.labels_to_share(client.label_rows(used)) if client.is_label_client else None,
        )
        for client in federation.clients
    }


def _trained(plan: Plan, federation: Federation, outputs: Mapping[str, Any]) -> tuple[list[Any], Federation]:
    return outputs[plan.client_names[0]], federation


frozen_rows: dict[str, Any] = {
    "client": client_program,
    "server_jobs": _server_jobs,
    "client_jobs": upload_jobs,
    "trained": _trained,
}
