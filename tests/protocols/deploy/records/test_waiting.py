"""Who is missing is said once, again when it changes, and in one way."""

import json
from pathlib import Path
from typing import Any

import pytest

from protocols.deploy.records.log import Log
from protocols.deploy.records.waiting import QUIET, Waiting
from refmpc.net.framing import listed, name_of, title


def said(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_participant_has_one_name() -> None:
    assert [name_of(peer) for peer in (1, "bank")] == ["server-1", "bank"]
    assert [title(peer) for peer in (1, "bank")] == ["server-1", "client 'bank'"]
    assert [listed("abc"[:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]


def test_the_missing_are_named_once_and_again_when_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    waiting = Waiting(Log("bank", tmp_path / "log"), silent=2.0)
    waiting.say([0, "card"])
    assert said(tmp_path / "log") == []
    now += 2.0
    for _ in range(3):
        waiting.say([0, "card"])
        waiting.say([1], "refused")
    lines = said(tmp_path / "log")
    assert [line["event"] for line in lines] == ["waiting", "waiting"]
    assert [line["missing"] for line in lines] == ["server-0 and card", "server-1"]
    assert [(line["level"], line.get("reason")) for line in lines] == [("info", None), ("warning", "refused")]
    waiting.here(1)
    waiting.say([1], "refused")
    waiting.say([0, "card"])
    assert len(said(tmp_path / "log")) == 3, "server-1 went again, the others were never there"
    now += QUIET
    waiting.say([0, "card"])
    assert len(said(tmp_path / "log")) == 4
