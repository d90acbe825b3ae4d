"""Three servers and their clients as threads of one process."""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Callable
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
from protocols.net.wire import Identity, call
from protocols.run.hosts.server import Server
from tests.protocols.run.hosts.federations import make_federation
from vfl.data.columns import ClientTable
from vfl.data.scaling import RowBound
from vfl.tables import Ids

__all__ = ["CLIENTS", "PATIENCE", "ROWS", "Federation", "train_until_a_checkpoint"]

ROWS, CLIENTS = 96, ("bank", "card")
PATIENCE = 120.0  # seconds for what takes one: the machine may have other work


class Federation:
    """Servers that run until ``stop``, and clients to be started, all of one session until ``align``."""

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
        self.align()

    def align(self, session: str = "") -> None:
        """A new session, as after an alignment, or other clients of this one."""
        self.session = session or secrets.token_hex(16)
        self.outcome: dict[str, Any] = {}  # of each client: its model, or the error that ended it
        self.threads: list[threading.Thread] = []

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

    def start_all(self, **how: bool) -> None:
        for number in range(3):
            self.start(number, **how)

    def end(self, *numbers: int) -> None:
        """Stop these servers, and wait until they are gone."""
        for number in numbers:
            self.servers[number][0].stop.set()
        for number in numbers:
            self.servers[number][1].join(20)
            assert not self.servers[number][1].is_alive()

    def stop(self) -> None:
        for server, _ in self.servers.values():
            server.stop.set()
        for _, thread in self.servers.values():
            thread.join(10)

    def identity(self, name: str) -> Identity:
        servers = [replace(s, **self.seen_by.get((name, s.id), {})) for s in self.config.servers]
        return Identity(replace(self.config, servers=tuple(servers)), name, load_credentials(self.config, name))

    def client(
        self, name: str, *, outcome: dict[str, Any] | None = None, rows: int = ROWS, scale: float = 1.0
    ) -> threading.Thread:
        """A client that has aligned its rows already; its model, or its error, goes into ``outcome``."""
        outcome = self.outcome if outcome is None else outcome
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
                    self.identity(name), plan, own, np.arange(rows), self.session, log, self.directory / f"state-{name}"
                )
            except Exception as error:
                outcome[name] = error

        return self.begin(name, work)

    def clients(self, *names: str, **how: Any) -> None:
        for name in names or CLIENTS:
            self.client(name, **how)

    def begin(self, name: str, work: Callable[[], None]) -> threading.Thread:
        self.threads.append(threading.Thread(target=work, daemon=True, name=name))
        self.threads[-1].start()
        return self.threads[-1]

    def wait(self) -> dict[str, Any]:
        """The models of all clients that were started, or their errors."""
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        return self.outcome

    def train(self, *names: str, rows: int = ROWS) -> np.ndarray:
        """The model, which is the same, when these clients have begun, too."""
        self.clients(*names, rows=rows)
        return self.finish()

    def finish(self) -> np.ndarray:
        """The model of the clients that have begun, which is the same."""
        assert all(isinstance(found, list) for found in self.wait().values()), self.outcome
        assert np.array_equal(self.outcome["bank"][0], self.outcome["card"][0])
        return self.outcome["bank"][0]

    def hello(self, name: str, **changed: Any) -> dict[str, Any]:
        """What this client says of a training that it begins under a name of its own."""
        facts = {"kind": "training", "session": secrets.token_hex(16), "rows": ROWS, "output": None}
        return {**facts, "people": self.people(name), **changed}

    def call(self, name: str, number: int, purpose: str = "upload", timeout: float = 5.0, **facts: Any) -> Any:
        """A channel of this client to a server, and its answer."""
        facts = facts or self.hello(name)
        return call(self.identity(name), number, self.config.addresses[number], purpose, timeout=timeout, **facts)

    def people(self, name: str, rows: int = ROWS) -> str:
        """The tag that this client sends."""
        return people_tag(self.directory, name, [*map(str, range(rows))])

    def events(self, name: str) -> list[dict[str, Any]]:
        log = self.directory / f"{name}.log"  # made by the participant's own thread, which may not have begun
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def reasons(self, name: str, event: str = "waiting") -> list[str]:
        return [str(found.get("reason")) for found in self.events(name) if found["event"] == event]

    def count(self, name: str, event: str) -> int:
        return sum(found["event"] == event for found in self.events(name))

    def wait_for_reason(self, name: str, *words: str) -> None:
        """Until it has logged that it waits, in all these words."""
        _wait(lambda: any(all(word in reason for word in words) for reason in self.reasons(name)))

    def wait_until_uploaded(self) -> None:
        """A client has shared its rows with all servers."""
        _wait(lambda: all(self.count(f"server-{number}", "upload complete") for number in range(3)))


def train_until_a_checkpoint(directory: Path) -> Federation:
    """Three servers in the middle of a training, its two clients waiting."""
    federation = Federation(directory, epochs=60, checkpoint_every=10)
    federation.start_all()
    for name in CLIENTS:
        federation.client(name)
    _wait(lambda: list(directory.glob("server-1/state/*/training-*/server/opened-000000[1-9]0.log")))
    return federation


def _wait(condition: Any, timeout: float = PATIENCE) -> None:
    until = awake() + timeout
    while not condition():
        assert awake() < until
        time.sleep(0.02)
