"""Time, forecast from a short run here: lines through two sizes, the network on top, and everything that is assumed is
said.

No test is about how many seconds came out: that is the machine's affair. ``bench.scale`` puts them beside what happens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from protocols.cli import main as ppvfl
from protocols.plan.run_plan import Plan
from protocols.run import calibration
from protocols.run.calibration import MEMORY, SENDING, Calibration, Line, calibrate, elapsed, forecast, measure_here
from protocols.run.phase_costs import phase_costs
from tests.protocols.run.hosts.federations import make_federation
from tests.protocols.state.test_stored_rows import make_plan


def test_a_line_rises_as_the_last_two_and_begins_as_the_first() -> None:
    line = Line.through((100, 5.0), (100, 3.0), (400, 6.0))
    assert line.each == pytest.approx(0.01)  # of what is warm
    assert line.at(100) == pytest.approx(5.0) and line.at(1000) == pytest.approx(14.0)  # and 2 s at the beginning
    falling = Line.through((100, 3.0), (100, 3.0), (400, 2.0))  # noise of the clock
    assert (falling.fixed, falling.each) == (3.0, 0.0)
    steep = Line.through((100, 1.0), (100, 1.0), (400, 8.0))  # a line that would begin below zero
    assert steep.fixed == 0.0 and steep.at(400) > 8.0
    assert Line.through((100, 4.0)) == Line(0.0, 0.04)
    assert Line.through((100, 3.0), (100, 4.0)) == Line(0.0, 0.04)


MEASURED = Calibration(
    {
        "upload": Line(0.1, 1e-3),
        "tests of the rows": Line(0.2, 2e-3),
        "norms for the clip": Line(0.3, 0.0),
        "training": Line(0.5, 1e-2),
    },
    memory=Line(0.0, 0.0),
    ids=Line(0.2, 12e-4),
    cores=2,
    rows=64,
    steps=20,
)


def test_everybody_here_and_a_host_each() -> None:
    plan = make_plan(200, epochs=3, weights="open")
    rows, steps = plan.schedule.num_rows, plan.schedule.num_steps
    here = forecast(plan, MEASURED).seconds
    assert here == pytest.approx(
        {
            "align": 0.2 + rows * 12e-4,
            "upload": 0.1 + rows * 1e-3,
            "tests of the rows": 0.2 + rows * 2e-3,
            "norms for the clip": 0.3,
            "training": 0.5 + steps * 1e-2,
        }
    )
    apart = forecast(plan, MEASURED, "wan")
    costs = phase_costs(plan, keeps_steps=True)
    training = [costs["training"], costs["checkpoint"]]
    waits = sum(cost.rounds * 20e-3 + cost.bytes / 3 / (200e6 / 8) for cost in training)
    assert apart.seconds["training"] == pytest.approx(here["training"] + waits)
    assert apart.seconds["align"] == pytest.approx(0.1 + rows * 6e-4 + 102 * rows / (200e6 / 8))
    assert apart.total == pytest.approx(sum(apart.seconds.values()))
    said = " ".join(apart.assumptions)
    for words in ("64 rows and 20 steps", "latency 20 ms, 200 Mbit/s", "not counted: starting, reading files"):
        assert words in said


def test_who_is_early_waits_and_that_is_no_work_of_the_next_phase() -> None:
    """A server that had taken rows in two seconds earlier waited in the tests of them, which counted as theirs."""
    servers = [{"upload": 6.5, "verification": 8.8}, {"upload": 8.5, "verification": 6.8, "checkpoint": 0.5}]
    assert elapsed(servers) == pytest.approx({"upload": 8.5, "verification": 6.8, "checkpoint": 0.5})


def test_where_memory_must_be_found_the_upload_has_a_range() -> None:
    plan = make_plan(200, epochs=3, weights="open")
    rows = plan.schedule.num_rows
    found = forecast(plan, replace(MEASURED, memory=Line(0.0, 1e-3)))
    low = 0.1 + rows * 1e-3
    assert found.ranges == {"upload": pytest.approx((low, low + rows * 1e-3 / 2))}  # servers on two cores
    assert found.seconds["upload"] == found.ranges["upload"][1]
    assert "memory" in " ".join(found.assumptions)
    apart = forecast(plan, replace(MEASURED, memory=Line(0.0, 1e-3)), "wan")
    low, high = apart.ranges["upload"]
    assert high - low == pytest.approx(rows * 1e-3 / 3)  # on a host each
    narrow = forecast(plan, replace(MEASURED, memory=Line(0.0, 1e-5)))
    assert narrow.ranges == {} and "memory" not in " ".join(narrow.assumptions)


def test_a_calibration_asks_for_the_same_few_rows_twice_and_then_for_many() -> None:
    plan = make_plan(330, epochs=3, weights="open")
    asked: list[Plan] = []

    def measure(plans: Sequence[Plan]) -> list[dict[str, float]]:
        asked.extend(plans)
        both = [{"upload": 1.0, SENDING: 2.0, "training": 3.0, "checkpoint": 0.5, "set-up": 9.0}] * 2
        return [*both, {"upload": 2.0, SENDING: 4.0, "training": 6.0, "checkpoint": 1.0, MEMORY: 3.2}]

    found = calibrate(plan, measure)
    small, again, large = asked
    assert small == again and large.schedule.num_rows == plan.schedule.num_rows  # few enough for all to be measured
    assert small.schedule.num_rows < large.schedule.num_rows and large.schedule.num_steps <= plan.schedule.num_steps
    assert set(found.lines) == {"upload", "training"}
    more = large.schedule.num_rows - small.schedule.num_rows
    assert found.lines["upload"].each == pytest.approx(3.0 / more)
    assert found.memory.at(large.schedule.num_rows) == pytest.approx(3.2)


@pytest.mark.heavy
@pytest.mark.parametrize("changes", [{"weights": "open"}, {"weights": "secret"}, {"protocol": "g_shuff", "epochs": 3}])
def test_a_calibration_runs_the_plans_own_shape(monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]) -> None:
    monkeypatch.setattr(calibration, "_STEPS", (2, 6))
    monkeypatch.setattr(calibration, "_IDS", 256)
    plan = make_plan(330, **changes)  # type: ignore[arg-type]
    found = calibrate(plan, measure_here(2))
    wanted = {"upload", "tests of the rows", "norms for the clip", "training"}
    assert set(found.lines) == wanted | ({"shuffle"} if plan.protocol == "g_shuff" else set())
    assert found.rows <= plan.schedule.num_rows and found.rows % plan.schedule.batch_size == 0
    assert found.ids.at(1) > 0 and forecast(plan, found).total > 0


def test_the_command_needs_no_keys_and_no_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_federation(tmp_path, keys="none")
    words = ["estimate", "--config", str(tmp_path / "federation.toml"), "--rows", "5000", "--no-calibration"]
    assert ppvfl([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["forecast"] is None and facts["rounds"] > facts["steps"] and facts["memory_per_server"] > 0
    assert ppvfl(words) == 0
    assert "between the servers" in capsys.readouterr().out
    assert ppvfl([*words, "--network", "moon"]) == 2
    assert "--network" in capsys.readouterr().err
