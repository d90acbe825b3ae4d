"""Inputs of one step of GL-BMF on the servers' grid, and how far its sums may be off."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

import refmpc
from protocols.plan.gl_plan import LayerPlan
from protocols.plan.gl_shapes import AdapterShape
from protocols.plan.scales import EMBEDDING_BITS, RELEASE_BITS
from protocols.plan.squared_norm_ratio import OverClip
from protocols.step.gl_step import (
    BlockOutputs,
    ClientFactors,
    block_norms,
    layer_step,
)
from protocols.step.open_gl_step import open_layer_step, public_block
from protocols.step.public_weights import rounded_head
from protocols.step.secret_step import Weights
from refmpc import ArithmeticTensor
from vfl.gradients import with_ones

__all__ = [
    "Inputs",
    "adapter_shapes",
    "make_inputs",
    "on_grid",
    "rounded_up",
    "secure_sum",
    "shared_inputs",
    "step_bound",
    "within",
]


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


def adapter_shapes(plan: LayerPlan) -> list[AdapterShape]:
    """The shapes of a plan with LoRA layers."""
    return [shape for shape in plan.shapes if isinstance(shape, AdapterShape)]


def within(rows: np.ndarray, bound: float) -> np.ndarray:
    return rows * np.minimum(1.0, bound / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12))


def make_inputs(plan: LayerPlan, weight_norm: float, seed: int = 0) -> Inputs:
    """Random rows and factors up to their bounds; weights of the given norm."""
    rng, scales, batch = np.random.default_rng(seed), plan.adapters, plan.schedule.batch_size
    bounds, found = scales.bounds, Inputs(*[[] for _ in range(7)])  # type: ignore[arg-type]
    rows = within(rng.normal(size=(batch, plan.width)), plan.scales.row_bound * 0.999)
    found.rows = on_grid(rows, EMBEDDING_BITS)
    found.labels = rng.integers(0, plan.classes, batch)
    weights = rng.normal(size=(plan.width + 1, plan.classes))
    found.weights = on_grid(weights * weight_norm / np.linalg.norm(weights), scales.block_bits)
    for shape in adapter_shapes(plan):
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
    if plan.opens_sums:
        bits = plan.scales.weight_bits
        public = np.rint(inputs.weights * 2.0**bits).astype(np.int64)
        head = rounded_head(public, bits, plan.scales.layers[-1].reach)
        blocks = [public_block(public[shape.columns], bits, plan.adapters) for shape in plan.shapes]
        with party.phase("step"):
            words = await open_layer_step(embeddings, labels, clients, head, blocks, noise, plan)
            await refmpc.open_words(party, words[0], plan.scales.truncated_bits, "test")
        return None, [refmpc.unseal(part) for part in words]
    with party.phase("step"):
        after, openings = await layer_step(embeddings, labels, clients, Weights(weights, None), noise, 1.0, plan)
    return await refmpc.reveal(after.values, release="test"), [refmpc.unseal(words) for words in openings]


def secure_sum(plan: LayerPlan, inputs: Inputs, **options):
    """The clipped sum that the servers compute, flat, from the change of W (secret weights) and from the openings."""
    result = refmpc.run(one_step, [(plan, inputs)] * 3, releases={"test": "no claim"}, timeout=60, **options)
    rate = plan.scales.learning_rate_used(1.0) / plan.schedule.batch_size
    parts = [] if plan.opens_sums else [(inputs.weights - result.outputs[0][0]).reshape(-1) / rate]
    bits = plan.scales.truncated_bits
    for words in zip(*(openings for _, openings in result.outputs), strict=True):
        total = sum(w.astype(np.uint64) for w in words)
        parts.append(
            ((total << np.uint64(bits)).view(np.int64) >> bits) * 2.0**-RELEASE_BITS + 1.5 * 2.0**-RELEASE_BITS
        )
    return np.concatenate(parts), result


def rounded_up(over: OverClip) -> float:
    """By how much 1/γ² is too large, relative."""
    return over.inverse * over.clip_norm**2 / 2.0**over.inverse_bits - 1


def step_bound(plan: LayerPlan, inputs: Inputs) -> float:
    """‖secure sum − float sum‖ of one step, for inputs on their grids.

    Clipping is the projection onto a ball, so it does not enlarge distances: the clipped gradient moves by at most as
    much as the gradient does. δ is off by e_δ = √S·2^-14 (softmax, logits rounded to 2^-16 included); t by ‖K‖φ·e_δ and
    the roundings of K, φδ and t. The clip factor is too small by 2^-14 + 2^-18 (relative) and by half of what q was
    rounded up. u, T and P are rounded as γ' says; the release to 2^-12, at most 1.5 units an entry.
    """
    scales, gamma, classes = plan.adapters, plan.training.clip_norm, plan.classes
    e_delta = math.sqrt(classes) * 2.0**-14
    omega = np.linalg.norm(inputs.weights, 2)
    reach = math.hypot(plan.scales.row_bound, 1.0)
    moved, excess = (
        (reach * e_delta) ** 2,
        2.0**-26 + 2 * (2.0**-plan.scales.norm_bits + reach**2 / gamma**2 * rounded_up(plan.scales.norms)),
    )
    for i, shape in enumerate(adapter_shapes(plan)):
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
