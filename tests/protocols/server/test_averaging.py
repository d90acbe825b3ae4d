"""Averages, learning curve and early stopping: exact functions of what was opened and of public rows, also after a
crash."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from protocols.methods import g_bmf, g_shuff
from protocols.plan.public_rows import PublicRows, with_public_rows
from protocols.plan.run_plan import Plan, plan_run
from protocols.run import launch
from protocols.server.averaging import Iterates, correct_and_loss
from protocols.server.open_training import OpenTrainingRun
from protocols.step.public_weights import PublicLayer, moved, public_start
from refmpc.core.errors import PartyFailed
from tests.not_none import not_none
from tests.protocols.conftest import small_federation
from tests.protocols.gl_runs import make
from tests.protocols.secure_runs import noise_of_the_servers, run_secure, small_training, weight_bound
from tests.protocols.server.watch import Watch
from vfl.gradients import GlobalModel, with_ones
from vfl.training import first_averaged, halving_steps
from vfl.twins import train_g_bmf

FEDERATION = small_federation(96, (5, 4), 4)


def planned(patience: int | None = None, federation=FEDERATION, protocol: str = "g_bmf", **changes) -> Plan:
    plan = plan_run(protocol, federation, small_training(**{"weights": "open", "epochs": 4, **changes}))
    if patience is None:
        return plan
    return with_public_rows(plan, PublicRows.of(federation.test_rows(), federation.test_labels, patience))


@pytest.mark.parametrize("kind", ["fifth", "exponential"])
def test_the_released_model_is_the_average_that_the_twin_gives(tmp_path, kind):
    plan = planned(average=kind, epochs=7)
    steps, result = plan.schedule.num_steps, run_secure(plan, FEDERATION, tmp_path)
    for everybody in (*result.outputs, *result.client_outputs.values()):
        assert (everybody[0] == result.outputs[0][0]).all()
    twin = train_g_bmf(FEDERATION, plan.training, noise=noise_of_the_servers(plan, tmp_path))
    assert np.abs(result.outputs[0][0] - twin.model.layers[0]).max() <= weight_bound(plan)
    last = train_g_bmf(FEDERATION, plan.training.with_(average="none"), noise=noise_of_the_servers(plan, tmp_path))
    assert np.abs(result.outputs[0][0] - last.model.layers[0]).max() > 1e-3  # it is not the last one
    assert first_averaged(steps) == steps - 5 and halving_steps(steps) == 1


def notes(plan: Plan, count: int) -> tuple[Iterates, list[np.ndarray]]:
    rng, iterates, shape = np.random.default_rng(1), Iterates(plan), plan.layer_shapes[0]
    values = [rng.integers(-(2**40), 2**40, shape) for _ in range(count)]
    for step, value in enumerate(values):
        iterates.note(step, [PublicLayer(value)])
    return iterates, values


def test_averages_are_those_of_the_integers_within_a_unit_a_step():
    plan = planned(average="fifth")
    steps = plan.schedule.num_steps
    iterates, values = notes(plan, steps)
    tail = values[first_averaged(steps) :]
    exact = [Fraction(int(sum(column)), len(tail)) for column in zip(*(v.reshape(-1) for v in tail), strict=True)]
    found = iterates.released([])[0].reshape(-1)
    assert max(abs(int(word) - mean) for word, mean in zip(found, exact, strict=True)) <= Fraction(len(tail), 2)

    plan = planned(average="exponential")
    iterates, values = notes(plan, steps)
    exact = [Fraction(int(word)) for word in values[0].reshape(-1)]
    for value in values[1:]:
        moved = zip(exact, value.reshape(-1), strict=True)
        exact = [mean + (int(word) - mean) / 2 ** halving_steps(steps) for mean, word in moved]
    found = iterates.released([])[0].reshape(-1)
    assert max(abs(int(word) - mean) for word, mean in zip(found, exact, strict=True)) <= 1


@pytest.mark.parametrize("changes", [{}, {"hidden": (6,), "learning_rate": 0.25}], ids=["linear", "hidden"])
def test_the_curve_is_the_accuracy_of_the_open_weights_on_the_public_rows(tmp_path, monkeypatch, changes):
    plan, reports = planned(0, **changes), []
    monkeypatch.setattr(
        OpenTrainingRun, "_report_curve", lambda run: reports.append((run.party.id, run.iterates.curve))
    )
    result = run_secure(plan, FEDERATION, tmp_path)
    curves = [curve for _, curve in reports if len(curve) == plan.schedule.epochs]
    assert len(curves) == 6 and all(
        curve == curves[0] for curve in curves
    )  # three servers, at the last step and the end
    model = GlobalModel(result.outputs[0])
    accuracy = model.accuracy(FEDERATION.test_rows(), FEDERATION.test_labels)
    assert abs(curves[0][-1].accuracy - accuracy) <= 1 / 64  # one row of 64 may lie between two classes
    logits = model.forward(with_ones(FEDERATION.test_rows()))[1]
    logits -= logits.max(axis=1, keepdims=True)
    picked = logits[np.arange(len(logits)), FEDERATION.test_labels]
    assert curves[0][-1].loss == pytest.approx(float(np.mean(np.log(np.exp(logits).sum(axis=1)) - picked)), abs=1e-3)


@pytest.mark.parametrize("kill", [None, (1, "after open_words 7"), (0, "before word 8"), (2, "after stat 5")])
def test_a_run_stops_when_public_rows_say_so_and_gives_its_best_model_also_after_a_crash(tmp_path, kill):
    plan = planned(2, epochs=12, learning_rate=1.0, epsilon=2.0)
    opened: dict[int, np.ndarray] = {}
    curves = []
    with pytest.MonkeyPatch.context() as patch:
        watch, move, report = Watch(patch, tmp_path), OpenTrainingRun._move, OpenTrainingRun._report_curve

        def moving(run, step, sums):
            move(run, step, sums)
            assert run.party.id or (opened.setdefault(step, sums) == sums).all()

        def reporting(run):
            report(run)
            curves.append(run.iterates.curve)

        patch.setattr(OpenTrainingRun, "_move", moving)
        patch.setattr(OpenTrainingRun, "_report_curve", reporting)
        if kill is not None:
            watch.dies_at = kill
            with pytest.raises(PartyFailed, match="Crash"):
                run_secure(plan, FEDERATION, tmp_path, every=5)
            watch.dies_at = None
        result = run_secure(plan, FEDERATION, tmp_path, every=5)
        again = run_secure(plan, FEDERATION, tmp_path, every=5)  # a finished run gives the same model again
    assert watch.two_values() == []
    accuracies = [point.accuracy for point in max(curves, key=len)]
    best = int(np.argmax(accuracies)) + 1
    assert len(accuracies) == min(best + 2, plan.schedule.epochs) and len(opened) == 3 * len(accuracies)
    assert (again.outputs[0][0] == result.outputs[0][0]).all() and "training" not in again.ledgers[0].phases
    words = [np.rint(layer * 2.0**plan.scales.weight_bits).astype(np.int64) for layer in result.outputs[0]]
    assert plan.public_rows is not None
    assert correct_and_loss(words, plan.public_rows, plan)[0] == round(max(accuracies) * len(plan.public_rows))


@pytest.mark.parametrize(
    ("protocol", "servers", "kill"),
    [
        ("g_bmf", g_bmf.servers, (1, "after open_words 7")),
        ("g_bmf", g_bmf.servers, (2, "after stat 5")),
        ("g_shuff", g_shuff.servers, (0, "before word 8")),
    ],
)
def test_adam_is_the_same_function_of_the_opened_sums_at_all_servers_also_after_a_crash(
    tmp_path, protocol, servers, kill
):
    plan = planned(protocol=protocol, optimiser="adam", learning_rate=0.05, hidden=(6,) if protocol == "g_bmf" else ())
    opened: dict[int, set[bytes]] = defaultdict(set)
    states: dict[int, set[bytes]] = defaultdict(set)
    with pytest.MonkeyPatch.context() as patch:
        watch, move = Watch(patch, tmp_path), OpenTrainingRun._move

        def moving(run, step, sums):
            move(run, step, sums)
            opened[step].add(sums.astype(np.int64).tobytes())
            states[step].add(run._flat().tobytes())

        patch.setattr(OpenTrainingRun, "_move", moving)
        watch.dies_at = kill
        with pytest.raises(PartyFailed, match="Crash"):
            run_secure(plan, FEDERATION, tmp_path, servers, every=5)
        watch.dies_at = None
        result = run_secure(plan, FEDERATION, tmp_path, servers, every=5)
    assert watch.two_values() == []
    steps = range(plan.schedule.num_steps)
    assert all(len(opened[step]) == len(states[step]) == 1 for step in steps)
    layers = public_start(plan.start, plan.scales, plan.training)
    for step in steps:
        (kept,) = opened[step]
        sums = plan.unflatten(np.frombuffer(kept, dtype=np.int64))
        word = plan.scales.rate_word(plan.learning_rate(step))
        layers = moved(layers, sums, word, plan.training, step, plan.noise_square(step))
    for everybody in (*result.outputs, *result.client_outputs.values()):
        for theirs, ours in zip(everybody, layers, strict=True):
            assert (theirs == ours.values * 2.0**-plan.scales.weight_bits).all()


def test_g_shuff_is_measured_too_and_the_state_comes_back(tmp_path):
    plan = planned(0, protocol="g_shuff", average="exponential")
    result = run_secure(plan, FEDERATION, tmp_path, g_shuff.servers, every=2)
    again = run_secure(plan, FEDERATION, tmp_path, g_shuff.servers, every=2)
    assert (again.outputs[0][0] == result.outputs[0][0]).all()
    iterates, _ = notes(plan, plan.schedule.num_steps)
    copy = Iterates(plan)
    copy.restore(iterates.flat())
    assert copy.curve == iterates.curve and len(copy.curve) == 4 and copy.best_epoch == iterates.best_epoch
    assert (copy.released([])[0] == iterates.released([])[0]).all()


def test_what_is_not_sound_is_refused_with_a_sentence():
    with pytest.raises(ValueError, match="average = 'fifth': must be 'none' with secret weights"):
        planned(average="fifth", weights="secret")
    with pytest.raises(ValueError, match="optimiser = 'adam': must be 'sgd' with secret weights.*weights = 'open'"):
        planned(optimiser="adam", weights="secret")
    with pytest.raises(ValueError, match="momentum = 0.9: must be 0 with optimiser = 'adam'"):
        planned(optimiser="adam", momentum=0.9)
    with pytest.raises(ValueError, match="optimiser = 'adam': must be 'sgd' in GL-BMF"):
        make(weights="open", optimiser="adam")
    with pytest.raises(ValueError, match="secret weights cannot be measured during training"):
        planned(0, weights="secret")
    with pytest.raises(ValueError, match="average = 'fifth': must be 'none' in GL-BMF"):
        make(weights="open", average="fifth")
    rows = PublicRows.of(FEDERATION.test_rows(), FEDERATION.test_labels)
    with pytest.raises(ValueError, match="in gl_bmf only clients have their layers"):
        with_public_rows(make(weights="open")[1], rows)
    with pytest.raises(ValueError, match="patience = 2: must be 0 with --average fifth"):
        planned(2, average="fifth")


def test_the_plan_is_bound_to_the_rows_and_says_so():
    plain, measured = planned(), planned(0)
    assert plain.fingerprint != measured.fingerprint != planned(3).fingerprint
    rows = not_none(measured.public_rows)
    other = replace(rows, labels=rows.labels[::-1].copy())
    assert with_public_rows(plain, other).fingerprint != measured.fingerprint
    assert (
        "64 labelled rows are public" in measured.claim.paragraph()
        and "not covered by the claim" in measured.claim.paragraph()
    )
    assert "stops when 3 epochs have not raised it" in planned(3).claim.paragraph()
    assert plain.claim.epsilon == measured.claim.epsilon


def test_the_command_draws_the_curve_and_reports_where_it_stopped(tmp_path, capsys):
    words = ["--parties", "threads", "--out", str(tmp_path), "--json", "--epochs", "4", "--epsilon", "1"]
    launch.main("g_bmf", None, [*words, "--public-fraction", "0.1", "--patience", "1", "--average", "exponential"])
    report = json.loads(capsys.readouterr().out)
    found, run = report["public_rows"], Path(report["directory"])
    assert found["rows"] == 144 and 1 <= len(found["curve"]) <= 4
    assert found["stopped_early"] == (len(found["curve"]) < 4)
    assert (run / "curves.png").stat().st_size > 10_000
    assert f"public rows: accuracy {found['curve'][-1]['accuracy']:.2%}" in (run / "run.log").read_text()
    assert "144 labelled rows are public" in (run / "claim.txt").read_text()
    for bad, sentence in (
        (["--patience", "2"], "must be 0 without public rows"),
        (
            ["--weights", "secret", "--public-fraction", "0.1"],
            "public_fraction = 0.1: must be absent, except in a classification with g_bmf or g_shuff and open weights",
        ),
    ):
        with pytest.raises(SystemExit, match=sentence):
            launch.main("g_bmf", None, [*words, *bad])
