"""Small federations for protocol tests: random columns for two or three clients, nothing to download."""

from __future__ import annotations

import numpy as np
import pytest

from vfl.client import make_clients
from vfl.federation import Federation
from vfl.scaling import RowBound


def small_federation(
    rows: int, widths: tuple[int, ...], classes: int, row_bound: float = 1.0, seed: int = 0
) -> Federation:
    """A learnable toy problem: labels from a random linear map of all clients' columns."""
    rng = np.random.default_rng(seed)
    total = rows + 64
    columns = [rng.normal(size=(total, width)) for width in widths]
    logits = np.concatenate(columns, axis=1) @ rng.normal(size=(sum(widths), classes))
    labels = logits.argmax(axis=1).astype(np.int64)
    each = row_bound / len(widths) ** 0.5
    bounds = [RowBound(each, "clip") for _ in widths]
    clients = make_clients([c[:rows] for c in columns], labels[:rows], bounds)
    return Federation(clients, classes, labels[rows:], [c[rows:] for c in columns], [], row_bound)


@pytest.fixture
def federation() -> Federation:
    return small_federation(96, (5, 4), 4)
