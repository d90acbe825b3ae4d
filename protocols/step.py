"""One training step on shares: forward, softmax, clip, backward with noise, update. Shared by all protocols.

The per-sample gradient of a linear layer is [h_j; 1] ⊗ δ_j, so neither it nor its norm is ever built: the batch needs one
forward product, the squared norms of δ, B clip factors and one backward product (DESIGN §5). Every server adds its own
noise to its own summand of the backward product, before the truncation that the DP proof asks for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

import refmpc
from protocols.scales import (
    EMBEDDING_BITS,
    GRADIENT_BITS,
    LOGIT_BITS,
    PROBABILITY_BITS,
    RELEASE_BITS,
    UPDATE_BITS,
    Scales,
)
from refmpc import ArithmeticTensor
from refmpc.normalise import MANTISSA_BITS
from vfl.twins.config import TrainingConfig

__all__ = [
    "SharedRows",
    "Weights",
    "clipped_updates",
    "explicit_gradient",
    "factored_gradient",
    "gradient_step",
    "logit_errors",
    "squared_norms",
    "step_cost",
]

NORM_CHUNK = 1 << 14  # rows whose norms are computed in one go


@dataclass
class SharedRows:
    """What the servers hold about the people: [H 1], one-hot labels, and n_j = (‖h_j‖²+1)/γ² rounded up."""

    embeddings: ArithmeticTensor
    labels: ArithmeticTensor
    norms: ArithmeticTensor

    def batch(self, rows: slice) -> SharedRows:
        """The rows of one step: views."""
        return SharedRows(self.embeddings[rows], self.labels[rows], self.norms[rows])


@dataclass
class Weights:
    """The global layer [W; b] and its momentum, on shares."""

    values: ArithmeticTensor
    velocity: ArithmeticTensor | None


async def squared_norms(embeddings: ArithmeticTensor, clip_norm: float, scales: Scales) -> ArithmeticTensor:
    """n_j = ‖[h_j 1]‖²/γ² at ``norm_bits``, never below the true value: once, when the embeddings arrive.

    2 rounds a chunk, 24 + 8 + 6·bits/8 bytes a row. 1/γ² is rounded up, and so is the truncation.
    """
    spare = math.floor(61 - 2 * EMBEDDING_BITS - math.log2(max(1.0, scales.norm_bound)))
    bits = min(20, spare)
    inverse = math.ceil(2.0**bits / clip_norm**2)
    pieces = []
    for start in range(0, len(embeddings), NORM_CHUNK):
        rows = embeddings[start : start + NORM_CHUNK]
        squares = await refmpc.dot(rows, rows)
        scaled = squares.scale_by_integers(inverse).reinterpret(2 * EMBEDDING_BITS + bits)
        pieces.append(await refmpc.truncate(scaled, scaled.fraction_bits - scales.norm_bits))
    return refmpc.concatenate(pieces) + 2.0**-scales.norm_bits


async def logit_errors(rows: SharedRows, weights: ArithmeticTensor, scales: Scales) -> ArithmeticTensor:
    """δ_j = softmax(z_j) − y_j at 18 bits. 4⌈log2 S⌉ + 22 rounds."""
    bits = EMBEDDING_BITS + scales.weight_bits - LOGIT_BITS
    logits = await refmpc.matmul_truncate(rows.embeddings, weights, bits)
    probabilities = await refmpc.softmax(logits, PROBABILITY_BITS, scales.logit_high_bit)
    return probabilities - rows.labels


async def clipped_updates(errors: ArithmeticTensor, norms: ArithmeticTensor, scales: Scales) -> ArithmeticTensor:
    """u_j = c_j·δ_j at 32 bits with c_j ≤ 1/max(1, ‖g_j‖/γ). 22 rounds.

    q_j = n_j·‖δ_j‖² is computed from the exact ‖δ_j‖² and rounded up, so the clip factor can only be too small.
    """
    squares = await refmpc.dot(errors, errors)
    q_bits = squares.fraction_bits + norms.fraction_bits
    q = await refmpc.multiply_truncate(squares, norms, q_bits - MANTISSA_BITS)
    factor = await refmpc.clip_factor(q + 2.0**-MANTISSA_BITS, scales.clip_bound)
    bits = MANTISSA_BITS + PROBABILITY_BITS - UPDATE_BITS
    return await refmpc.multiply_truncate(factor.reshape(-1, 1), errors, bits)


async def factored_gradient(
    rows: SharedRows, errors: ArithmeticTensor, addend: np.ndarray, training: TrainingConfig, scales: Scales
) -> ArithmeticTensor:
    """[H 1]ᵀ·diag(c)·Δ + addend, truncated: no per-sample gradient is ever built."""
    updates = await clipped_updates(errors, rows.norms, scales)
    return await refmpc.matmul_truncate(rows.embeddings.T, updates, scales.truncated_bits, addend=addend)


EXPLICIT_BITS = (
    GRADIENT_BITS - MANTISSA_BITS
)  # of a per-sample gradient: times the clip factor it has the noise's scale


async def explicit_gradient(
    rows: SharedRows, errors: ArithmeticTensor, addend: np.ndarray, training: TrainingConfig, scales: Scales
) -> ArithmeticTensor:
    """The same sum as the paper computes it: all B·(d+1)·S entries of the per-sample gradients, their norms, their clip.

    The reference for ``factored_gradient``, at about 60 times its bytes. The norm is that of the rounded gradient itself,
    so the clip needs no slack.
    """
    batch, width = rows.embeddings.shape
    classes = errors.shape[1]
    bits = EMBEDDING_BITS + PROBABILITY_BITS - EXPLICIT_BITS
    gradients = await refmpc.multiply_truncate(
        rows.embeddings.reshape(batch, width, 1), errors.reshape(batch, 1, classes), bits
    )
    flat = gradients.reshape(batch, width * classes)
    squares = await refmpc.dot(flat, flat)
    spare = math.floor(61 - 2 * EXPLICIT_BITS - math.log2(4 * scales.norm_bound))
    inverse = math.ceil(2.0 ** min(20, spare) / training.clip_norm**2)
    scaled = squares.scale_by_integers(inverse).reinterpret(2 * EXPLICIT_BITS + min(20, spare))
    q = await refmpc.truncate(scaled, scaled.fraction_bits - MANTISSA_BITS)
    factor = await refmpc.clip_factor(q + 2.0**-MANTISSA_BITS, scales.clip_bound)
    total = await refmpc.matmul_truncate(
        factor.reshape(1, batch), flat, scales.truncated_bits, addend=addend.reshape(1, -1)
    )
    return total.reshape(width, classes)


async def gradient_step(
    rows: SharedRows,
    weights: Weights,
    noise: np.ndarray,
    learning_rate: float,
    training: TrainingConfig,
    scales: Scales,
) -> Weights:
    """One step of SGD: v ← βv + Σ_j c_j g_j + noise, W ← αW − (η/B)·v.

    ``noise`` is this server's own row of filtered integer noise at 46 bits, or zeros. Momentum is merged into the
    truncation: β·v joins the summand of the backward product as a public multiple of this server's share of v.
    """
    momentum, weight_decay = training.momentum, training.weight_decay
    errors = await logit_errors(rows, weights.values, scales)
    addend = noise.reshape(weights.values.shape).view(np.uint64)
    if weights.velocity is not None:
        factor = np.uint64(round(momentum * 2.0 ** (GRADIENT_BITS - RELEASE_BITS)))
        addend = np.add(addend, weights.velocity.first * factor)
    gradient = factored_gradient if training.gradients == "factored" else explicit_gradient
    velocity = await gradient(rows, errors, addend, training, scales)
    values = weights.values
    if weight_decay != 1.0:
        bits = 16
        decayed = values.scale_by_integers(round(weight_decay * 2**bits)).reinterpret(scales.weight_bits + bits)
        values = await refmpc.truncate(decayed, bits)
    change = velocity.scale_by_integers(scales.rate_word(learning_rate)).reinterpret(scales.weight_bits)
    return Weights(values - change, velocity if weights.velocity is not None else None)


def step_cost(training: TrainingConfig, width: int, classes: int, scales: Scales) -> refmpc.Cost:
    """The declared cost of ``gradient_step`` for these sizes; nothing runs."""

    def shaped(*shape: int, bits: int) -> ArithmeticTensor:
        return ArithmeticTensor(None, np.broadcast_to(np.uint64(0), (2, *shape)), bits)  # type: ignore[arg-type]

    batch = training.batch_size
    rows = shaped(batch, width + 1, bits=EMBEDDING_BITS)
    weights = shaped(width + 1, classes, bits=scales.weight_bits)
    errors = shaped(batch, classes, bits=PROBABILITY_BITS)
    column = shaped(batch, bits=MANTISSA_BITS)
    total = refmpc.matmul_truncate.cost(rows, weights, EMBEDDING_BITS + scales.weight_bits - LOGIT_BITS)
    total += refmpc.softmax.cost(shaped(batch, classes, bits=LOGIT_BITS), PROBABILITY_BITS, scales.logit_high_bit)
    if training.gradients == "factored":
        total += refmpc.dot.cost(errors, errors)
        total += refmpc.multiply_truncate.cost(column, column, 2 * PROBABILITY_BITS + scales.norm_bits - MANTISSA_BITS)
        total += refmpc.clip_factor.cost(column, scales.clip_bound)
        total += refmpc.multiply_truncate.cost(
            column.reshape(-1, 1), errors, MANTISSA_BITS + PROBABILITY_BITS - UPDATE_BITS
        )
        total += refmpc.matmul_truncate.cost(rows.T, shaped(batch, classes, bits=UPDATE_BITS), scales.truncated_bits)
    else:
        flat = shaped(batch, (width + 1) * classes, bits=EXPLICIT_BITS)
        spare = math.floor(61 - 2 * EXPLICIT_BITS - math.log2(4 * scales.norm_bound))
        total += refmpc.multiply_truncate.cost(flat, flat, EMBEDDING_BITS + PROBABILITY_BITS - EXPLICIT_BITS)
        total += refmpc.dot.cost(flat, flat)
        total += refmpc.truncate.cost(column, 2 * EXPLICIT_BITS + min(20, spare) - MANTISSA_BITS)
        total += refmpc.clip_factor.cost(column, scales.clip_bound)
        total += refmpc.matmul_truncate.cost(column.reshape(1, -1), flat, scales.truncated_bits)
    if training.weight_decay != 1.0:
        total += refmpc.truncate.cost(weights, 16)
    return total
