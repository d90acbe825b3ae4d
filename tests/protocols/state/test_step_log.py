"""Open weights: no step is ever opened with two values, whoever dies when; what cannot be kept is refused."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from protocols.plan.run_plan import plan_run
from protocols.run import launch
from protocols.server.open_training import OpenTrainingRun
from protocols.state.step_log import OpenedSteps
from refmpc.core.errors import PartyFailed
from tests.protocols.conftest import small_federation
from tests.protocols.secure_runs import noise_of_the_servers, run_secure, small_training, weight_bound
from tests.protocols.server.watch import Crash, Watch
from vfl.twins import train_g_bmf

STEPS = 6


@pytest.fixture
def plan_and_federation():
    federation = small_federation(96, (5, 4), 4)
    return plan_run("g_bmf", federation, small_training(weights="open", epochs=2, momentum=0.9)), federation


def points_of_a_run(plan, federation, directory: Path) -> dict[int, list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        dry = Watch(patch, directory)
        run_secure(plan, federation, directory, every=2)
    assert plan.schedule.num_steps == STEPS and not dry.too_early and not dry.two_values()
    assert len(dry.sent) == 3 * STEPS
    return dry.points


SOME, ALL = [(0, 10), (1, 10), (2, 10)], [(0, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize(("server", "every"), [*SOME, *(pytest.param(*each, marks=pytest.mark.heavy) for each in ALL)])
def test_no_step_is_opened_with_two_values_wherever_a_server_dies(plan_and_federation, tmp_path, server, every):
    plan, federation = plan_and_federation
    points = points_of_a_run(plan, federation, tmp_path / "dry")[server]
    assert len(points) > 50
    for number in range(3 * server % every, len(points), every):
        run = tmp_path / f"{number}"
        with pytest.MonkeyPatch.context() as patch:
            watch = Watch(patch, run)
            watch.kill = server, number
            with pytest.raises(PartyFailed, match="Crash"):
                run_secure(plan, federation, run, every=2)
            watch.kill = None
            result = run_secure(plan, federation, run, every=2)
        assert watch.two_values() == [] and watch.too_early == [], points[number]
        for output in (*result.outputs[1:], *result.client_outputs.values()):
            assert (output[0] == result.outputs[0][0]).all()
        opened = [r.name for r in result.ledgers[0].releases].count("noised gradient sums")
        assert opened <= STEPS
        shutil.rmtree(run)


def test_two_crashes_in_one_run_and_a_record_that_was_cut_off(plan_and_federation, tmp_path, monkeypatch):
    """Server 2 dies before anybody hears that the words of step 3 are written; server 1 has lost half of its own; then
    server 0 dies in step 4 of the resumed run."""
    plan, federation = plan_and_federation
    run, watch = tmp_path / "run", Watch(monkeypatch, tmp_path / "run")
    for name, server in (("before the words are written 3", 2), ("after mark 4", 0)):
        watch.points.clear()
        watch.dies_at = server, name
        with pytest.raises(PartyFailed, match=f"Crash: {name}"):
            run_secure(plan, federation, run, every=2)
        if server == 2:
            file = sorted((run / "server-1").glob("opened-*.log"))[-1]
            file.write_bytes(file.read_bytes()[:-7])
    watch.dies_at = None
    run_secure(plan, federation, run, every=2)
    assert watch.two_values() == [] and watch.too_early == []


@pytest.mark.parametrize("lost", ["the last file", "everything", "the last words"])
def test_a_server_that_lost_what_was_opened_ends_the_run(plan_and_federation, tmp_path, lost):
    plan, federation = plan_and_federation
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch, run)
        watch.dies_at = 1, "after open_words 3"
        with pytest.raises(PartyFailed, match="Crash"):
            run_secure(plan, federation, run, every=2)
    own = run / "server-2"
    file = own / "opened-00000002.log"
    (own / "opened-00000004.log").unlink(missing_ok=True)  # it may have been on its way to step 4 already
    if lost == "everything":
        shutil.rmtree(own)
    elif lost == "the last file":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-200])  # an older copy: words of step 3 are gone
    with pytest.raises(PartyFailed, match=r"server-2 no longer has the state after step \d, which was released"):
        run_secure(plan, federation, run, every=2)


def test_a_run_that_keeps_nothing_is_not_resumed_but_hands_its_model_over_again(plan_and_federation, tmp_path):
    plan, federation = plan_and_federation
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch, tmp_path / "broken")
        watch.kill = 1, 6  # in the middle
        with pytest.raises(PartyFailed, match="Crash"):
            run_secure(plan, federation, tmp_path / "broken")
        watch.kill = None
        with pytest.raises(PartyFailed, match="begun without checkpoints.*start a new run"):
            run_secure(plan, federation, tmp_path / "broken")
        with pytest.raises(PartyFailed, match="begun without checkpoints.*start a new run"):
            run_secure(plan, federation, tmp_path / "broken", every=2)
        assert watch.two_values() == []
    first = run_secure(plan, federation, tmp_path / "whole").outputs[0][0]
    again = run_secure(plan, federation, tmp_path / "whole")
    assert (again.outputs[0][0] == first).all() and (again.client_outputs["client 1"][0] == first).all()
    faults = {f"fault in the upload of {name}" for name in plan.client_names}
    assert {r.name for r in again.ledgers[0].releases} == {*faults, "global model"}


def test_without_checkpoints_no_round_is_spent_on_them_and_with_them_one_a_step(plan_and_federation, tmp_path):
    plan, federation = plan_and_federation
    without, with_ = (run_secure(plan, federation, tmp_path / str(every), every=every) for every in (0, 3))
    assert "checkpoint" not in without.ledgers[0].phases
    assert with_.ledgers[0].phases["checkpoint"].rounds == STEPS
    assert with_.ledgers[0].phases["training"].rounds == without.ledgers[0].phases["training"].rounds
    files = {file.name for file in (tmp_path / "3" / "server-0").glob("opened-*.log")}
    # step 3 may have been written before the state before it was
    assert {"opened-00000003.log", "opened-00000006.log"} <= files <= {f"opened-0000000{p}.log" for p in (0, 3, 6)}
    assert all(file.stat().st_mode & 0o077 == 0 for file in (tmp_path / "3" / "server-0").glob("opened-*.log"))


@pytest.mark.parametrize(
    "words", [[], ["--checkpoint-every", "4"], ["--checkpoint-every", "4", "--durability", "power"]]
)
def test_the_folder_says_what_was_open_and_what_was_kept(tmp_path, capsys, words):
    common = ["--epochs", "1", "--parties", "threads", "--out", str(tmp_path), "--json"]
    launch.main("g_bmf", None, [*common, *words])
    report = json.loads(capsys.readouterr().out)
    claim = (Path(report["directory"]) / "claim.txt").read_text()
    assert report["weights"] == "open" and "The weights are open while they are trained" in claim
    sums = next(r for r in report["releases"] if r["name"] == "noised gradient sums")
    assert sums["times"] == report["steps"] == 11
    wanted = {0: "the run cannot be resumed", 2: "kill -9", 4: "a power failure (fsync)"}[len(words)]
    assert wanted in claim and any(wanted in note for note in report["notes"])


def test_words_of_an_attempt_that_is_over_are_never_opened_with_those_of_the_next(plan_and_federation, tmp_path):
    """Server 0 has written its words of step 0 when server 1 dies; the next attempt dies when the two others have
    written theirs, and server 0 has not: what lies at server 0 does not belong to them."""
    plan, federation = plan_and_federation
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch, run)
        watch.dies_at = 1, "before stat 0"
        with pytest.raises(PartyFailed, match="Crash"):
            run_secure(plan, federation, run, every=2)
        watch.dies_at = None
        waiting = threading.Event()
        real = OpenTrainingRun._keep

        async def dying(self: OpenTrainingRun, step: int, words: np.ndarray) -> None:
            if self.party.id == 0:
                waiting.wait(20)
                raise Crash
            await real(self, step, words)

        append = OpenedSteps._append
        written = []

        def noting(opened: OpenedSteps, kind: bytes, step: int, content: bytes) -> None:
            append(opened, kind, step, content)
            written.append(kind)
            if written.count(b"word") == 2:
                waiting.set()

        with pytest.MonkeyPatch.context() as second:
            second.setattr(OpenTrainingRun, "_keep", dying)
            second.setattr(OpenedSteps, "_append", noting)
            with pytest.raises(PartyFailed, match="Crash"):
                run_secure(plan, federation, run, every=2)
        assert waiting.is_set()
        result = run_secure(plan, federation, run, every=2)
    twin = train_g_bmf(federation, plan.training, noise=noise_of_the_servers(plan, run))
    assert np.abs(result.outputs[0][0] - twin.model.layers[0]).max() <= weight_bound(plan)
