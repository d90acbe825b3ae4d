"""A whole step with open weights, from rows to opened sums: what one server sees does not depend on the rows.

The distinguisher is that of ``tests.refmpc.transcripts``: two very different batches on constant shares, so that all
randomness left is that of the masks. Every row of the batch is the same, so that each is a sample of every message
about a row: d = 2, three classes, 4096 rows. The words of the opened sums are of no row; ``open_words`` has cases of
its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import refmpc
from protocols.plan.run_plan import plan_run
from protocols.plan.scales import EMBEDDING_BITS
from protocols.step.open_step import step_words
from protocols.step.public_weights import Head, rounded_head
from protocols.step.secret_step import SharedRows
from refmpc.primitives import dealing
from tests.protocols.conftest import small_federation
from tests.protocols.secure_runs import small_training
from tests.refmpc.transcripts import Case, draws, finds_a_leak, leaks, watch_streams

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
    (words,) = await step_words(batch, head(), addend, PLAN.training, PLAN.scales)
    await refmpc.open_words(party, words.reshape(-1), PLAN.scales.truncated_bits, "example")


def packing(name: str, bits: int) -> tuple[int, int]:
    """The modulus of the values in a packed message of this step, and how many of a row lie beside each other."""
    moduli = {
        "largest_coarse": {117: 7, 81: 7, 24: 2**8},  # dealt digits, tests, and masked slots
        "exp_below": {6: 2, 8: 2**8, 12: 2},
        "truncate_additive + octave": {111: 2**37, 32: 2**32, 2: 4},
        "cut_and_square": {75: 2**25},
        "cut_and_square + weigh_reached": {75: 2**25, 200: 11},
        "weigh_reached": {32: 11, 12: 11, 141: 2**47},  # and products with 47 bits each
    }
    _, rest = name.split(": ", 1)
    operation = rest.rsplit(" from ", 1)[0]
    return moduli[operation][bits], 3 if operation == "largest_coarse" else 1  # pairs


CASE = Case(
    step,
    ("arithmetic",) * 3,
    ((round(0.3 * 2**14), 1, 5 << 10), (round(-0.25 * 2**14), 0, 7 << 11)),
    composed=True,
    shape=(3,),
)
CLOSELY = replace(CASE, composed=False, packed=packing)
SEEN_ALONE = [
    (0, 4, 0),
    (0, 10, 1),
    (1, 2, 0),
    (1, 2, 1),
    (1, 3, 3),
    (1, 4, 0),
    (1, 4, 1),
    (1, 5, 3),
    (1, 6, 2),
    (1, 7, 1),
]
SEEN_ALONE += [(1, 8, 1), (1, 8, 3), (1, 9, 2), (1, 10, 1), (1, 10, 2), (1, 11, 1)]


@pytest.fixture(autouse=True)
def _watched(monkeypatch):
    watch_streams(monkeypatch)
    monkeypatch.setattr(dealing, "FEWEST_ROWS", 10**9)


def test_no_message_of_a_step_tells_one_batch_from_another():
    assert leaks(CASE) == []


@pytest.mark.heavy
def test_no_message_together_with_anything_that_a_server_knows_tells_one_batch_from_another():
    """Every message with every draw, every other message and every result: 40 s."""
    assert leaks(CLOSELY) == []


@pytest.mark.heavy
@pytest.mark.parametrize("mask", SEEN_ALONE)
def test_a_mask_that_is_taken_away_is_seen_in_one_message_alone(mask):
    """The other masks of a step cover values that earlier masks have made random already: with constant inputs their
    loss shows in the primitives' own tests (``tests/refmpc/test_privacy.py``), where each is taken away in turn."""
    assert mask in draws(CASE)
    assert finds_a_leak(CASE, lost_mask=mask)
