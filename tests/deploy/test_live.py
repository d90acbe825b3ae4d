"""GL-BMF in a deployment: the clients stay while the servers train, and whoever leaves may come back."""

from __future__ import annotations

import json
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocols.commitment import ColumnsChanged
from protocols.deploy.audit import read_log
from protocols.deploy.audit_log import check, check_against_logs, collect
from protocols.deploy.columns import OwnColumns
from protocols.deploy.facts import joint_plan_for
from protocols.deploy.live_client import local_client, train_with_servers
from protocols.deploy.log import Log
from protocols.deploy.wire import Refused, call
from protocols.gl_client import TrainedClient
from protocols.gl_plan import JointPlan
from refmpc.errors import HandshakeError
from tests.deploy.test_servers import Federation
from tests.protocols.test_against_twins import noise_of_the_servers
from tests.protocols.test_gl_bmf import parameter_bound
from vfl.columns import ClientTable
from vfl.federation import Federation as LocalFederation
from vfl.scaling import RowBound, split_row_bound
from vfl.twins import train_gl_bmf

ROWS, NAMES = 96, ("bank", "card")
LAYERS = "rank = 2\nlora_alpha = 2.0\nlocal_learning_rate = 0.5"
WEAK_NOISE = {"epsilon": 20.0, "learning_rate": 0.5, "row_rule": '"clip"', "epochs": 2}


class LiveFederation(Federation):
    """Servers as threads, and clients of GL-BMF that have aligned their rows already."""

    def __init__(self, directory: Path, **run: Any):
        super().__init__(directory, protocol=f'"gl_bmf"\n{LAYERS}', **run)
        self.plan: JointPlan = joint_plan_for(self.config, ROWS)

    def own(self, name: str, scale: float = 1.0) -> OwnColumns:
        """Columns from which the labels can be learnt, the same at every call."""
        columns = dict(zip(NAMES, np.split(np.random.default_rng(5).normal(size=(ROWS, 7)), [4], axis=1), strict=True))
        labels = tuple(str(int(row)) for row in columns["bank"][:, 0] + columns["card"][:, 0] > 0)
        table = ClientTable(f"{name}.csv", tuple(map(str, range(ROWS))), (), np.empty((ROWS, 0), np.float32), labels)
        bound = RowBound(split_row_bound(self.config.run.row_bound, 2)[0], self.config.run.row_rule)
        return OwnColumns(table, scale * columns[name], bound, "a test")

    def stay(self, name: str, session: str, outcome: dict[str, Any], **options: Any) -> threading.Thread:
        """A client as a thread; what it has trained, or its error, goes into ``outcome``."""
        models: list[TrainedClient] = []

        def work() -> None:
            log = Log(name, self.directory / f"{name}.log")
            own, state = self.own(name, **options), self.directory / f"state-{name}"
            rows = np.arange(ROWS)
            try:
                outcome[name] = train_with_servers(
                    self.identity(name), self.plan, own, rows, session, log, state, on_model=models.append
                )
                assert models and all(np.array_equal(model.model, outcome[name].model) for model in models)
            except Exception as error:
                outcome[name] = error

        thread = threading.Thread(target=work, daemon=True, name=name)
        thread.start()
        return thread

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


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[LiveFederation]:
    found = LiveFederation(tmp_path, **WEAK_NOISE)
    yield found
    found.stop()


def finish(federation: LiveFederation, threads: list[threading.Thread], outcome: dict[str, Any]) -> None:
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive()
    assert all(isinstance(found, TrainedClient) for found in outcome.values()), outcome
    assert np.array_equal(outcome["bank"].model, outcome["card"].model)
    for _, thread in federation.servers.values():
        thread.join(20)
        assert not thread.is_alive()


def test_live_clients_train_what_the_twin_trains(federation: LiveFederation, tmp_path: Path) -> None:
    for number in range(3):
        federation.start(number)
    session, outcome, plan = secrets.token_hex(16), {}, federation.plan
    threads = [federation.stay("bank", session, outcome)]
    federation.wait_for("server-0", "waiting for clients")
    assert federation.servers[0][0]._state_in_words() == "waits for card"
    threads.append(federation.stay("card", session, outcome))
    for number in range(3):  # the noise is gone when everybody has the model
        federation.wait_for(f"server-{number}", "training begins")
        (tmp_path / "kept" / f"server-{number}").mkdir(parents=True)
        shutil.copy(federation.server_file(number, "noise.key"), tmp_path / "kept" / f"server-{number}")
    finish(federation, threads, outcome)
    noise = noise_of_the_servers(plan, tmp_path / "kept")
    local = federation.twin_federation()
    twin = train_gl_bmf(local, plan.training, noise=noise)
    far = [np.linalg.norm(outcome["bank"].model - twin.model.layers[0])]
    for client in twin.clients:
        layers = outcome[client.name].layers
        far += [np.linalg.norm(layers[k] - v) for k, v in client.adapter_state().items() if "velocity" not in k]
    assert np.linalg.norm(far) <= parameter_bound(plan, local, noise)
    assert np.linalg.norm(outcome["bank"].layers["up_0"]) > 1e-3  # the layers have moved
    _check_records(federation, steps_of_attempts=[plan.schedule.num_steps])


def _check_records(federation: LiveFederation, steps_of_attempts: list[int]) -> None:
    """Every step was released once to each client, the model once to everybody, at all servers, under the claim."""
    plan, directory = federation.plan, federation.directory
    runs, logs, wrong = collect([directory / f"server-{number}" / "state" for number in range(3)])
    assert not wrong and not check(runs) and not check_against_logs(runs, logs) and len(runs) == 3
    for run in runs:
        found = Counter((r["name"], r["receiver"], r["elements"]) for r in run.ledger["releases"])
        resent = 1 if len(steps_of_attempts) > 1 else 0
        layers = {
            (f"layer gradient of {name}", f"client '{name}'", shape.parameters): steps_of_attempts[-1] + resent
            for name, shape in zip(plan.client_names, plan.shapes, strict=True)
        }
        model = [
            ("global model", to, plan.global_parameters) for to in ("all servers", "client 'bank'", "client 'card'")
        ]
        assert found == Counter(layers) + Counter(model)
        assert {r["claim"] for r in run.ledger["releases"]} == {plan.claim.paragraph()}
    assert sum(steps_of_attempts) == plan.schedule.num_steps
    for number in range(3):
        assert not federation.server_file(number, "noise.key").exists()
        assert not list(federation.server_file(number, ".").glob("release-*.npz"))
