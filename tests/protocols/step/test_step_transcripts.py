"""A whole step with open weights, from rows to opened sums: what one server sees does not depend on the rows.

The distinguisher is that of ``tests.refmpc.transcripts``: two very different batches on constant shares, so that all randomness
left is that of the masks. Every row of the batch is the same, so that each is a sample of every message about a row: d = 2,
three classes, 4096 rows. Each mask taken away in turn must be noticed.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import refmpc
from protocols.plan.run_plan import SUMS_RELEASE, plan_run
from protocols.plan.scales import EMBEDDING_BITS
from protocols.step.global_step import SharedRows
from protocols.step.open_step import step_words
from protocols.step.public_weights import Head, rounded_head
from refmpc.primitives import dealing
from tests.protocols.conftest import small_federation
from tests.protocols.secure_runs import small_training
from tests.refmpc.transcripts import COUNT, Case, draws, finds_a_leak, leaks, observe, watch_streams

PLAN = plan_run("g_bmf", small_federation(64, (1, 1), 3), small_training(weights="open", epsilon=4.0))
WEIGHTS = np.array([[0.7, -0.2, 0.1], [-0.4, 0.9, 0.3], [0.05, 0.0, -0.1]])


def head() -> Head:
    words = np.rint(WEIGHTS * 2.0**PLAN.scales.weight_bits).astype(np.int64)
    return rounded_head(words, PLAN.scales.weight_bits, PLAN.scales.layers[-1].reach)


async def step(party: Any, rows: Any, label: Any, norm: Any) -> None:
    """One step of the protocol. Each input has three equal entries a row; what is public about them is done here."""
    turned = rows.scale_by_integers(np.array([1, -2, 0])).reinterpret(EMBEDDING_BITS)
    embeddings = turned + np.array([0.0, 0.0, 1.0])
    one_hot = label.scale_by_integers(np.array([1, -1, 0])).reinterpret(0) + np.array([0, 1, 0])
    batch = SharedRows(embeddings, one_hot, norm[:, 0].reinterpret(PLAN.scales.norm_bits))
    addend = np.zeros(PLAN.parameters, dtype=np.uint64)
    (words,) = await step_words(batch, [], head(), addend, PLAN.training, PLAN.scales)
    await refmpc.open_words(party, words.reshape(-1), PLAN.scales.truncated_bits, "example")


CASE = Case(
    step,
    ("arithmetic",) * 3,
    ((round(0.3 * 2**14), 1, 5 << 10), (round(-0.25 * 2**14), 0, 7 << 11)),
    composed=True,
    shape=(3,),
)


@pytest.fixture(autouse=True)
def _watched(monkeypatch):
    watch_streams(monkeypatch)
    monkeypatch.setattr(dealing, "FEWEST_ROWS", 10**9)


def test_time():
    t = time.time()
    _, plan = observe(CASE, 0, 1, constant_for=0)
    print("one", time.time() - t, len(draws(CASE)), SUMS_RELEASE, COUNT)
    t = time.time()
    print(leaks(CASE), time.time() - t)
    for d in draws(CASE):
        t = time.time()
        print(d, finds_a_leak(CASE, lost_mask=d, seeds=range(1, 2)), time.time() - t, flush=True)
