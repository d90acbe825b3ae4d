"""Short trainings of a federation's shape on this machine, as ``ppvfl`` does them: what ``ppvfl estimate`` takes its
seconds from.

Three servers and the clients are processes with keys of their own, over mutual TLS on loopback. Servers keep uploads
and steps on disk, synced, take uploads in from there, and lay rows into files where the run itself would. Only the rows
are made up, and ids are not matched. The same processes do one training after the other.

    python -m protocols.run.timing_run DIR NAME      # one participant; ``measure_trials`` starts it
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import pickle
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.serialization import Encoding

from accel.errors import PpvflError
from protocols.client.columns import OwnColumns
from protocols.client.take_part import take_part
from protocols.federation.public_plan import client_bounds, plan_for
from protocols.federation.read import ClientEntry, FederationConfig, ServerEntry
from protocols.log import Log
from protocols.net.credentials import load_credentials, make_key, read_certificate
from protocols.net.wire import Identity
from protocols.plan.run_plan import Plan
from protocols.run.calibration import MEMORY, SENDING, elapsed
from protocols.run.hosts.jobs import Task, TrainingTask
from protocols.run.hosts.server import Server, load_kernels
from protocols.server.intake import shares_of_rows
from protocols.state.stored_rows import IN_MEMORY
from refmpc.net.certificates import fingerprint_of
from vfl.data.scaling import RowBound
from vfl.tables.applying import ClientTable
from vfl.tables.ids import Ids

__all__ = ["TrialFailed", "measure_trials", "processes"]

_HERE = "127.0.0.1"
_GO, _DONE = "go", ".done"
_TRIALS = "trials.pickle"
_READY, _UPLOADED = "rows are there", "upload complete, all servers have it"
_LISTENING = "listening"
_LOOK = 0.1  # seconds between two looks whether everybody is there: rare, because looking takes the servers' time
_END = 10.0  # seconds for a process to end after it was asked to
_FILES = 4  # times the shares of all rows at a server: files of three servers, and what clients have sent
_PIECE, _FEWEST = 1 << 22, 16
_PATIENCE = 600.0  # for each: kernels may have to be compiled first


class TrialFailed(PpvflError):
    """A participant of a trial ended, or did not end in time."""


@dataclass(frozen=True)
class _Trial:
    """One training, and where its participants keep what they keep."""

    folder: Path
    plan: Plan
    session: str
    rows: int  # common rows of the run itself
    in_memory: int

    def make_task(self, config: FederationConfig, facts: dict[str, Any], trained: Path | None) -> Task:
        """At a server: the training of this plan, whatever the file would plan for so few rows; the run itself is
        planned, too, because that takes its time."""
        plan_for(config, self.rows)
        task = TrainingTask(config, facts["rows"], self.plan)
        task.in_memory = self.in_memory
        return task

    def said(self, name: str) -> dict[str, float]:
        """When a participant has logged what, in seconds."""
        file, found = self.folder / f"{name}.log", {}
        for line in file.read_text().splitlines() if file.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):  # it is being written
                record = json.loads(line)
                found[record["event"]] = datetime.datetime.fromisoformat(record["time"]).timestamp()
        return found


def measure_trials(
    config: FederationConfig, rows: int, shortened: Sequence[Plan], directory: Path | None = None
) -> list[dict[str, float]]:
    """Seconds of each of the ``shortened`` plans, one after the other: by phase of the servers' ledger, and from
    aligned rows until all servers have everything (``SENDING``); of the slowest client. ``MEMORY`` as in
    ``protocols.run.calibration``. ``rows`` are those of the run itself. The first training begins as one of ``ppvfl``,
    with kernels just loaded, and the others find everything warm.

    ``directory``: where a folder is made, and removed (default: that of temporary files). Raises ``TrialFailed``."""
    in_memory = 0 if shares_of_rows(plan_for(config, rows)) > IN_MEMORY else sys.maxsize
    with tempfile.TemporaryDirectory(prefix="ppvfl-estimates-", dir=directory) as folder:
        root = Path(folder)
        local = _on_this_machine(config, root)
        trials = [
            _Trial(root / f"trial-{number}", each, secrets.token_hex(16), rows, in_memory)
            for number, each in enumerate(shortened)
        ]
        for trial in trials:
            trial.folder.mkdir()
        (root / _TRIALS).write_bytes(pickle.dumps((local, trials)))
        command = [sys.executable, "-m", "protocols.run.timing_run", str(root)]
        with processes({entry.name: [*command, entry.name] for entry in local.participants}, root) as running:
            memory: list[float] = []
            for trial in trials:
                _wait(running, root, partial(_everybody_is_there, local, trial))
                with _memory_taken(root / "ballast", trial) as new_memory:
                    (trial.folder / _GO).touch()
                    _wait(running, root, partial(_everybody_is_done, local, trial))
                memory.append(new_memory)
        return [{**_seconds(local, trial), MEMORY: extra} for trial, extra in zip(trials, memory, strict=True)]


def _on_this_machine(config: FederationConfig, root: Path) -> FederationConfig:
    """The same federation with keys of its own, on loopback."""
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(socket.create_server((_HERE, 0))).getsockname()[1] for _ in config.servers]
    pins, certificates = {}, {}
    servers = [replace(server, host=_HERE, port=port) for server, port in zip(config.servers, ports, strict=True)]
    everybody: list[ServerEntry | ClientEntry] = [*servers, *config.clients]
    for entry in everybody:
        certificate = read_certificate(make_key(entry, root / entry.name, request=False, days=1))
        pins[entry.name] = fingerprint_of(certificate)
        certificates[entry.name] = certificate.public_bytes(Encoding.PEM).decode()
    return replace(
        config,
        servers=tuple(replace(server, fingerprint=pins[server.name]) for server in servers),
        clients=tuple(replace(client, fingerprint=pins[client.name]) for client in config.clients),
        budget=None,
        certificates=certificates,
        source=str(root / "federation.toml"),
    )


@contextlib.contextmanager
def _memory_taken(file: Path, trial: _Trial) -> Iterator[float]:
    """Rows in files take memory that was not in use before, which a virtual machine may have to be given by its host
    first: ten times slower than memory that somebody has just freed, and a short run gets some of each. So a file as
    large as those of this trial is written first, and synced: the disk shall have nothing to do but what the trial
    gives it. Gives the seconds that memory new to the machine takes more for it than used memory."""
    if trial.in_memory:
        yield 0.0
        return
    piece, taken = bytes(_PIECE), []
    with file.open("wb", buffering=0) as handle:
        for _ in range(max(_FEWEST, _FILES * shares_of_rows(trial.plan) // _PIECE)):
            begun = time.perf_counter()
            handle.write(piece)
            taken.append(time.perf_counter() - begun)
        os.fsync(handle.fileno())
    used, new = np.quantile(taken, (0.1, 0.9))
    try:
        yield float(new - used) * len(taken)
    finally:
        file.unlink()


def _everybody_is_there(config: FederationConfig, trial: _Trial) -> bool:
    words = {**{s.name: _LISTENING for s in config.servers}, **{c.name: _READY for c in config.clients}}
    return all(word in trial.said(name) for name, word in words.items())


def _everybody_is_done(config: FederationConfig, trial: _Trial) -> bool:
    return all((trial.folder / f"{entry.name}{_DONE}").exists() for entry in config.participants)


def _wait(running: Mapping[str, Any], root: Path, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not done():
        ended = [name for name, process in running.items() if process.poll() not in (None, 0)]
        if ended or time.monotonic() > deadline:
            words = (root / f"{ended[0]}.err").read_text()[-1000:] if ended else ""
            raise TrialFailed(f"a trial on this machine failed: {ended[0] if ended else 'not done in time'}\n{words}")
        time.sleep(_LOOK)


def _seconds(config: FederationConfig, trial: _Trial) -> dict[str, float]:
    clients = [trial.said(client.name) for client in config.clients]
    begun = (trial.folder / _GO).stat().st_mtime
    found = {SENDING: max(said[_UPLOADED] for said in clients) - begun}
    servers = []
    for server in config.servers:
        (file,) = (trial.folder / server.name).glob("*/training-*/ledger.json")
        phases = json.loads(file.read_text())["phases"]
        servers.append({phase: counters["seconds"] for phase, counters in phases.items()})
    return found | elapsed(servers)


# a participant -----------------------------------------------------------------------------------


def _play(root: Path, name: str) -> None:
    config: FederationConfig
    trials: list[_Trial]
    config, trials = pickle.loads((root / _TRIALS).read_bytes())  # our own, in a folder of mode 0700
    entry = config.participant(name)
    identity = Identity(config, entry.peer, load_credentials(config, name))
    if isinstance(entry, ServerEntry):
        load_kernels(config, root / name, Log(name, root / f"{name}.log"), threading.Event())
    for trial in trials:
        log = Log(name, trial.folder / f"{name}.log")
        if isinstance(entry, ServerEntry):
            Server(identity, trial.folder / name, log, host=_HERE, make=trial.make_task).serve()
        else:
            _take_part(identity, entry, trial, log)
        (trial.folder / f"{name}{_DONE}").touch()


def _take_part(identity: Identity, entry: ClientEntry, trial: _Trial, log: Log) -> None:
    """Share made-up rows, when everybody is there."""
    rows = trial.plan.schedule.num_samples
    own = _made_up(identity.config, entry, rows)
    order = np.random.default_rng(0).permutation(rows)
    log.info(_READY, rows=rows)
    while not (trial.folder / _GO).exists():
        time.sleep(0.005)
    plan_for(identity.config, trial.rows)
    take_part(identity, trial.plan, own, order, trial.session, log, trial.folder / entry.name)


def _made_up(config: FederationConfig, entry: ClientEntry, rows: int) -> OwnColumns:
    random = np.random.default_rng(0)
    values = random.uniform(-1.0, 1.0, (rows, entry.width)).astype(np.float32)
    labels = targets = None
    if entry.label and config.run.target_range is not None:
        targets = random.uniform(*config.run.target_range, rows)
    elif entry.label:
        labels = tuple(config.run.classes[place] for place in random.integers(0, len(config.run.classes), rows))
    names = tuple(f"column_{place}" for place in range(entry.width))
    ids = tuple(f"row-{row:09d}" for row in random.permutation(rows))  # as people lie in a file: in no order
    table = ClientTable("made up", Ids(ids), names, values, labels, targets)
    bound = client_bounds(config)[config.ordered_clients.index(entry)]
    return OwnColumns(table, values, RowBound(bound, config.run.row_rule), "made up")


@contextlib.contextmanager
def processes(commands: dict[str, Sequence[str]] | dict[str, list[str]], out: Path) -> Iterator[dict[str, Any]]:
    """Start all commands, output into files; whoever still runs at the end is asked to stop, then made to."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            with (out / f"{name}.out").open("wb") as file, (out / f"{name}.err").open("wb") as errors:
                running[name] = subprocess.Popen(command, stdout=file, stderr=errors)
        yield running
    finally:
        for process in running.values():
            if process.poll() is None:
                process.terminate()
        for process in running.values():
            try:
                process.wait(_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


if __name__ == "__main__":
    _play(Path(sys.argv[1]), sys.argv[2])
