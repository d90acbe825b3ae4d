"""Every file that a server and a client of a deployment keep, damaged in every way: reading it names it, or gives the
same.

The files are those that a training leaves, at two stages: the training itself is
``tests/protocols/state/test_damaged_state.py``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.errors import InvalidArgument
from protocols.cli.audit_log import collect
from protocols.client.align import Agreed, Aligner
from protocols.client.people import people_tag
from protocols.client.take_part import SharedColumns
from protocols.log import Log
from protocols.net.wire import PREDICTION, TRAINING
from protocols.run.hosts.sessions import SessionStore
from protocols.state.budget import Budgets
from tests.protocols.run.hosts.test_operators import with_a_flipped_bit
from tests.protocols.run.hosts.threads import Federation

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": with_a_flipped_bit,
    "cut off": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
}
# read by nobody: a lock and a marker count by being there, a pid is for people; under server/ see the other test
NEVER_READ = {"pid", "begun.json", "bank.taken", "card.taken"}
# has its own hash chain, and the heads that others note: tests/protocols/state/test_audit_log.py
CHAINED = "audit.jsonl"


def read_by_a_server(federation: Federation, state: Path) -> list[Any]:
    """All that a server reads of its state when it is started, computes, hands out and is asked about it."""
    directory = federation.identity("server-1").kept_in(state)
    store = SessionStore(federation.config, directory, predictions=True)
    found: list[Any] = [[spent.words for spent in Budgets(state, federation.config).spent()]]
    for session in store:
        found += [session.failed, session.people, session.parameters(), session.shown_curve]
        for client, spool in session.spools.items():
            for number in range(spool.count):
                part = np.empty(session.task.message_of(client, number, 1)[0], dtype=np.uint8)
                spool.read(number, "input_from_client", [part])
                found.append(part.tobytes())
        found += [session.result(client) for client in session.task.receivers]
    if store.training is not None and store.training.done:
        hello = {"kind": PREDICTION, "session": "0" * 32, "rows": 5, "output": "label"}
        found.append(store.open(hello, "bank").parameters())
        runs, _, wrong = collect([state])
        found += [[run.claim for run in runs], wrong]
    return found


def damaged_or_the_same(state: Path, read: Callable[[Path], Any], tmp_path: Path) -> set[str]:
    """Damage every file below ``state`` in a copy and read it; the names of those that were noticed in every case."""
    copy = tmp_path / "copy"
    shutil.copytree(state, copy)
    expected = read(copy)
    shutil.rmtree(copy)
    silent, named = set[str](), set[str]()
    files = [file for file in state.rglob("*") if file.is_file() and file.stat().st_size and file.name != CHAINED]
    for file in sorted(files):
        for damage in DAMAGES.values():
            shutil.copytree(state, copy)
            damaged = copy / file.relative_to(state)
            damaged.write_bytes(damage(file.read_bytes()))
            try:
                found = read(copy)
            except InvalidArgument as error:
                assert file.name in str(error), (file, error)
                named.add(file.name)
            else:
                assert found == expected, file
                silent.add(file.name)
            shutil.rmtree(copy)
    assert not named & silent, "noticed in one way and not in another"
    assert silent <= NEVER_READ, silent
    return named


def test_what_a_server_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(tmp_path)
    monkeypatch.setattr("protocols.net.server_calls.ServerCalls.confirm", lambda calls: None)
    federation.start_all()
    state = tmp_path / "server-1" / "state"
    federation.client("bank")
    federation.wait_until_uploaded()
    shutil.copytree(state, tmp_path / "uploaded")
    federation.train("card")
    federation.stop()
    named = set[str]()
    for stage in (tmp_path / "uploaded", state):
        named |= damaged_or_the_same(stage, lambda copy: read_by_a_server(federation, copy), tmp_path)
    assert {"session.json", "00000000.message", "complete.json", "people-bank.tag", "done.json", "card.result"} <= named
    assert {"model.npz", "claim.txt", "ledger.json", "people.json"} <= named


def test_what_a_client_keeps(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    state = tmp_path / "bank" / "state" / "kept"

    def aligner(place: Path) -> Aligner:
        log = Log("bank", tmp_path / "log")
        return Aligner(federation.identity("bank"), TRAINING, ["a", "b"], place, log, listen_on=None)

    def read(place: Path) -> list[Any]:
        kept = aligner(place / "kept").kept()
        assert kept is not None
        shared = SharedColumns.__new__(SharedColumns)
        shared._file, shared._facts = place / "kept" / "shared.json", {"session": "s", "digest": "d"}
        return [kept.rows.tolist(), kept.session, people_tag(place, "bank", ["a", "b"]), shared.differs]

    aligner(state)._save(Agreed(np.array([1, 0]), "s"))
    people_tag(state.parent, "bank", ["a", "b"])
    shared = SharedColumns.__new__(SharedColumns)
    shared._file, shared._facts = state / "shared.json", {"session": "s", "digest": "d"}
    shared.note()
    named = damaged_or_the_same(state.parent, read, tmp_path)
    assert named == {"alignment-training.npz", "people.key", "shared.json"}
