"""The defaults for tables: always a usable schedule, and as good as a search on a table that they were not chosen
on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.errors import InvalidArgument
from bench.defaults import PublicTable, score, twin_score
from protocols.plan.run_plan import PublicClient, PublicFederation, plan_run
from vfl.data.scaling import split_row_bound
from vfl.defaults import chosen_training, table_row_bound, training_defaults
from vfl.training import TrainingConfig


@given(rows=st.integers(1, 10**8), epsilon=st.floats(0.01, 100))
def test_every_size_has_a_schedule_with_few_steps(rows, epsilon):
    chosen: dict[str, Any] = training_defaults(rows, epsilon)
    schedule = TrainingConfig(epsilon=epsilon, **chosen).steps(rows)
    assert schedule.num_samples > 0.8 * rows  # hardly a row is left over
    assert min(50, rows) <= schedule.num_steps <= max(760, 1.01 * rows / 2**13 + 1)
    assert schedule.batch_size <= 2**13  # of clipped gradients of norm 1: their sum fits the ring
    assert 0.25 <= chosen["learning_rate"] <= 4 and chosen["average"] == "fifth"
    seen = training_defaults(rows, epsilon, averaging=False)
    assert seen["learning_rate"] <= 1 and seen["average"] == "none"


def test_what_is_asked_for_by_name():
    large = {"batch_size": 1008, "epochs": 18, "learning_rate": 4.0, "average": "fifth"}
    assert training_defaults(28_239, 3.0) == large
    assert training_defaults(28_239, 3.0, averaging=False) == large | {"learning_rate": 1.0, "average": "none"}
    assert training_defaults(400, 1.0) == {"batch_size": 80, "epochs": 20, "learning_rate": 0.32, "average": "fifth"}
    assert training_defaults(400, 1.0, hidden=True)["learning_rate"] == 0.16
    assert training_defaults(400, 1.0, hidden=True)["average"] == "none"
    assert training_defaults(28_239, 3.0, regression=True)["learning_rate"] == 0.1
    adam = {"epsilon": 1.0, "optimiser": "adam", "weights": "open"}
    assert chosen_training(adam, 400, averages=True) == training_defaults(400, 1.0) | {"learning_rate": 0.1}
    assert chosen_training(adam | {"learning_rate": 0.3}, 400)["learning_rate"] == 0.3
    assert chosen_training(adam, 400, regression=True)["learning_rate"] == 0.01
    assert chosen_training(adam | {"hidden": (8,)}, 400)["learning_rate"] == 0.03
    assert table_row_bound(4) == 8.0 and table_row_bound(10**9) == 1024.0
    with pytest.raises(InvalidArgument, match="width = 0"):
        table_row_bound(0)


def test_a_narrow_table_keeps_what_tells_its_rows_apart():
    """Two columns each; `normalise` leaves directions only, and loses the size that decides."""
    random = np.random.default_rng(4)
    rows = random.normal(size=(2500, 2))
    labels = (np.linalg.norm(rows, axis=1) + 0.3 * random.normal(size=2500) > 1.2).astype(np.int64)
    rows = np.abs(rows)
    table = PublicTable("sizes", rows[:2000], labels[:2000], rows[2000:], labels[2000:])
    chosen = training_defaults(2000, 3.0)
    clipped = twin_score(table.federation(table_row_bound(2), "clip"), 3.0, chosen, seeds=1)
    normalised = twin_score(table.federation(1.0, "normalise"), 3.0, chosen, seeds=1)
    assert clipped > 0.93 and normalised < 0.7
    assert score(np.array([[0.4, 0.6], [0.6, 0.4]]), np.array([1, 0])) == 1.0


def test_a_clients_only_column_keeps_its_tail():
    """Its part of the bound is where the schema cuts off (four deviations), not before: a rare class often sits out
    there."""
    random = np.random.default_rng(5)
    rows = random.normal(size=(8000, 3))
    rows[:, 0] = np.clip(np.abs(rows[:, 0]) * 1.4, 0, 4)
    labels = (rows[:, 0] + 0.2 * random.normal(size=8000) > 2.9).astype(np.int64)
    parts = split_row_bound(table_row_bound(3), 2, [1, 2])
    assert parts[0] == pytest.approx(4.0, rel=0.01)
    table = PublicTable("tail", rows[:6000], labels[:6000], rows[6000:], labels[6000:])
    assert 0.01 < labels.mean() < 0.06
    assert twin_score(table.federation(table_row_bound(3), "clip"), 3.0, training_defaults(6000, 3.0), seeds=1) > 0.985


@pytest.mark.parametrize("classes", [1, 2, 10])
@pytest.mark.parametrize("width", [2, 100, 5000])
def test_the_defaults_always_make_a_plan(classes, width):
    """Row bound and rate fit the fixed-point range, from few rows to many, with open and with secret weights."""
    bound = table_row_bound(width)
    clients = tuple(
        PublicClient(name, width // 2, part)
        for name, part in zip("ab", split_row_bound(bound, 2, [width // 2] * 2), strict=True)
    )
    task = {1: "regression", 2: "binary"}.get(classes, "classification")
    for rows, epsilon, weights in ((300, 0.5, "open"), (1_000_000, 8.0, "open"), (20_000, 3.0, "secret")):
        chosen = training_defaults(rows, epsilon, regression=classes == 1, averaging=weights == "open")
        training = TrainingConfig(epsilon=epsilon, delta=1e-7, task=task, weights=weights, **chosen)
        federation = PublicFederation(clients, rows, classes, bound, ())
        assert plan_run("g_bmf", federation, training).claim.epsilon == pytest.approx(epsilon, rel=1e-6)
