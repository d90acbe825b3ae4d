"""The audit log's chain, what breaks it, what only witnesses see, and the command that compares servers."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refmpc
from protocols.cli import main
from protocols.state.audit_log import START, WITNESS, AuditError, AuditLog, compare, read_log


def write(path: Path, count: int = 4) -> AuditLog:
    log = AuditLog(path)
    for i in range(count):
        log.append("release", what="global model", elements=650 + i, epsilon=3.0)
    return log


def test_records_follow_from_each_other_across_restarts(tmp_path: Path):
    path = tmp_path / "state" / "audit.jsonl"
    with AuditLog(path) as log:
        assert (log.head, log.count) == (START, 0)
    with write(path, 2) as log:
        head = log.head
    with AuditLog(path) as log:
        assert (log.head, log.count) == (head, 2)
        log.append("stopped", reason="asked to")
    records = read_log(path)
    assert [record.index for record in records] == [0, 1, 2]
    assert records[2].previous == head
    assert records[1].facts == {"what": "global model", "elements": 651, "epsilon": 3.0}
    assert path.stat().st_mode & 0o007 == 0


TAMPERING = {
    "changed": lambda lines: [*lines[:1], lines[1].replace(b"651", b"999"), *lines[2:]],
    "removed": lambda lines: [*lines[:1], *lines[2:]],
    "swapped": lambda lines: [lines[0], lines[2], lines[1], lines[3]],
    "inserted": lambda lines: [lines[0], lines[0], *lines[1:]],
    "first removed": lambda lines: lines[1:],
    "garbage": lambda lines: [lines[0], b"\xff{\n", *lines[1:]],
    "key added": lambda lines: [lines[0].replace(b'{"event"', b'{"extra": 1, "event"'), *lines[1:]],
}


@pytest.mark.parametrize("how", TAMPERING)
def test_tampering_is_found(tmp_path: Path, how):
    path = tmp_path / "audit.jsonl"
    write(path).close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(TAMPERING[how](lines)))
    with pytest.raises(AuditError, match=r"audit.jsonl, line [12] (does not follow|is not a record)"):
        read_log(path)
    with pytest.raises(AuditError):
        AuditLog(path)


def test_a_crash_in_the_middle_of_a_write_is_noted_and_survived(tmp_path: Path):
    path = tmp_path / "audit.jsonl"
    write(path, 2).close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event": "rel')
    with AuditLog(path) as log:
        log.append("started")
    assert [record.event for record in read_log(path)] == ["release", "release", "a torn record was removed", "started"]
    assert path.read_bytes().startswith(whole)


def test_a_disk_that_is_full_leaves_the_log_whole(tmp_path: Path, monkeypatch):
    path = tmp_path / "audit.jsonl"
    log = write(path, 2)
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:20]))
    with pytest.raises(OSError, match=r"only 20 of \d+ bytes were written"):
        log.append("release")
    monkeypatch.undo()
    log.append("release")
    log.close()
    assert len(read_log(path)) == 3


def test_one_writer_at_a_time(tmp_path: Path):
    with write(tmp_path / "audit.jsonl"), pytest.raises(AuditError, match="another process"):
        AuditLog(tmp_path / "audit.jsonl")


@pytest.mark.parametrize(
    "facts",
    [{"x": np.zeros(3)}, {"x": b"key"}, {"x": list(range(100))}, {"x": float("nan")}, {"x": {"y": {1, 2}}}],
    ids=["array", "bytes", "long list", "nan", "set"],
)
def test_values_do_not_get_into_the_log_by_accident(tmp_path: Path, facts):
    with write(tmp_path / "audit.jsonl", 1) as log, pytest.raises(ValueError, match="facts.x.*must be"):
        log.append("upload", **facts)
    assert len(read_log(tmp_path / "audit.jsonl")) == 1


def test_an_oversized_record_is_refused(tmp_path: Path):
    with write(tmp_path / "audit.jsonl", 1) as log, pytest.raises(ValueError, match="size of a record"):
        log.append("upload", reason="x" * 20_000)


def witnessed(tmp_path: Path) -> tuple[Path, Path]:
    """Two servers that note each other's heads."""
    zero, one = tmp_path / "server-0/audit.jsonl", tmp_path / "server-1/audit.jsonl"
    with write(zero, 3) as first, write(one, 2) as second:
        head, count = first.head, first.count
        first.append(WITNESS, peer="server-1", head=second.head, count=second.count)
        second.append(WITNESS, peer="server-0", head=head, count=count)
        first.append("release")
    return zero, one


def test_witnesses_agree(tmp_path: Path):
    zero, one = witnessed(tmp_path)
    assert compare({"server-0": read_log(zero), "server-1": read_log(one)}) == []


@pytest.mark.parametrize("rewrite", [False, True], ids=["cut", "rewritten"])
def test_what_a_chain_alone_cannot_show(tmp_path: Path, rewrite):
    """Server 0 hides its third release: its own chain is sound again, but server 1 has seen the head."""
    zero, one = witnessed(tmp_path)
    if rewrite:
        zero.unlink()
        write(zero, 5).close()
    else:
        zero.write_bytes(b"".join(zero.read_bytes().splitlines(keepends=True)[:2]))
    assert read_log(zero)
    (sentence,) = compare({"server-0": read_log(zero), "server-1": read_log(one)})
    assert "server-1 noted at" in sentence
    assert "the log of server-0 was cut or rewritten since" in sentence


# the command -------------------------------------------------------------------------------------


def make_run(tmp_path: Path) -> Path:
    """Three servers' ledgers, from a real computation."""

    async def program(party, own):
        x = await refmpc.input_from_party(party, 0, own, shape=(3,))
        return await refmpc.reveal(x * x, release="squares")

    result = refmpc.run(program, [[1.0, 2.0, 3.0], None, None], releases={"squares": "an example, no claim"})
    for i, ledger in enumerate(result.ledgers):
        directory = tmp_path / "run" / f"server-{i}" / "state"
        directory.mkdir(parents=True)
        (directory / "ledger.json").write_text(ledger.to_json())
        (directory / "claim.txt").write_text("an example, no claim\n")
        with AuditLog(directory / "audit.jsonl") as log:
            log.append("release", what="squares", elements=3)
    return tmp_path / "run"


def test_servers_that_agree(tmp_path: Path, capsys):
    run = make_run(tmp_path)
    assert main(["audit-log", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "squares" in shown
    assert "server-0, server-1, server-2 agree" in " ".join(shown.split())
    assert "chains are whole" in " ".join(shown.split())
    assert shown.count("elements 3") == 1, "what three servers noted alike is one row"
    assert main(["audit-log", *(str(run / f"server-{i}") for i in range(3)), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [one["server"] for one in facts["runs"]] == ["server-0", "server-1", "server-2"]
    assert facts["runs"][0]["ledger"]["releases"][0]["elements"] == 3
    assert facts["wrong"] == []


def test_one_server_alone(tmp_path: Path, capsys):
    assert main(["audit-log", str(make_run(tmp_path) / "server-1")]) == 0
    assert "nothing to compare" in " ".join(capsys.readouterr().out.split())


def edit_release(ledger: dict[str, Any]) -> None:
    ledger["releases"][0]["elements"] = 2


def hide_release(ledger: dict[str, Any]) -> None:
    ledger["releases"].clear()


def edit_claim(ledger: dict[str, Any]) -> None:
    ledger["releases"][0]["claim"] = "ε = 0.1"


def add_rounds(ledger: dict[str, Any]) -> None:
    next(iter(ledger["phases"].values()))["rounds"] += 5


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (edit_release, "server-0 and server-2 differ in releases: 'squares' (3 to all servers), 'squares' (2 to all"),
        (hide_release, "server-0 and server-2 differ in releases: 'squares' (3 to all servers), none"),
        (edit_claim, "server-2: release 'squares' was not declared with the claim that it carries"),
        (add_rounds, "server-0 and server-2 differ in rounds of the phase"),
        (lambda ledger: ledger.pop("phases"), "ledger.json is not a ledger: KeyError"),
    ],
    ids=["elements", "hidden", "claim", "rounds", "incomplete"],
)
def test_servers_that_do_not_agree(tmp_path: Path, capsys, edit, sentence):
    run = make_run(tmp_path)
    file = run / "server-2/state/ledger.json"
    ledger = json.loads(file.read_text())
    edit(ledger)
    file.write_text(json.dumps(ledger))
    assert main(["audit-log", str(run), "--json"]) == 1
    wrong = json.loads(capsys.readouterr().out)["wrong"]
    assert any(sentence in found for found in wrong), wrong


def test_a_broken_chain_is_told(tmp_path: Path, capsys):
    run = make_run(tmp_path)
    file = run / "server-1/state/audit.jsonl"
    file.write_text(file.read_text().replace('"elements": 3', '"elements": 4'))
    assert main(["audit-log", str(run)]) == 1
    assert "does not follow from the lines before it" in " ".join(capsys.readouterr().out.split())


def make_sessions(tmp_path: Path) -> Path:
    """A training and a prediction at the same servers, as ``ppvfl server`` keeps them."""
    run = make_run(tmp_path)
    for i in range(3):
        state = run / f"server-{i}/state"
        with AuditLog(state / "audit.jsonl") as log:
            for kind, name in (("training", "aa" * 16), ("prediction", "bb" * 16)):
                (state / name).mkdir()
                (state / name / "session.json").write_text(json.dumps({"kind": kind, "name": name, "rows": 3}))
                ledger = json.loads((state / "ledger.json").read_text())
                if kind == "prediction":
                    ledger["releases"][0]["receiver"] = "client 'card'"
                (state / name / "ledger.json").write_text(json.dumps(ledger))
                for attempt in ("first", "second"):
                    (release,) = ledger["releases"]
                    claim = hashlib.sha256(release["claim"].encode()).hexdigest()
                    log.append("release", session=name, attempt=attempt, **(release | {"claim": claim}))
        (state / "ledger.json").unlink()
    return run


def test_sessions_of_one_server_are_told_apart(tmp_path: Path, capsys):
    """Each session is compared with its counterparts at the other servers, and with the server's own audit log."""
    assert main(["audit-log", str(make_sessions(tmp_path)), "--json"]) == 0
    names = {one["name"] for one in json.loads(capsys.readouterr().out)["runs"]}
    assert names == {"training aaaaaaaa", "prediction bbbbbbbb"}


def test_a_ledger_that_its_own_servers_log_contradicts(tmp_path: Path, capsys):
    """All three ledgers were changed in the same way: they agree with each other, but not with the chained logs."""
    run = make_sessions(tmp_path)
    for i in range(3):
        file = run / f"server-{i}/state" / ("aa" * 16) / "ledger.json"
        ledger = json.loads(file.read_text())
        hide_release(ledger)
        file.write_text(json.dumps(ledger))
    assert main(["audit-log", str(run), "--json"]) == 1
    wrong = json.loads(capsys.readouterr().out)["wrong"]
    assert len(wrong) == 3
    assert "training aaaaaaaa: the ledger of server-0 lists 0 releases, its audit log has 1" in wrong[0]


def test_each_configuration_has_a_log_of_its_own(tmp_path: Path, capsys):
    """A federation that trained twice: ledgers are held against the log beside them, heads against their
    counterparts."""
    both = tmp_path / "both"
    for number in ("first", "second"):
        run = make_sessions(tmp_path / number)
        heads = {}
        for i in range(3):
            with AuditLog(run / f"server-{i}/state/audit.jsonl") as log:
                log.append("finished", configuration=number)
                heads[f"server-{i}"] = {"head": log.head, "count": log.count}
        for i in range(3):
            with AuditLog(run / f"server-{i}/state/audit.jsonl") as log:
                for peer, facts in heads.items():
                    if peer != f"server-{i}":
                        log.append(WITNESS, peer=peer, **facts)
            shutil.move(run / f"server-{i}/state", both / f"server-{i}/state/{number}")
    assert main(["audit-log", str(both), "--json"]) == 0, capsys.readouterr().out
    facts = json.loads(capsys.readouterr().out)
    assert {log["place"] for log in facts["logs"]} == {"state/first", "state/second"}
    (both / "server-1/state/first/audit.jsonl").write_bytes((both / "server-1/state/second/audit.jsonl").read_bytes())
    assert main(["audit-log", str(both), "--json"]) == 1
    wrong = json.loads(capsys.readouterr().out)["wrong"]
    assert len([sentence for sentence in wrong if "the log of server-1 was cut or rewritten" in sentence]) == 2


def test_nothing_there(tmp_path: Path, capsys):
    assert main(["audit-log", str(tmp_path)]) == 2
    assert "must be directories with a ledger.json or an audit.jsonl" in capsys.readouterr().err
    assert main(["audit-log", str(tmp_path / "no")]) == 2
    assert "must be an existing directory" in capsys.readouterr().err
