"""One training step with weights that everybody knows: only what depends on people is secret.

Forward products are shares times public integers: local, nothing is sent. Softmax and clip are those of every step. The
backward product is not truncated on shares but opened: each server cuts its own summand, with its own noise in it, and
sends it to the two others (``refmpc.primitives.opening``). What is opened, y_t, is what the DP theorem is about: it
covers the release of the whole sequence, so opening every y_t instead of the last model alone does not change the
claim.

One layer: 17 rounds instead of 18 with up to 12 classes, 3 instead of 4 with one output. Hidden layers:
``protocols.step.hidden_step``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

import refmpc
from protocols.plan.scales import PROBABILITY_BITS, Scales
from protocols.step import bounded_softmax, low_round, one_output
from protocols.step.clip import clip_factors, clipped_updates
from protocols.step.hidden_step import hidden_updates
from protocols.step.public_weights import Head
from protocols.step.secret_step import SharedRows, explicit_clip
from refmpc import ArithmeticTensor, TwoHolder, Words
from refmpc.core.words import seal
from vfl.training import TrainingConfig

__all__ = ["clipped_updates_from_logits", "errors_from_logits", "layer_updates", "logits_of", "step_words"]


async def errors_from_logits(logits: ArithmeticTensor, labels: ArithmeticTensor, head: Head) -> ArithmeticTensor:
    """δ = softmax(z) − y at 18 bits, from logits within the bound of this step. 11 rounds, 14 beyond 12
    classes."""
    return await refmpc.softmax(logits, PROBABILITY_BITS, head.high_bit) - labels


def logits_of(inputs: ArithmeticTensor, head: Head, scales: Scales) -> ArithmeticTensor | TwoHolder:
    """[a 1]·W̃, in the form that ``clipped_updates_from_logits`` takes: local."""
    if scales.low_round is not None and scales.one_output is None:
        return refmpc.matmul_public_held(inputs, head.words, head.logit_bits)
    return refmpc.matmul_public(inputs, head.words).reinterpret(head.logit_bits)


async def clipped_updates_from_logits(
    logits: ArithmeticTensor | TwoHolder,
    rows: SharedRows,
    head: Head,
    scales: Scales,
    class_weights: Sequence[float] = (),
) -> ArithmeticTensor:
    """u_j = c_j·(softmax(z_j) − y_j) of one layer, replicated, with ‖[h_j 1]‖·‖u_j‖ ≤ γ: 16 rounds, 19 beyond 12
    classes.

    A run that leaves no room for ``scales.low_round`` takes longer, and u is rounded. One output: ``one_output``.
    """
    if scales.one_output is not None:
        assert isinstance(logits, ArithmeticTensor) and head.wave is not None
        return await one_output.open_updates(logits, rows.labels, rows.norms, scales.one_output, head.wave)
    if scales.bounded_softmax is not None:
        assert isinstance(logits, ArithmeticTensor) and head.wave is not None
        return await bounded_softmax.clipped_updates(logits, rows.labels, scales.bounded_softmax, head.wave)
    if scales.low_round is not None:
        here = replace(scales.low_round, logit_bits=head.logit_bits, logit_bound=head.logit_bound)
        return await low_round.clipped_updates(logits, rows.labels, rows.norms, here, class_weights)
    assert isinstance(logits, ArithmeticTensor)
    errors = await errors_from_logits(logits, rows.labels, head)
    factor = await clip_factors([errors], [rows.embeddings], rows.norms, scales)
    return await clipped_updates(factor, errors)


async def layer_updates(
    rows: SharedRows, head: Head, scales: Scales, class_weights: Sequence[float]
) -> tuple[list[ArithmeticTensor], list[ArithmeticTensor]]:
    """[a 1] and u of every layer, first layer first, with factored gradients."""
    if head.hidden is not None:
        assert scales.smooth is not None
        return await hidden_updates(rows.embeddings, rows.labels, head.hidden, scales.smooth)
    logits = logits_of(rows.embeddings, head, scales)
    return [rows.embeddings], [await clipped_updates_from_logits(logits, rows, head, scales, class_weights)]


async def step_words(
    rows: SharedRows,
    head: Head,
    addend: np.ndarray,
    training: TrainingConfig,
    scales: Scales,
) -> list[Words]:
    """This server's words of every layer's noised gradient sum: nothing is opened yet.

    ``addend`` is what this server adds: its own row of filtered integer noise at the gradients' scale, and the
    constant that makes the cut unbiased, in the flat layout of ``vfl.gradients``.
    """
    cut, own = scales.truncated_bits, seal(addend).view(np.uint64)
    if training.gradients == "explicit":
        logits = refmpc.matmul_public(rows.embeddings, head.words).reinterpret(head.logit_bits)
        errors = await errors_from_logits(logits, rows.labels, head)
        flat, factor = await explicit_clip(rows.embeddings, errors, scales)
        return [refmpc.matmul_opening(factor.reshape(1, -1), flat, cut, own.reshape(1, -1))]
    inputs, updates = await layer_updates(rows, head, scales, training.class_weights)
    words, start = [], 0
    for left, update, layer in zip(inputs, updates, scales.layers, strict=True):
        shape = layer.fan_in + 1, layer.fan_out
        stop = start + shape[0] * shape[1]
        words.append(refmpc.matmul_opening(left.T, update, cut, own[start:stop].reshape(shape)))
        start = stop
    return words
