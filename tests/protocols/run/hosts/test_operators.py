"""What operators ran into: a participant that waits says so and goes on by itself; a bad upload is refused and
named."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocols.cli import main
from protocols.log import Log
from protocols.net.wire import Refused
from protocols.run.hosts import server as server_command
from protocols.run.hosts import server_sync
from protocols.run.hosts.jobs import make_task
from protocols.run.hosts.sessions import Session
from protocols.state.audit_log import AuditLog
from refmpc.core.errors import HandshakeError
from tests.protocols.run.hosts.threads import CLIENTS, ROWS, Federation, _wait, train_until_a_checkpoint
from tests.protocols.run.hosts.wiretap import Relay


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    found = Federation(tmp_path, timeout=3.0)
    yield found
    found.stop()


def test_a_client_that_waits_notices_a_server_that_fell_silent(federation: Federation) -> None:
    """The host of server 1 is gone for this client, without a word, while it waits for the model: it sat there for
    good."""
    relay = Relay(federation.config.addresses[1])
    federation.seen_by["bank", 1] = {"host": relay.address[0], "port": relay.address[1]}
    federation.start_all()
    federation.client("bank")
    # it has called for its result, and was told whom everybody waits for
    _wait(lambda: any(e["event"] == "waiting" and e["peer"] == "card" for e in federation.events("bank")))
    relay.stall()
    federation.wait_for_reason("bank", "server-1 sent nothing for 3 s")
    federation.train("card")
    relay.close()


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
    federation.clients()
    federation.wait_for_reason("server-2", "compiles or loads its kernels")
    assert servers[1]._state_in_words() == "compiles or loads its kernels"  # to doctors
    assert not federation.count("server-0", "all servers agree") and not federation.outcome
    servers[1].ready.set()
    federation.finish()


def test_a_server_on_a_full_disk_stops_when_it_is_asked_to(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation.start(0)
    _wait(lambda: federation.count("server-0", "listening"))
    append = AuditLog.append

    def full(log: AuditLog, event: str, **facts: Any) -> Any:
        if event == "stopped":
            raise OSError(errno.ENOSPC, "No space left on device", "audit.jsonl")
        return append(log, event, **facts)

    monkeypatch.setattr(AuditLog, "append", full)
    federation.end(0)
    line = next(e for e in federation.events("server-0") if "audit log" in e["event"])
    assert line["errno"] == "ENOSPC" and line["path"] == "audit.jsonl"


def test_an_upload_that_is_a_column_short_is_refused_by_name(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was accepted and sealed, and then failed in every attempt, without end and without a name."""
    federation.start_all()
    from protocols.client import upload

    share = upload.share_columns

    def short(client: Any, job: Any, *more: Any) -> None:
        share(client, upload.ClientJob(job.plan, job.embeddings[:][:, :-1], job.labels), *more)

    monkeypatch.setattr("protocols.client.take_part.share_columns", short)
    federation.client("bank")
    refused = federation.wait()["bank"]
    assert isinstance(refused, Refused)
    assert "bank sent something that does not fit" in str(refused) and "96 rows of 4 columns" in str(refused)
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
    hello = federation.hello("bank")
    channel, _ = federation.call("bank", 0, **hello)
    monkeypatch.setattr(server._store._planner, "_make", slow)
    with pytest.raises(Exception, match="greeting"):  # the caller gives up before the plan is made
        federation.call("card", 0, timeout=1.0, **federation.hello("card", rows=10**9))
    assert begun.is_set()
    assert server._store.training is not None and server._state_in_words()  # neither waits for the lock
    again, answer = federation.call("bank", 0, **hello)
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
    federation.start_all()
    federation.clients()
    federation.wait_for_reason("bank", "cannot write to its disk")
    (said,) = {e["errno"] for e in federation.events("server-1") if e["level"] == "error"}
    assert said == "ENOSPC" and all("path" in e for e in federation.events("server-1") if e["level"] == "error")
    assert not list(federation.directory.glob("server-*/state/*/training-*/upload/*/*.message"))
    full.clear()
    federation.finish()


def test_a_server_survives_its_own_full_disk(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Session.finish
    failed: list[str] = []

    def fail_once(session: Session, attempt: str, outbox: Any) -> None:
        if "server-1" in str(session.directory) and not failed:
            failed.append(attempt)
            raise OSError(errno.ENOSPC, "No space left on device", str(session.directory / "results"))
        finish(session, attempt, outbox)

    monkeypatch.setattr(Session, "finish", fail_once)
    federation.start_all()
    federation.train()
    (line,) = [e for e in federation.events("server-1") if "the attempt failed" in e["event"]]
    assert line["errno"] == "ENOSPC" and line["path"].endswith("results") and line["pause"] > 0


def test_lost_state_is_told_with_the_way_out(federation: Federation) -> None:
    federation.start_all()
    federation.client("bank")
    federation.wait_until_uploaded()
    federation.end(1)
    shutil.rmtree(federation.directory / "server-1" / "state")
    federation.start(1)
    told = federation.wait()["bank"]
    assert isinstance(told, HandshakeError) and "its state was lost" in str(told) and "begin a new run" in str(told)


def test_servers_wait_for_the_one_that_is_missing_and_for_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two that were there took each other's new meeting for a departure ("has gone again")."""
    monkeypatch.setattr(server_sync, "_MEETING", 1.0)
    federation = train_until_a_checkpoint(tmp_path)
    federation.end(2)
    _wait(lambda: all("server-2" in federation.servers[n][0]._state_in_words() for n in (0, 1)))
    time.sleep(3.0)  # a few meetings
    for number in (0, 1):
        named = {e["peer"] for e in federation.events(f"server-{number}") if e["event"] == "waiting"}
        assert named - {"bank", "card"} == {"server-2"}
        assert federation.servers[number][0]._state_in_words().startswith("waiting for server-2 since 20")
    federation.start(2)
    federation.finish()
    federation.stop()


def test_a_client_that_voids_the_others_guarantee_is_refused_by_name(federation: Federation) -> None:
    """Rows × 1000: the training ended, and the (3, 1e-5) claim was handed out."""
    federation.start_all()
    federation.client("bank", scale=1000.0)
    federation.client("card")
    for found in federation.wait().values():
        assert isinstance(found, HandshakeError) and "client 'bank' shared rows beyond the row bound" in str(found)
    assert not list(federation.directory.glob("server-*/state/*/training-*/done.json"))
    federation.align()
    federation.train()


def _strangers_session(federation: Federation, name: str, number: int) -> str:
    """What a server answers a client that begins a training under a name of its own."""
    try:
        federation.call(name, number, timeout=20.0)[0].close()
    except Refused as error:
        return str(error)
    return ""


def test_one_client_removes_nothing_that_another_has_shared(federation: Federation) -> None:
    """A first message of one client, with a random name, deleted the uploads of all at three servers."""
    federation.start_all()
    federation.client("bank")
    federation.wait_until_uploaded()
    before = sorted(federation.directory.glob("server-*/state/*/training-*/upload/bank/*"))
    assert len(before) == 6
    for number in range(3):
        for _ in range(3):
            assert _strangers_session(federation, "card", number) == ""
    assert sorted(federation.directory.glob("server-*/state/*/training-*/upload/bank/*")) == before
    assert len(list(federation.directory.glob("server-*/state/*/training-*"))) == 6  # of card only the last one stays
    federation.train("card")
    assert len(list(federation.directory.glob("server-*/state/*/training-*"))) == 3


def with_a_flipped_bit(content: bytes) -> bytes:
    at = 2 * len(content) // 3
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


@pytest.mark.parametrize("damage", [with_a_flipped_bit, lambda content: content[: len(content) // 2]])
def test_a_damaged_upload_is_told_of_its_server_and_of_no_client(federation: Federation, damage: Any) -> None:
    """A flipped bit was blamed on a client ("rows beyond the row bound"), a message that was cut off was tried for
    ever."""
    federation.start_all()
    federation.client("bank")
    federation.wait_until_uploaded()
    (file,) = federation.directory.glob("server-1/state/*/training-*/upload/bank/*.message")
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    federation.client("card")
    for found in federation.wait().values():
        assert "server-1: " in str(found) and f"{file.name} is damaged" in str(found), found
    federation.end(1)
    file.write_bytes(whole)  # from a backup
    federation.start(1)
    federation.train()


def test_shares_and_noise_go_when_all_servers_are_done(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stayed for ever if one client never came for its result."""
    monkeypatch.setattr("protocols.net.server_calls.ServerCalls.confirm", lambda calls: None)
    federation.start_all()
    federation.train()
    kept = [f.name for f in federation.directory.glob("server-*/state/*/training-*/**/*") if f.is_file()]
    expected = {"session.json", "done.json", "claim.txt", "ledger.json", "model.npz", "begun.json", "pid"}
    expected |= {"bank.result", "card.result", "people-bank.tag", "people-card.tag"}
    assert set(kept) == expected and len(kept) == 3 * len(expected)
    federation.train("bank")  # the result can still be fetched


def _files(federation: Federation) -> set[str]:
    return {f.name for f in federation.directory.glob("server-1/state/*/training-*/**/*") if f.is_file()}


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("way", ["forget", "retention_days"])
def test_a_session_is_forgotten_and_what_was_opened_stays_spent(tmp_path: Path, way: str, opened: bool) -> None:
    federation = Federation(tmp_path, retention_days=1.0 if way == "retention_days" else 0.0, epochs=60)
    federation.start_all()
    federation.clients(*CLIENTS if opened else ["bank"])
    pattern = (
        f"server-1/state/*/training-{federation.session}/{'server/opened-*' if opened else 'upload/bank/complete.json'}"
    )
    _wait(lambda: list(tmp_path.glob(pattern)))
    if way == "forget":  # not while the server runs
        own = ["forget", federation.session[:12], "--as", "server-1", "--config", str(tmp_path / "federation.toml")]
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
