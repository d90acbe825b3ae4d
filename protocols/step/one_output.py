"""One training step of a model with one output: a logit of two classes, or a number. The clip is one bounded function
(proofs §4.9).

| rounds | open weights | secret weights |
|---|---|---|
| v, linear in output z = [h 1]·w and label: held by two, or opened; words of F beside it | 1 | 1 |
| u = λ·F(v), replicated | 1 | 1 |
| backward with noise: opened, or cut | 1 | 2 |

λ = ±γ/‖[h 1]‖ is made once, when the rows arrive. Labels are a column of 0 or 1, or of targets.
"""

from __future__ import annotations

import refmpc
from protocols.plan.one_output_scales import OneOutputScales
from protocols.plan.scales import EMBEDDING_BITS, Scales
from protocols.plan.squared_norm_ratio import squares_over_clip
from refmpc import Additive, ArithmeticTensor
from refmpc.mathematics.normalise import MANTISSA_BITS
from refmpc.primitives.arithmetic import matmul_summand
from refmpc.primitives.dealing import TwoHolder, held, row_segments
from vfl.losses import WEIGHT_BITS, relative_weights

__all__ = ["multipliers", "open_updates", "secret_updates"]


async def multipliers(
    exact_squares: ArithmeticTensor, labels: ArithmeticTensor, scales: OneOutputScales
) -> ArithmeticTensor:
    """λ_j = γ/‖[h_j 1]‖ from the exact ‖[h_j 1]‖², never beyond the true value; times the class weight over the
    largest, and negative for the second of two classes. 8 rounds, one more for a sign and one for class weights.

    1/‖[h_j 1]‖ ≤ 1 is never too large, γ and the class weight are rounded down, and the truncation's unit is taken off.
    """
    squares, label = await squares_over_clip(exact_squares, scales.lengths), labels.reshape(len(labels))
    inverse, more = await refmpc.clip_factor(squares, max(2.0, scales.lengths.largest)), 0
    if scales.class_weights:
        first, second = (int(word) for word in relative_weights(scales.class_weights))
        weight = label.scale_by_integers(second - first).reinterpret(WEIGHT_BITS) + first * 2.0**-WEIGHT_BITS
        inverse, more = await refmpc.multiply(inverse, weight), WEIGHT_BITS
    exact = inverse.scale_by_integers(scales.clip_word).reinterpret(MANTISSA_BITS + scales.clip_bits + more)
    found = await refmpc.truncate(exact, scales.cut + more) - 2.0**-scales.multiplier_bits
    return found if scales.task == "regression" else await refmpc.multiply(found, 1 - label * 2)


async def _updates(
    argument: Additive | TwoHolder, multiplier: ArithmeticTensor, scales: OneOutputScales, wave: tuple[int, int]
) -> ArithmeticTensor:
    """u_j = λ_j·F(v_j) as a column, with ‖[h_j 1]‖·|u_j| ≤ γ exactly. 2 rounds."""
    factor = held(multiplier.reshape(-1, 1), argument.segments)
    return await refmpc.replicate(await refmpc.series_times(argument, scales.function(wave), factor))


async def open_updates(
    outputs: ArithmeticTensor,
    labels: ArithmeticTensor,
    multiplier: ArithmeticTensor,
    scales: OneOutputScales,
    wave: tuple[int, int],
) -> ArithmeticTensor:
    """u from outputs [H 1]·w of public weights, which are replicated: nothing is opened. 2 rounds."""
    k, of_label, bits = scales.argument_words(outputs.fraction_bits, labels.fraction_bits, wave)
    scaled = outputs.scale_by_integers(k).reinterpret(bits)
    argument = (scaled + labels.scale_by_integers(of_label).reinterpret(bits)).reshape(len(labels))
    return await _updates(held(argument, row_segments(labels.party, len(labels))), multiplier, scales, wave)


async def secret_updates(
    embeddings: ArithmeticTensor,
    weights: ArithmeticTensor,
    labels: ArithmeticTensor,
    multiplier: ArithmeticTensor,
    scales: Scales,
) -> ArithmeticTensor:
    """u from secret weights: the servers' own summands of [H 1]·w are opened. 2 rounds."""
    own = scales.one_output
    assert own is not None
    wave, party = own.public.wave(scales.logit_bound), embeddings.party
    k, of_label, bits = own.argument_words(EMBEDDING_BITS + scales.weight_bits, labels.fraction_bits, wave)
    scaled, product = weights.scale_by_integers(k), party.machine.memory((len(embeddings), 1))
    matmul_summand(embeddings, scaled, None, product)
    outputs = refmpc.summands(party, product, bits, of=[embeddings, scaled])
    argument = outputs.minus(labels.scale_by_integers(-of_label).reinterpret(bits)).reshape(len(labels))
    return await _updates(argument, multiplier, own, wave)
