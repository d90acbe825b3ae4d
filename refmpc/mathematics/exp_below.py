"""e^x of numbers below zero with the test of their range inside: two rounds."""

from __future__ import annotations

import functools

import numpy as np

from accel import kernels
from accel.validate import require, require_integer
from refmpc.core.integer_logs import agreed_exp_constant
from refmpc.core.primitive import Cost, primitive
from refmpc.primitives.dealing import (
    DEALER,
    FIRST,
    SECOND,
    Additive,
    Dealing,
    TwoHolder,
    each_dealer,
    nothing,
    row_sizes,
)

__all__ = ["EXP_BITS", "GRID_BITS", "LOW_BITS", "digit_sizes", "exp_below"]

GRID_BITS = 16  # x is taken on a grid of 2^-16
LOW_BITS = 20  # digits of 16
DEALT_BITS, HELD_BITS = 40, 17
EXP_BITS = DEALT_BITS + HELD_BITS  # scale of the result
MOST_DIGIT_BITS = 8


def digit_sizes(high_bits: int) -> tuple[int, ...]:
    """The bits above the low 20 as two digits, or as many as it takes beyond 16 bits."""
    require_integer("high bits of x", high_bits, 2, 4 * MOST_DIGIT_BITS, way_out="bound the logits more tightly")
    count = max(2, -(-high_bits // MOST_DIGIT_BITS))
    base, more = divmod(high_bits, count)
    return tuple(base + (index >= count - more) for index in range(count))


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """e^(−i/256), e^(−i/65536), e^(i/256 − 16·target), e^(i/65536): correctly rounded, the same everywhere. A product
    of two is off by less than 2^-51."""
    falling = [agreed_exp_constant(-i / 256) for i in range(4096)]
    falling_fine = [agreed_exp_constant(-i / 65536) for i in range(256)]
    rising = [[agreed_exp_constant(i / 256 - 16 * target) for i in range(4096)] for target in range(2)]
    rising_fine = [agreed_exp_constant(i / 65536) for i in range(256)]
    tables = (falling, falling_fine, rising, rising_fine)
    return tuple(np.array(table) for table in tables)  # type: ignore[return-value]


def _hot_words(size: int) -> tuple[int, int]:
    """Words of a one-hot vector of 2^size places, and how many bits of each are sent."""
    return max(1, (1 << size) // 64), min(64, 1 << size)


def _cost(z: TwoHolder, largest: Additive, high_bits: int) -> Cost:
    sizes, each = digit_sizes(high_bits), z.words.size // max(1, len(z.words))
    total = 0
    for rows in row_sizes(len(z.words)):
        count = rows * each
        total += 2 * kernels.packed_size(rows, largest.bits)
        total += sum(kernels.packed_size(count * words, bits) for words, bits in map(_hot_words, sizes))
        total += 8 * count * (2 ** (len(sizes) + 1) - 1) + 2 * kernels.packed_size(count, 2 * len(sizes))
    return Cost(2, total)


@primitive(
    cost=_cost, source="this project: product of the two holders' exponentials, digits compared by one-hot vectors"
)
async def exp_below(z: TwoHolder, largest: Additive, high_bits: int) -> Additive:
    """e^(z_i − largest − one unit of ``largest``) of every entry of a row, additive at 57 bits.

    2 rounds, the first of which opens ``largest``; 73 bytes an entry for 12 high bits (two digits of 6), 105 for 16.
    Domain: −2^(high_bits + 4) + 16 < x < 0 on the grid of 2^-16, which holds if ``largest`` is the coarse maximum of z
    and |z| ≤ L with 2L + 34 ≤ 2^(high_bits + 4). Error: relative 2^-17.9 and absolute 2^-18; never negative, exactly 0
    below −32, and between −16 and −32 at most 2^-18.

    x = C − R on the grid, C = C_hi·2^20 + C_lo (R likewise) leaves three cases: R_hi = C_hi and x = C_lo − R_lo,
    R_hi = C_hi + 1 and x = C_lo − R_lo − 16, or x < −16. The dealer deals one-hot vectors of R_hi's digits over GF(2),
    and g = e^-R_lo at a place that secret bits mu decide, for both targets T = 0, 1. The holders exchange their shares
    of [digit of R_hi = digit of C_hi + T] ⊕ mu: α. The bit is 1 iff mu = 1 ⊕ α, so the word at place 1 ⊕ α is g or 0;
    times e^(C_lo − 16T) it is e^x. The last word of target 1 is a difference: all words of a target have the same sum.

    Errors: g is off by half a unit of 2^-40 and at least e^-16: 2^-17.9; the holders' word by half a unit of 2^-17,
    times g: 2^-18·e^-R_lo, and R_lo is uniform in 0..16.

    Views: role 1 gets the vectors and words under masks it does not know; both holders get bits under the other's part
    of mu, which it shares with the dealer alone. The dealer gets nothing.
    """
    require(z.same_dealers(largest), "largest", largest, "of the same rows and dealers as z (one call)")
    sizes = digit_sizes(high_bits)
    ring = LOW_BITS + high_bits
    unit = GRID_BITS - largest.fraction_bits
    require_integer("bits of largest", largest.bits, ring - unit, 64)
    rows, entries = z.shape
    party = z.party
    up, down = max(0, GRID_BITS - z.fraction_bits), max(0, z.fraction_bits - GRID_BITS)
    falling, falling_fine, rising, rising_fine = map(party.machine.public, _tables())
    size_words = party.machine.public(sizes, np.int64)
    hot_words = [_hot_words(size) for size in sizes]
    all_words = sum(words for words, _ in hot_words)
    digits, numbers = len(sizes), 2 ** (len(sizes) + 1) - 1
    out = nothing(party, (rows, entries))

    async def work(dealing: Dealing) -> None:
        mine = dealing.contiguous(z.words[dealing.slice])
        count = mine.size
        opening = dealing.open(dealing.contiguous(largest.words[dealing.slice]), largest.bits)
        x = dealing.memory(mine.shape)
        flat = x.reshape(-1)
        if dealing.role == DEALER:
            dealing.call("exp_below_argument", mine, opening.words, up, down, unit, 0, ring, x)
            mu = dealing.memory(count)
            dealing.call("xor", dealing.masks(FIRST, count), dealing.masks(SECOND, count), mu)
            hot_halves, value_halves = dealing.masks(FIRST, count, all_words), dealing.masks(FIRST, count, numbers)
            hot, values = dealing.memory((count, all_words)), dealing.memory((count, numbers))
            dealing.call(
                "exp_below_deal", flat, size_words, mu, falling, falling_fine, hot_halves, value_halves, hot, values
            )
            at = 0
            for words, bits in hot_words:
                dealing.send_packed(SECOND, dealing.contiguous(hot[:, at : at + words]), bits)
                at += words
            dealing.send(SECOND, values)
            await dealing.turn()
            await dealing.turn()
            return
        mu = dealing.masks(DEALER, count)
        arriving = []
        if dealing.role == FIRST:
            hot, values = dealing.masks(DEALER, count, all_words), dealing.masks(DEALER, count, numbers)
        else:
            arriving = [dealing.expect_packed(DEALER, (count, words), bits) for words, bits in hot_words]
            values = dealing.expect(DEALER, (count, numbers))
        await dealing.turn()
        if dealing.role == SECOND:
            hot, at = dealing.memory((count, all_words)), 0
            for part in arriving:
                dealing.call("copy", part.words, hot[:, at : at + part.shape[1]])
                at += part.shape[1]
        # one unit more: the coarse maximum may lie one below an entry
        dealing.call("exp_below_argument", mine, opening.words, up, down, unit, 1 << unit, ring, x)
        codes = dealing.memory(count, np.uint8)
        dealing.call("exp_below_bits", flat, size_words, hot, mu, codes)
        dealing.send_packed(1 - dealing.role, codes, 2 * digits)
        theirs = dealing.expect_packed(1 - dealing.role, (count,), 2 * digits)
        await dealing.turn()
        result = out[dealing.slice].reshape(-1)
        dealing.call("exp_below_take", flat, codes, theirs.small, digits, values, rising, rising_fine, result)

    operation, _ = await each_dealer("exp_below", z, (largest, high_bits), work)
    return Additive(party, out, z.segments, EXP_BITS, operation.history())
