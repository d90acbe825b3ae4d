"""Plans that take long: callers hear at once what is computed and since when, and get the plan when they ask again."""

from __future__ import annotations

import queue
import time
from typing import Any

import pytest

from accel.errors import InvalidArgument
from protocols.federation.read import load
from protocols.run.hosts import planning
from protocols.run.hosts.planning import StillPlanning
from protocols.run.hosts.sessions import SessionStore
from tests.protocols.run.hosts.commands_at_hosts import change
from tests.protocols.run.hosts.federations import make_federation
from vfl.dp import certificate_cache

HELLO = {"kind": "training", "session": "0" * 32, "rows": 120, "output": None}


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("PPVFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(certificate_cache, "_memory", {})
    make_federation(tmp_path)
    file = tmp_path / "federation.toml"
    change(file, protocol="g_shuff", epochs=2, batch_size=30, delta=1e-3, held_out=0.0)
    return load(file)


def opened(store: SessionStore, hello: dict[str, Any]):
    """As a client does it: again and again."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            return store.open(hello)
        except StillPlanning:
            time.sleep(0.05)
    raise AssertionError("no plan in a minute")


def test_callers_are_told_while_a_certificate_is_computed(config, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "_PATIENCE", 0.2)
    said: queue.Queue[str] = queue.Queue()
    store = SessionStore(config, tmp_path / "state", predictions=True, say=lambda event, **facts: said.put(event))
    with certificate_cache._one_at_a_time:  # as long as somebody computes another one
        for _ in range(2):  # whoever asks, and asks again
            with pytest.raises(StillPlanning, match="of 120 rows and computes the certificate of its noise, since 20"):
                store.open(HELLO)
        with pytest.raises(StillPlanning, match="of 120 rows"):  # another one's turn comes later
            store.open({**HELLO, "session": "1" * 32, "rows": 90})
        assert "training of 120 rows" in store.planning
    session = opened(store, HELLO)
    assert session.task.plan.claim.proven and store.planning == "" and opened(store, HELLO) is session
    assert [said.get_nowait() for _ in range(2)] == [
        "the certificate of the noise is being computed",
        "the certificate of the noise was computed",
    ]


def test_what_is_wrong_with_a_plan_is_told_to_its_caller(config, tmp_path):
    store = SessionStore(config, tmp_path / "state", predictions=True)
    with pytest.raises(InvalidArgument, match="batch_size"):
        opened(store, {**HELLO, "rows": 5})
    assert opened(store, {**HELLO, "session": "1" * 32}).name == "1" * 32
