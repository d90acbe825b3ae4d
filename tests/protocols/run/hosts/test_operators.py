"""What operators ran into: a participant that waits says so and goes on by itself; a bad upload is refused and
named."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocols.cli import main
from protocols.log import Log
from protocols.net.wire import Refused, call
from protocols.run.hosts import server as server_command
from protocols.run.hosts import server_sync
from protocols.run.hosts.jobs import make_task
from protocols.run.hosts.sessions import Session
from protocols.state.audit_log import AuditLog
from refmpc.core.errors import HandshakeError
from tests.protocols.run.hosts.threads import PATIENCE, ROWS, Federation, _wait, train_until_a_checkpoint
from tests.protocols.run.hosts.wiretap import Relay


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    found = Federation(tmp_path, timeout=3.0)
    yield found
    found.stop()


def _events(federation: Federation, name: str) -> list[dict[str, Any]]:
    return federation.events(name) if (federation.directory / f"{name}.log").exists() else []


def reasons(federation: Federation, name: str, event: str) -> list[str]:
    return [str(e.get("reason")) for e in federation.events(name) if e["event"] == event]


def test_a_client_that_waits_notices_a_server_that_fell_silent(federation: Federation) -> None:
    """The host of server 1 is gone for this client, without a word, while it waits for the model: it sat there for
    good."""
    relay = Relay(federation.config.addresses[1])
    federation.seen_by["bank", 1] = {"host": relay.address[0], "port": relay.address[1]}
    for number in range(3):
        federation.start(number)
    session = secrets.token_hex(16)
    outcome: dict[str, Any] = {}
    bank = federation.client("bank", session, outcome)
    # it has called for its result, and was told whom everybody waits for
    _wait(lambda: any(e["event"] == "waiting" and e["peer"] == "card" for e in _events(federation, "bank")))
    relay.stall()
    _wait(lambda: any("server-1 sent nothing for 3 s" in why for why in reasons(federation, "bank", "waiting")))
    federation.client("card", session, outcome).join(PATIENCE)
    bank.join(PATIENCE)
    relay.close()
    assert np.array_equal(outcome["bank"][0], outcome["card"][0])


def test_kernels_that_cannot_be_loaded_ahead_are_a_line(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that loads them says so when it fails: without them the training is a second slower."""

    def broken(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(server_command, "warm_up", broken)
    log = Log("server-0", federation.directory / "server-0.log")
    server_command.load_kernels(federation.config, federation.directory / "state", log, ready := threading.Event())
    line = federation.events("server-0")[-1]
    assert line["event"] == "kernels were not loaded ahead" and line["reason"] == "OSError" and ready.is_set()


def test_servers_meet_when_their_kernels_are_compiled(federation: Federation) -> None:
    """The first training of a fresh install was silent for 45 s: every kernel was compiled within the attempt."""
    servers = [federation.start(number) for number in range(3)]
    servers[1].ready.clear()
    session, outcome = secrets.token_hex(16), dict[str, Any]()
    clients = [federation.client(name, session, outcome) for name in ("bank", "card")]
    _wait(lambda: any("compiles or loads its kernels" in why for why in reasons(federation, "server-2", "waiting")))
    assert servers[1]._state_in_words() == "compiles or loads its kernels"  # to doctors
    assert not reasons(federation, "server-0", "all servers agree") and not outcome
    servers[1].ready.set()
    for client in clients:
        client.join(PATIENCE)
    assert np.array_equal(outcome["bank"][0], outcome["card"][0])


def test_a_server_on_a_full_disk_stops_when_it_is_asked_to(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = federation.start(0)
    _wait(lambda: any(e["event"] == "listening" for e in federation.events("server-0")))
    append = AuditLog.append

    def full(log: AuditLog, event: str, **facts: Any) -> Any:
        if event == "stopped":
            raise OSError(errno.ENOSPC, "No space left on device", "audit.jsonl")
        return append(log, event, **facts)

    monkeypatch.setattr(AuditLog, "append", full)
    server.stop.set()
    _, thread = federation.servers[0]
    thread.join(PATIENCE)
    line = next(e for e in federation.events("server-0") if "audit log" in e["event"])
    assert line["errno"] == "ENOSPC" and line["path"] == "audit.jsonl"


def test_an_upload_that_is_a_column_short_is_refused_by_name(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was accepted and sealed, and then failed in every attempt, without end and without a name."""
    for number in range(3):
        federation.start(number)
    from protocols.client import upload

    share = upload.share_columns

    def short(client: Any, job: Any, *more: Any) -> None:
        share(client, upload.ClientJob(job.plan, job.embeddings[:][:, :-1], job.labels), *more)

    monkeypatch.setattr("protocols.client.take_part.share_columns", short)
    outcome: dict[str, Any] = {}
    federation.client("bank", secrets.token_hex(16), outcome).join(PATIENCE)
    assert isinstance(outcome["bank"], Refused)
    assert "bank sent something that does not fit" in str(outcome["bank"]) and "96 rows of 4 columns" in str(
        outcome["bank"]
    )
    assert not list(federation.directory.glob("server-[12]/state/*/training-*/upload/bank/*.message"))


def test_nobody_waits_for_the_plan_of_a_strangers_numbers(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rows = 10^9 held the lock of the training for 110 s."""
    begun, go_on, make = threading.Event(), threading.Event(), make_task

    def slow(config: Any, facts: Any, trained: Any) -> Any:
        if facts["rows"] == 10**9:
            begun.set()
            assert go_on.wait(30)
            facts = {**facts, "rows": ROWS}
        return make(config, facts, trained)

    server = federation.start(0)
    facts = {"kind": "training", "session": secrets.token_hex(16), "rows": ROWS, "people": "0" * 64}
    channel, _ = call(federation.identity("bank"), 0, federation.config.addresses[0], "upload", timeout=5.0, **facts)
    monkeypatch.setattr(server._store._planner, "_make", slow)
    huge = {**facts, "session": secrets.token_hex(16), "rows": 10**9}
    address = federation.config.addresses[0]
    with pytest.raises(Exception, match="greeting"):  # the caller gives up before the plan is made
        call(federation.identity("card"), 0, address, "upload", timeout=1.0, **huge)
    assert begun.is_set()
    assert server._store.training is not None and server._state_in_words()  # neither waits for the lock
    again, answer = call(federation.identity("bank"), 0, address, "upload", timeout=5.0, **facts)
    assert answer["kept"] == 0
    go_on.set()
    channel.close()
    again.close()


def test_a_full_disk_is_a_pause_and_a_sentence(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients sent 20 MB a second again and again, servers logged "OSError". Now nothing is sent until there is
    room."""
    full, usage = threading.Event(), shutil.disk_usage

    def disk(path: Any) -> Any:
        found = usage(path)
        return found._replace(free=1000) if full.is_set() and "server-1" in str(path) else found

    monkeypatch.setattr(shutil, "disk_usage", disk)
    full.set()
    for number in range(3):
        federation.start(number)
    session = secrets.token_hex(16)
    outcome: dict[str, Any] = {}
    threads = [federation.client(name, session, outcome) for name in ("bank", "card")]
    _wait(lambda: any("cannot write to its disk" in why for why in reasons(federation, "bank", "waiting")))
    (said,) = {e["errno"] for e in federation.events("server-1") if e["level"] == "error"}
    assert said == "ENOSPC" and all("path" in e for e in federation.events("server-1") if e["level"] == "error")
    assert not list(federation.directory.glob("server-*/state/*/training-*/upload/*/*.message"))
    full.clear()
    for thread in threads:
        thread.join(PATIENCE)
    assert np.array_equal(outcome["bank"][0], outcome["card"][0])


def test_a_server_survives_its_own_full_disk(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Session.finish
    failed: list[str] = []

    def fail_once(session: Session, attempt: str, outbox: Any) -> None:
        if "server-1" in str(session.directory) and not failed:
            failed.append(attempt)
            raise OSError(errno.ENOSPC, "No space left on device", str(session.directory / "results"))
        finish(session, attempt, outbox)

    monkeypatch.setattr(Session, "finish", fail_once)
    for number in range(3):
        federation.start(number)
    session = secrets.token_hex(16)
    outcome: dict[str, Any] = {}
    for thread in [federation.client(name, session, outcome) for name in ("bank", "card")]:
        thread.join(PATIENCE)
    assert np.array_equal(outcome["bank"][0], outcome["card"][0])
    (line,) = [e for e in federation.events("server-1") if "the attempt failed" in e["event"]]
    assert line["errno"] == "ENOSPC" and line["path"].endswith("results") and line["pause"] > 0


def test_lost_state_is_told_with_the_way_out(federation: Federation) -> None:
    for number in range(3):
        federation.start(number)
    session = secrets.token_hex(16)
    outcome: dict[str, Any] = {}
    bank = federation.client("bank", session, outcome)
    _wait(lambda: all(any(e["event"] == "upload complete" for e in federation.events(f"server-{n}")) for n in range(3)))
    server, thread = federation.servers[1]
    server.stop.set()
    thread.join(10)
    shutil.rmtree(federation.directory / "server-1" / "state")
    federation.start(1)
    bank.join(PATIENCE)
    assert isinstance(outcome["bank"], HandshakeError)
    assert "its state was lost" in str(outcome["bank"]) and "begin a new run" in str(outcome["bank"])


def test_servers_wait_for_the_one_that_is_missing_and_for_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two that were there took each other's new meeting for a departure ("has gone again")."""
    monkeypatch.setattr(server_sync, "_MEETING", 1.0)
    federation, threads, outcome = train_until_a_checkpoint(tmp_path)
    server, thread = federation.servers[2]
    server.stop.set()
    thread.join(10)
    _wait(lambda: all("server-2" in federation.servers[n][0]._state_in_words() for n in (0, 1)))
    time.sleep(3.0)  # a few meetings
    for number in (0, 1):
        named = {e["peer"] for e in federation.events(f"server-{number}") if e["event"] == "waiting"}
        assert named - {"bank", "card"} == {"server-2"}
        assert federation.servers[number][0]._state_in_words().startswith("waiting for server-2 since 20")
    federation.start(2)
    for thread in threads:
        thread.join(PATIENCE)
    assert np.array_equal(outcome["bank"][0], outcome["card"][0])
    federation.stop()


def test_a_client_that_voids_the_others_guarantee_is_refused_by_name(federation: Federation) -> None:
    """Rows × 1000: the training ended, and the (3, 1e-5) claim was handed out."""
    for number in range(3):
        federation.start(number)
    session = secrets.token_hex(16)
    outcome: dict[str, Any] = {}
    threads = [federation.client("bank", session, outcome, scale=1000.0), federation.client("card", session, outcome)]
    for thread in threads:
        thread.join(PATIENCE)
    for found in outcome.values():
        assert isinstance(found, HandshakeError) and "client 'bank' shared rows beyond the row bound" in str(found)
    assert not list(federation.directory.glob("server-*/state/*/training-*/done.json"))
    session = secrets.token_hex(16)  # aligned again
    threads = [federation.client(name, session, outcome) for name in ("bank", "card")]
    for thread in threads:
        thread.join(PATIENCE)
    assert np.array_equal(outcome["bank"][0], outcome["card"][0])


def _strangers_session(federation: Federation, name: str, number: int) -> str:
    """What a server answers a client that begins a training under a name of its own."""
    facts = {"kind": "training", "session": secrets.token_hex(16), "rows": ROWS, "people": federation.people(name)}
    try:
        channel, _ = call(
            federation.identity(name), number, federation.config.addresses[number], "upload", timeout=20.0, **facts
        )
    except Refused as error:
        return str(error)
    channel.close()
    return ""


def test_one_client_removes_nothing_that_another_has_shared(federation: Federation) -> None:
    """A first message of one client, with a random name, deleted the uploads of all at three servers."""
    for number in range(3):
        federation.start(number)
    session, outcome = secrets.token_hex(16), dict[str, Any]()
    threads = [federation.client("bank", session, outcome)]
    _wait(lambda: all(any(e["event"] == "upload complete" for e in federation.events(f"server-{n}")) for n in range(3)))
    before = sorted(federation.directory.glob("server-*/state/*/training-*/upload/bank/*"))
    assert len(before) == 6
    for number in range(3):
        for _ in range(3):
            assert _strangers_session(federation, "card", number) == ""
    assert sorted(federation.directory.glob("server-*/state/*/training-*/upload/bank/*")) == before
    assert len(list(federation.directory.glob("server-*/state/*/training-*"))) == 6  # of card only the last one stays
    threads.append(federation.client("card", session, outcome))
    for thread in threads:
        thread.join(PATIENCE)
    assert np.array_equal(outcome["bank"][0], outcome["card"][0])
    assert len(list(federation.directory.glob("server-*/state/*/training-*"))) == 3


def with_a_flipped_bit(content: bytes) -> bytes:
    at = 2 * len(content) // 3
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


@pytest.mark.parametrize("damage", [with_a_flipped_bit, lambda content: content[: len(content) // 2]])
def test_a_damaged_upload_is_told_of_its_server_and_of_no_client(federation: Federation, damage: Any) -> None:
    """A flipped bit was blamed on a client ("rows beyond the row bound"), a message that was cut off was tried for
    ever."""
    for number in range(3):
        federation.start(number)
    session, outcome = secrets.token_hex(16), dict[str, Any]()
    threads = [federation.client("bank", session, outcome)]
    _wait(lambda: all(any(e["event"] == "upload complete" for e in federation.events(f"server-{n}")) for n in range(3)))
    (file,) = federation.directory.glob("server-1/state/*/training-*/upload/bank/*.message")
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    threads.append(federation.client("card", session, outcome))
    for thread in threads:
        thread.join(PATIENCE)
    for found in outcome.values():
        assert "server-1: " in str(found) and f"{file.name} is damaged" in str(found), found
    server, thread = federation.servers[1]
    server.stop.set()
    thread.join(PATIENCE)
    file.write_bytes(whole)  # from a backup
    federation.start(1)
    for thread in [federation.client(name, session, outcome) for name in ("bank", "card")]:
        thread.join(PATIENCE)
    assert np.array_equal(outcome["bank"][0], outcome["card"][0])


def test_shares_and_noise_go_when_all_servers_are_done(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stayed for ever if one client never came for its result."""
    monkeypatch.setattr("protocols.net.server_calls.ServerCalls.confirm", lambda calls: None)
    for number in range(3):
        federation.start(number)
    session, outcome = secrets.token_hex(16), dict[str, Any]()
    for thread in [federation.client(name, session, outcome) for name in ("bank", "card")]:
        thread.join(PATIENCE)
    assert np.array_equal(outcome["bank"][0], outcome["card"][0])
    kept = [f.name for f in federation.directory.glob("server-*/state/*/training-*/**/*") if f.is_file()]
    expected = {"session.json", "done.json", "claim.txt", "ledger.json", "model.npz", "begun.json", "pid"}
    expected |= {"bank.result", "card.result", "people-bank.tag", "people-card.tag"}
    assert set(kept) == expected and len(kept) == 3 * len(expected)
    again = federation.client("bank", session, outcome)  # the result can still be fetched
    again.join(PATIENCE)
    assert np.array_equal(outcome["bank"][0], outcome["card"][0])


def _files(federation: Federation) -> set[str]:
    return {f.name for f in federation.directory.glob("server-1/state/*/training-*/**/*") if f.is_file()}


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("way", ["forget", "retention_days"])
def test_a_session_is_forgotten_and_what_was_opened_stays_spent(tmp_path: Path, way: str, opened: bool) -> None:
    federation = Federation(tmp_path, retention_days=1.0 if way == "retention_days" else 0.0, epochs=60)
    for number in range(3):
        federation.start(number)
    session, outcome = secrets.token_hex(16), dict[str, Any]()
    for name in ("bank", "card") if opened else ("bank",):
        federation.client(name, session, outcome)
    pattern = f"server-1/state/*/training-{session}/{'server/opened-*' if opened else 'upload/bank/complete.json'}"
    _wait(lambda: list(tmp_path.glob(pattern)))
    if way == "forget":  # not while the server runs
        own = ["forget", session[:12], "--as", "server-1", "--config", str(tmp_path / "federation.toml")]
        assert main(own) == 2 and "complete.json" in _files(federation)
    federation.stop()
    if way == "forget":
        assert main([*own[:1], *own[2:]]) == 0 and main(own) == 0
    else:
        for file in tmp_path.glob("server-*/state/*/training-*/**/*"):
            os.utime(file, (time.time() - 2 * 86400,) * 2)
    federation.start(1)
    _wait(lambda: "complete.json" not in _files(federation))
    expected = {"session.json", "failed.json", "begun.json", "pid", "people-bank.tag", "people-card.tag"}
    _wait(lambda: _files(federation) == (expected if opened else set()))
    answer = _strangers_session(federation, "card", 1)
    assert ("already trained" in answer) == opened
    federation.stop()
