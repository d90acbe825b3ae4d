"""The soak's plan and verdict. The soak itself is a command of half an hour: ``python -m bench.soak``."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bench.soak import __main__ as command
from bench.soak import hosts
from bench.soak.__main__ import Lap, Soak, main
from bench.soak.faults import KINDS, SURVIVOR, planned
from bench.soak.federation import PARTICIPANTS, SERVERS
from bench.soak.watch import OpenedTwice, SentWords
from protocols.state.step_log import OpenedSteps
from refmpc.primitives.opening import added_words
from tests.protocols.state.test_stored_rows import make_plan

GOOD = Lap(2.0, 1000, dict.fromkeys(KINDS, 2), 9, 1.0, 990, 1e-5, 0.1, 3.0, {"server-0": (100.0, 200.0, 205.0, 210.0)})


def test_every_kind_of_fault_happens_and_the_survivor_lives() -> None:
    faults = list(itertools.islice(planned(1, 10.0, 20.0, KINDS), 200))
    assert {fault.kind for fault in faults[: len(KINDS)]} == set(KINDS)  # of a short soak, too
    assert {fault.victim for fault in faults} == set(PARTICIPANTS)
    assert all(fault.victim in SERVERS for fault in faults if fault.kind == "disk")
    late = [fault for fault in faults if fault.at > 200 and fault.victim == SURVIVOR]
    assert late and not {"kill", "restart"} & {fault.kind for fault in late}
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    for at, count in Counter(fault.at for fault in faults).items():
        assert at % 20 == 0 and count <= 2
        assert len({fault.victim for fault in faults if fault.at == at}) == count
    assert list(itertools.islice(planned(1, 10.0, 20.0, KINDS), 200)) == faults
    assert list(itertools.islice(planned(2, 10.0, 20.0, KINDS), 200)) != faults


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, ""),
        ({"difference": 0.2}, "differs from that without faults"),
        ({"memory": {"server-0": (100.0, 200.0, 240.0, 250.0)}}, "memory of server-0 grew from 200 to 240 MB"),
        ({"memory": {"server-0": (10.0, 200.0, 240.0, 250.0)}}, ""),  # too short a life to say
        ({"compared": 500}, "only 500 of 1000 steps"),
        ({"faults": {"kill": 9}}, "never happened: restart, stop, unplug, disk"),
    ],
)
def test_the_verdict_says_what_does_not_hold(tmp_path: Path, changes: dict[str, object], sentence: str) -> None:
    lap = replace(GOOD, **changes)  # type: ignore[arg-type]
    wrong = tuple(command._wrong([lap], KINDS, 30.0, 20.0))
    assert len(wrong) == bool(sentence) and sentence in "".join(wrong)
    console = Console(record=True, width=200)
    code = command._end(tmp_path, console, Soak(2.0, KINDS, (lap,), wrong), wrong)
    facts = json.loads((tmp_path / "soak.json").read_text())
    said = console.export_text()
    if sentence:
        assert code == 1 and facts["verdict"] == "failed" and sentence in said and "FAILED" in said
    else:
        assert code == 0 and facts["verdict"] == "passed" and "PASSED" in said and facts["laps"][0]["steps"] == 1000


def test_it_goes_on_until_the_minutes_are_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings that take less than the trial promised are followed by others, of the length that is left."""
    asked: list[int] = []

    def lap(directory: Path, hosts: object, epochs: int, faults: object, console: Console) -> Lap:
        asked.append(epochs)
        return replace(GOOD, steps=10 * epochs, minutes=epochs / 10, compared=10 * epochs)

    monkeypatch.setattr(command, "_lap", lap)
    monkeypatch.setattr(command, "_choose_epochs", lambda *_: 20)  # two minutes
    assert main(["--minutes", "3", "--out", str(tmp_path)]) == 0
    assert asked[0] == 20 and asked[1] in (11, 12) and len(asked) == 2  # one minute, and a tenth to spare
    assert json.loads((tmp_path / "soak.json").read_text())["minutes"] == pytest.approx(sum(asked) / 10)


def test_an_error_on_the_way_is_a_verdict_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lap(*_: object) -> Lap:
        raise command.SoakFailed("server-1 has ended with 1")

    monkeypatch.setattr(command, "_lap", lap)
    monkeypatch.setattr(command, "_choose_epochs", lambda *_: 20)
    assert main(["--minutes", "3", "--out", str(tmp_path)]) == 1
    assert json.loads((tmp_path / "soak.json").read_text())["wrong"] == ["SoakFailed: server-1 has ended with 1"]


def test_the_watch_sees_every_step_and_a_second_value(tmp_path: Path) -> None:
    """Files as three servers keep them, looked at more often than a file is replaced."""
    folders = [tmp_path / "federation" / name / "state" / "x" / "training-y" / "server" for name in SERVERS]
    for folder in folders:
        folder.mkdir(parents=True)
    opened = [OpenedSteps(folder, np.uint32, 3, synced=False) for folder in folders]
    watch = SentWords(tmp_path, make_plan(96, weights="open"), words=3)
    random, sums = np.random.default_rng(0), None
    for server in opened:
        server.keep_state(0, np.zeros(3, np.int64))
    for step in range(100):
        own = [random.integers(0, 1 << 20, 3, dtype=np.uint32) for _ in opened]
        for server, words in zip(opened, own, strict=True):
            if step and step % 10 == 0:
                server.keep_state_later(step, np.zeros(3, np.int64))
                while server._background.busy:  # it takes less than a step, where steps are real
                    time.sleep(0.001)
            server.write(step, words, sums)
            server.mark(step)
        sums = added_words(own, watch.bits)
        if step % 8 == 7:
            watch.look()
    assert watch.look() == 99 and watch.compared == 99  # what the last step has opened stands in no file yet
    again = opened[1].resume(99, from_state=False)
    assert again.words is not None
    opened[1].write(99, again.words + np.uint32(1), None)
    opened[1].mark(99)
    with pytest.raises(OpenedTwice, match="server-1 had sent other words in step 99 before"):
        watch.look()
    for server in opened:
        server.close()


def test_nobody_is_late_because_everything_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("bench.soak.hosts.time.monotonic", lambda: now[0])
    clock = hosts._AwakeClock()
    begun = clock()
    for seconds in (0.5, 4.0, 300.0, 0.5):  # the third: stopped, most likely
        now[0] += seconds
        clock()
    assert clock() - begun == pytest.approx(0.5 + 4.0 + 5.0 + 0.5)
