"""A whole step of one hidden layer, from rows to updates: what one server sees depends neither on the rows nor on
secret weights.

As ``test_step_transcripts``: every row of the batch is the same, on constant shares, so that each is a sample of every
message about a row. d = 2, one hidden output, three classes, 4096 rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protocols.plan.run_plan import Plan, plan_run
from protocols.plan.scales import EMBEDDING_BITS
from protocols.step.hidden_chain import secret_hidden_updates
from refmpc.primitives import dealing
from tests.protocols.conftest import small_federation
from tests.protocols.secure_runs import small_training
from tests.refmpc.transcripts import Case, draws, finds_a_leak, leaks, watch_streams


def make_plan() -> Plan:
    training = small_training(weights="secret", epsilon=4.0, hidden=(1,), learning_rate=0.05)
    return plan_run("g_bmf", small_federation(64, (1, 1), 3), training)


PLAN = make_plan()
FIRST = np.array([[0.7], [-0.4], [0.05]])
SECOND = np.array([[0.6, -0.2, 0.1], [0.05, 0.0, -0.1]])


def batch(rows: Any, label: Any, norm: Any, plan: Plan) -> tuple[Any, Any, Any]:
    """Each input has three equal entries a row; what is public about them is done here."""
    turned = rows.scale_by_integers(np.array([1, -2, 0])).reinterpret(EMBEDDING_BITS)
    one_hot = label.scale_by_integers(np.array([1, -1, 0])).reinterpret(0) + np.array([0, 1, 0])
    return turned + np.array([0.0, 0.0, 1.0]), one_hot, norm[:, 0].reinterpret(plan.scales.norm_bits)


async def secret_step(party: Any, rows: Any, label: Any, norm: Any, weight: Any) -> list[Any]:
    """Both layers are public numbers times one secret."""
    plan = PLAN
    bits = plan.scales.weight_bits

    def layer(values: np.ndarray) -> Any:
        known = np.rint(values * 2.0**10).astype(np.int64)
        return weight[: len(values), : values.shape[1]].scale_by_integers(known).reinterpret(bits)

    layers = [layer(FIRST), layer(SECOND)]
    _, updates = await secret_hidden_updates(*batch(rows, label, norm, plan), layers, plan.scales)
    return updates


def secrets(*more: tuple[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    pairs = (round(0.3 * 2**14), round(-0.25 * 2**14)), (1, 0), (5 << 8, 7 << 9), *more
    one, other = zip(*pairs, strict=True)
    return one, other


UNIT = 1 << (PLAN.scales.weight_bits - 10)
CASES = {
    "secret": Case(secret_step, ("arithmetic",) * 4, secrets((UNIT, -UNIT // 2)), composed=True, shape=(3,)),
}


# bits that a packed message has for a row → the modulus of its values
TESTS_OF_ORDER = {117: 7, 81: 7}
THERMOMETERS = {63: 5, 9: 5} | dict.fromkeys(
    (435, 65, 40, 35, 30, 25, 20, 15), 17
)  # of the limit, and of the octaves of q
CUTS = {16: 2**16, 36: 2**36, 37: 2**37, 111: 2**37, 75: 2**25, 41: 2**41}
OTHERS = {24: 2**8, 8: 2**8, 6: 2, 12: 2, 32: 2**32, 2: 4}  # slots, the largest logit, digits of exp, octave of the sum


def packing(name: str, bits: int) -> tuple[int, int]:
    """The modulus of the values in a packed message of these steps, and how many of a row lie beside each other."""
    if ": is_negative" in name:
        return 11, 1
    return (TESTS_OF_ORDER | THERMOMETERS | CUTS | OTHERS)[bits], 3 if bits in TESTS_OF_ORDER else 1  # pairs


# draws whose loss is seen in one message alone, (first party of the pair, operation, index); the others cover what
# earlier masks have made random already, and their loss shows in the primitives' own tests
# (``tests/refmpc/test_privacy.py``)
SEEN_ALONE = {
    "secret": [
        *((0, 7, 0), (0, 10, 0), (0, 11, 0), (0, 16, 0), (1, 2, 0), (1, 4, 0), (1, 7, 0), (1, 8, 2), (1, 9, 3)),
        *((1, 10, 0), (1, 10, 1), (1, 11, 0), (1, 11, 1), (1, 12, 3), (1, 13, 2), (1, 14, 1), (1, 15, 1), (1, 15, 3)),
        *((1, 16, 0), (1, 16, 1), (1, 17, 1), (1, 17, 4), (1, 18, 2), (1, 19, 2), (1, 20, 1), (2, 2, 0), (2, 2, 1)),
    ],
}


@pytest.fixture(autouse=True)
def _watched(monkeypatch):
    watch_streams(monkeypatch)
    monkeypatch.setattr(dealing, "FEWEST_ROWS", 10**9)


@pytest.mark.parametrize("weights", CASES)
def test_no_message_of_a_step_tells_one_batch_from_another(weights):
    assert leaks(CASES[weights]) == []


@pytest.mark.heavy
@pytest.mark.parametrize("weights", CASES)
def test_no_message_together_with_anything_that_a_server_knows_tells_one_batch_from_another(weights):
    """Every message with every draw, every other message and every result."""
    assert leaks(replace(CASES[weights], composed=False, packed=packing), turns=(0,)) == []


@pytest.mark.heavy
@pytest.mark.parametrize("weights, mask", [(weights, mask) for weights, masks in SEEN_ALONE.items() for mask in masks])
def test_a_mask_that_is_taken_away_is_seen_in_one_message_alone(weights, mask):
    assert mask in draws(CASES[weights])
    assert finds_a_leak(CASES[weights], lost_mask=mask)
