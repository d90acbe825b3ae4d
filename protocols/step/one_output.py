"""One training step of a model with one output: a logit of two classes, or a number. The clip is a clamp (proofs §4.9).

| rounds | binary | regression |
|---|---|---|
| output z = [h 1]·w: opened with the order, or cut | 9 with sigmoid | 2 (secret weights), 0 (open) |
| δ = p − y cut to 32 bits | 2 | 0 |
| u = clamp(δ, ±b), b = γ/‖[h 1]‖ from the upload | 4 | 4 |
| backward with noise: cut, or opened | 2 or 1 | 2 or 1 |

In all 17 or 16 rounds for two classes, 8 or 5 for a number. sigmoid(z) is the softmax of (z, 0), of which one column is
kept. Labels are a column of 0 or 1, or of targets; class weights multiply δ on the way (``refmpc.probabilities``).
"""

from __future__ import annotations

from collections.abc import Sequence

import refmpc
from protocols.plan.one_output_scales import RESOLUTION_BITS, OneOutputScales
from protocols.plan.scales import EMBEDDING_BITS, UPDATE_BITS, Scales
from protocols.step.class_weights import row_weights, weighted_labels
from protocols.step.squared_norm_ratio import squares_over_clip
from refmpc import Additive, ArithmeticTensor
from refmpc.mathematics.normalise import MANTISSA_BITS
from refmpc.primitives.arithmetic import matmul_summand

__all__ = ["clamped_updates", "clip_bounds", "clip_bounds_of_squares", "secret_output", "with_zero_column"]

UNIT = 2.0**-UPDATE_BITS


async def clip_bounds(embeddings: ArithmeticTensor, scales: OneOutputScales) -> ArithmeticTensor:
    """b_j = γ/‖[h_j 1]‖ at 32 bits, never above the true value: once, when the embeddings arrive. 9 rounds."""
    return await clip_bounds_of_squares(await refmpc.dot(embeddings, embeddings), scales)


async def clip_bounds_of_squares(exact_squares: ArithmeticTensor, scales: OneOutputScales) -> ArithmeticTensor:
    """``clip_bounds`` from the exact ‖[h_j 1]‖². 8 rounds.

    1/‖[h_j 1]‖ ≤ 1 is never too large, γ is rounded down, and the truncation's unit is taken off.
    """
    squares = await squares_over_clip(exact_squares, scales.lengths)
    inverse = await refmpc.clip_factor(squares, max(2.0, scales.lengths.largest))
    exact = inverse.scale_by_integers(scales.clip_word).reinterpret(MANTISSA_BITS + scales.clip_bits)
    return await refmpc.truncate(exact, scales.cut) - UNIT


def with_zero_column(values: ArithmeticTensor) -> ArithmeticTensor:
    """(z, 0): a softmax of these is the sigmoid of z."""
    zeros = ArithmeticTensor.zeros(values.party, values.shape, values.fraction_bits)
    return refmpc.concatenate([values, zeros], axis=1)


async def _clamped(errors: ArithmeticTensor, bounds: ArithmeticTensor, high_bit: int) -> ArithmeticTensor:
    """δ within ±b, at 32 bits, never beyond: δ − max(0, δ − b) + max(0, −δ − b). 4 rounds.

    Compared to 2^-20: a δ that close below b may become b, which is within the clip too.
    """
    beyond = refmpc.concatenate([errors - bounds, -errors - bounds])
    excess = await refmpc.relu(beyond, RESOLUTION_BITS, high_bit)
    return errors - excess[: len(errors)] + excess[len(errors) :]


async def secret_output(
    embeddings: ArithmeticTensor, weights: ArithmeticTensor, scales: Scales
) -> Additive | ArithmeticTensor:
    """[H 1]·w from secret weights: summands of (z, 0) for two classes, or the number itself at 32 bits. 0 or 2
    rounds."""
    assert scales.one_output is not None
    bits, party = EMBEDDING_BITS + scales.weight_bits, embeddings.party
    if scales.one_output.task == "regression":
        return await refmpc.matmul_truncate(embeddings, weights, bits - UPDATE_BITS)
    product = party.machine.memory((len(embeddings), 2))
    both = with_zero_column(weights)
    matmul_summand(embeddings, both, None, product)
    return refmpc.summands(party, product, bits, of=[embeddings, both])


async def clamped_updates(
    output: Additive | ArithmeticTensor,
    labels: ArithmeticTensor,
    bounds: ArithmeticTensor,
    scales: OneOutputScales,
    output_bound: float,
    class_weights: Sequence[float] = (),
) -> ArithmeticTensor:
    """u_j = clamp(δ_j, ±b_j) as a column at 32 bits, with ‖[h_j 1]‖·|u_j| ≤ γ exactly. 4 rounds, 15 for two classes.

    ``output``: (z, 0) for two classes, z for a number, within ``output_bound``. Errors: δ within that of
    ``refmpc.probabilities`` and a unit (two classes), or exact; b as in ``clip_bounds``.
    """
    if scales.task == "regression":
        assert isinstance(output, ArithmeticTensor)
        errors = output.rescale(UPDATE_BITS) - labels.rescale(UPDATE_BITS)
    else:
        weights = row_weights(labels, class_weights)
        p = await refmpc.probabilities(output, output_bound, 1, weights)
        delta = p.minus(weighted_labels(labels, class_weights))
        errors = await refmpc.truncate_additive(delta, delta.fraction_bits - UPDATE_BITS)
    return await _clamped(errors, bounds.reshape(-1, 1), scales.high_bit(output_bound))
