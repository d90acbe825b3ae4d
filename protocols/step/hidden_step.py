"""A step of hidden layers with public weights, from rows to clipped updates (proofs §4.11).

| one hidden layer, one logit | what |
|---|---|
| 1 | sums [h 1]·W_1 are held by two: words of φ and φ' |
| 2 | a replicated; φ' opened; outputs [a 1]·W_2 opened |
| 3 | what comes back, δ_2·W_2ᵀ, opened, times φ': δ_1; squares of δ_2 |
| 4 | squares of δ_1 |
| 5, 6 | q opened; F(q) opened, times δ of every layer: u |
| 7 | u replicated |

The noised sums are the eighth round. Each further layer is one round forward and one back. q is the sum of squares of
the very integers that u has, so what a record adds to all layers together is within γ exactly, for any weights and
rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

import refmpc
from accel.validate import require
from protocols.plan.bounded_softmax_scales import BoundedSoftmaxScales
from protocols.plan.scales import EMBEDDING_BITS
from protocols.plan.smooth_scales import (
    BACK_BITS,
    FACTOR,
    OUTPUT_BITS,
    SLOPE,
    SmoothScales,
    StepBounds,
    clip_series,
    waves,
)
from protocols.step.bounded_softmax import errors as softmax_errors
from protocols.step.public_weights import PublicLayer, rounded
from refmpc import Additive, ArithmeticTensor, Lifted, Party, Words
from refmpc.core.digest import digest, mix
from refmpc.mathematics.probabilities import PROBABILITY_BITS
from refmpc.mathematics.series import half_wave
from refmpc.primitives.dealing import FIRST, TwoHolder, at_holders, nothing
from vfl.hidden import WEIGHT_BITS

__all__ = ["HiddenWeights", "hidden_updates", "hidden_weights"]

FIRST_BITS = 16  # of W_1
LINK_BITS = 15, 16
LARGEST_SPREAD = 2.0**26  # of logits: they have 32 bits more


@dataclass(frozen=True)
class HiddenWeights:
    """Public weights as a step uses them: W_1 at ``FIRST_BITS``, the others at ``WEIGHT_BITS``, and without their bias
    turned around for the way back; their bounds; the wave of the outputs' function, or how far logits of a row
    differ."""

    first: np.ndarray
    others: tuple[np.ndarray, ...]
    back: tuple[np.ndarray, ...]
    bounds: StepBounds
    wave: tuple[int, int]
    spread: float

    def at(self, party: Party) -> HiddenWeights:
        """As public inputs of a recorded step."""
        public = party.machine.public
        others, back = (tuple(public(each) for each in group) for group in (self.others, self.back))
        return replace(self, first=public(self.first), others=others, back=back)


def hidden_weights(model: Sequence[PublicLayer], weight_bits: int, scales: SmoothScales) -> HiddenWeights:
    """The same at every server: integer arithmetic on public numbers, with the certificate of the clip."""
    first, *rest = (layer.values for layer in model)
    others = tuple(rounded(values, weight_bits - WEIGHT_BITS) for values in rest)
    bounds, link = StepBounds.of_weights(others, scales), scales.public.link(others[-1])
    spread = float(1 << (math.ceil(2 * scales.public.output_bound(others[-1])).bit_length()))
    require(
        scales.public.task != "classification" or scales.public.softmax is not None or spread <= LARGEST_SPREAD,
        "weights",
        f"logits up to {spread / 2:.3g}",
        f"logits up to {LARGEST_SPREAD / 2:.3g}",
        "the training diverges: lower the learning rate",
    )
    if scales.public.task == "classification" and scales.public.softmax is None:  # p·W lies modulo 2^64
        most = 64 - (PROBABILITY_BITS + WEIGHT_BITS - BACK_BITS)
        largest = max(kept.bits for kept in bounds.backs)
        require(
            largest <= most,
            "weights",
            f"gradients of a hidden layer up to 2^{largest - BACK_BITS - 1}",
            f"gradients of a hidden layer up to 2^{most - BACK_BITS - 1}",
            "the training diverges: lower the learning rate",
        )
    back = tuple(np.ascontiguousarray(layer[:-1].T) for layer in others)
    return HiddenWeights(rounded(first, weight_bits - FIRST_BITS), others, back, bounds, link, spread)


async def hidden_updates(
    embeddings: ArithmeticTensor, labels: ArithmeticTensor, weights: HiddenWeights, scales: SmoothScales
) -> tuple[list[ArithmeticTensor], list[ArithmeticTensor]]:
    """[a 1] and u of every layer, first layer first; [A 1]ᵀu has ``gradient_bits``. 7 rounds and 2 for each further
    hidden layer."""
    bounds = weights.bounds
    sums = refmpc.matmul_public_held(embeddings, weights.first, EMBEDDING_BITS + FIRST_BITS)
    inputs, slopes, delta = await _forward(sums, labels, weights, 0, scales)
    lifted, squares = await _backward(delta, slopes, weights)
    q = _weighed(squares, bounds)
    factor = await refmpc.series(q, clip_series(), clip_series().bits + FACTOR.range_bits)
    updates = await refmpc.gather(*(_update(factor, each, bounds, scales, depth) for depth, each in enumerate(lifted)))
    return [embeddings, *(_with_a_one(each) for each in inputs)], updates


async def _forward(
    sums: Additive | TwoHolder, labels: ArithmeticTensor, weights: HiddenWeights, depth: int, scales: SmoothScales
) -> tuple[list[ArithmeticTensor], list[Lifted], Additive]:
    """a of this layer and those behind it, their φ', and δ of the outputs."""
    outputs, slope = await refmpc.series_together(sums, waves(), 64)
    last, public = depth + 1 == len(weights.others), scales.public
    if last and public.softmax is not None:  # z_j − z_y takes a replicated z
        kept, replicated = await refmpc.gather(refmpc.open_kept(slope, SLOPE), refmpc.replicate(outputs))
        logits = refmpc.matmul_public(_with_a_one(replicated), weights.others[depth])
        logits = logits.reinterpret(OUTPUT_BITS + WEIGHT_BITS)
        bounded = BoundedSoftmaxScales(public.softmax, 24)
        return [replicated], [kept], await softmax_errors(logits, labels, bounded, weights.wave, 64, outputs.segments)
    following = _times_public(_with_one(outputs), weights.others[depth])

    async def rest() -> tuple[list[ArithmeticTensor], list[Lifted], Additive]:
        if not last:
            return await _forward(following, labels, weights, depth + 1, scales)
        return [], [], await _errors(following, labels, public.task, weights)

    kept, replicated, found = await refmpc.gather(refmpc.open_kept(slope, SLOPE), refmpc.replicate(outputs), rest())
    return [replicated, *found[0]], [kept, *found[1]], found[2]


async def _errors(outputs: Additive, labels: ArithmeticTensor, task: str, weights: HiddenWeights) -> Additive:
    """δ of the outputs: σ(z) − y, or a smooth bounded z − y: 1 round. softmax(z) − y: 9, 12 beyond 12 classes."""
    if task == "classification":
        found = await refmpc.probabilities(outputs, weights.spread)
        return found.minus_shifted(at_holders(labels, outputs.segments), found.fraction_bits)
    (held_bits, dealt_bits), wave = LINK_BITS, weights.wave
    link = half_wave(wave[0].bit_length() - 1, wave[1], held_bits=held_bits, dealt_bits=dealt_bits)
    shared = at_holders(labels, outputs.segments)
    if task == "regression":
        argument = outputs.minus_shifted(shared, outputs.fraction_bits - shared.fraction_bits)
        return await refmpc.series(argument, link.scaled(Fraction(2)).of_half_the_period())
    probabilities = await refmpc.series(outputs, link)
    return probabilities.minus_shifted(shared, probabilities.fraction_bits - shared.fraction_bits)


async def _backward(
    delta: Additive, slopes: Sequence[Lifted], weights: HiddenWeights
) -> tuple[list[Lifted], list[Additive]]:
    """δ of every layer, opened to be multiplied, and its exact squares, first layer first."""
    bounds, depth = weights.bounds, len(slopes)

    async def before() -> tuple[list[Lifted], list[Additive]]:
        if not slopes:
            return [], []
        back = _times_public(delta, weights.back[depth - 1])
        bits = SLOPE.fraction_bits + BACK_BITS + (64 - SLOPE.fraction_bits - BACK_BITS if depth > 1 else 0)
        if depth == 1:
            bits += bounds.deltas[0].range_bits
        own = await refmpc.open_product(back, bounds.backs[depth - 1], slopes[-1], bits)
        return await _backward(own, slopes[:-1], weights)

    kept = bounds.deltas[depth]
    (lifted, squares), (others, more) = await refmpc.gather(
        refmpc.open_squares(delta, kept, bounds.square_bits), before()
    )
    return [*others, lifted], [*more, squares]


def _weighed(squares: Sequence[Additive], bounds: StepBounds) -> Additive:
    """q over γ²·4^j: local."""
    party, machine, total = squares[0].party, squares[0].party.machine, None
    for each, word in zip(squares, bounds.square_words, strict=True):
        part = machine.binary("multiply", each.words, np.uint64(word))
        total = part if total is None else machine.binary("add", total, part)
    assert total is not None
    history = mix(3, *(digest(each) for each in squares), *bounds.square_words)
    return Additive(party, total, squares[0].segments, bounds.square_bits, history, bounds.square_bits)


async def _update(
    factor: Additive, delta: Lifted, bounds: StepBounds, scales: SmoothScales, depth: int
) -> ArithmeticTensor:
    """u = C·δ. 2 rounds."""
    left = OUTPUT_BITS if depth else EMBEDDING_BITS
    shift = scales.gradient_bits - left - bounds.update_bits
    exact = await refmpc.open_product(factor, FACTOR, delta, 64 - shift)
    words = exact.party.machine.binary("multiply", exact.words, np.uint64(1 << shift))
    history = mix(4, exact.history, shift)
    shifted = Additive(exact.party, words, exact.segments, scales.gradient_bits - left, history)
    return await refmpc.replicate(shifted)


def _with_a_one(outputs: ArithmeticTensor) -> ArithmeticTensor:
    """[a 1]."""
    ones = ArithmeticTensor.zeros(outputs.party, (len(outputs), 1), outputs.fraction_bits) + 1.0
    return refmpc.concatenate([outputs, ones], axis=1)


def _with_one(x: Additive) -> Additive:
    """[x 1]."""
    rows, columns = x.shape
    machine, words = x.party.machine, nothing(x.party, (rows, columns + 1))
    machine.call("copy", x.words, words[:, :columns])
    for segment in x.segments:
        if segment.role(x.party.id) == FIRST:
            machine.call("copy", np.uint64(1 << x.fraction_bits), words[segment.slice, columns])
    return Additive(x.party, words, x.segments, x.fraction_bits, mix(1, x.history), x.bits)


def _times_public(x: Additive, factor: Words | np.ndarray) -> Additive:
    """x@factor for public integers at ``WEIGHT_BITS``: local."""
    machine = x.party.machine
    words = machine.memory((1, len(x.words), factor.shape[1]))
    public = factor if isinstance(factor, Words) else machine.public(np.ascontiguousarray(factor))
    machine.call("matmul_each", x.words.reshape(1, *x.shape), public.view(np.uint64), words)
    history = mix(2, x.history, WEIGHT_BITS)
    return Additive(x.party, words[0], x.segments, x.fraction_bits + WEIGHT_BITS, history, x.bits)
