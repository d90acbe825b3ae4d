"""GL-BMF between servers and clients that stay, as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from protocols.client.columns import OwnColumns, client_row_bound
from protocols.client.gl_client import TrainedClient
from protocols.client.stay_connected import local_client, train_with_servers
from protocols.federation.public_plan import layer_plan_for
from protocols.log import Log
from protocols.plan.gl_plan import LayerPlan
from tests.protocols.run.hosts.threads import CLIENTS, ROWS, Federation, _wait
from vfl.data.columns import ClientTable
from vfl.data.scaling import RowBound
from vfl.federation import Federation as LocalFederation
from vfl.tables import Ids

__all__ = ["ROWS", "WEAK_NOISE", "LiveFederation"]

LAYERS = "rank = 2\nlora_alpha = 2.0\nlocal_learning_rate = 0.5"
WEAK_NOISE = {"epsilon": 20.0, "learning_rate": 0.5, "row_rule": '"clip"', "row_bound": 1.0, "epochs": 2}


class LiveFederation(Federation):
    """Servers as threads, and clients of GL-BMF that have aligned their rows already."""

    def __init__(self, directory: Path, **run: Any):
        super().__init__(directory, protocol=f'"gl_bmf"\n{LAYERS}', **run)
        self.plan: LayerPlan = layer_plan_for(self.config, ROWS)
        self.noise_is_kept = threading.Event()

    def own(self, name: str, scale: float = 1.0) -> OwnColumns:
        """Columns from which the labels can be learnt, the same at every call."""
        columns = dict(
            zip(CLIENTS, np.split(np.random.default_rng(5).normal(size=(ROWS, 7)), [4], axis=1), strict=True)
        )
        labels = tuple(str(int(row)) for row in columns["bank"][:, 0] + columns["card"][:, 0] > 0)
        table = ClientTable(f"{name}.csv", Ids(map(str, range(ROWS))), (), np.empty((ROWS, 0), np.float32), labels)
        entry = next(client for client in self.config.clients if client.name == name)
        bound = RowBound(client_row_bound(self.config, entry), self.config.run.row_rule)
        return OwnColumns(table, scale * columns[name], bound, "a test")

    def stay(
        self,
        name: str,
        scale: float = 1.0,
        on_step: Callable[[int], None] = lambda done: None,
        on_model: Callable[[TrainedClient], None] = lambda trained: None,
    ) -> threading.Thread:
        """A client as a thread; what it has trained, or its error, goes into ``self.outcome``."""

        def beat(message: Mapping[str, Any]) -> None:
            progress = message.get("progress") or {}
            if progress.get("phase") == "training" and "missing" not in message:  # its own, not a server's
                on_step(progress["done"])

        def work() -> None:
            log = Log(name, self.directory / f"{name}.log")
            own, state = self.own(name, scale), self.directory / f"state-{name}"
            everything = (self.identity(name), self.plan, own, np.arange(ROWS), self.session, log, state)
            try:
                self.outcome[name] = train_with_servers(*everything, on_model=on_model, on_beat=beat)
            except Exception as error:
                self.outcome[name] = error

        return self.begin(name, work)

    def clients(self, *names: str, **how: Any) -> None:
        for name in names or CLIENTS:
            self.stay(name, **how)

    def finish(self) -> np.ndarray:
        """The model of the clients that have begun, which is the same, when the servers have ended."""
        assert all(isinstance(found, TrainedClient) for found in self.wait().values()), self.outcome
        assert np.array_equal(self.outcome["bank"].model, self.outcome["card"].model)
        for _, thread in self.servers.values():
            thread.join(20)
            assert not thread.is_alive()
        return self.outcome["bank"].model

    def until_noise_is_kept(self, trained: TrainedClient) -> None:
        """A client that has not confirmed the model makes the servers keep their noise."""
        assert self.noise_is_kept.wait(60)

    def wait_for(self, name: str, event: str) -> None:
        _wait(lambda: self.count(name, event))

    def server_file(self, number: int, name: str) -> Path:
        (found,) = self.directory.glob(f"server-{number}/state/*/training-*")
        return found / "server" / name

    def twin_federation(self) -> LocalFederation:
        """The same clients in the clear."""
        rows = np.arange(ROWS)
        clients = [local_client(self.identity(name), self.plan, self.own(name), rows) for name in CLIENTS]
        labels = clients[-1].label_rows()
        frozen, blocks = [c.embeddings for c in clients], [list(c.block_outputs) for c in clients]
        return LocalFederation(clients, 2, labels, frozen, blocks, self.config.run.row_bound)
