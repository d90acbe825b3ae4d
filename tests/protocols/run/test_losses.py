"""The commands with one logit and with a regression: trained, compared with the twin, measured and predicted."""

from __future__ import annotations

import json

import numpy as np
import pytest

from protocols.plan.public_rows import PublicRows, with_public_rows
from protocols.plan.run_plan import plan_run
from protocols.run import launch, predict
from protocols.server.averaging import correct_and_loss
from tests.protocols.conftest import small_federation
from tests.protocols.secure_runs import small_training
from vfl.gradients import GlobalModel

COMMON = [
    "--parties",
    "threads",
    "--row-rule",
    "clip",
    "--epsilon",
    "8",
    "--batch-size",
    "64",
    "--epochs",
    "4",
    "--json",
    "--twin",
]
RUNS = {
    "binary": ["--data", "breast_cancer", "--row-bound", "4", "--learning-rate", "0.5", "--class-weights", "2,1"],
    "regression": ["--data", "diabetes", "--row-bound", "6", "--learning-rate", "0.1"],
}


@pytest.mark.parametrize("task", RUNS)
def test_a_run_and_its_predictions(task, tmp_path, capsys):
    launch.main("g_bmf", "", [*RUNS[task], *COMMON, "--task", task, "--out", str(tmp_path)])
    facts = json.loads(capsys.readouterr().out)
    assert facts["score"] == ("R²" if task == "regression" else "accuracy")
    assert facts["test_accuracy"] == pytest.approx(facts["twin_accuracy"], abs=0.01)
    assert facts["test_accuracy"] > (0.2 if task == "regression" else 0.85)
    for output in (None, "probabilities") if task == "binary" else (None,):
        more = [] if output is None else ["--output", output]
        predict.main("", ["--run", facts["directory"], "--parties", "threads", "--json", *more])
        told = json.loads(capsys.readouterr().out)
        assert told["accuracy"] == pytest.approx(told["clear_accuracy"], abs=0.01)
        assert told["clear_accuracy"] == pytest.approx(facts["test_accuracy"], abs=1e-9)
    with pytest.raises(SystemExit):
        wrong = "label" if task == "regression" else "value"
        predict.main("", ["--run", facts["directory"], "--parties", "threads", "--output", wrong])


def test_public_rows_count_right_answers_of_one_logit():
    federation = small_federation(64, (3, 2), 2)
    plan = plan_run("g_bmf", federation, small_training(task="binary", weights="open"))
    rows = PublicRows.of(federation.test_rows(), federation.test_labels)
    plan = with_public_rows(plan, rows)
    layer = federation.rows().T @ (2 * federation.labels - 1) / 64
    weights = np.append(layer, 0.0).reshape(-1, 1)
    words = [np.rint(weights * 2.0**plan.scales.weight_bits).astype(np.int64)]
    right, loss = correct_and_loss(words, rows, plan)
    model = GlobalModel([weights])
    assert right == round(model.accuracy(federation.test_rows(), federation.test_labels, "binary") * len(rows))
    assert right > 0.7 * len(rows) and 0 < loss < 0.7
    number = plan_run("g_bmf", small_federation(64, (3, 2), 1), small_training(task="regression", weights="open"))
    with pytest.raises(ValueError, match="with task 'regression'.*must be given to a classification"):
        with_public_rows(number, rows)
