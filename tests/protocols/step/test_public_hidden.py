"""Public weights of one hidden layer: the bounds hold for the integers that a step uses, and what outgrows them is
refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from protocols.plan.run_plan import Plan, plan_run
from protocols.plan.scales import EMBEDDING_BITS
from protocols.plan.squared_norm_ratio import ERROR_NORM
from protocols.step.public_hidden import HiddenHead, hidden_head
from protocols.step.public_weights import PublicLayer
from tests.not_none import not_none
from tests.protocols.conftest import small_federation
from tests.protocols.secure_runs import small_training
from tests.protocols.step.test_hidden_chain import CLASSES, HIDDEN, make_plan, words


def head_of(plan: Plan, layers: list[np.ndarray]) -> HiddenHead | None:
    integers = [words(layer, plan.scales.weight_bits) for layer in layers]
    return hidden_head([PublicLayer(own) for own in integers], plan.scales)


def longest_rows(columns: np.ndarray, reach: float) -> np.ndarray:
    """For each column the row of norm ``reach`` whose product with it is largest."""
    units: np.ndarray = columns / np.maximum(1e-300, np.linalg.norm(columns, axis=0))
    return reach * units.T


@pytest.mark.parametrize("scale", [0.0, 1e-3, 0.1, 1.0, 20.0, 80.0])
@pytest.mark.parametrize("row_bound", [1.0, 16.0])
def test_bounds_hold_for_the_longest_rows(scale, row_bound):
    plan = make_plan("open", 1.0, row_bound)
    rng, reach = np.random.default_rng(3), plan.scales.layers[0].reach
    layers = [rng.normal(size=shape) * scale for shape in plan.layer_shapes]
    layers[0] -= 0.5 * scale
    head = head_of(plan, layers)
    assert (head is None) == (scale == 80.0)  # ‖W_2‖ there is beyond what δ_1 may be
    if head is None:
        return
    used = head.words * 2.0**-head.bits
    sums = longest_rows(used, reach) @ used
    assert np.abs(sums).max() <= head.sum_bound
    assert reach * np.linalg.norm(used, 2) <= head.output_bound
    last = head.head.words * 2.0**-head.head.bits
    assert np.abs(longest_rows(last, head.output_bound + 1.0) @ last).max() <= head.head.logit_bound
    back = head.back * 2.0**-head.back_bits
    assert ERROR_NORM * np.linalg.norm(back, 2) <= not_none(plan.scales.hidden_chain).error_limit
    assert head.logit_bits + math.log2(head.head.logit_bound) <= 61


def test_the_bound_of_sums_is_that_of_the_rounded_weights():
    """A million inputs whose weights are all rounded up to twice what they were."""
    plan = make_plan("open", 1.0, 16.0)
    inputs, reach, bits = 1_060_000, plan.scales.layers[0].reach, plan.scales.weight_bits
    first = np.full((inputs, 2), 1 << (bits - 13))
    second = np.zeros((3, CLASSES), dtype=np.int64)
    second[-1, 0] = 1 << (bits + 19)  # a bias that leaves W_1 as few bits as it may have
    head = not_none(hidden_head([PublicLayer(first), PublicLayer(second)], plan.scales))
    assert head.bits == 12 and (head.words == 1).all()
    assert reach * math.sqrt(inputs) * 2.0**-head.bits <= head.sum_bound


def test_rounding_the_first_layer_takes_nobody_beyond_the_bound_of_norms():
    """W_1 as large as the run's ranges say, of rank one along the row, all entries rounded up."""
    width = 48
    federation = small_federation(96, (24, 24), CLASSES, row_bound=math.sqrt(width))
    for rate in 0.05 + 5e-7 * np.arange(80):
        training = small_training(
            hidden=(HIDDEN,), batch_size=32, learning_rate=float(rate), epsilon=20.0, weights="open"
        )
        plan = plan_run("g_bmf", federation, training)
        first = plan.scales.layers[0]
        units = first.weight_bound / math.sqrt((width + 1) * HIDDEN) * 2.0**16
        if 0.5 < units % 1 < 0.55:
            break
    assert 0.5 < units % 1 < 0.55
    layers = [np.full((width + 1, HIDDEN), units * 2.0**-16), np.full((HIDDEN + 1, CLASSES), 0.1)]
    head = not_none(head_of(plan, layers))
    assert head.bits == 16 and np.linalg.norm(layers[0], 2) <= first.weight_bound
    rows = np.ones(width + 1)
    assert np.linalg.norm(rows) <= first.reach
    outputs = rows @ (head.words * 2.0**-head.bits) + 2.0**-EMBEDDING_BITS  # cut, one more
    assert np.linalg.norm([*outputs, 1.0]) <= not_none(plan.scales.hidden_chain).norms.bound


def test_weights_whose_outputs_or_logits_outgrow_the_ring_take_the_longer_way():
    plan = make_plan("open", 1.0, 16.0)
    small = [np.full(shape, 0.1) for shape in plan.layer_shapes]
    assert head_of(plan, small) is not None
    assert head_of(plan, [small[0] * 2.0**16, small[1]]) is None
    bias = small[1].copy()
    bias[-1, 0] = 2.0**22
    assert head_of(plan, [small[0], bias]) is None
