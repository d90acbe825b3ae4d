"""From logits to clipped updates in 6 rounds, for a softmax whose other classes are capped against the label (proofs
§4.12).

| round | what |
|---|---|
| 1 | open v = z_j − z_y, an angle; words of the sigmoid: e |
| 2 | open s = Σe and e; words of R, times e: p' = e·R(s) |
| 3 | open t = Σp' and p'; words of 1/t, times p': p, and δ = p − y |
| 4 | open δ; words of its squares: q = Σδ², exact |
| 5 | open q; words of the clip factor, times δ: u = C(q)·δ |
| 6 | u is replicated |
"""

from __future__ import annotations

import refmpc
from protocols.plan.bounded_softmax_scales import ERRORS_KEPT, ODDS_KEPT, SHARES_KEPT, BoundedSoftmaxScales
from refmpc import Additive, ArithmeticTensor
from refmpc.core.party import Segment
from refmpc.primitives.arithmetic import dot_summand
from refmpc.primitives.dealing import at_holders

__all__ = ["clipped_updates", "errors"]


def _margins(logits: ArithmeticTensor, labels: ArithmeticTensor, segments: list[Segment] | None) -> Additive:
    """z_j − Σ_k y_k z_k, this server's summand: local."""
    machine, rows = logits.party.machine, len(logits)
    of_label = machine.memory(rows)
    dot_summand(logits, labels, None, of_label)
    own = machine.binary("subtract", logits.first, of_label.reshape(rows, 1))
    return refmpc.summands(logits.party, own, logits.fraction_bits, segments, of=[logits, labels])


async def errors(
    logits: ArithmeticTensor,
    labels: ArithmeticTensor,
    scales: BoundedSoftmaxScales,
    wave: tuple[int, int],
    ring: int = 0,
    segments: list[Segment] | None = None,
) -> Additive:
    """δ of every row, additive at 37 bits modulo 2^40 or 2^ring, each entry in −1.5 … 2.5 for any logits. 3 rounds."""
    link, crude, fine = scales.link(wave), scales.crude, scales.fine
    odds = await refmpc.series(_margins(logits, labels, segments), link, link.bits + max(2, crude.period_bits))
    bits = ODDS_KEPT.fraction_bits + crude.bits + SHARES_KEPT.range_bits
    shares = await refmpc.series_times(odds.sum(), crude, odds, bits, ODDS_KEPT)
    bits = SHARES_KEPT.fraction_bits + fine.bits + ERRORS_KEPT.range_bits
    found = await refmpc.series_times(shares.sum(), fine, shares, ring or bits, SHARES_KEPT)
    return found.minus_shifted(at_holders(labels, found.segments), found.fraction_bits)


async def clipped_updates(
    logits: ArithmeticTensor, labels: ArithmeticTensor, scales: BoundedSoftmaxScales, wave: tuple[int, int]
) -> ArithmeticTensor:
    """u_j = C(‖δ_j‖²)·δ_j of every row, replicated, with ‖u_j‖ ≤ b exactly, whatever the logits are. 6 rounds.

    ``labels`` are one-hot. Each server sees openings and dealt words under masks it does not know; the dealer of a row
    receives nothing.
    """
    delta, q = await refmpc.open_squares(await errors(logits, labels, scales, wave), ERRORS_KEPT, scales.square_bits)
    return await refmpc.replicate(await refmpc.series_times(q, scales.clip, delta))
