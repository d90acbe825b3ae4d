"""What one step costs between the servers: the step itself, run dry on shares of zeros of the plan's shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import refmpc
from protocols.plan.gl_plan import LayerPlan
from protocols.plan.gl_shapes import AdapterShape, JacobianShape
from protocols.plan.run_plan import SUMS_RELEASE, Plan
from protocols.plan.scales import EMBEDDING_BITS, RELEASE_BITS
from protocols.step.gl_step import BlockOutputs, ClientFactors, layer_step
from protocols.step.hidden_step import hidden_weights
from protocols.step.jacobians import ClientJacobian
from protocols.step.open_gl_step import open_layer_step, public_block
from protocols.step.open_step import step_words
from protocols.step.public_weights import Head, public_start, widest_head
from protocols.step.secret_step import SharedRows, Weights, gradient_step
from refmpc import ArithmeticTensor, Cost, Party
from refmpc.core.words import seal, unseal
from vfl.hidden import WEIGHT_BITS, HiddenClip

__all__ = ["step_cost"]


def step_cost(plan: Plan, head: Head | None = None) -> Cost:
    """Rounds and bytes of one step, exactly; with open weights at most that, because bytes depend on how large logits
    can be, which is public in every step (``head``: those of one step). Hidden layers: those of the starting weights; a
    step of larger ones sends a few bits an entry more. Uploads, noise and openings to clients come on top.

    Takes as long as three servers compute on one batch, one after the other: under a second at the paper's sizes.
    """
    if isinstance(plan, LayerPlan):
        step = _open_layer_step if plan.opens_sums else _layer_step
        return refmpc.dry_run(step, plan, releases=plan.releases)["main"]
    if plan.opens_sums:
        return refmpc.dry_run(_open_step, (plan, head), releases=plan.releases)["main"]
    return refmpc.dry_run(_global_step, plan)["main"]


def _zeros(party: Party, *shape: int, bits: int) -> ArithmeticTensor:
    return ArithmeticTensor.zeros(party, shape, bits)


def _weights(party: Party, plan: Plan) -> list[Weights]:
    found = []
    for shape in plan.layer_shapes:
        velocity = _zeros(party, *shape, bits=RELEASE_BITS) if plan.training.momentum else None
        found.append(Weights(_zeros(party, *shape, bits=plan.scales.weight_bits), velocity))
    return found


def _rows(party: Party, plan: Plan) -> SharedRows:
    batch = plan.schedule.batch_size
    return SharedRows(
        _zeros(party, batch, plan.width + 1, bits=EMBEDDING_BITS),
        _zeros(party, batch, plan.outputs, bits=plan.label_bits),
        _zeros(party, batch, bits=plan.scales.row_bits),
    )


async def _global_step(party: Party, plan: Plan) -> None:
    noise = np.zeros(plan.parameters, dtype=np.int64)
    rate = plan.learning_rate(0)
    await gradient_step(_rows(party, plan), _weights(party, plan), noise, rate, plan.training, plan.scales)


async def _open_step(party: Party, job: tuple[Plan, Head | None]) -> None:
    plan, head = job
    *_, last = plan.layer_shapes
    if head is None and plan.scales.smooth is not None:
        model = public_start(plan.start, plan.scales, plan.training)
        used = hidden_weights(model, plan.scales.weight_bits, plan.scales.smooth)
        head = Head(np.zeros(last, dtype=np.int64), WEIGHT_BITS, 0.0, hidden=used)
    elif head is None:
        head = widest_head(last, plan.scales.logit_bound)
        bounded = plan.scales.bounded
        if bounded is not None and not isinstance(bounded, HiddenClip):
            head = replace(head, wave=bounded.wave(plan.scales.logit_bound))
    addend = np.zeros(plan.parameters, dtype=np.uint64)
    parts = await step_words(_rows(party, plan), head, addend, plan.training, plan.scales)
    words = seal(np.concatenate([unseal(part).reshape(-1) for part in parts]))
    await refmpc.open_words(party, words, plan.scales.truncated_bits, SUMS_RELEASE)


async def _layer_step(party: Party, plan: LayerPlan) -> None:
    rows, (weights,) = _rows(party, plan), _weights(party, plan)
    clients = [_client(party, plan, shape) for shape in plan.shapes]
    noise = np.zeros(plan.parameters, dtype=np.int64)
    await layer_step(rows.embeddings, rows.labels, clients, weights, noise, plan.learning_rate(0), plan)


async def _open_layer_step(party: Party, plan: LayerPlan) -> None:
    rows, (shape,) = _rows(party, plan), plan.layer_shapes
    clients = [_client(party, plan, shape) for shape in plan.shapes]
    zeros = np.zeros(shape, dtype=np.int64)
    blocks = [public_block(zeros[own.columns], plan.scales.weight_bits, plan.adapters) for own in plan.shapes]
    head = widest_head(shape, plan.scales.logit_bound)
    addend = np.zeros(plan.parameters, dtype=np.uint64)
    words, *_ = await open_layer_step(rows.embeddings, rows.labels, clients, head, blocks, addend, plan)
    await refmpc.open_words(party, words, plan.scales.truncated_bits, SUMS_RELEASE)


def _client(party: Party, plan: LayerPlan, shape: AdapterShape | JacobianShape) -> ClientFactors | ClientJacobian:
    batch, scales = plan.schedule.batch_size, plan.adapters
    if isinstance(shape, JacobianShape):
        jacobian = _zeros(party, batch, shape.width, shape.parameters, bits=scales.jacobian_bits)
        return ClientJacobian(shape, jacobian)
    blocks = None
    if shape.with_down:
        inputs = [_zeros(party, batch, width, bits=EMBEDDING_BITS) for width in shape.block_widths]
        blocks = BlockOutputs(inputs, _zeros(party, batch, len(inputs), bits=scales.block_norm_bits))
    return ClientFactors(
        shape,
        _zeros(party, batch, shape.stacked_rank, bits=scales.projected_bits),
        _zeros(party, shape.width, shape.stacked_rank, bits=scales.up_bits),
        _zeros(party, batch, bits=scales.row_factor_bits),
        blocks,
    )
