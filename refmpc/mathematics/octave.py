"""Which power of two a sum lies above: its mantissa and the power, additive, in two rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from accel import kernels
from accel.validate import require, require_integer
from refmpc.core.primitive import Cost, primitive
from refmpc.primitives.dealing import (
    DEALER,
    FIRST,
    SECOND,
    Additive,
    Dealing,
    check_additive,
    each_dealer,
    nothing,
    row_sizes,
)

__all__ = ["octave", "octave_top", "ring_words"]


def octave_top(most: int) -> int:
    """The largest k with 2^k < most."""
    return (most - 1).bit_length() - 1


def ring_words(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Integers of any sign as ring words."""
    return np.array([[int(value) % 2**64 for value in row] for row in rows], dtype=np.uint64)


def _places(most: int) -> tuple[int, int, int]:
    """Places of 1/8, words they take, and bits of each that are sent."""
    places = 8 << (most - 1).bit_length()
    return places, max(1, places // 64), min(64, places)


def _cost(s: Additive, most: int) -> Cost:
    count = octave_top(most) + 1
    _, words, bits = _places(most)
    each = [
        16 * n + kernels.packed_size(n * words, bits) + 16 * n * count + 2 * kernels.packed_size(n, count)
        for n in row_sizes(len(s.words))
    ]
    return Cost(2, sum(each))


@primitive(cost=_cost, source="this project: rotated one-hot vector over GF(2), bits under pads dealt beforehand")
async def octave(s: Additive, most: int) -> tuple[Additive, Additive]:
    """m = s/2^k exactly, and t = 2^-k, for 0.6 < s < most: k ≥ −1 is such that 1 ≤ m < 2.25.

    2 rounds, the first of which opens s; 16 bytes, 2^⌈log2 most⌉ for the vector and 16.25 a threshold. With
    top = ⌈log2 most⌉ − 1, m has the scale of s plus top, and t the scale top.

    Eighths: d = ⌊8s⌋ or ⌊8s⌋ + 1 as the difference of (c≫) and (ρ≫). [s ≥ 2^k] is the XOR of the entries d ≥ 8·2^k + 1
    of the dealer's one-hot vector turned by c: bit 1 implies s ≥ 2^k, bit 0 implies s < 2^k + 1/8 (and s ≥ 1.2/2 is
    twice at least 1.2 where no bit is set). The holders exchange their shares ⊕ pad_k; with α open, bit = α + (1 −
    2α)·pad is linear in shares of pad and pad·ρ that the dealer dealt with the opening. Views: as for ``exp_below``;
    the dealer gets nothing.
    """
    require_integer("most", most, 2, 64)
    require(not s.dealer_adds, "s", s, "without a summand of the dealer")
    top, (places, words, sent_bits) = octave_top(most), _places(most)
    require_integer("fraction bits of s", s.fraction_bits, 3, 62 - top)
    await check_additive(s, round(0.6 * 2**s.fraction_bits), most << s.fraction_bits, "octave")
    shift, count = s.fraction_bits - 3, top + 1
    powers = [1 << count, *(-(1 << (top - k)) for k in range(count))]
    machine = s.party.machine
    weights, times = machine.public(ring_words([powers, powers])), machine.public([True, False])
    out = nothing(s.party, (2, len(s.words)))

    async def work(dealing: Dealing) -> None:
        n = dealing.rows
        opening = dealing.open(s.words[dealing.slice])
        if dealing.role == DEALER:
            rho = opening.words
            halves, hot = dealing.masks(FIRST, n, words), dealing.memory((n, words))
            dealing.call("octave_deal", rho, shift, places, halves, hot)
            dealing.send_packed(SECOND, hot, sent_bits)
            codes, pads = dealing.memory(n), dealing.memory((count, n), np.uint8)
            dealing.call("xor", dealing.masks(FIRST, n), dealing.masks(SECOND, n), codes)
            dealing.call("split_codes", codes, pads)
            dealing.deal("weigh_opened_deal", pads, rho, shape=(n, 2, count))
            await dealing.turn()
            await dealing.turn()
            return
        if dealing.role == FIRST:
            hot = dealing.masks(DEALER, n, words)
        else:
            arriving = dealing.expect_packed(DEALER, (n, words), sent_bits)
        own = dealing.masks(DEALER, n)
        halves = dealing.deal("weigh_opened_deal", shape=(n, 2, count))
        await dealing.turn()
        if dealing.role == SECOND:
            hot = arriving.words
        mine, both = dealing.memory(n, np.uint8), dealing.memory(n, np.uint8)
        dealing.call("octave_bits", opening.words, hot, own, shift, places, top, mine)
        dealing.send_packed(1 - dealing.role, mine, count)
        theirs = dealing.expect_packed(1 - dealing.role, (n,), count)
        await dealing.turn()
        dealing.call("xor", mine, theirs.small, both)
        alpha = dealing.memory((count, n), np.uint8)
        dealing.call("split_codes", both, alpha)
        found = dealing.memory((2, n))
        dealing.call(
            "weigh_opened_hold", alpha, halves, opening.words, opening.mask, weights, times, dealing.leads, found
        )
        dealing.call("copy", found, out[:, dealing.slice])

    operation, _ = await each_dealer("octave", s, (most,), work)
    mantissa = Additive(s.party, out[0], s.segments, s.fraction_bits + top, operation.history())
    return mantissa, Additive(s.party, out[1], s.segments, top, operation.history(1))
