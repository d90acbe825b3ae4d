"""Three servers and their clients as threads of one process."""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.soak.hosts import awake
from protocols.client.columns import OwnColumns
from protocols.client.people import people_tag
from protocols.client.take_part import take_part
from protocols.federation.public_plan import plan_for
from protocols.federation.read import FederationConfig, load
from protocols.log import Log
from protocols.net.credentials import load_credentials
from protocols.net.wire import Identity
from protocols.run.hosts.server import Server
from tests.protocols.run.hosts.federations import make_federation
from vfl.data.columns import ClientTable
from vfl.data.scaling import RowBound
from vfl.tables import Ids

__all__ = ["PATIENCE", "ROWS", "Federation", "train_until_a_checkpoint"]

ROWS = 96
PATIENCE = 120.0  # seconds for what takes one: the machine may have other work


class Federation:
    """Servers that run until the test ends, and clients to be started."""

    def __init__(self, directory: Path, **run: Any):
        make_federation(directory)
        file = directory / "federation.toml"
        text = file.read_text()
        for name, value in {"epochs": 1, "batch_size": 32, **run}.items():
            text, count = re.subn(rf"(?m)^(?:# )?{name} = .*$", f"{name} = {value}", text)
            assert count == 1
        file.write_text(text)
        self.directory = directory
        self.config: FederationConfig = load(file)
        self.servers: dict[int, tuple[Server, threading.Thread]] = {}
        self.seen_by: dict[tuple[str, int], dict[str, Any]] = {}  # other addresses of a server, for one client

    def start(self, number: int, *, predictions: bool = False, status: bool = False) -> Server:
        name = f"server-{number}"
        identity = Identity(self.config, number, load_credentials(self.config, name))
        log = Log(name, self.directory / f"{name}.log")
        state = self.directory / name / "state"
        server = Server(identity, state, log, host="127.0.0.1", predictions=predictions)
        if status:
            server.show_status(("127.0.0.1", 0))
        thread = threading.Thread(target=server.serve, daemon=True, name=name)
        thread.start()
        self.servers[number] = server, thread
        return server

    def stop(self) -> None:
        for server, _ in self.servers.values():
            server.stop.set()
        for _, thread in self.servers.values():
            thread.join(10)

    def identity(self, name: str) -> Identity:
        servers = [replace(s, **self.seen_by.get((name, s.id), {})) for s in self.config.servers]
        return Identity(replace(self.config, servers=tuple(servers)), name, load_credentials(self.config, name))

    def client(
        self, name: str, session: str, outcome: dict[str, Any], rows: int = ROWS, scale: float = 1.0
    ) -> threading.Thread:
        """A client that has aligned its rows already; its model, or its error, goes into ``outcome``."""
        entry = self.config.participant(name)
        random = np.random.default_rng(len(name))
        embeddings = scale * random.uniform(-0.3, 0.3, size=(rows, entry.width))  # type: ignore[union-attr]
        labels = tuple(str(i % 2) for i in range(rows))
        table = ClientTable(f"{name}.csv", Ids(map(str, range(rows))), (), np.empty((rows, 0), np.float32), labels)
        own = OwnColumns(table, embeddings, RowBound(max(1.0, scale), "clip"), "a test")

        def work() -> None:
            log = Log(name, self.directory / f"{name}.log")
            try:
                plan = plan_for(self.config, rows)
                outcome[name] = take_part(
                    self.identity(name), plan, own, np.arange(rows), session, log, self.directory / f"state-{name}"
                )
            except Exception as error:
                outcome[name] = error

        thread = threading.Thread(target=work, daemon=True, name=name)
        thread.start()
        return thread

    def people(self, name: str, rows: int = ROWS) -> str:
        """The tag that this client sends."""
        return people_tag(self.directory, name, [*map(str, range(rows))])

    def events(self, name: str) -> list[dict[str, Any]]:
        log = self.directory / f"{name}.log"  # made by the participant's own thread, which may not have begun
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def train_until_a_checkpoint(directory: Path) -> tuple[Federation, list[threading.Thread], dict[str, Any]]:
    """Three servers in the middle of a training, its two clients waiting, and what these will have."""
    federation = Federation(directory, epochs=60, checkpoint_every=10)
    for number in range(3):
        federation.start(number)
    outcome: dict[str, Any] = {}
    session = secrets.token_hex(16)
    threads = [federation.client(name, session, outcome) for name in ("bank", "card")]
    _wait(lambda: list(directory.glob("server-1/state/*/training-*/server/opened-000000[1-9]0.log")))
    return federation, threads, outcome


def _wait(condition: Any, timeout: float = PATIENCE) -> None:
    until = awake() + timeout
    while not condition():
        assert awake() < until
        time.sleep(0.02)
