"""Powers of two by a thermometer whose bits are dealt, not reshared: mantissa and scale factor, additive, in three
rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from accel import kernels
from accel.validate import require, require_integer
from refmpc.core.primitive import Cost, primitive
from refmpc.core.tensor import ArithmeticTensor
from refmpc.core.words import Words
from refmpc.mathematics.octave import ring_words
from refmpc.primitives.comparison import THERMOMETER_DIGIT_BITS, Layout, aligned_low_bits
from refmpc.primitives.dealing import (
    DEALER,
    FIRST,
    SECOND,
    Additive,
    Dealing,
    each_dealer,
    held,
    nothing,
    row_segments,
    row_sizes,
)

__all__ = ["weigh_reached"]

Weights = Sequence[tuple[Sequence[int], bool]]


def _cost(
    x: Additive | ArithmeticTensor,
    thresholds: Sequence[int],
    low_bits: Sequence[int],
    high_bit: int,
    weights: Weights,
    ring: int = 64,
) -> Cost:
    lows = aligned_low_bits(low_bits)
    layout = Layout.of(high_bit - lows[0], THERMOMETER_DIGIT_BITS)
    total, rows = 0, x.shape[0]
    for n in row_sizes(rows):
        total += layout.dealt_bytes(n) + sum(2 * layout.reply_bytes(n, high_bit - low) for low in lows)
        total += kernels.packed_size(n * len(thresholds), ring)
    opened = 24 if isinstance(x, Additive) else 0
    return Cost(3, total + (8 * len(thresholds) + opened) * rows)


@primitive(cost=_cost, source="thermometer, with what depends on its bits dealt in one more round")
async def weigh_reached(
    x: Additive | ArithmeticTensor,
    thresholds: Sequence[int],
    low_bits: Sequence[int],
    high_bit: int,
    weights: Weights,
    ring: int = 64,
) -> list[Additive]:
    """For every (start, step_1, …), times of ``weights``: start + Σ_k step_k·[x ≥ t_k], times x where ``times`` is set.

    3 rounds, the first of which opens an additive x; bytes of ``thermometer``, 8 + ring/8 a threshold, and 24 for the
    opening. With ``ring`` below 64, what is times x is known modulo 2^ring only, and is returned times 2^(64−ring).
    Exact modulo 2^64, given the bits; those are as ``thermometer`` says: [x ≥ t] where x ≥ t or x < t − 2^low_bit,
    either between. Domain: −2^high_bit ≤ x − t ≤ 2^high_bit − 2^low_bit.

    bit = α ⊕ pad with α at the holders and pad at the dealer, who deals pad and pad·ρ: bit = α + (1 − 2α)·pad and
    bit·x = bit·c − bit·ρ are linear in these. (If x was additive, ρ itself is dealt as well: it contains the dealer's
    own summand.) Views: those of ``thermometer``, and dealt words under masks.
    """
    require(len(thresholds) == len(low_bits) > 0, "low_bits", low_bits, "as many as thresholds, at least one")
    require(sorted(low_bits) == list(low_bits), "low_bits", low_bits, "in non-decreasing order")
    require_integer("high_bit", high_bit, low_bits[-1] + 1, 63)
    require_integer("ring", ring, 1, 64)
    party, count, rows = x.party, len(thresholds), x.shape[0]
    machine, lows = party.machine, aligned_low_bits(low_bits)
    layout = Layout.of(high_bit - lows[0], THERMOMETER_DIGIT_BITS)
    segments = x.segments if isinstance(x, Additive) else row_segments(party, rows)
    given = held(x, segments) if isinstance(x, ArithmeticTensor) else None
    source = x if isinstance(x, Additive) else given
    assert source is not None
    # the tests are of x < t: start + Σ step·[x ≥ t] = start + Σ step − Σ step·[x < t]
    turned = [[sum(row), *(-step for step in row[1:])] for row, _ in weights]
    table, times = machine.public(ring_words(turned)), machine.public([flag for _, flag in weights])
    words = [np.uint64(t % 2**64) for t in thresholds]
    numbers = layout.digit_bits, layout.prime
    out = nothing(party, (len(weights), rows))

    async def work(dealing: Dealing) -> None:
        n, at = dealing.rows, dealing.slice
        opening = dealing.open(x.words[at]) if isinstance(x, Additive) else None
        if dealing.role == DEALER:
            rho = given.words[at] if given is not None else opening.words  # type: ignore[union-attr]
            await deal(dealing, rho, opening is not None)
            return
        if dealing.role == FIRST:
            bits = dealing.uniform(DEALER, layout.prime, layout.thresholds, n)
        else:
            arriving = dealing.expect_packed(DEALER, (layout.thresholds, n), layout.prime_bits)
        await dealing.turn()
        if dealing.role == SECOND:
            bits = arriving.small
        c = given.words[at] if given is not None else opening.words  # type: ignore[union-attr]
        alpha = reply(dealing, c, bits)
        await dealing.turn()
        narrow = ring < 64 and dealing.role == SECOND
        if narrow:  # the words times ρ come with fewer bits
            pads = dealing.expect(DEALER, (n, count))
            times_rho = dealing.expect_packed(DEALER, (n, count), ring)
            halves = dealing.memory((n, 2, count))
        else:
            halves = dealing.halves(n, 2, count)
        if isinstance(x, Additive):
            rho_half = dealing.halves(n)
        else:
            rho_half = dealing.memory(n)
            dealing.call("negate", x.shares[dealing.role, at], rho_half)
        await dealing.turn()
        if narrow:
            dealing.call("copy", pads, halves[:, 0])
            dealing.call("copy", times_rho.words, halves[:, 1])
        found = dealing.memory((len(weights), n))
        dealing.call("weigh_opened_hold", alpha, halves, c, rho_half, table, times, dealing.leads, found)
        dealing.call("copy", found, out[:, at])

    async def deal(dealing: Dealing, rho: Words, deal_rho: bool) -> None:
        n = dealing.rows
        halves = dealing.uniform(FIRST, layout.prime, layout.thresholds, n)
        negative, zero = dealing.memory(n), dealing.memory(n)
        dealing.call("negate", rho, negative)
        dealing.call("copy", np.uint64(0), zero)
        top, dealt = dealing.memory(n, np.uint8), dealing.memory(layout.dealt_bytes(n), np.uint8)
        dealing.call("compare_deal", negative, zero, halves, lows[0], layout.width, *numbers, top, dealt)
        dealing.send(SECOND, dealt)
        await dealing.turn()
        sizes = [layout.reply_bytes(n, high_bit - low) for low in lows]
        replies = [[dealing.expect(role, size, np.uint8) for role in (FIRST, SECOND)] for size in sizes]
        await dealing.turn()
        pads = dealing.memory((count, n), np.uint8)
        for index, (low, both) in enumerate(zip(lows, replies, strict=True)):
            digits = layout.digits_of(high_bit - low)
            dealing.call("compare_decide", *both, digits, layout.prime, top, pads[index])
        if ring == 64:
            dealing.deal("weigh_opened_deal", pads, rho, shape=(n, 2, count))
        else:
            halves, rest = dealing.halves(n, 2, count), dealing.memory((n, 2, count))
            dealing.call("weigh_opened_deal", pads, rho, halves, rest)
            dealing.send(SECOND, dealing.contiguous(rest[:, 0]))
            dealing.send_packed(SECOND, dealing.contiguous(rest[:, 1]), ring)
        if deal_rho:
            half, rest = dealing.halves(n), dealing.memory(n)
            dealing.call("subtract_low", rho, half, 64, rest)
            dealing.send(SECOND, rest)
        await dealing.turn()

    def reply(dealing: Dealing, c: Words, bits: Words) -> Words:
        n, other = dealing.rows, 1 - dealing.role
        alpha = dealing.memory((count, n), np.uint8)
        for index, (word, low) in enumerate(zip(words, lows, strict=True)):
            width = high_bit - low
            digits = layout.digits_of(width)
            coins = dealing.coins(other, n)
            scale = dealing.uniform(other, layout.prime - 1, digits, n)
            mask = dealing.uniform(other, layout.prime, digits, n)
            turn = dealing.uniform(other, digits, n)
            skipped = (low - lows[0]) // THERMOMETER_DIGIT_BITS * (2**THERMOMETER_DIGIT_BITS - 1)
            message = dealing.memory(layout.reply_bytes(n, width), np.uint8)
            blinding = bits[skipped:], coins, scale, mask, turn
            own = alpha[index]
            dealing.call("compare_reply", c, word, *blinding, low, width, *numbers, dealing.leads, own, message)
            dealing.send(DEALER, message)
        return alpha

    public = list(thresholds), list(low_bits), high_bit, [(list(steps), flag) for steps, flag in weights], ring
    operation, _ = await each_dealer("weigh_reached", source, public, work)
    found = []
    for index, (row, (_, flag)) in enumerate(zip(out, weights, strict=True)):
        if flag and ring < 64:
            row = machine.binary("multiply", row, np.uint64(1 << (64 - ring)))
        scale = x.fraction_bits + 64 - ring if flag else 0
        found.append(Additive(party, row, segments, scale, operation.history(index)))
    return found
