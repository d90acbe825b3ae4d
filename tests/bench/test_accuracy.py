"""The accuracy bench keeps to the stated bounds and draws what it says; the table of aims covers its cases."""

import json

import numpy as np
import pytest

from bench import mathematics
from bench.accuracy import CURVES, main, measure
from bench.measure import Measurement


@pytest.mark.parametrize("name", CURVES)
def test_every_curve_stays_within_its_bound(name):
    points = measure(CURVES[name])
    assert points.used <= 1 and points.worst > 0
    assert not CURVES[name].never_above or points.error.max() < 0


def test_plots_and_figures_are_written(tmp_path, capsys):
    main(["--only", "clip_factor", "--out", str(tmp_path / "plots"), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["functions"]["clip_factor"]["largest_above"] < 0
    (plot,) = report["plots"]
    with open(plot, "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"


def test_a_function_that_leaves_its_bound_shows():
    curve = CURVES["log"]
    off = type(curve)(**{**vars(curve), "truth": lambda x: np.log(x) + 2.0**-13})
    assert measure(off).used > 1


def test_every_case_has_an_aim_and_a_missed_one_is_seen():
    assert set(mathematics.AIMS) == set(mathematics.CASES)
    aim = mathematics.AIMS["shuffle 50,000×20"]
    assert not aim.missed(Measurement(1.0, 2, 3200, 100))
    assert aim.missed(Measurement(1.0, 3, 3200, 100)) and aim.missed(Measurement(1.0, 2, 3300, 100))
    softmax = mathematics.AIMS["softmax 128×10"]
    assert not softmax.missed(Measurement(1.0, 11, 614_000, 1280)) and softmax.missed(
        Measurement(1.0, 11, 1_000_001, 1280)
    )
