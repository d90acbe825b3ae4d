"""GL-BMF between servers and clients that stay, as threads of one process."""

from __future__ import annotations

import json
import threading
import time
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
from tests.protocols.run.hosts.threads import Federation
from vfl.data.columns import ClientTable
from vfl.data.scaling import RowBound
from vfl.federation import Federation as LocalFederation
from vfl.tables import Ids

__all__ = ["NAMES", "ROWS", "WEAK_NOISE", "LiveFederation"]

ROWS, NAMES = 96, ("bank", "card")


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
        columns = dict(zip(NAMES, np.split(np.random.default_rng(5).normal(size=(ROWS, 7)), [4], axis=1), strict=True))
        labels = tuple(str(int(row)) for row in columns["bank"][:, 0] + columns["card"][:, 0] > 0)
        table = ClientTable(f"{name}.csv", Ids(map(str, range(ROWS))), (), np.empty((ROWS, 0), np.float32), labels)
        entry = next(client for client in self.config.clients if client.name == name)
        bound = RowBound(client_row_bound(self.config, entry), self.config.run.row_rule)
        return OwnColumns(table, scale * columns[name], bound, "a test")

    def stay(
        self,
        name: str,
        session: str,
        outcome: dict[str, Any],
        *,
        scale: float = 1.0,
        on_step: Callable[[int], None] = lambda done: None,
        on_model: Callable[[TrainedClient], None] = lambda trained: None,
    ) -> threading.Thread:
        """A client as a thread; what it has trained, or its error, goes into ``outcome``."""

        def beat(message: Mapping[str, Any]) -> None:
            progress = message.get("progress") or {}
            if progress.get("phase") == "training" and "missing" not in message:  # its own, not a server's
                on_step(progress["done"])

        def work() -> None:
            log = Log(name, self.directory / f"{name}.log")
            own, state = self.own(name, scale), self.directory / f"state-{name}"
            everything = (self.identity(name), self.plan, own, np.arange(ROWS), session, log, state)
            try:
                outcome[name] = train_with_servers(*everything, on_model=on_model, on_beat=beat)
            except Exception as error:
                outcome[name] = error

        thread = threading.Thread(target=work, daemon=True, name=name)
        thread.start()
        return thread

    def until_noise_is_kept(self, trained: TrainedClient) -> None:
        """A client that has not confirmed the model makes the servers keep their noise."""
        assert self.noise_is_kept.wait(60)

    def wait_for(self, name: str, event: str, count: int = 1) -> None:
        until = time.monotonic() + 60
        while sum(found["event"] == event for found in self.events(name)) < count:
            assert time.monotonic() < until, f"{name} did not log {event!r}"
            time.sleep(0.02)

    def events(self, name: str) -> list[dict[str, Any]]:
        file = self.directory / f"{name}.log"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def server_file(self, number: int, name: str) -> Path:
        (found,) = self.directory.glob(f"server-{number}/state/*/training-*")
        return found / "server" / name

    def twin_federation(self) -> LocalFederation:
        """The same clients in the clear."""
        rows = np.arange(ROWS)
        clients = [local_client(self.identity(name), self.plan, self.own(name), rows) for name in NAMES]
        labels = clients[-1].label_rows()
        frozen, blocks = [c.embeddings for c in clients], [list(c.block_outputs) for c in clients]
        return LocalFederation(clients, 2, labels, frozen, blocks, self.config.run.row_bound)
