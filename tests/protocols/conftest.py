"""Small federations for protocol tests: random columns for two or three clients, nothing to download."""

from __future__ import annotations

import numpy as np
import pytest

from vfl.data.scaling import RowBound, bound_rows
from vfl.federation import Federation
from vfl.local.client import LocalUpdate, make_clients


def small_federation(
    rows: int, widths: tuple[int, ...], classes: int, row_bound: float = 1.0, seed: int = 0
) -> Federation:
    """A learnable toy problem: labels from a random linear map of all clients' columns; numbers if there is one
    class."""
    rng = np.random.default_rng(seed)
    total = rows + 64
    columns = [rng.normal(size=(total, width)) for width in widths]
    logits = np.concatenate(columns, axis=1) @ rng.normal(size=(sum(widths), classes))
    labels = np.tanh(logits[:, 0]) if classes == 1 else logits.argmax(axis=1).astype(np.int64)
    each = row_bound / len(widths) ** 0.5
    bounds = [RowBound(each, "clip") for _ in widths]
    clients = make_clients([c[:rows] for c in columns], labels[:rows], bounds)
    return Federation(clients, classes, labels[rows:], [c[rows:] for c in columns], [], row_bound)


def lora_federation(
    rows: int,
    widths: tuple[int, ...],
    block_widths: tuple[tuple[int, ...], ...],
    classes: int,
    *,
    rank: int = 2,
    alpha: float = 2.0,
    local_update: str = "released",
    local_learning_rate: float = 0.3,
    momentum: float = 0.0,
    parts: str = "UV",
    regularisation: str | float = "noise",
    rule: str = "clip",
    row_bound: float = 1.0,
    seed: int = 0,
) -> Federation:
    """The same problem with LoRA layers: random block outputs of norm one, on which the labels depend too."""
    rng = np.random.default_rng(seed)
    total = rows + 64
    columns = [rng.normal(size=(total, width)) for width in widths]
    blocks = [[bound_rows(rng.normal(size=(total, m)), 1.0, "normalise") for m in own] for own in block_widths]
    seen = np.concatenate([*columns, *(x for own in blocks for x in own)], axis=1)
    labels = (seen @ rng.normal(size=(seen.shape[1], classes))).argmax(axis=1).astype(np.int64)
    each = row_bound / len(widths) ** 0.5
    clients = make_clients(
        [c[:rows] for c in columns],
        labels[:rows],
        [RowBound(each, rule) for _ in widths],
        block_outputs=[[x[:rows] for x in own] for own in blocks],
        rank=rank,
        alpha=alpha,
        update=LocalUpdate(
            local_update,
            learning_rate=local_learning_rate,
            momentum=momentum,
            regularisation=regularisation,
            parts=parts,
        ),
    )
    tests = [[x[rows:] for x in own] for own in blocks]
    return Federation(clients, classes, labels[rows:], [c[rows:] for c in columns], tests, row_bound)


@pytest.fixture
def federation() -> Federation:
    return small_federation(96, (5, 4), 4)
