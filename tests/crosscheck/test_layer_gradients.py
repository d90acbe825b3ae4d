"""The factored GL-BMF gradients executed by MP-SPDZ, against the explicit float64 reference and against ours on
shares."""

from __future__ import annotations

import os

import numpy as np
import pytest

from bench.mpspdz.runner import HOME_VARIABLE, MpSpdz
from protocols.plan.gl_plan import plan_layer_run
from tests.protocols.conftest import lora_federation
from tests.protocols.step.gl_inputs import make_inputs, secure_sum, step_bound
from vfl.gradients import AdapterFactors, GlobalModel, clipped_gradient, with_ones
from vfl.training import TrainingConfig

pytestmark = [
    pytest.mark.mpspdz,
    pytest.mark.skipif(not os.environ.get(HOME_VARIABLE), reason=f"{HOME_VARIABLE} is not set: no MP-SPDZ to ask"),
]


@pytest.mark.parametrize("seed", [1, 2])
def test_layer_gradients_agree_with_the_explicit_reference(seed):
    """Largest errors: the clip factor (0.37 %, times entries of a clipped sum of at most B·γ in all) and softmax, both
    relative to sums of B rows; 1 % of the largest entry covers them, and a wrong factor anywhere moves far more."""
    rng = np.random.default_rng(seed)
    batch, classes, rank, scale, clip = 12, 4, 3, 0.5, 1.0
    widths, inners = (6, 5), (7, 9)
    hidden = rng.normal(size=(batch, sum(widths)))
    rows = with_ones(hidden)
    labels = rng.integers(0, classes, batch)
    model = GlobalModel([rng.normal(size=(sum(widths) + 1, classes)) * 0.5])
    adapters, starts = [], np.cumsum([0, *widths])
    for width, inner, start in zip(widths, inners, starts, strict=False):
        inputs = rng.normal(size=(batch, inner)) * 0.5
        projected = inputs @ rng.normal(size=(inner, rank)) * 0.5
        columns = slice(int(start), int(start) + width)
        adapters.append(AdapterFactors(columns, projected, inputs, rng.normal(size=(width, rank)) * 0.5, scale))
    exact = clipped_gradient(model, rows, labels, clip, adapters=adapters, method="explicit")
    assert (exact.clip_factors < 1).any()
    given = [rows, np.eye(classes)[labels], (rows**2).sum(axis=1) / clip**2, model.layers[0]]
    sizes: list[int] = []
    for adapter in adapters:
        squares = [scale**2 / clip**2 * (part**2).sum(axis=1) for part in (adapter.projected, adapter.inputs)]
        given += [adapter.projected, adapter.inputs, adapter.up, *squares]
        sizes += [adapter.up.shape[0], rank, adapter.inputs.shape[1]]
    mpspdz = MpSpdz()
    compiled = mpspdz.compile("layer_gradients", batch, sum(widths) + 1, classes, scale, *sizes)
    found = mpspdz.run(compiled, given).values
    assert found.shape == exact.total.shape
    bound = 0.01 * np.abs(exact.total).max()
    assert np.abs(found - exact.total).max() <= bound
    unclipped = clipped_gradient(model, rows, labels, None, adapters=adapters)
    assert np.abs(unclipped.total - exact.total).max() > 20 * bound


@pytest.mark.parametrize("seed", [1, 2])
def test_both_systems_compute_the_same_layer_gradients(seed):
    """Ours is within the bound that ``step_bound`` derives; for MP-SPDZ, which states none, 1 % of the largest
    entry."""
    clip, classes = 0.5, 4
    federation = lora_federation(24, (6, 5), ((7,), (9,)), classes, rank=3, seed=seed)
    plan = plan_layer_run(federation, TrainingConfig(epochs=1, batch_size=12, learning_rate=0.5, clip_norm=clip))
    inputs = make_inputs(plan, weight_norm=1.0, seed=seed)
    ours, _ = secure_sum(plan, inputs)
    rows = with_ones(inputs.rows)
    given = [rows, np.eye(classes)[inputs.labels], (rows**2).sum(axis=1) / clip**2, inputs.weights]
    sizes: list[int] = []
    for projected, up, factors, (block,) in zip(
        inputs.projected, inputs.up, inputs.row_factors, inputs.blocks, strict=True
    ):
        scaled = factors[:, np.newaxis] * block
        squares = [(part**2).sum(axis=1) / clip**2 for part in (projected, scaled)]
        given += [projected, scaled, up, *squares]
        sizes += [up.shape[0], up.shape[1], block.shape[1]]
    mpspdz = MpSpdz()
    compiled = mpspdz.compile("layer_gradients", 12, rows.shape[1], classes, 1.0, *sizes)
    theirs = mpspdz.run(compiled, given).values
    assert theirs.shape == ours.shape
    assert np.abs(ours - theirs).max() <= step_bound(plan, inputs) + 0.01 * np.abs(ours).max()
    assert np.abs(ours).max() > 10 * step_bound(plan, inputs)
