"""A step of one hidden layer from rows to clipped updates in 20 rounds with open weights, 25 with secret ones.

| open | secret | what |
|---|---|---|
| – | 1, 2 | sums of the hidden layer, cut |
| 1, 2 | 3, 4 | which of them are negative |
| 3 | 5 | a = max(0, sum), left at the holders |
| 4–12 | 6; 7–15 | (a replicated;) logits, softmax: p. Beside it ‖a‖, whether it is within the limit, and n_2 |
| 13 | 16 | δ_2 = cut(p − y), first half, and n_2·‖δ_2‖² |
| 13 | 17, 18 | (p − y)·W_2ᵀ (secret: δ_2·W_2ᵀ) times [sum ≥ 0], left at the holders |
| 14 | 19 | δ_1, first half, and n_1·‖δ_1‖² |
| 15–18 | 20–23 | clip factor of the sum q |
| 19, 20 | 24, 25 | u = C·δ of both layers; replicated again |

q is the exact integer n_1·‖δ_1‖² + n_2·‖δ_2‖² of the δ that u uses, so the contributions of a sample to both layers
together are within γ exactly (proofs §4.11). With open weights δ_1 is made of p − y before the cut: rounding changes
which function is clipped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import refmpc
from protocols.plan.hidden_scales import HiddenScales
from protocols.plan.scales import EMBEDDING_BITS, RESOLUTION_BITS, Scales
from refmpc import Additive, ArithmeticTensor
from refmpc.core.digest import digest, mix
from refmpc.core.integer_logs import ceil_log2
from refmpc.core.party import Segment
from refmpc.mathematics.probabilities import PROBABILITY_BITS
from refmpc.mathematics.scale_rows import begin_cut_and_square
from refmpc.primitives.arithmetic import matmul_summand
from refmpc.primitives.dealing import at_holders, row_segments

__all__ = ["secret_hidden_updates"]

Factors = tuple[list[ArithmeticTensor], list[ArithmeticTensor]]


async def secret_hidden_updates(
    embeddings: ArithmeticTensor,
    labels: ArithmeticTensor,
    norms: ArithmeticTensor,
    layers: Sequence[ArithmeticTensor],
    scales: Scales,
) -> Factors:
    """The same with weights on shares. 25 rounds, 28 beyond 12 classes."""
    chain, (first, second) = _chain(scales), layers
    dealers = row_segments(embeddings.party, len(embeddings))
    sums = await refmpc.matmul_truncate(embeddings, first, scales.weight_bits)
    high_bit = EMBEDDING_BITS + ceil_log2(chain.sum_bound) + 1
    active = ~await refmpc.is_negative(sums, 0, high_bit, dealers)
    outputs = await refmpc.replicate(await refmpc.gated(active, sums))
    logits = _product(_inputs(outputs), second, dealers)
    hidden, probabilities = await refmpc.gather(
        _limited(outputs, dealers, chain, chain.output_bound),
        refmpc.probabilities(logits, 2 * chain.logit_bound),
    )
    differences = probabilities.minus_shifted(at_holders(labels, dealers), PROBABILITY_BITS)
    q, rest = await begin_cut_and_square(differences, PROBABILITY_BITS - chain.delta_bits, hidden.norms)
    last = await rest
    back = await refmpc.gated(active, _product(last, second[:-1].T, dealers))
    first_q, first_rest = await begin_cut_and_square(back, back.fraction_bits - chain.delta_bits, norms)
    updates = await _clipped(hidden, _plus(q, first_q), first_rest, last, chain)
    return [embeddings, hidden.inputs], updates


def _chain(scales: Scales) -> HiddenScales:
    assert scales.hidden_chain is not None
    return scales.hidden_chain


# parts ---------------------------------------------------------------------------------------------


class _Outputs:
    """The hidden layer: [a 1], n_2 (0 and a unit beyond the limit), [within the limit] and minus its complement,
    additive."""

    def __init__(self, inputs: ArithmeticTensor, norms: ArithmeticTensor, within: Additive, beyond: Additive):
        self.inputs, self.norms, self.within, self.beyond = inputs, norms, within, beyond


def _inputs(outputs: ArithmeticTensor) -> ArithmeticTensor:
    """[a 1]."""
    ones = ArithmeticTensor.zeros(outputs.party, (len(outputs), 1), EMBEDDING_BITS) + 1.0
    return refmpc.concatenate([outputs, ones], axis=1)


async def _limited(
    outputs: ArithmeticTensor, dealers: list[Segment], chain: HiddenScales, output_bound: float
) -> _Outputs:
    """What the clip needs of a: 6 rounds, beside the softmax.

    [‖[a 1]‖² ≥ limit² + 1] is decided to a relative 2^-6 upwards; whatever it says in between, norms and factor go with
    it.
    """
    inputs = _inputs(outputs)
    squares = at_holders(await refmpc.dot(inputs, inputs), dealers)
    bits = squares.fraction_bits
    low = bits + ceil_log2(chain.norm_limit**2) - RESOLUTION_BITS
    threshold = (int(chain.norm_limit**2) + 1 << bits) + (1 << low)
    high = bits + 2 * ceil_log2(max(output_bound, chain.norm_limit) + 1.0) + 1
    rows = [([1, -1], True), ([1, -1], False), ([0, -1], False)]
    kept, within, beyond = await refmpc.weigh_reached(squares, [threshold], [low], high, rows)
    over, machine = chain.norms, outputs.party.machine
    words = machine.binary("multiply", kept.words, np.uint64(over.inverse))
    scaled = Additive(kept.party, words, dealers, over.cut + over.bits, mix(kept.history, over.inverse))
    norms = await refmpc.truncate_additive(scaled, over.cut) + 2.0**-over.bits
    return _Outputs(inputs, norms, within, beyond)


async def _clipped(
    hidden: _Outputs, q: Additive, first_rest: object, last: ArithmeticTensor, chain: HiddenScales
) -> list[ArithmeticTensor]:
    """u of both layers: clip factor of q, 0 beyond the limit, times δ. 6 rounds."""
    stopped = q.minus_shifted(hidden.beyond, chain.clip.stop)
    root = refmpc.clip_root(stopped, chain.clip_bound, True)
    first, factor = await refmpc.gather(first_rest, root)  # type: ignore[arg-type]
    # one unit less, so that it is never above, but not where it is 0
    less = factor.minus_shifted(hidden.within, chain.factor_cut)
    both = refmpc.concatenate([first, last], axis=1)
    updates = await refmpc.replicate(await refmpc.scale_rows(less, both, chain.factor_cut))
    return [updates[:, : chain.hidden], updates[:, chain.hidden :]]


def _product(x: ArithmeticTensor, y: ArithmeticTensor, dealers: list[Segment]) -> Additive:
    """Own summands of x@y."""
    words = x.party.machine.memory((len(x), y.shape[1]))
    matmul_summand(x, y, None, words)
    return refmpc.summands(x.party, words, x.fraction_bits + y.fraction_bits, dealers, of=[x, y])


def _plus(one: Additive, other: Additive) -> Additive:
    """The sum of two additive numbers of the same scale and dealers."""
    words = one.party.machine.binary("add", one.words, other.words)
    adds = one.dealer_adds or other.dealer_adds
    history = mix(digest(one), digest(other))
    return Additive(one.party, words, one.segments, one.fraction_bits, history, dealer_adds=adds)
