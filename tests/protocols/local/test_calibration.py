"""Time, forecast from a short run here: lines through two sizes, the network on top, and everything that is assumed is said.

No test is about how many seconds came out: that is the machine's affair. ``bench.scale`` puts them beside what happens.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protocols.deploy.cli import main as ppvfl
from protocols.local import calibration
from protocols.local.calibration import Calibration, Line, calibrate, forecast
from protocols.local.phase_costs import phase_costs
from tests.protocols.deploy.federations import make_federation
from tests.protocols.server.test_stored_rows import make_plan


def test_a_line_goes_through_both_points_and_never_falls() -> None:
    line = Line.through((100, 3.0), (400, 6.0))
    assert (
        line.at(100) == pytest.approx(3.0) and line.at(400) == pytest.approx(6.0) and line.at(1000) == pytest.approx(12)
    )
    falling = Line.through((100, 3.0), (400, 2.0))  # noise of the clock
    assert (falling.fixed, falling.each) == (2.0, 0.0)
    steep = Line.through((100, 1.0), (400, 8.0))  # a line that would begin below zero
    assert steep.fixed == 0.0 and steep.at(400) > 8.0
    assert Line.through((100, 3.0), (100, 4.0)) == Line(0.0, 0.04)


MEASURED = Calibration(
    {
        "upload": Line(0.1, 1e-3),
        "tests of the rows": Line(0.2, 2e-3),
        "norms for the clip": Line(0.3, 0.0),
        "training": Line(0.5, 1e-2),
    },
    id_seconds=6e-4,
    disk_seconds=1e-7,
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
            "align": rows * 2 * 6e-4,  # two clients share the cores
            "upload": 0.1 + rows * 1e-3 + rows * 16 * (8 + 3) * 1e-7,
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
    assert apart.seconds["align"] == pytest.approx(rows * 6e-4 + 108 * rows / (200e6 / 8))
    assert apart.total == pytest.approx(sum(apart.seconds.values()))
    said = " ".join(apart.assumptions)
    for words in ("64 rows and 20 steps", "latency 20 ms, 200 Mbit/s", "not counted: starting, reading files"):
        assert words in said


@pytest.mark.heavy
@pytest.mark.parametrize("changes", [{"weights": "open"}, {"weights": "secret"}, {"protocol": "g_shuff", "epochs": 3}])
def test_a_calibration_runs_the_plans_own_shape(monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]) -> None:
    monkeypatch.setattr(calibration, "_STEPS", (2, 6))
    plan = make_plan(330, **changes)  # type: ignore[arg-type]
    found = calibrate(plan, 2)
    wanted = {"upload", "tests of the rows", "norms for the clip", "training"}
    assert set(found.lines) == wanted | ({"shuffle"} if plan.protocol == "g_shuff" else set())
    assert found.rows <= plan.schedule.num_rows and found.rows % plan.schedule.batch_size == 0
    assert found.id_seconds > 0 and found.disk_seconds > 0 and forecast(plan, found).total > 0


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
