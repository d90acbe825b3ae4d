"""A server that comes back with an old disk, or with another plan: nothing is released a second time, everybody is
told."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.files import read_json
from protocols.net.wire import Refused, call
from protocols.run.hosts.sessions import Session
from refmpc.core.errors import PeerLost
from tests.protocols.run.hosts.live_runs import NAMES, WEAK_NOISE, LiveFederation
from tests.protocols.run.hosts.threads import PATIENCE, ROWS, Federation, _wait, train_until_a_checkpoint


def lose_the_last_checkpoint(monkeypatch: pytest.MonkeyPatch, server: str) -> list[Path]:
    """When everybody has computed, this server fails, and comes back as it was one checkpoint earlier."""
    finish, lost = Session.finish, list[Any]()

    def fail_once(session: Session, attempt: str, outbox: Any) -> None:
        if server in str(session.directory) and not lost:
            own = session.directory / "server"
            lost.extend(
                [*sorted(own.glob("checkpoint-*.npz"))[-1:], *own.glob("opened-*.log")]
            )  # secret or open weights
            for file in lost:
                file.unlink()
            (own / "released").unlink(missing_ok=True)
            raise PeerLost("the disk had to be replaced")
        finish(session, attempt, outbox)

    monkeypatch.setattr(Session, "finish", fail_once)
    return lost


def models(directory: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in directory.glob("server-*/state/*/training-*/model.npz")}


def refusals(federation: Federation) -> list[str]:
    found = [event for i in range(3) for event in federation.events(f"server-{i}")]
    return [event["reason"] for event in found if event["event"] == "this training must not go on"]


def test_an_old_backup_does_not_make_the_servers_release_a_second_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = Federation(tmp_path, checkpoint_every=1)
    lost = lose_the_last_checkpoint(monkeypatch, "server-1")
    for number in range(3):
        federation.start(number)
    outcome: dict[str, Any] = {}
    session = secrets.token_hex(16)
    threads = [federation.client(name, session, outcome) for name in ("bank", "card")]
    _wait(lambda: lost)
    _wait(lambda: len(models(tmp_path)) >= 2)
    before = models(tmp_path)
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    for found in outcome.values():
        assert "server-1 no longer has the state after step 3, which was released" in str(found)
    assert all(models(tmp_path)[name] == content for name, content in before.items())
    assert len(refusals(federation)) == 3
    keys = sorted(tmp_path.glob("server-*/state/*/training-*/server/noise.key"))
    assert len(keys) == 3
    for restarted in (
        False,
        True,
    ):  # a first message of one client deleted all this, and the same configuration trained again
        if restarted:
            federation.stop()
            for number in range(3):
                federation.start(number)
        for number in range(3):
            facts = {"kind": "training", "session": secrets.token_hex(16), "rows": ROWS, "people": "0" * 64}
            with pytest.raises(Refused, match="already trained"):
                call(
                    federation.identity("card"),
                    number,
                    federation.config.addresses[number],
                    "upload",
                    timeout=20.0,
                    **facts,
                )
        assert sorted(tmp_path.glob("server-*/state/*/training-*/server/noise.key")) == keys
    federation.stop()


def test_an_old_backup_ends_gl_bmf_with_a_sentence_to_everybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = LiveFederation(tmp_path, **WEAK_NOISE)
    steps = federation.plan.schedule.num_steps
    lose_the_last_checkpoint(monkeypatch, "server-1")
    for number in range(3):
        federation.start(number)
    session, outcome = secrets.token_hex(16), dict[str, Any]()
    threads = [federation.stay(name, session, outcome) for name in NAMES]
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    sentence = f"server-1 no longer has the state after step {steps}, which was released"
    assert all(sentence in str(found) for found in outcome.values()), outcome
    assert any(sentence in reason for reason in refusals(federation))
    federation.stop()


def test_servers_with_another_plan_than_the_training_was_begun_with_refuse(tmp_path: Path) -> None:
    """An edited file has another directory; another version of the software may plan otherwise in the same one."""
    federation, threads, outcome = train_until_a_checkpoint(tmp_path)
    federation.stop()
    files = list(tmp_path.glob("server-*/state/*/training-*/server/begun.json"))
    assert len(files) == 3
    for file in files:
        begun = read_json(file)
        file.write_text(json.dumps({**begun, "plan": {**begun["plan"], "clip_norm": 7.0}}))
    for number in range(3):
        federation.start(number)
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert all("another plan: clip_norm was 7.0 and is 1.0" in str(found) for found in outcome.values()), outcome
    assert not models(tmp_path) and not any(isinstance(found, np.ndarray) for found in outcome.values())
    federation.stop()
