"""Short trainings as ``ppvfl`` does them, for the estimate of time: every phase is measured, nothing stays, what fails
is said."""

from __future__ import annotations

import datetime
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from protocols.federation.public_plan import plan_for
from protocols.federation.read import FederationConfig, load
from protocols.plan.run_plan import Plan
from protocols.run import timing_run
from protocols.run.calibration import MEMORY, SENDING
from protocols.run.timing_run import TrialFailed, measure_trials
from tests.protocols.run.hosts.federations import make_federation

ROWS = 400


def federation(directory: Path, **changes: str) -> tuple[FederationConfig, Plan]:
    make_federation(directory, keys="none")
    file = directory / "federation.toml"
    text = file.read_text().replace('batch_size = "auto"', "batch_size = 64")
    for word, value in changes.items():
        text = re.sub(rf"(?m)^{word} = \S+", f"{word} = {value}", text)
    file.write_text(text)
    config = load(file, pinned=False)
    return config, plan_for(config, ROWS)


def shortened(plan: Plan, batches: int) -> Plan:
    schedule = replace(plan.schedule, num_samples=64 * batches, dummies=0, epochs=1)
    return replace(plan, schedule=schedule)


@pytest.mark.heavy
@pytest.mark.parametrize("in_files", [False, True])
def test_every_phase_is_measured_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_files: bool
) -> None:
    config, plan = federation(tmp_path / "federation")
    if in_files:
        monkeypatch.setattr(timing_run, "IN_MEMORY", 0)
    own = tmp_path / "trials"
    own.mkdir()
    found = measure_trials(config, ROWS, [shortened(plan, 1), shortened(plan, 3)], own)
    assert len(found) == 2
    for seconds in found:
        assert {SENDING, MEMORY, "upload", "verification", "norms", "training", "checkpoint"} <= set(seconds)
        assert all(value > 0 for name, value in seconds.items() if name in (SENDING, "upload", "training"))
        assert (seconds[MEMORY] > 0) == in_files
    assert not list(own.iterdir())
    assert not (tmp_path / "federation" / "server-0").exists()  # the federation's own places are not used


def test_the_last_participant_counts_and_nobodys_wait(tmp_path: Path) -> None:
    config, plan = federation(tmp_path / "federation")
    trial_ = timing_run._Trial(tmp_path, plan, "session", ROWS, 0)
    (tmp_path / timing_run._GO).touch()
    begun = (tmp_path / timing_run._GO).stat().st_mtime
    for place, client in enumerate(config.clients):
        at = datetime.datetime.fromtimestamp(begun + 2 + place, datetime.UTC).isoformat(timespec="milliseconds")
        words = (
            json.dumps({"time": at, "event": timing_run._UPLOADED}) + '\n{"time": "2026-'
        )  # a line that is being written
        (tmp_path / f"{client.name}.log").write_text(words)
    for place, server in enumerate(config.servers):
        kept = tmp_path / server.name / "0123" / "training-0123"
        kept.mkdir(parents=True)
        phases = {"verification": {"seconds": 1.0 + place}, "norms": {"seconds": 3.0 - place}}
        (kept / "ledger.json").write_text(json.dumps({"phases": phases}))
    found = timing_run._seconds(config, trial_)
    assert found == {SENDING: pytest.approx(3.0, abs=0.01), "verification": 3.0, "norms": 1.0}


@pytest.mark.heavy
def test_a_trial_that_fails_says_who_and_leaves_nothing(tmp_path: Path) -> None:
    config, plan = federation(tmp_path / "federation", epochs="1", learning_rate="0.5")
    longer = replace(plan, schedule=replace(plan.schedule, epochs=2))  # noise is planned for one epoch only
    with pytest.raises(TrialFailed, match=r"server-\d"):
        measure_trials(config, ROWS, [longer], tmp_path)
    assert not list(tmp_path.glob("ppvfl-estimates-*"))
