"""A server that comes back with an old disk, or with another plan: nothing is released a second time, everybody is
told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.files import read_json
from protocols.net.wire import Refused
from protocols.run.hosts.sessions import Session
from refmpc.core.errors import PeerLost
from tests.protocols.run.hosts.live_runs import WEAK_NOISE, LiveFederation
from tests.protocols.run.hosts.threads import Federation, _wait, train_until_a_checkpoint


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
    federation.start_all()
    federation.clients()
    _wait(lambda: lost)
    _wait(lambda: len(models(tmp_path)) >= 2)
    before = models(tmp_path)
    for found in federation.wait().values():
        assert "server-1 no longer has the state after step 3, which was released" in str(found)
    assert all(models(tmp_path)[name] == content for name, content in before.items())
    assert len(refusals(federation)) == 3
    keys = sorted(tmp_path.glob("server-*/state/*/training-*/server/noise.key"))
    assert len(keys) == 3
    # a first message of one client deleted all this, and the same configuration trained again
    for restarted in (False, True):
        if restarted:
            federation.stop()
            federation.start_all()
        for number in range(3):
            with pytest.raises(Refused, match="already trained"):
                federation.call("card", number, timeout=20.0)
        assert sorted(tmp_path.glob("server-*/state/*/training-*/server/noise.key")) == keys
    federation.stop()


def test_an_old_backup_ends_gl_bmf_with_a_sentence_to_everybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = LiveFederation(tmp_path, **WEAK_NOISE)
    steps = federation.plan.schedule.num_steps
    lose_the_last_checkpoint(monkeypatch, "server-1")
    federation.start_all()
    federation.clients()
    outcome = federation.wait()
    sentence = f"server-1 no longer has the state after step {steps}, which was released"
    assert all(sentence in str(found) for found in outcome.values()), outcome
    assert any(sentence in reason for reason in refusals(federation))
    federation.stop()


def test_servers_with_another_plan_than_the_training_was_begun_with_refuse(tmp_path: Path) -> None:
    """An edited file has another directory; another version of the software may plan otherwise in the same one."""
    federation = train_until_a_checkpoint(tmp_path)
    federation.stop()
    files = list(tmp_path.glob("server-*/state/*/training-*/server/begun.json"))
    assert len(files) == 3
    for file in files:
        begun = read_json(file)
        file.write_text(json.dumps({**begun, "plan": {**begun["plan"], "clip_norm": 7.0}}))
    federation.start_all()
    outcome = federation.wait()
    assert all("another plan: clip_norm was 7.0 and is 1.0" in str(found) for found in outcome.values()), outcome
    assert not models(tmp_path) and not any(isinstance(found, np.ndarray) for found in outcome.values())
    federation.stop()
