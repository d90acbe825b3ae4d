"""Checkpoints in the background: a step does not wait for them, one is under way at most, an error is told at the next
step, and whatever lies on disk at any moment is enough to go on."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocols.plan.run_plan import plan_run
from protocols.state.background import Background
from protocols.state.checkpoint import ServerDirectory
from protocols.state.step_log import OpenedSteps
from refmpc.core.errors import PartyFailed
from tests.protocols.conftest import small_federation
from tests.protocols.secure_runs import noise_of_the_servers, released, run_secure, small_training, weight_bound
from vfl.twins import train_g_bmf

WORDS = 3


def test_one_is_under_way_at_most_and_errors_are_told_to_whoever_looks_next() -> None:
    background, gate, running = Background(), threading.Event(), list[int]()
    most = 0

    def work() -> None:
        nonlocal most
        running.append(1)
        most = max(most, len(running))
        gate.wait(10)
        running.pop()

    background.start(work)
    assert background.busy
    background.check()  # does not wait
    threading.Timer(0.05, gate.set).start()
    background.start(work)  # waits for the first
    background.wait()
    assert most == 1 and not background.busy

    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "a path")

    for look in (background.check, background.wait, lambda: background.start(work)):
        background.start(fail)
        while background.busy:
            time.sleep(0.001)
        with pytest.raises(OSError, match=r"\[Errno 28\] No space left on device: 'a path'"):
            look()
        background.wait()  # it was told, once
    background.start(fail)
    background.close()  # whoever ends because of something else is not held up by it


# the files of open weights ------------------------------------------------------------------------


def state_before(position: int) -> np.ndarray:
    return np.array([position, position * position], dtype=np.int64)


def sums_of(step: int) -> np.ndarray:
    return np.arange(WORDS) - step


def words_of(step: int) -> np.ndarray:
    return np.arange(WORDS, dtype=np.uint32) + np.uint32(100 * step)


def goes_on(directory: Path, scratch: Path, position: int) -> None:
    """What lies there leads to ``position``: a state, all sums since, and the last words."""
    shutil.copytree(directory, scratch)
    opened = OpenedSteps(scratch, np.uint32, WORDS, synced=True)
    kept = opened.resume(position, from_state=False)
    assert np.array_equal(kept.state, state_before(kept.step)) and kept.step < position
    assert len(kept.sums) == position - 1 - kept.step
    assert all(np.array_equal(sums, sums_of(kept.step + i)) for i, sums in enumerate(kept.sums))
    assert kept.words is not None and np.array_equal(kept.words, words_of(position - 1))
    opened.mark(position - 1)
    other = words_of(position) + np.uint32(7)  # of an attempt of its own; what was beyond is gone
    opened.write(position, other, sums_of(position - 1))
    opened.close()
    again = OpenedSteps(scratch, np.uint32, WORDS, synced=False)
    assert (again.written, again.marked) == (position + 1, position)
    assert np.array_equal(again.words(position), other)
    shutil.rmtree(scratch)


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("lag", [0, 1, 3, 4])
def test_what_lies_on_disk_at_any_moment_is_enough_to_go_on(tmp_path, monkeypatch, every: int, lag: int) -> None:
    """States that take ``lag`` steps to be written; servers may be a step apart, so this one may have to go back by
    one."""
    directory, scratch = tmp_path / "server", tmp_path / "copy"
    directory.mkdir()
    opened = OpenedSteps(directory, np.uint32, WORDS, synced=True)
    gates: dict[int, threading.Event] = {}
    write_state = OpenedSteps._write_state

    def slow(self: OpenedSteps, position: int, content: bytes) -> None:
        if position in gates:
            assert gates[position].wait(20)
        write_state(self, position, content)

    monkeypatch.setattr(OpenedSteps, "_write_state", slow)
    opened.keep_state(0, state_before(0))
    most = 0
    for step in range(24):
        if step and step % every == 0:
            for gate in gates.values():  # the one before is waited for
                gate.set()
            gates[step] = threading.Event()
            opened.keep_state_later(step, state_before(step))
        for position, gate in gates.items():
            if position + lag <= step and not gate.is_set():
                gate.set()
                while opened._background.busy:
                    time.sleep(0.001)
        opened.write(step, words_of(step), sums_of(step - 1) if step else None)
        goes_on(directory, scratch, step + 1)
        if step:
            goes_on(directory, scratch, step)
        opened.mark(step)
        goes_on(directory, scratch, step + 1)
        most = max(most, len(list(directory.glob("opened-*.log"))))
    for gate in gates.values():
        gate.set()
    opened.finish(24, state_before(24))
    opened.close()
    assert OpenedSteps(directory, np.uint32, WORDS, synced=False).finished
    assert most <= 3 + (3 if every == 1 else 1 if every == 2 else 0)  # of 24 / every
    assert not list(directory.glob("*.part"))


def test_a_state_that_was_cut_off_counts_for_nothing(tmp_path) -> None:
    directory = tmp_path / "server"
    directory.mkdir()
    opened = OpenedSteps(directory, np.uint32, WORDS, synced=True)
    opened.keep_state(0, state_before(0))
    for step in range(3):
        opened.write(step, words_of(step), sums_of(step - 1) if step else None)
    (directory / "opened-00000003.part").write_bytes(b"stat")  # killed in the middle of it
    opened.close()
    goes_on(directory, tmp_path / "copy", 3)
    OpenedSteps(directory, np.uint32, WORDS, synced=True).resume(3, from_state=False)
    assert not list(directory.glob("*.part"))


# runs ---------------------------------------------------------------------------------------------


def failing_once(
    monkeypatch: pytest.MonkeyPatch, kind: Any, name: str, position: int, before: Callable[[Path], None]
) -> None:
    """The background of server 1 fails of its disk at ``position``, once."""
    real, failed = getattr(kind, name), list[int]()

    def write(self: Any, at: int, content: Any) -> None:
        path = self._file(at) if isinstance(self, OpenedSteps) else self.path / f"checkpoint-{at:08d}.npz"
        if at == position and path.parent.name == "server-1" and not failed:
            failed.append(at)
            before(path)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(self, at, content)

    monkeypatch.setattr(kind, name, write)


@pytest.mark.parametrize("weights", ["open", "secret"])
def test_a_disk_that_fails_in_the_background_is_told_with_number_and_path(tmp_path, monkeypatch, weights: str) -> None:
    federation = small_federation(96, (5, 4), 4)
    plan = plan_run("g_bmf", federation, small_training(weights=weights, epochs=2))
    kind, name = (OpenedSteps, "_write_state") if weights == "open" else (ServerDirectory, "_write")

    def step_2_is_written(path: Path) -> None:
        """In the file before: a run that goes on reads the sums of the steps between there."""
        while weights == "open" and OpenedSteps(path.parent, np.uint32, 0, synced=False).written < 3:
            time.sleep(0.01)

    failing_once(monkeypatch, kind, name, 2, step_2_is_written)
    file = "opened-00000002.log" if weights == "open" else "checkpoint-00000002.npz"
    with pytest.raises(PartyFailed, match=rf"server-1 failed: OSError: \[Errno 28\] No space left.*server-1/{file}"):
        run_secure(plan, federation, tmp_path, every=2)
    result = run_secure(plan, federation, tmp_path, every=2)
    twin = train_g_bmf(federation, plan.training, noise=noise_of_the_servers(plan, tmp_path))
    assert np.abs(released(result)[0] - twin.model.layers[0]).max() <= weight_bound(plan)


def test_a_server_whose_disk_is_slow_does_not_cost_the_others_their_checkpoints(tmp_path, monkeypatch) -> None:
    """Secret weights: server 0 has written three checkpoints more than server 1 when that dies. All have one in
    common."""
    federation = small_federation(96, (5, 4), 4)
    plan = plan_run("g_bmf", federation, small_training(weights="secret", epochs=4))

    def others_are_ahead(path: Path) -> None:
        ahead = path.parent.with_name("server-0") / "checkpoint-00000006.npz"
        until = time.monotonic() + 30
        while not ahead.exists():
            assert time.monotonic() < until
            time.sleep(0.01)

    failing_once(monkeypatch, ServerDirectory, "_write", 4, others_are_ahead)
    with pytest.raises(PartyFailed, match="server-1 failed: OSError"):
        run_secure(plan, federation, tmp_path, every=2)
    assert ServerDirectory(tmp_path / "server-1").steps() == [2]
    assert ServerDirectory(tmp_path / "server-0").steps() == [2, 4, 6]
    result = run_secure(plan, federation, tmp_path, every=2)
    rounds = result.ledgers[0].phases["training"].rounds
    assert rounds % 10 == 0 and plan.schedule.num_steps == 12  # steps 2 to 11
    twin = train_g_bmf(federation, plan.training, noise=noise_of_the_servers(plan, tmp_path))
    assert np.abs(released(result)[0] - twin.model.layers[0]).max() <= weight_bound(plan)
