"""From logits to clipped updates in 16 rounds (19 beyond 12 classes): rounds 1 to 16 of an 18-round step.

| rounds | what |
|---|---|
| 1–3 | open z (if it is additive), the coarse maximum of every row |
| 4, 5 | e^(z − max) |
| 6, 7 | octave of Σe; e cut to 20 bits |
| 8, 9 | 1/Σe by a spline; p |
| 10 | first half of δ = cut(p − y), and q = n·Σδ² |
| 11 | second half; open q, thermometer |
| 12–14 | octave of q, spline: the clip factor |
| 15, 16 | u = C·δ; replicated again |

With open weights z is held by two (shares of H times public integers): nothing is opened in round 1, the rest is the
same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import refmpc
from protocols.plan.low_round_scales import LowRoundScales
from protocols.step.class_weights import row_weights, weighted_labels
from refmpc import Additive, ArithmeticTensor, TwoHolder
from refmpc.mathematics.scale_rows import begin_cut_and_square

__all__ = ["clipped_updates", "clipped_updates_cost"]


async def clipped_updates(
    logits: Additive | ArithmeticTensor | TwoHolder,
    labels: ArithmeticTensor,
    norms: ArithmeticTensor,
    scales: LowRoundScales,
    class_weights: Sequence[float] = (),
) -> ArithmeticTensor:
    """u_j = c_j·w_j·(softmax(z_j) − y_j) for every row, replicated at ``scales.update_bits``, with sqrt(n_j)·‖u_j‖ ≤ 1
    exactly.

    ``logits`` are this server's summands of [H 1]·W (``refmpc.summands(party, matmul_summand(…), bits)``), or
    replicated or held by two; ``labels`` one-hot, ``norms`` n_j at ``scales.norm_bits``, w_j the weight of its class.
    16 rounds, 19 beyond 12 classes. Errors: δ within that of ``refmpc.probabilities`` and one unit, c_j too small by at
    most ``scales.clip_loss``, u exact from there.
    """
    weights = row_weights(labels, class_weights)
    probabilities = await refmpc.probabilities(logits, scales.spread, None, weights)
    errors = probabilities.minus(weighted_labels(labels, class_weights))
    q, cut = await begin_cut_and_square(errors, scales.cut_bits, norms)
    delta, factor = await refmpc.gather(cut, refmpc.clip_root(q, scales.clip_bound))
    updates = await refmpc.scale_rows(factor, delta, scales.factor_cut, margin=1)
    return await refmpc.replicate(updates)


def clipped_updates_cost(batch: int, scales: LowRoundScales, *, opens: bool) -> refmpc.Cost:
    """Cost of ``clipped_updates``; ``opens`` if the logits are additive."""

    def additive(*shape: int, bits: int) -> Additive:
        return Additive(None, np.broadcast_to(np.uint64(0), shape), [], bits, 0)  # type: ignore[arg-type]

    def tensor(*shape: int, bits: int) -> ArithmeticTensor:
        return ArithmeticTensor(None, np.broadcast_to(np.uint64(0), (2, *shape)), bits)  # type: ignore[arg-type]

    entries = batch, scales.classes
    z = (additive if opens else tensor)(*entries, bits=scales.logit_bits)
    p, q = additive(*entries, bits=40), additive(batch, bits=scales.q_bits)
    weights = tensor(batch, bits=scales.weight_bits) if scales.weight_bits else None
    square = refmpc.cut_and_square.cost(p, scales.cut_bits, tensor(batch, bits=scales.norm_bits))
    clip = refmpc.clip_root.cost(q, scales.clip_bound)
    total = refmpc.probabilities.cost(z, scales.spread, None, weights)
    total += refmpc.Cost(1 + clip.rounds, square.bytes + clip.bytes)  # the second half of the cut beside the clip
    total += refmpc.scale_rows.cost(q, tensor(*entries, bits=scales.delta_bits), scales.factor_cut, 1)
    return total + refmpc.replicate.cost(p)
