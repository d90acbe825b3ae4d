"""Secure inference: equal to the clear model, costs as of a dry run, only the named client receives, and the
command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import refmpc
from protocols.methods.prediction import (
    PREDICTION_RELEASE,
    PredictionClientJob,
    PredictionPlan,
    PredictionServerJob,
    arg_maximum,
    client_program,
    plan_with_released_model,
    servers,
)
from protocols.run.data import make_federation
from protocols.run.launch import launch
from protocols.run.predict import main
from protocols.run.report import write_report
from protocols.settings import RunOptions
from refmpc import Cost
from refmpc.primitives.io import SHARE_DIGEST_BYTES
from vfl.gradients import GlobalModel, softmax
from vfl.training import TrainingConfig

NAMES, WIDTHS = ("bank", "card"), (5, 3)


def random_model(hidden: tuple[int, ...], classes: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    sizes = (sum(WIDTHS), *hidden, classes)
    return [rng.normal(size=(a + 1, b)) for a, b in pairwise(sizes)]


def new_rows(count: int, seed: int = 1) -> list[np.ndarray]:
    """Rows of norm at most one, many of them on the bound."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(count, sum(WIDTHS)))
    rows /= np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True))
    return [rows[:, : WIDTHS[0]], rows[:, WIDTHS[0] :]]


def plan_for(layers: Sequence[np.ndarray], output: str, rows: int, receiver: str = "card") -> PredictionPlan:
    return plan_with_released_model(
        layers, 1.0, NAMES, WIDTHS, receiver=receiver, output=output, rows=rows, training_claim="none, random weights."
    )


def run(plan: PredictionPlan, layers: Sequence[np.ndarray], columns: list[np.ndarray], **options) -> refmpc.RunResult:
    return refmpc.run(
        servers,
        [PredictionServerJob(plan, tuple(layers))] * 3,
        clients={
            name: (client_program, PredictionClientJob(plan, part))
            for name, part in zip(plan.client_names, columns, strict=True)
        },
        **{"releases": plan.releases, "parameters": plan.public_parameters(), **options},
    )


def dry_run(plan: PredictionPlan) -> dict[str, Cost]:
    """What the servers' program costs, phase by phase, with a model of zeros."""
    layers = tuple(np.zeros(shape) for shape in plan.shapes)
    return refmpc.dry_run(servers, PredictionServerJob(plan, layers), releases=plan.releases)


@pytest.mark.parametrize(
    "hidden, activation", [((), "relu"), ((6,), "relu"), ((7, 4), "relu"), ((6,), "tanh"), ((7, 4), "tanh")]
)
@pytest.mark.parametrize("output", ["label", "probabilities", "logits"])
@pytest.mark.filterwarnings("ignore:insecure_check_ranges")
def test_equals_the_clear_model_up_to_rounding_at_the_cost_of_a_dry_run(hidden, activation, output):
    layers, columns = random_model(hidden, 5), new_rows(40)
    plan = replace(plan_for(layers, output, 40), activation=activation)
    result = run(plan, layers, columns)
    clear = GlobalModel(list(layers), activation).logits(np.concatenate(columns, axis=1))
    error = plan.logit_error([float(np.linalg.norm(layer, 2)) for layer in layers])
    assert error < 0.02
    received = result.client_outputs["card"]
    if output == "label":
        best = clear[np.arange(40), received]
        assert (clear.max(axis=1) - best <= 2 * error).all()
        assert (received == clear.argmax(axis=1)).sum() >= 38
    elif output == "logits":
        assert np.abs(received - clear).max() <= error
        assert np.abs(received - clear).max() > 0
    else:
        assert np.abs(received - softmax(clear)).max() <= 2 * error + 2.0**-14
    counted = dry_run(plan)
    computing, opening = counted["prediction"], counted["release"]
    phases = [ledger.phases for ledger in result.ledgers]
    assert [p["prediction"].rounds if "prediction" in p else 0 for p in phases] == [computing.rounds] * 3
    assert sum(p["prediction"].bytes_sent for p in phases) == computing.bytes
    assert [p["release"].rounds for p in phases] == [opening.rounds] * 3
    assert sum(p["release"].bytes_sent for p in phases) == opening.bytes


def test_one_layer_costs_what_the_documentation_says():
    """18 rounds for a label among ten classes, none between the servers and 12 bytes a logit for logits."""
    layers = [np.random.default_rng(0).normal(size=(9, 10))]
    counted = dry_run(plan_for(layers, "label", 100))
    assert counted["prediction"].rounds == 2 + 4 * 4 and counted["release"].bytes == 24 * 100 + 3 * SHARE_DIGEST_BYTES
    counted = dry_run(plan_for(layers, "logits", 100))
    assert counted["prediction"] == Cost(0, 0) and counted["release"].bytes == 12 * 1000


def test_only_the_named_client_receives_and_the_ledger_says_so():
    layers, columns = random_model((), 3), new_rows(7)
    plan = plan_for(layers, "label", 7, receiver="bank")
    result = run(plan, layers, columns)
    assert result.outputs == [None] * 3
    assert result.client_outputs["card"] is None and result.client_outputs["bank"].shape == (7,)
    for ledger in result.ledgers:
        (release,) = ledger.releases
        assert (release.name, release.elements, release.receiver) == (PREDICTION_RELEASE, 7, "client 'bank'")
        assert "post-processing" in release.claim and "that 'card' holds" in release.claim
    with pytest.raises(refmpc.PartyFailed, match="was not declared"):
        run(plan, layers, columns, releases={})


def test_many_rows_come_in_chunks(monkeypatch):
    monkeypatch.setattr("protocols.methods.prediction.CHUNK_ROWS", 16)
    layers, columns = random_model((), 4), new_rows(50)
    plan = plan_for(layers, "logits", 50)
    assert len(plan.chunks) == 4
    result = run(plan, layers, columns)
    clear = GlobalModel(list(layers)).logits(np.concatenate(columns, axis=1))
    assert np.abs(result.client_outputs["card"] - clear).max() < 0.01
    assert sum(p.phases["release"].bytes_sent for p in result.ledgers) == dry_run(plan)["release"].bytes


@pytest.mark.filterwarnings("ignore:insecure")
@pytest.mark.parametrize("classes", [1, 2, 3, 5, 8])
def test_arg_maximum_is_exact_and_takes_one_of_equal_entries(classes):
    rng = np.random.default_rng(classes)
    values = rng.integers(-(2**20), 2**20, size=(30, classes))
    values[:10] = values[:10] // 2**19  # many equal entries
    values[0] = 2**20 - 1
    values[1] = -(2**20)

    async def program(party: refmpc.Party, own):
        x = await refmpc.input_from_party(party, 0, own, values.shape, 0)
        return await refmpc.reveal(await arg_maximum(x, 22), "columns")

    result = refmpc.run(program, [values, None, None], releases={"columns": "a test"}, insecure_check_ranges=True)
    columns = result.outputs[0].astype(int)
    assert (values[np.arange(30), columns] == values.max(axis=1)).all()


def test_the_compared_parameters_tell_models_apart():
    layers = random_model((), 3)
    one, other = plan_for(layers, "label", 4), plan_for([2.0 * layers[0]], "label", 4)
    assert one.public_parameters() != other.public_parameters()
    assert one.public_parameters() == plan_for(layers, "label", 4).public_parameters()


def test_rows_within_the_bound_stay_within_the_ranges_that_were_planned():
    """The worst row there is: along the first singular vector, at the row bound."""
    for hidden in ((), (6,)):
        layers = random_model(hidden, 4, seed=5)
        direction = np.linalg.svd(layers[0][:-1])[0][:, 0]
        rows = np.stack([direction, -direction])
        plan = plan_for(layers, "logits", 2)
        clear = GlobalModel(list(layers)).logits(rows)
        assert np.linalg.norm(clear, axis=1).max() <= plan.bounds[-1]
        with pytest.warns(UserWarning, match="insecure_check_ranges"):
            result = run(plan, layers, [rows[:, :5], rows[:, 5:]], insecure_check_ranges=True)
        assert np.abs(result.client_outputs["card"] - clear).max() < 0.02


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"receiver": "nobody"}, "receiver = 'nobody': must be one of 'bank', 'card'"),
        ({"output": "gradient"}, "output = 'gradient': must be one of"),
        ({"rows": 0}, "rows = 0"),
        ({"client_widths": (5, 4)}, "shapes of the layers"),
        ({"weight_bits": 5}, "too large for 64 bits"),
    ],
)
def test_bad_plans_are_refused(change, sentence):
    plan = plan_for(random_model((), 3), "label", 4)
    with pytest.raises(ValueError, match=sentence):
        replace(plan, **change)


@pytest.fixture(scope="module", params=["open", "secret"])
def finished(request, tmp_path_factory) -> Path:
    """A short run on the embedded digits, as the command leaves it."""
    out = tmp_path_factory.mktemp("runs")
    training = TrainingConfig(epochs=1, batch_size=256, epsilon=8.0, weights=request.param)
    options = RunOptions("g_bmf", training, parties="threads", out=str(out), json=True)
    report = launch(options, make_federation(options), Console(quiet=True))
    write_report(report)
    return report.directory


def test_the_command_predicts_the_test_rows_of_a_finished_run(finished, capsys):
    """With what the servers have: the model, or with secret weights their shares of it."""
    report = json.loads((finished / "report.json").read_text())
    words = ["--run", str(finished), "--parties", "threads", "--json"]
    main(None, words)
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"] == ("released" if report["weights"] == "open" else "shares")
    assert facts["clear_accuracy"] == pytest.approx(report["test_accuracy"])
    assert facts["different_labels"] <= facts["close_rows"] < 100  # the noise is fresh in every run
    assert facts["rounds"] == 18 and facts["receiver"] == "client 2"
    assert "(8, 1e-05)-differentially private" in facts["claim"]
    if report["weights"] == "secret":
        with pytest.raises(SystemExit, match="--model = 'released': must be shares"):
            main(None, [*words, "--model", "released"])


def test_the_command_in_the_clear_and_its_refusals(finished, tmp_path, capsys):
    main(None, ["--run", str(finished), "--clear", "--rows", "10"])
    assert "accuracy in the clear" in capsys.readouterr().out
    for words, sentence in (
        (["--run", str(tmp_path)], "config.json is missing"),
        (["--run", str(finished), "--rows", "100000"], "rows = 100000"),
        (["--run", str(finished), "--client", "eve"], "receiver = 'eve'"),
    ):
        with pytest.raises(SystemExit, match=sentence):
            main(None, words)
