"""Plans that take long: callers hear at once what is computed and since when, and get the plan when they ask again."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from accel.errors import InvalidArgument
from protocols.federation.read import configuration_hash, load
from protocols.run.hosts import planning
from protocols.run.hosts.jobs import Task, TrainingTask, make_task
from protocols.run.hosts.planning import Planner, StillPlanning
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
            return store.open(hello, "bank")
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
                store.open(HELLO, "bank")
        with pytest.raises(StillPlanning, match="of 120 rows"):  # one at a time for each client
            store.open({**HELLO, "session": "1" * 32, "rows": 90}, "bank")
        assert "training of 120 rows" in store.planning
    session = opened(store, HELLO)
    assert session.task.plan.claim.proven and store.planning == "" and opened(store, HELLO) is session
    assert [said.get_nowait() for _ in range(2)] == [
        "the certificate of the noise is being computed",
        "the certificate of the noise was computed",
    ]


def rows_of(task: Task) -> int:
    assert isinstance(task, TrainingTask)
    return task.plan.schedule.num_samples


def test_one_clients_numbers_take_the_turn_of_no_other(config, tmp_path):
    """``rows = 10^9`` in one message kept the only planner busy for 150 s, and the bound was the same for everybody."""
    go_on, made = threading.Event(), []
    change(tmp_path / "federation.toml", protocol="g_bmf")  # a plan without a certificate

    def make(config: Any, facts: Any, trained: Any):
        if facts["rows"] == 90:
            assert go_on.wait(60)
        made.append(facts["rows"])
        return make_task(config, facts, trained)

    planner = Planner(load(tmp_path / "federation.toml"), lambda event, **facts: None, make)
    facts = {"kind": "training", "name": "0" * 32, "rows": 90, "output": None}
    with pytest.raises(StillPlanning, match="of 90 rows"):
        planner.task(facts, lambda: None, "bank")
    assert rows_of(planner.task({**facts, "rows": 120}, lambda: None, "card")) == 120
    go_on.set()
    with ThreadPoolExecutor(2) as both:
        asked = [both.submit(planner.task, facts, lambda: None, client) for client in ("card", "bank")]
        assert all(rows_of(each.result()) == 90 for each in asked)
    assert planner.words == "" and made.count(120) == 1


@pytest.mark.parametrize(("stated", "bound"), [({}, 10**8), ({"maximum_rows": 1000}, 1000)])
def test_more_rows_than_the_file_allows_are_refused_at_once(config, tmp_path, stated, bound):
    file = tmp_path / "federation.toml"
    for name, value in stated.items():
        file.write_text(file.read_text().replace("[run]\n", f"[run]\n{name} = {value}\n"))
    store = SessionStore(load(file), tmp_path / "state", predictions=True)
    with pytest.raises(
        InvalidArgument, match=rf"rows = {bound + 1}: must be at most {bound}, see \[run\] maximum_rows"
    ):
        store.open({**HELLO, "rows": bound + 1}, "bank")
    assert configuration_hash(load(file)) != configuration_hash(config) or not stated


def test_what_is_wrong_with_a_plan_is_told_to_its_caller(config, tmp_path):
    store = SessionStore(config, tmp_path / "state", predictions=True)
    with pytest.raises(InvalidArgument, match="batch_size"):
        opened(store, {**HELLO, "rows": 5})
    assert opened(store, {**HELLO, "session": "1" * 32}).name == "1" * 32
