"""A client alone gets of its own rows what it gets of them as one of a federation."""

from __future__ import annotations

import numpy as np
import pytest

from accel.errors import InvalidArgument
from vfl.data.embeddings import embed, embed_own_rows
from vfl.data.sets import VerticalData
from vfl.local.config import LocalModelConfig

ROWS = np.random.default_rng(1).uniform(2.0, 9.0, size=(40, 5))
PUBLIC = np.random.default_rng(2).uniform(0.0, 11.0, size=(60, 5))
SCALINGS = [{"value_range": (0.0, 10.0)}, {"public": PUBLIC}, {"are_embeddings": True}]


@pytest.mark.parametrize("kind", ["identity", "mlp"])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: next(iter(scaling)))
def test_own_rows_are_embedded_as_in_a_federation(kind, scaling):
    if kind == "mlp":
        pytest.importorskip("torch")
    config = LocalModelConfig(kind)
    alone, source = embed_own_rows(ROWS, config, name="bank.csv", **scaling)
    labels = np.arange(len(ROWS)) % 2
    shared = {**scaling, "public": (PUBLIC, PUBLIC)} if "public" in scaling else scaling
    data = VerticalData("both", 2, (ROWS, ROWS[:, ::-1]), labels, (ROWS[:3], ROWS[:3]), labels[:3], **shared)
    together = embed(data, config, progress=False)[0]
    assert np.array_equal(alone, together.train) and source == together.source


def test_private_rows_are_never_what_they_are_scaled_by():
    with pytest.raises(InvalidArgument, match="bank.csv: public rows.*private rows must not be used for scaling"):
        embed_own_rows(ROWS, LocalModelConfig(), name="bank.csv")
