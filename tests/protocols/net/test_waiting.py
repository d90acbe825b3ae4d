"""Who is missing is said once, again when it changes, and in one way."""

import json
from pathlib import Path
from typing import Any

import pytest

from protocols.log import Log
from protocols.net.waiting import Waiting
from refmpc.net.framing import listed, name_of, title


def said(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_participant_has_one_name() -> None:
    assert [name_of(peer) for peer in (1, "bank")] == ["server-1", "bank"]
    assert [title(peer) for peer in (1, "bank")] == ["server-1", "client 'bank'"]
    assert [listed("abc"[:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]


def test_a_wait_is_logged_at_once_and_then_more_and_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    waits = Waiting(Log("card", tmp_path / "log"))
    for _ in range(3600):
        waits.on("bank", "to align rows")
        now += 1.0
    assert waits.words.startswith("waiting for bank since 20") and waits.words.endswith("(to align rows)")
    waits.on("bank", "refused")  # another reason is said at once
    waits.over("bank")
    lines = said(tmp_path / "log")
    assert 10 <= len(lines) <= 20 and {line["peer"] for line in lines} == {"bank"}
    assert [line["event"] for line in lines[-2:]] == ["waiting", "no longer waiting"] and waits.words == ""
    assert lines[-2]["reason"] == "refused" and lines[-2]["seconds"] == 3600
