"""One training step on shares: forward, softmax, clip, backward with noise, update. Shared by all protocols.

The per-sample gradient of a linear layer is [h_j; 1] ⊗ δ_j, so neither it nor its norm is ever built: the batch needs
one forward product, the squared norms of δ, B clip factors and one backward product (proofs §4.1). Every server adds
its own noise to its own summand of the backward product, before the truncation that the DP proof asks for.

An MLP has such a gradient for every layer, ‖g_j‖² = Σ_l (‖a_{l−1,j}‖²+1)·‖δ_{l,j}‖², and one clip factor for all. A
sample whose hidden norms leave the public limit contributes nothing: see ``protocols.plan.scales`` for why, and for
the proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import refmpc
from protocols.plan.scales import (
    DECAY_BITS,
    EMBEDDING_BITS,
    EXPLICIT_BITS,
    LOGIT_BITS,
    PROBABILITY_BITS,
    LayerScales,
    Scales,
)
from protocols.plan.squared_norm_ratio import norms_over_clip
from protocols.step import bounded_softmax, low_round, one_output
from protocols.step.clip import clip_factors, clipped_updates, squared_norms
from protocols.step.hidden_chain import secret_hidden_updates
from refmpc import ArithmeticTensor, Party, TwoHolderBits, Words, seal
from refmpc.primitives.arithmetic import matmul_summand
from vfl.training import TrainingConfig

__all__ = [
    "SharedRows",
    "Weights",
    "explicit_clip",
    "explicit_gradient",
    "factored_gradients",
    "gradient_step",
    "hidden_layer",
    "layer_factors",
    "linear_updates",
    "logit_errors",
    "own_addends",
    "rate_input",
    "squared_norms",
    "updated",
    "written_out",
]


@dataclass
class SharedRows:
    """What the servers hold about the people: [H 1], labels (one-hot; one column if there is one output), and of the
    norms n_j = ‖[h_j 1]‖²/γ² rounded up, or with one output λ_j = ±γ/‖[h_j 1]‖ rounded towards zero."""

    embeddings: ArithmeticTensor
    labels: ArithmeticTensor
    norms: ArithmeticTensor

    def batch(self, rows: slice) -> SharedRows:
        """The rows of one step: views."""
        return SharedRows(self.embeddings[rows], self.labels[rows], self.norms[rows])


@dataclass
class Weights:
    """One layer [W; b] of the global model and its momentum, on shares."""

    values: ArithmeticTensor
    velocity: ArithmeticTensor | None


# forward -----------------------------------------------------------------------------------------


async def hidden_layer(
    inputs: ArithmeticTensor, weights: ArithmeticTensor, scales: Scales, layer: LayerScales
) -> tuple[ArithmeticTensor, TwoHolderBits]:
    """[a 1] with a = max(0, [a' 1]·W), and the bits that say where the sum was not negative. 6 rounds."""
    sums = await refmpc.matmul_truncate(inputs, weights, scales.weight_bits)
    active = ~await refmpc.is_negative(sums, 0, layer.sum_high_bit)
    outputs = await refmpc.select(active, sums)
    ones = ArithmeticTensor.zeros(inputs.party, (len(inputs), 1), EMBEDDING_BITS) + 1.0
    return refmpc.concatenate([outputs, ones], axis=1), active


async def logit_errors(rows: SharedRows, weights: ArithmeticTensor, scales: Scales) -> ArithmeticTensor:
    """δ_j = softmax(z_j) − y_j at 18 bits. 13 rounds, 16 beyond 12 classes."""
    bits = EMBEDDING_BITS + scales.weight_bits - LOGIT_BITS
    logits = await refmpc.matmul_truncate(rows.embeddings, weights, bits)
    probabilities = await refmpc.softmax(logits, PROBABILITY_BITS, scales.logit_high_bit)
    return probabilities - rows.labels


# backward ----------------------------------------------------------------------------------------


async def hidden_errors(
    errors: ArithmeticTensor,
    layers: Sequence[Weights],
    active: Sequence[TwoHolderBits],
    scales: Scales,
) -> list[ArithmeticTensor]:
    """δ_l of all layers, first layer first, from that of the last: δ_l = (δ_{l+1} W_{l+1}ᵀ)·[a_l > 0]. 4 rounds a
    layer."""
    found = [errors]
    for depth in range(len(layers) - 1, 0, -1):
        cut = found[0].fraction_bits + scales.weight_bits - scales.layers[depth - 1].error_bits
        through = await refmpc.matmul_truncate(found[0], layers[depth].values[:-1].T, cut)
        found.insert(0, await refmpc.select(active[depth - 1], through))
    return found


async def layer_factors(
    rows: SharedRows, layers: Sequence[Weights], scales: Scales
) -> tuple[list[ArithmeticTensor], list[ArithmeticTensor]]:
    """[a 1] and δ of every layer, first layer first: forward, softmax, and back through the weights."""
    inputs, active = [rows.embeddings], []
    for depth, weights in enumerate(layers[:-1]):
        outputs, bits = await hidden_layer(inputs[-1], weights.values, scales, scales.layers[depth])
        inputs.append(outputs)
        active.append(bits)
    last = SharedRows(inputs[-1], rows.labels, rows.norms)
    return inputs, await hidden_errors(await logit_errors(last, layers[-1].values, scales), layers, active, scales)


async def factored_gradients(
    inputs: Sequence[ArithmeticTensor],
    errors: Sequence[ArithmeticTensor],
    norms: ArithmeticTensor,
    addends: Sequence[np.ndarray],
    scales: Scales,
) -> list[ArithmeticTensor]:
    """[A 1]ᵀ·diag(c)·Δ + addend of every layer, truncated: no per-sample gradient is ever built."""
    factor = await clip_factors(errors, inputs, norms, scales)
    updates = await refmpc.gather(*(clipped_updates(factor, delta) for delta in errors))
    return await _backward(inputs, [update.rescale(scales.update_bits) for update in updates], addends, scales)


async def _backward(
    inputs: Sequence[ArithmeticTensor],
    updates: Sequence[ArithmeticTensor],
    addends: Sequence[np.ndarray],
    scales: Scales,
) -> list[ArithmeticTensor]:
    """[A 1]ᵀ·U + addend of every layer, truncated. 2 rounds."""
    products = (
        refmpc.matmul_truncate(rows.T, update, scales.truncated_bits, addend=addend)
        for rows, update, addend in zip(inputs, updates, addends, strict=True)
    )
    return await refmpc.gather(*products)


async def linear_updates(
    rows: SharedRows, weights: ArithmeticTensor, scales: Scales, class_weights: Sequence[float] = ()
) -> ArithmeticTensor:
    """u_j = c_j·(softmax([h_j 1]·W) − y_j) of one layer, exactly within the clip: 16 rounds, 19 beyond 12 classes;
    with one output 2."""
    if scales.one_output is not None:
        return await one_output.secret_updates(rows.embeddings, weights, rows.labels, rows.norms, scales)
    if scales.bounded_softmax is not None:
        exact = await refmpc.matmul(rows.embeddings, weights)
        wave = scales.bounded_softmax.public.wave(scales.logit_bound)
        return await bounded_softmax.clipped_updates(exact, rows.labels, scales.bounded_softmax, wave)
    assert scales.low_round is not None
    embeddings, party = rows.embeddings, rows.embeddings.party
    product = party.machine.memory((len(embeddings), weights.shape[1]))
    matmul_summand(embeddings, weights, None, product)
    logits = refmpc.summands(party, product, scales.low_round.logit_bits, of=[embeddings, weights])
    return await low_round.clipped_updates(logits, rows.labels, rows.norms, scales.low_round, class_weights)


async def written_out(embeddings: ArithmeticTensor, errors: ArithmeticTensor) -> ArithmeticTensor:
    """[h_j 1] ⊗ δ_j of every sample, flat, (B×(d+1)S) at 20 bits. 2 rounds."""
    batch, width = embeddings.shape
    cut = EMBEDDING_BITS + PROBABILITY_BITS - EXPLICIT_BITS
    found = await refmpc.multiply_truncate(embeddings.reshape(batch, width, 1), errors.reshape(batch, 1, -1), cut)
    return found.reshape(batch, -1)


async def explicit_clip(
    embeddings: ArithmeticTensor, errors: ArithmeticTensor, scales: Scales
) -> tuple[ArithmeticTensor, ArithmeticTensor]:
    """The per-sample gradients written out, and their clip factors. 23 rounds."""
    assert scales.written_out is not None
    flat = await written_out(embeddings, errors)
    return flat, await refmpc.clip_factor(await norms_over_clip(flat, scales.written_out), scales.clip_bound)


async def explicit_gradient(
    embeddings: ArithmeticTensor, errors: ArithmeticTensor, addend: np.ndarray, scales: Scales
) -> ArithmeticTensor:
    """The same sum as the paper computes it: all B·(d+1)·S entries of the per-sample gradients, their norms, their
    clip.

    The reference for ``factored_gradients``, one layer only, at about 60 times its bytes. The norm is that of the
    rounded gradient itself, so the clip needs no slack.
    """
    flat, factor = await explicit_clip(embeddings, errors, scales)
    total = await refmpc.matmul_truncate(
        factor.reshape(1, -1), flat, scales.truncated_bits, addend=addend.reshape(1, -1)
    )
    return total.reshape(*addend.shape)


async def gradient_step(
    rows: SharedRows,
    layers: Sequence[Weights],
    noise: np.ndarray,
    learning_rate: float | Words,
    training: TrainingConfig,
    scales: Scales,
) -> list[Weights]:
    """One step of SGD on all layers: v ← βv + Σ_j c_j g_j + noise, W ← αW − (η/B)·v.

    ``learning_rate`` is η, or in a recorded step, whose public numbers are fixed, the word of η/B (``rate_input``).

    ``noise`` is this server's own row of filtered integer noise at 46 bits, or zeros, in the flat layout of
    ``vfl.gradients``: layer after layer; it is lifted to the scale of the gradients. Momentum is merged into the
    truncation: β·v joins the summand of the backward product as a public multiple of this server's share of v. One
    layer: 18 rounds where ``scales.low_round`` fits, 4 with one output.
    """
    addends = own_addends(noise, layers, training.momentum, scales)
    if scales.low_round is not None or scales.bounded is not None:
        update = await linear_updates(rows, layers[0].values, scales, training.class_weights)
        product = refmpc.matmul_truncate(rows.embeddings.T, update, scales.truncated_bits, addend=addends[0])
        return await updated(layers, [await product], learning_rate, training, scales)
    if scales.hidden_chain is not None:
        matrices = [weights.values for weights in layers]
        factors = await secret_hidden_updates(rows.embeddings, rows.labels, rows.norms, matrices, scales)
        products = _backward(*factors, addends, scales)
        return await updated(layers, await products, learning_rate, training, scales)
    inputs, errors = await layer_factors(rows, layers, scales)

    # clip, backward with noise
    if training.gradients == "factored":
        velocities = await factored_gradients(inputs, errors, rows.norms, addends, scales)
    else:
        velocities = [await explicit_gradient(rows.embeddings, errors[0], addends[0], scales)]

    # update
    return await updated(layers, velocities, learning_rate, training, scales)


def rate_input(party: Party, learning_rate: float, scales: Scales) -> np.ndarray:
    """The learning rate as an input of a recorded step: the ring word of η/B, public, an array of one."""
    return party.machine.public([scales.rate_word(learning_rate) % 2**64], np.uint64)


async def updated(
    layers: Sequence[Weights],
    velocities: Sequence[ArithmeticTensor],
    learning_rate: float | Words,
    training: TrainingConfig,
    scales: Scales,
) -> list[Weights]:
    """W ← αW − (η/B)·v: local and exact, 1 round if weights decay."""
    values = await refmpc.gather(*(_decayed(weights.values, training.weight_decay) for weights in layers))
    word = learning_rate if isinstance(learning_rate, Words) else scales.rate_word(learning_rate)
    return [
        Weights(
            value - velocity.scale_by_integers(word).reinterpret(scales.weight_bits),
            velocity if weights.velocity is not None else None,
        )
        for value, velocity, weights in zip(values, velocities, layers, strict=True)
    ]


def own_addends(noise: np.ndarray, layers: Sequence[Weights], momentum: float, scales: Scales) -> list[Words]:
    """This server's own summand of every layer's sum: its slice of the noise, and β times its share of the momentum."""
    machine, words = layers[0].values.party.machine, seal(noise).view(np.uint64)
    if scales.noise_shift:
        words = machine.binary("multiply", words, np.uint64(1 << scales.noise_shift))
    found, start = [], 0
    for weights in layers:
        addend = words[start : start + weights.values.size].reshape(weights.values.shape)
        if weights.velocity is not None:
            factor = np.uint64(round(momentum * 2.0**scales.truncated_bits))
            addend = machine.binary("add", addend, machine.binary("multiply", weights.velocity.first, factor))
        found.append(addend)
        start += weights.values.size
    return found


async def _decayed(values: ArithmeticTensor, weight_decay: float) -> ArithmeticTensor:
    """α·W. 1 round, none if α = 1."""
    if weight_decay == 1.0:
        return values
    decayed = values.scale_by_integers(round(weight_decay * 2**DECAY_BITS))
    return await refmpc.truncate(decayed.reinterpret(values.fraction_bits + DECAY_BITS), DECAY_BITS)
