"""One step of GL-BMF on shares against the float gradient on the same integers, and the clip in the worst corners."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import refmpc
from protocols.plan.gl_plan import JointPlan, plan_joint_run
from protocols.plan.gl_scales import AdapterScales
from protocols.plan.scales import EMBEDDING_BITS, RELEASE_BITS
from protocols.step.gl_step import (
    BlockOutputs,
    ClientFactors,
    block_norms,
    clip_factors,
    joint_step,
    joint_step_cost,
    weight_products,
)
from protocols.step.global_step import SharedRows, Weights, logit_errors, squared_norms
from protocols.step.over_clip import OverClip
from refmpc import ArithmeticTensor
from tests.protocols.conftest import lora_federation
from vfl.gradients import AdapterFactors, GlobalModel, clipped_gradient, with_ones
from vfl.training import TrainingConfig


@dataclass
class Inputs:
    """One batch, every value on the grid of its scale, so that sharing rounds nothing."""

    rows: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    projected: list[np.ndarray]
    up: list[np.ndarray]
    row_factors: list[np.ndarray]
    blocks: list[list[np.ndarray]]


def on_grid(values: np.ndarray, bits: int) -> np.ndarray:
    return np.trunc(values * 2.0**bits) * 2.0**-bits


def within(rows: np.ndarray, bound: float) -> np.ndarray:
    return rows * np.minimum(1.0, bound / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12))


def make_inputs(plan: JointPlan, weight_norm: float, seed: int = 0) -> Inputs:
    """Random rows and factors up to their bounds; weights of the given norm."""
    rng, scales, batch = np.random.default_rng(seed), plan.adapters, plan.schedule.batch_size
    bounds, found = scales.bounds, Inputs(*[[] for _ in range(7)])  # type: ignore[arg-type]
    rows = within(rng.normal(size=(batch, plan.width)), plan.scales.row_bound * 0.999)
    found.rows = on_grid(rows, EMBEDDING_BITS)
    found.labels = rng.integers(0, plan.classes, batch)
    weights = rng.normal(size=(plan.width + 1, plan.classes))
    found.weights = on_grid(weights * weight_norm / np.linalg.norm(weights), scales.block_bits)
    for shape in plan.shapes:
        size = 10.0 ** rng.uniform(-2, 0)
        projected = within(rng.normal(size=(batch, shape.stacked_rank)) * size, bounds.projected)
        found.projected.append(on_grid(projected, scales.projected_bits))
        up = rng.normal(size=(shape.width, shape.stacked_rank))
        found.up.append(on_grid(up * size * bounds.up / np.linalg.norm(up), scales.up_bits))
        found.row_factors.append(on_grid(rng.uniform(0, bounds.row_factor, batch), scales.row_factor_bits))
        found.blocks.append(
            [on_grid(within(rng.normal(size=(batch, m)), bounds.block), EMBEDDING_BITS) for m in shape.block_widths]
        )
    return found


async def shared_inputs(party, plan, inputs):
    """Party 0 shares the batch: [H 1], labels, weights, and every client's factors."""
    source = inputs if party.id == 0 else None

    async def share(values, shape, bits) -> ArithmeticTensor:
        return await refmpc.input_from_party(party, 0, values, shape, bits)

    batch, scales = plan.schedule.batch_size, plan.adapters
    embeddings = await share(
        None if source is None else with_ones(source.rows), (batch, plan.width + 1), EMBEDDING_BITS
    )
    one_hot = None if source is None else np.eye(plan.classes, dtype=np.int64)[source.labels]
    labels = await share(one_hot, (batch, plan.classes), 0)
    shape_w = plan.width + 1, plan.classes
    weights = await share(None if source is None else source.weights, shape_w, plan.scales.weight_bits)
    clients = []
    for i, shape in enumerate(plan.shapes):
        part = {
            "projected": ((batch, shape.stacked_rank), scales.projected_bits),
            "up": ((shape.width, shape.stacked_rank), scales.up_bits),
            "row_factors": ((batch,), scales.row_factor_bits),
        }
        shared = {
            name: await share(None if source is None else getattr(source, name)[i], size, bits)
            for name, (size, bits) in part.items()
        }
        blocks = None
        if shape.with_down:
            x = [
                await share(None if source is None else source.blocks[i][l], (batch, m), EMBEDDING_BITS)
                for l, m in enumerate(shape.block_widths)
            ]
            blocks = BlockOutputs(x, await block_norms(x, plan))
        clients.append(ClientFactors(shape, blocks=blocks, **shared))
    return embeddings, labels, weights, clients


async def one_step(party, job):
    plan, inputs = job
    embeddings, labels, weights, clients = await shared_inputs(party, plan, inputs)
    noise = np.zeros(plan.parameters, dtype=np.int64)
    with party.phase("step"):
        after, openings = await joint_step(embeddings, labels, clients, Weights(weights, None), noise, 1.0, plan)
    return await refmpc.reveal(after.values, release="test"), openings


def secure_sum(plan: JointPlan, inputs: Inputs, **options):
    """The clipped sum that the servers compute, flat, from the change of W and from the openings."""
    result = refmpc.run(one_step, [(plan, inputs)] * 3, releases={"test": "no claim"}, timeout=60, **options)
    rate = plan.scales.learning_rate_used(1.0) / plan.schedule.batch_size
    parts = [(inputs.weights - result.outputs[0][0]).reshape(-1) / rate]
    bits = plan.scales.truncated_bits
    for words in zip(*(openings for _, openings in result.outputs), strict=True):
        total = sum(w.astype(np.uint64) for w in words)
        parts.append(
            ((total << np.uint64(bits)).view(np.int64) >> bits) * 2.0**-RELEASE_BITS + 1.5 * 2.0**-RELEASE_BITS
        )
    return np.concatenate(parts), result


def float_sum(plan: JointPlan, inputs: Inputs) -> np.ndarray:
    adapters = []
    for i, shape in enumerate(plan.shapes):
        for l, x in enumerate(inputs.blocks[i]):
            here = slice(l * shape.rank, (l + 1) * shape.rank)
            scaled = inputs.row_factors[i][:, None] * x
            parts = "UV" if shape.with_down else "U"
            adapters.append(
                AdapterFactors(shape.columns, inputs.projected[i][:, here], scaled, inputs.up[i][:, here], 1.0, parts)
            )
    model = GlobalModel([inputs.weights])
    return clipped_gradient(
        model, with_ones(inputs.rows), inputs.labels, plan.training.clip_norm, adapters=adapters
    ).total


def rounded_up(over: OverClip) -> float:
    """By how much 1/γ² is too large, relative."""
    return over.inverse * over.clip_norm**2 / 2.0**over.inverse_bits - 1


def step_bound(plan: JointPlan, inputs: Inputs) -> float:
    """‖secure sum − float sum‖ of one step, for inputs on their grids.

    Clipping is the projection onto a ball, so it does not enlarge distances: the clipped gradient moves by at most as
    much as the gradient does. δ is off by e_δ = √S·2^-14 (softmax, logits rounded to 2^-16 included); t by ‖K‖φ·e_δ and the
    roundings of K, φδ and t. The clip factor is too small by 2^-14 + 2^-18 (relative) and by half of what q was rounded
    up. u, T and P are rounded as γ' says; the release to 2^-12, at most 1.5 units an entry.
    """
    scales, gamma, classes = plan.adapters, plan.training.clip_norm, plan.classes
    e_delta = math.sqrt(classes) * 2.0**-14
    omega = np.linalg.norm(inputs.weights, 2)
    reach = math.hypot(plan.scales.row_bound, 1.0)
    moved, excess = (
        (reach * e_delta) ** 2,
        2.0**-26 + 2 * (2.0**-plan.scales.norm_bits + reach**2 / gamma**2 * rounded_up(plan.scales.norms)),
    )
    for i, shape in enumerate(plan.shapes):
        a = np.linalg.norm(inputs.projected[i], axis=1).max()
        moved += (omega * a * e_delta) ** 2
        curvature = 2 * omega**2
        norm_error = 2.0**-scales.projected_norm_bits * 2 + (a / gamma) ** 2 * rounded_up(scales.projected_norms)
        loose = 3 * 2.0**-scales.curvature_bits + 3 * classes * 2.0**-scales.gram_bits
        excess += curvature * norm_error + (a / gamma) ** 2 * loose + loose * norm_error + 2.0**-25
        if shape.with_down:
            phi, k = inputs.row_factors[i].max(), np.linalg.norm(inputs.up[i], 2) * omega
            e_t = k * (phi * e_delta + math.sqrt(classes) * 2.0**-18)
            e_t += 1.5 * phi * math.sqrt(shape.stacked_rank * classes) * 2.0**-scales.up_weights_bits
            e_t += math.sqrt(shape.stacked_rank) * 2.0**-scales.layer_bits
            moved += e_t**2 * scales.bounds.block**2
            t = 1.5 * k * phi + e_t
            norm_error = 2.0**-scales.block_norm_bits * 2 + (scales.bounds.block / gamma) ** 2 * rounded_up(
                scales.block_norms
            )
            loose = len(shape.block_widths) * 2 * 2.0**-scales.layer_norm_bits
            excess += t**2 * norm_error + loose * ((scales.bounds.block / gamma) ** 2 + norm_error) + 2.0**-25
    sample = math.sqrt(moved) + gamma * (2.0**-14 + 2.0**-18 + excess / 2) + scales.clip_rounding
    return plan.schedule.batch_size * sample + math.sqrt(plan.parameters) * 1.5 * 2.0**-RELEASE_BITS


def make_plan(widths=(5, 4), blocks=((3, 4), (6,)), classes=4, batch=16, clip=1.0, parts="UV", rule="clip", **changes):
    federation = lora_federation(batch, widths, blocks, classes, parts=parts, rule=rule, **changes)
    training = TrainingConfig(epochs=1, batch_size=batch, learning_rate=1.0, clip_norm=clip, epsilon=8.0)
    return plan_joint_run(federation, training)


@settings(max_examples=8)
@given(
    widths=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    layers=st.integers(1, 3),
    classes=st.integers(2, 5),
    rank=st.integers(1, 3),
    clip=st.sampled_from([0.2, 1.0, 5.0]),
    parts=st.sampled_from(["U", "UV"]),
    rule=st.sampled_from(["clip", "normalise"]),
    seed=st.integers(0, 1000),
)
def test_one_step_is_the_float_gradient(widths, layers, classes, rank, clip, parts, rule, seed):
    blocks = tuple(tuple(2 + (i + l) % 4 for l in range(layers)) for i in range(len(widths)))
    plan = make_plan(tuple(widths), blocks, classes, 8, clip, parts, rule, rank=rank)
    inputs = make_inputs(plan, min(1.5, 0.7 * plan.adapters.weight_bound), seed)
    found, _ = secure_sum(plan, inputs)
    expected = float_sum(plan, inputs)
    assert np.linalg.norm(found - expected) <= step_bound(plan, inputs)


def test_the_bound_of_one_step_says_something():
    """Every part of the gradient is larger than the bound, so a part left out or swapped would be noticed."""
    plan = make_plan()
    inputs = make_inputs(plan, 1.2, 3)
    bound, expected = step_bound(plan, inputs), float_sum(plan, inputs)
    found, result = secure_sum(plan, inputs)
    assert np.linalg.norm(found - expected) <= bound
    start = 0
    sizes = [plan.global_parameters]
    for shape in plan.shapes:
        for m in shape.block_widths:
            sizes += [shape.width * shape.rank, shape.rank * m]
    for size in sizes:
        assert np.linalg.norm(expected[start : start + size]) > bound
        start += size
    assert start == plan.parameters
    declared = joint_step_cost(plan)
    assert result.ledgers[0].phases["step"].rounds == declared.rounds
    assert sum(ledger.phases["step"].bytes_sent for ledger in result.ledgers) == declared.bytes


@pytest.mark.parametrize("clip", [0.02, 0.2])
def test_the_contribution_of_every_sample_is_clipped_over_all_parts(clip):
    """One row in the batch, everything at its bound, a tiny clip norm: the release stays within γ' and its rounding."""
    for seed in range(4):
        plan = make_plan(batch=1, clip=clip)
        inputs = make_inputs(plan, plan.adapters.weight_bound * 0.9, seed)
        found, _ = secure_sum(plan, inputs)
        rounding = math.sqrt(plan.parameters) * 1.5 * 2.0**-RELEASE_BITS
        assert np.linalg.norm(found) <= clip + plan.adapters.clip_rounding + rounding
        assert np.linalg.norm(found) >= 0.9 * clip - rounding  # the clip was active, and not much too small


async def clip_only(party, job):
    """The clip of a step, with everything it is computed from."""
    plan, inputs = job
    embeddings, labels, weights, clients = await shared_inputs(party, plan, inputs)
    scales = plan.adapters
    errors = await logit_errors(SharedRows(embeddings, labels, labels), weights, plan.scales)
    norms = await squared_norms(embeddings, plan.scales)
    products = [await weight_products(client, weights, scales) for client in clients]
    factor, at_layers, _ = await clip_factors(errors, norms, clients, products, scales)
    opened = [errors, factor, *(product.block for product in products), *at_layers.values()]
    return [await refmpc.reveal(x, release="test") for x in opened]


def clip_ratio(plan: JointPlan, inputs: Inputs, opened: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """c_j·‖g_j‖/γ for the g_j of the very integers that the servers hold, and which samples are clipped."""
    errors, factor, *rest = opened
    count, clip = len(plan.shapes), plan.training.clip_norm
    assert factor.max() <= 1.0
    squares = ((inputs.rows**2).sum(axis=1) + 1) * (errors**2).sum(axis=1)
    for i, (shape, block, t) in enumerate(zip(plan.shapes, rest[:count], rest[count:], strict=True)):
        squares += ((errors @ block.T) ** 2).sum(axis=1) * (inputs.projected[i] ** 2).sum(axis=1)
        for l, x in enumerate(inputs.blocks[i]):
            here = slice(l * shape.rank, (l + 1) * shape.rank)
            squares += (t[:, here] ** 2).sum(axis=1) * (x**2).sum(axis=1)
    return factor[:, 0] * np.sqrt(squares) / clip, squares > 1.05 * clip**2


PLANNED: dict[str, int] = {}
COARSE = {
    "curvature_bits": 10,
    "gram_bits": 10,
    "projected_norm_bits": 17,
    "layer_norm_bits": 10,
    "block_norm_bits": 17,
}
COARSE_NORMS = {"projected_norm_bits": 11, "layer_norm_bits": 16, "block_norm_bits": 11}


def coarser(scales: AdapterScales, bits: dict[str, int]) -> AdapterScales:
    norms = {
        name: replace(getattr(scales, name), bits=bits.pop(f"{name[:-1]}_bits"))
        for name in ("projected_norms", "block_norms")
        if f"{name[:-1]}_bits" in bits
    }
    return replace(scales, **norms, **bits)


@pytest.mark.parametrize("changed", [PLANNED, COARSE, COARSE_NORMS], ids=["planned", "coarse", "coarse norms"])
@pytest.mark.parametrize("way", ["down", "up", "against_the_value", "by_lot"])
def test_no_rounding_makes_the_clip_factor_too_large(monkeypatch, way, changed):
    """c_j·‖g_j‖ ≤ γ for the g_j of the very integers that the servers hold, however every truncation rounds.

    Rows of all sizes, so that q lies below 1, near 1 and far above. At the planned scales the factor is at most 2 % too
    small; at coarse ones, where a rounding weighs more than the margin of the clip factor, it must still not be too large.
    """
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "refmpc"))
    from tests.refmpc import rounding

    choose = rounding.by_lot(1) if way == "by_lot" else getattr(rounding, way)
    rounding.forced(monkeypatch, choose)
    largest = 0.0
    for clip, seed, only_down in ((0.05, 0, False), (0.5, 1, False), (1.2, 2, False), (4.0, 3, False), (0.5, 4, True)):
        plan = make_plan(batch=32, clip=clip)
        plan = replace(plan, adapters=coarser(plan.adapters, dict(changed)))
        inputs = make_inputs(plan, 0.9 * plan.adapters.weight_bound, seed)
        sizes = np.exp2(-np.arange(32) / 4)[:, None]
        if only_down:  # no room made by rounding up ∂L/∂U: U large, A and h zero
            inputs.rows *= 0.0
            inputs.projected = [a * 0.0 for a in inputs.projected]
            up = [u * plan.adapters.bounds.up * 0.99 / np.linalg.norm(u) for u in inputs.up]
            inputs.up = [on_grid(u, plan.adapters.up_bits) for u in up]
        inputs.projected = [on_grid(a * sizes, plan.adapters.projected_bits) for a in inputs.projected]
        inputs.blocks = [[on_grid(x * sizes, EMBEDDING_BITS) for x in own] for own in inputs.blocks]
        result = refmpc.run(clip_only, [(plan, inputs)] * 3, releases={"test": "no claim"}, timeout=60)
        ratio, clipped = clip_ratio(plan, inputs, result.outputs[0])
        assert ratio.max() <= 1.0
        largest = max(largest, ratio.max())
        assert changed or (ratio[clipped] > 0.98).all()
    assert largest > (0.9 if changed else 0.999)


def test_factors_at_all_their_bounds_stay_in_range():
    """The debug mode opens every operand and raises at the first that leaves its domain."""
    plan = make_plan(rule="normalise", clip=0.5)
    inputs = make_inputs(plan, plan.adapters.weight_bound * 0.95, 1)
    for i in range(len(plan.shapes)):
        inputs.row_factors[i][:] = plan.adapters.bounds.row_factor
        scale = plan.adapters.bounds.projected * 0.999 / np.linalg.norm(inputs.projected[i], axis=1, keepdims=True)
        inputs.projected[i] = on_grid(inputs.projected[i] * scale, plan.adapters.projected_bits)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        secure_sum(plan, inputs, insecure_check_ranges=True)
