"""kill -9 at random points of all three protocols with open weights: everything that was ever sent is compared.

In threads a server raises at the point, a handful of times; in processes (heavy) it ends itself with signal 9, more
than fifty times. Runs are killed twice, so that the second attempt meets what the first has left.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocols.methods import g_bmf, g_shuff, gl_bmf
from protocols.methods.gl_bmf import METHOD, server_jobs
from protocols.plan.run_plan import Plan, plan_run
from refmpc import run
from refmpc.core.errors import PartyFailed
from tests.protocols.conftest import small_federation
from tests.protocols.gl_runs import make, parameter_bound
from tests.protocols.secure_runs import noise_of_the_servers, released, run_secure, small_training, weight_bound
from tests.protocols.server.watch import Watch
from vfl.federation import Federation
from vfl.twins import train_g_bmf, train_g_shuff, train_gl_bmf

SERVERS: dict[str, Callable[..., Any]] = {"g_bmf": g_bmf.servers, "g_shuff": g_shuff.servers, "gl_bmf": gl_bmf.servers}
PROTOCOLS = tuple(SERVERS)
KILLS = 18  # of each protocol, in processes


def made(protocol: str) -> tuple[Federation, Plan]:
    if protocol == "gl_bmf":
        return make(weights="open", epochs=2, learning_rate=0.1, local={"local_learning_rate": 0.1})
    rows = 96 if protocol == "g_bmf" else 32  # one batch: what is trained does not depend on the secret order
    federation = small_federation(rows, (5, 4), 4)
    epochs = 2 if protocol == "g_bmf" else 6
    return federation, plan_run(protocol, federation, small_training(weights="open", epochs=epochs, learning_rate=0.2))


def attempt(protocol: str, plan: Any, federation: Federation, directory: Path, servers: Any, parties: str) -> Any:
    if protocol == "gl_bmf":
        clients, jobs = METHOD.clients(plan, federation, directory), server_jobs(plan, directory, keep=True)
        return run(servers, jobs, parties=parties, clients=clients, releases=plan.releases, timeout=60)
    return run_secure(plan, federation, directory, servers, parties, every=2)


def check_model(protocol: str, plan: Any, federation: Federation, directory: Path, result: Any) -> None:
    """What came out is the twin's, with the servers' noise: a sum of words of two attempts would be far off."""
    noise = noise_of_the_servers(plan, directory)
    if protocol == "gl_bmf":
        twin, bound = train_gl_bmf(federation, plan.training, noise=noise), parameter_bound(plan, federation, noise)
        assert np.abs(released(result)[0] - twin.model.layers[0]).max() <= bound
        return
    train = train_g_bmf if protocol == "g_bmf" else train_g_shuff
    twin = train(federation, plan.training, noise=noise)
    assert np.abs(released(result)[0] - twin.model.layers[0]).max() <= weight_bound(plan)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_two_crashes_at_random_points_in_threads(tmp_path, protocol):
    federation, plan = made(protocol)
    draw = random.Random(f"points of {protocol}")
    with pytest.MonkeyPatch.context() as patch:
        dry = Watch(patch, tmp_path / "dry")
        attempt(protocol, plan, federation, tmp_path / "dry", SERVERS[protocol], "threads")
    for number in range(2):
        directory, watch, died = tmp_path / str(number), None, 0
        with pytest.MonkeyPatch.context() as patch:
            watch = Watch(patch, directory)
            for _ in range(2):
                server = draw.randrange(3)
                watch.points.clear()
                watch.kill = server, draw.randrange(len(dry.points[server]))
                try:
                    attempt(protocol, plan, federation, directory, SERVERS[protocol], "threads")
                except PartyFailed as failure:
                    assert "Crash" in str(failure)
                    died += 1
            watch.kill = None
            result = attempt(protocol, plan, federation, directory, SERVERS[protocol], "threads")
        assert died and watch.two_values() == [] and watch.too_early == []
        check_model(protocol, plan, federation, directory, result)


# processes ---------------------------------------------------------------------------------------


class _Notes(Watch):
    """A watch in a process of its own: what is sent goes into a file before it is sent, and the point is a real end."""

    def __init__(self, patch: pytest.MonkeyPatch, directory: Path, server: int, kill: tuple[int, int] | None):
        super().__init__(patch, directory)
        self._file = directory / f"sent-by-{server}.txt"
        self._server, self._kill_at = server, kill

    def _point(self, server: int, name: str) -> None:
        self.points[server].append(name)
        if self._kill_at == (server, len(self.points[server]) - 1):
            with self._file.with_name("killed.txt").open("a") as handle:
                handle.write(f"{server} {name}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    def _note(self, party: Any, sends: dict[Any, list[np.ndarray]]) -> None:
        before = len(self.too_early)
        super()._note(party, sends)
        lines = [["too early", text, ""] for text in self.too_early[before:]]
        for key, parts in self.sent.items():
            lines += [["sent", repr(key), hashlib.sha256(part.tobytes()).hexdigest()] for part in parts]
        self.sent.clear()
        with self._file.open("a") as handle:
            handle.writelines(json.dumps(line) + "\n" for line in lines)


def _noted_server(protocol: str, directory: Path, kill: tuple[int, int] | None, party: Any, job: Any) -> Any:
    _Notes(pytest.MonkeyPatch(), directory, party.id, kill)  # the process ends with the run: nothing is put back
    return SERVERS[protocol](party, job)


def everything_sent(directory: Path) -> dict[str, set[str]]:
    """By sender, step and receiver: the values that were sent, as hashes."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in directory.glob("sent-by-*.txt"):
        for line in file.read_text().splitlines():
            kind, what, value = json.loads(line)
            assert kind == "sent", what
            found[what].add(value)
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_kill_9_at_random_points_of_processes(tmp_path, protocol):
    federation, plan = made(protocol)
    draw, kills, number = random.Random(f"kills of {protocol}"), 0, 0
    with pytest.MonkeyPatch.context() as patch:
        dry = Watch(patch, tmp_path / "dry")
        attempt(protocol, plan, federation, tmp_path / "dry", SERVERS[protocol], "threads")
    while kills < KILLS:
        directory, number = tmp_path / str(number), number + 1
        directory.mkdir()
        for tried in range(3):
            server = draw.randrange(3)
            kill = None if tried == 2 else (server, draw.randrange(len(dry.points[server])))
            servers = functools.partial(_noted_server, protocol, directory, kill)
            try:
                result = attempt(protocol, plan, federation, directory, servers, "processes")
            except PartyFailed as failure:
                assert kill is not None and "killed by signal 9" in str(failure), failure
        killed = directory / "killed.txt"
        kills += len(killed.read_text().splitlines()) if killed.exists() else 0
        sent = everything_sent(directory)
        assert len(sent) >= 3 * plan.schedule.num_steps and all(len(values) == 1 for values in sent.values())
        check_model(protocol, plan, federation, directory, result)
