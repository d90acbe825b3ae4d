"""The paper's figures are complete and consistent, and the command measures the rows it prints."""

from __future__ import annotations

import json

import pytest

from bench.evaluation.cost import CostRow, Figure, Pace, load_costs, markdown, paper_costs, table, table_number
from bench.paper import main
from bench.shapes import PAPER_SHAPES, StepShape, step_inputs, step_plan
from protocols.step.cost import step_cost


def test_the_figures_of_the_paper():
    costs = paper_costs()
    assert len(costs) == 2 * 4 * 3
    assert (table_number("lan"), table_number("wan")) == (5, 8)
    assert costs["lan", "CIFAR-10", "Pre-ImageNet", "G-BMF"] == Figure(14.57, 453.6)
    for (network, data, pretraining, protocol), figure in costs.items():
        far = costs["wan", data, pretraining, protocol]
        assert figure.megabytes == far.megabytes  # a protocol sends the same whatever the network
        assert network == "wan" or far.seconds > figure.seconds


def test_ours_sends_far_less_than_the_paper():
    for (data, pretraining), shape in PAPER_SHAPES.items():
        paper = paper_costs()["lan", data, pretraining, "G-BMF"]
        assert step_cost(step_plan(shape)).bytes / 1e6 < paper.megabytes / 150


def test_step_inputs_obey_the_row_bound_and_the_grid():
    shape = StepShape(8, 30, 3)
    inputs = step_inputs(shape)
    assert (inputs.rows * 2**14 == (inputs.rows * 2**14).round()).all()
    assert (((inputs.rows[:, :-1] ** 2).sum(axis=1) ** 0.5) <= shape.row_bound).all()
    assert (inputs.rows[:, -1] == 1).all() and (inputs.one_hot.sum(axis=1) == 1).all()
    with pytest.raises(ValueError, match="classes = 1: must be an integer from 2 to 64"):
        StepShape(8, 30, 1)


@pytest.mark.heavy
def test_the_command_measures_ours(capsys):
    main(["cost", "--network", "lan", "--only", "CIFAR-10 Pre-Cifar100", "--repeat", "1", "--no-mpspdz", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["protocol"] for row in rows] == ["G-Shuff", "G-BMF", "GL-BMF"]
    assert rows[0]["ours"]["megabytes"] > rows[1]["ours"]["megabytes"] > 0
    assert rows[1]["ours_explicit"]["megabytes"] > 20 * rows[1]["ours"]["megabytes"]
    assert rows[2]["ours"]["megabytes"] > rows[1]["ours"]["megabytes"]
    assert all(0 < row["ours_open"]["megabytes"] < row["ours"]["megabytes"] for row in rows)
    assert all(row["mpspdz"] is None for row in rows)


def test_the_tables_name_every_figure():
    """A row with all figures and one with the paper's alone, for people and as Markdown."""
    full = Figure(0.5, 2.0)
    key = ("lan", "CIFAR-10", "Pre-ImageNet")
    rows = [
        CostRow(*key, "G-BMF", Figure(14.57, 453.6), Figure(3.0, 433.0), Figure(1.0, 74.0), Figure(0.6, 3.0), full),
        CostRow(*key, "GL-BMF", Figure(132.8, 6220.87), None, None, None),
    ]
    lines = markdown(rows, "lan").splitlines()
    assert "Table 5" in lines[0]
    assert lines[-2].endswith("| 14.6 s, 453.6 MB | 3 s, 433 MB | 1 s, 74 MB | 0.6 s, 3 MB | 0.5 s, 2 MB | 29, 227 |")
    assert lines[-1].endswith("| 133 s, 6,221 MB | –, – | –, – | –, – | –, – | –, – |")
    assert table(rows, "lan").row_count == 2 and table(rows, "wan").row_count == 0


def test_an_unknown_shape_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["cost", "--only", "MNIST-1D"])
    assert "matches none of: CIFAR-10 Pre-ImageNet" in capsys.readouterr().err


def test_what_was_measured_is_kept_shape_by_shape(monkeypatch, tmp_path, capsys):
    """An interrupted run continues, and says what it is at."""
    asked: list[tuple[str, str, str]] = []

    def measured(network, data, pretraining, repeat, mpspdz, pace, progress):
        progress("at work")
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append((network, data, pretraining))
        key = (network, data, pretraining)
        return [
            CostRow(*key, p, paper_costs()[(*key, p)], None, None, Figure(0.1, 1.0)) for p in ("G-Shuff", "G-BMF")
        ], ""

    monkeypatch.setattr("bench.evaluation.cost.measure_shape", measured)
    file = tmp_path / "cost.json"
    arguments = ["cost", "--network", "lan", "--no-mpspdz", "--keep", str(file)]
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    assert "at work" in capsys.readouterr().err
    assert len(load_costs(file)[0]) == 4
    first, asked[:] = list(asked), []
    main([*arguments, "--only", "CIFAR-10"])
    assert asked == []  # both are there
    main([*arguments, "--only", "EMNIST"])
    assert len({*first, *asked}) == 4 and len(load_costs(file)[0]) == 8
    assert "EMNIST" in capsys.readouterr().out


def test_the_pace_of_mpspdz_is_learnt():
    small, large = PAPER_SHAPES["CIFAR-10", "Pre-Cifar100"], PAPER_SHAPES["EMNIST", "Pre-ImageNet"]
    pace = Pace()
    before = pace.guess(large, "wan")
    assert before > pace.guess(large, "lan") > pace.guess(small, "lan") > 1
    pace.learn(small, "lan", 2 * pace.guess(small, "lan"))
    assert pace.guess(large, "wan") == pytest.approx(2 * before)
