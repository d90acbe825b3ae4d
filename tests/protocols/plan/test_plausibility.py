"""What was opened must be possible under clip, rate, noise and steps: honest runs are far inside, what is not is not
handed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refmpc
from protocols.plan.plausibility import (
    Impossible,
    largest_sum,
    largest_weights,
    require_possible_model,
    require_possible_sums,
)
from protocols.plan.run_plan import Plan, PublicClient, PublicFederation, plan_run
from protocols.plan.scales import RELEASE_BITS
from protocols.server.open_training import OpenTrainingRun
from protocols.server.training import TrainingRun
from protocols.step.public_weights import moved, public_start
from tests.protocols.secure_runs import released, small_training
from tests.protocols.server.test_verification import honest, make_plan, train


def made(**changes: Any) -> Plan:
    clients = (PublicClient("bank", 3), PublicClient("card", 5))
    return plan_run("g_bmf", PublicFederation(clients, 64, 3, 1.0, ()), small_training(**changes))


@pytest.mark.parametrize(
    "changes", [{}, {"momentum": 0.9}, {"hidden": (6,)}, {"noise": "joint"}, {"weight_decay": 0.5}]
)
def test_the_largest_that_can_happen_passes_and_a_little_more_does_not(changes: dict[str, Any]) -> None:
    """A batch of rows at the clip norm that all pull the same way, on top of the noise of one in 10^20 runs."""
    plan = made(**changes)
    extreme = plan.schedule.batch_size * plan.training.clip_norm
    noise = 9 * plan.noise.outsider_std * float(np.linalg.norm(plan.factorisation.noising_taps))
    sums = np.zeros(plan.global_parameters, dtype=np.int64)
    for value in (extreme + noise, -extreme - noise):
        sums[1] = round(value * 2**RELEASE_BITS)
        require_possible_sums(plan, 0, sums)
    limit = largest_sum(plan)
    assert limit < 2 * (extreme + noise)
    for value in (1.01 * limit, -1.01 * limit, 2.0 ** (62 - RELEASE_BITS)):
        sums[1] = round(value * 2**RELEASE_BITS)
        with pytest.raises(Impossible, match="step 8 opened a gradient sum"):
            require_possible_sums(plan, 7, sums)


@pytest.mark.parametrize(("hidden", "measured"), [((), "weight"), ((6,), "norm")])
def test_models_beyond_all_steps_and_no_numbers_are_refused(hidden: tuple[int, ...], measured: str) -> None:
    plan = made(hidden=hidden)
    last = len(plan.layer_shapes) - 1
    layers = [np.zeros(shape) for shape in plan.layer_shapes]
    for layer, limit in zip(layers, largest_weights(plan), strict=True):
        np.fill_diagonal(layer, 0.99 * limit)  # of that norm, and longer in all
    require_possible_model(plan, layers)
    for value in (1.01 * largest_weights(plan)[last], -1e9, np.nan):
        layers[last][2, 1] = value
        with pytest.raises(Impossible, match=f"layer {last} of the model has a {measured} of"):
            require_possible_model(plan, layers)


@pytest.mark.parametrize("hidden", [(), (6,)])
def test_adam_reaches_its_bound_and_never_leaves_it(hidden: tuple[int, ...]) -> None:
    """Sums that are as large as words can hold, all of one sign, in every step: noise takes no part in the bound."""
    plan = made(hidden=hidden, weights="open", optimiser="adam", learning_rate=0.05, epochs=20)
    layers = public_start(plan.start, plan.scales, plan.training)
    start = [layer.values.copy() for layer in layers]
    word = plan.scales.rate_word(0.05)
    sums = [np.full(shape, 2**29 - 1) for shape in plan.layer_shapes]
    for step in range(plan.schedule.num_steps):
        layers = moved(layers, sums, word, plan.training, step, plan.noise_square(step))
    unit = 2.0**-plan.scales.weight_bits
    require_possible_model(plan, [layer.values * unit for layer in layers])
    for layer, before, limit in zip(layers, start, largest_weights(plan), strict=True):
        drift = (layer.values - before) * unit
        assert 0.9 * limit < (
            np.linalg.norm(drift, 2) + np.linalg.norm(before * unit, 2) if hidden else np.abs(drift).max()
        )


def test_a_weight_that_changed_in_memory_ends_the_run_before_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, opened = made(hidden=(6,), weights="open"), []
    move, opening = OpenTrainingRun._move, OpenTrainingRun._open

    def damaged(run: OpenTrainingRun, step: int, sums: np.ndarray) -> None:
        move(run, step, sums)
        if run.party.id == 1 and step == 1:
            run.model[0].values[0, 0] ^= 1 << 61

    async def watched(run: OpenTrainingRun, words: np.ndarray) -> np.ndarray:
        opened.append(run.party.step)
        return await opening(run, words)

    monkeypatch.setattr(OpenTrainingRun, "_move", damaged)
    monkeypatch.setattr(OpenTrainingRun, "_open", watched)
    with pytest.raises(refmpc.PartyFailed, match="layer 0 of the model has a norm of"):
        train(plan, tmp_path, *honest(plan))
    assert set(opened) == {0, 1}


@pytest.mark.parametrize("weights", ["open", "secret"])
def test_a_run_whose_shares_were_damaged_hands_nothing_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    """One high bit falls over in a server's memory, after the uploads were tested."""
    plan = made(weights=weights)
    noise = TrainingRun.noise_row

    async def damaged(run: TrainingRun) -> np.ndarray:
        row = (await noise(run)).copy()
        if run.party.id == 1 and run.party.step == 1:
            row[4] ^= 1 << (58 - plan.scales.noise_shift)
        return row

    monkeypatch.setattr(TrainingRun, "noise_row", damaged)
    expected = "step 2 opened a gradient sum" if weights == "open" else "layer 0 of the model has a weight"
    with pytest.raises(refmpc.PartyFailed, match=expected):
        train(plan, tmp_path, *honest(plan))


def test_honest_models_lie_inside_and_the_bound_is_not_idle(tmp_path: Path) -> None:
    plan = make_plan()
    result = train(plan, tmp_path, *honest(plan))
    (model,) = released(result)
    assert np.abs(model).max() < largest_weights(plan)[0] < 1e4 * np.abs(model).max()
