"""The defaults for tables: always a usable schedule, and as good as a search on a table that they were not chosen on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.errors import InvalidArgument
from bench.defaults import PublicTable, score, twin_score
from vfl.defaults import table_row_bound, training_defaults
from vfl.training import TrainingConfig


@given(rows=st.integers(1, 10**8), epsilon=st.floats(0.01, 100))
def test_every_size_has_a_schedule_with_few_steps(rows, epsilon):
    chosen: dict[str, Any] = training_defaults(rows, epsilon)
    schedule = TrainingConfig(epsilon=epsilon, **chosen).steps(rows)
    assert schedule.num_samples > 0.8 * rows  # hardly a row is left over
    assert min(50, rows) <= schedule.num_steps <= 760
    assert 0.25 <= chosen["learning_rate"] <= 1


def test_what_is_asked_for_by_name():
    assert training_defaults(28_239, 3.0) == {"batch_size": 1008, "epochs": 18, "learning_rate": 1.0}
    assert training_defaults(400, 1.0) == {"batch_size": 80, "epochs": 20, "learning_rate": 0.32}
    assert training_defaults(400, 1.0, hidden=True)["learning_rate"] == 0.16
    assert table_row_bound(4) == 4.0 and table_row_bound(10**9) == 1024.0
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
