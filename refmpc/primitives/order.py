"""The largest of a few numbers in three rounds: all pairs are compared at once.

The holders put the classes of a row into secret random slots. Then the dealer may learn the whole order *of the slots*,
which is a uniform permutation whatever the numbers are, and pick the best one without anybody knowing its class.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from accel import kernels
from accel.validate import require_integer
from refmpc.core.primitive import Cost, primitive
from refmpc.core.tensor import ArithmeticTensor
from refmpc.core.words import Words
from refmpc.primitives.dealing import (
    DEALER,
    FIRST,
    SECOND,
    Additive,
    Dealing,
    TwoHolder,
    each_dealer,
    held,
    row_segments,
    row_sizes,
)

__all__ = ["MOST_IN_A_GROUP", "largest_coarse", "order_groups"]

MOST_IN_A_GROUP = 12  # beyond, groups of about √S and then their winners: three rounds more, fewer pairs
_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


@dataclass(frozen=True)
class _Layout:
    """How numbers whose differences are below 2^width are compared."""

    width: int

    @property
    def digits(self) -> int:
        return -(-self.width // 2)

    @property
    def dealt(self) -> int:
        return 3 * self.digits + 1

    @property
    def tests(self) -> int:
        return 2 * self.digits + 1

    @property
    def prime(self) -> int:
        """No test exceeds digits + 1."""
        return next(p for p in _PRIMES if p > self.digits + 1)

    @property
    def prime_bits(self) -> int:
        return self.prime.bit_length()


def order_groups(classes: int) -> list[int]:
    """The sizes of the groups that are ordered first."""
    if classes <= MOST_IN_A_GROUP:
        return [classes]
    groups = math.isqrt(classes - 1) + 1
    base, more = divmod(classes, groups)
    return [base + (index < more) for index in range(groups)]


class _Order:
    """One group of one dealer's rows: ``__init__`` speaks in the round that opens the numbers, then ``reply`` and
    ``pick``."""

    def __init__(self, dealing: Dealing, words: Words, width: int):
        """``words``: c or ρ, (n, g), of which the low width + 1 bits count; c is not looked at before ``reply``."""
        self.dealing, self.layout = dealing, _Layout(width)
        rows, classes = words.shape
        self.classes, self.pairs = classes, classes * (classes - 1) // 2
        layout = self.layout
        shape = (layout.dealt, rows * self.pairs)
        if dealing.role == SECOND:
            self._bits = dealing.expect_packed(DEALER, shape, layout.prime_bits)
            self._rest = dealing.expect_packed(DEALER, (rows, classes), width + 1)
            return
        other = DEALER if dealing.role == FIRST else FIRST
        self.halves = dealing.uniform(other, layout.prime, *shape)
        self.rest = dealing.masks(other, rows, classes)
        if dealing.role == DEALER:
            out = dealing.memory(shape, np.uint8)
            dealing.call("order_deal", words, self.halves, width, layout.prime, out)
            dealing.send_packed(SECOND, out, layout.prime_bits)
            rest = dealing.memory((rows, classes))
            dealing.call("subtract_low", words.reshape(-1), self.rest.reshape(-1), width + 1, rest.reshape(-1))
            dealing.send_packed(SECOND, rest, width + 1)

    def reply(self, words: Words) -> None:
        """The holders' tests of all pairs, at the places of their slots, and their halves of ρ by slot."""
        dealing, layout = self.dealing, self.layout
        width, rows = layout.width, len(words)
        shape, by_slot = (layout.tests, rows * self.pairs), (rows, self.classes)
        if dealing.role == DEALER:
            self._tests = [dealing.expect_packed(role, shape, layout.prime_bits) for role in (FIRST, SECOND)]
            self._slots = [dealing.expect_packed(role, by_slot, width + 1) for role in (FIRST, SECOND)]
            return
        if dealing.role == SECOND:
            self.halves, self.rest = self._bits.small, self._rest.words
        other = 1 - dealing.role
        slots = dealing.memory(by_slot, np.uint8)
        draws = dealing.memory((self.classes - 1, rows), np.uint8)
        for bound in range(2, self.classes + 1):
            dealing.call("copy", dealing.uniform(other, bound, rows), draws[bound - 2])
        dealing.call("order_shuffle", draws, slots)
        scale = dealing.uniform(other, layout.prime - 1, *shape)
        mask = dealing.uniform(other, layout.prime, *shape)
        turn = dealing.uniform(other, layout.tests, shape[1])
        out = dealing.memory(shape, np.uint8)
        dealing.call(
            "order_reply", words, self.halves, slots, scale, mask, turn, width, layout.prime, dealing.leads, out
        )
        dealing.send_packed(DEALER, out, layout.prime_bits)
        masks = [dealing.masks(other, *by_slot) for _ in range(2)]
        zero, placed = dealing.memory(by_slot), dealing.memory(by_slot)
        dealing.call("copy", np.uint64(0), zero)
        dealing.call("order_place", self.rest, slots, masks[dealing.role], zero, width, placed)
        dealing.send_packed(DEALER, placed, width + 1)
        self.placed = dealing.memory(by_slot)
        dealing.call("order_place", words, slots, masks[0], masks[1], width, self.placed)

    def pick(self, out: Words) -> None:
        """The dealer deals the one-hot vector of the best slot; ``finish`` takes it, one round later."""
        dealing, width = self.dealing, self.layout.width
        shape = (len(out), self.classes)
        if dealing.role == SECOND:
            self._half = dealing.expect_packed(DEALER, shape, width + 1)
            return
        self.half = dealing.masks(DEALER if dealing.role == FIRST else FIRST, *shape)
        if dealing.role == DEALER:
            best, rest = dealing.memory(shape), dealing.memory(shape)
            tests, slots = [part.small for part in self._tests], [part.words for part in self._slots]
            dealing.call("order_decide", *tests, self.layout.prime, *slots, width, best, out)
            dealing.call("subtract_low", best.reshape(-1), self.half.reshape(-1), width + 1, rest.reshape(-1))
            dealing.send_packed(SECOND, rest, width + 1)

    def finish(self, out: Words) -> None:
        """The holders' summands of the largest number."""
        dealing = self.dealing
        if dealing.role != DEALER:
            half = self._half.words if dealing.role == SECOND else self.half
            dealing.call("order_pick", half, self.placed, self.layout.width, out)


async def _largest(dealing: Dealing, groups: list[_Order], words: list[Words], out: Words) -> None:
    """Two rounds: reply and pick of groups whose numbers have been dealt."""
    for order, mine in zip(groups, words, strict=True):
        order.reply(mine)
    await dealing.turn()
    columns = [dealing.memory(len(out)) for _ in groups]
    for order, column in zip(groups, columns, strict=True):
        order.pick(column)
    await dealing.turn()
    for index, (order, column) in enumerate(zip(groups, columns, strict=True)):
        order.finish(column)
        dealing.call("copy", column, out[:, index])


def _level_bytes(rows: int, sizes: list[int], width: int) -> int:
    """Bytes of ordering groups of these sizes: dealt bits, halves of ρ, tests, slots, one-hot vectors."""
    layout = _Layout(width)
    total = 0
    for classes in sizes:
        pairs = rows * (classes * (classes - 1) // 2)
        total += kernels.packed_size(pairs * layout.dealt, layout.prime_bits)
        total += 2 * kernels.packed_size(pairs * layout.tests, layout.prime_bits)
        total += 4 * kernels.packed_size(rows * classes, width + 1)
    return total


def _cost(z: Additive | ArithmeticTensor | TwoHolder, unit_bits: int, width: int) -> Cost:
    rows, classes = z.shape
    groups = order_groups(classes)
    total = 16 * rows * classes if isinstance(z, Additive) else 0
    for size in row_sizes(rows):
        total += _level_bytes(size, groups, width)
        if len(groups) > 1:
            total += 2 * kernels.packed_size(size * len(groups), width + 1) + _level_bytes(size, [len(groups)], width)
    return Cost(3 if len(groups) == 1 else 6, total)


@primitive(cost=_cost, source="this project: all pairs under secret slots; digit tests as in is_negative")
async def largest_coarse(
    z: Additive | ArithmeticTensor | TwoHolder, unit_bits: int, width: int
) -> tuple[TwoHolder, Additive]:
    """The opened z (rows × classes), and the largest entry of every row on a grid of 2^-unit_bits, additive modulo
    2^(width + 1).

    3 rounds, the first of which opens z if it is additive; 6 beyond 12 classes (groups, then winners). 33 bytes a pair
    and 9.5 a number at width 18. Coarse numbers are x'_i = (c_i≫k) − (ρ_i≫k), which is ⌊z_i·2^unit_bits⌋ or one more,
    and the result is exactly their maximum: within one coarse unit of the true one. Domain: differences of two entries
    below 2^(width − unit_bits) − 2·2^-unit_bits; 2 to 64 classes.

    Why exact: x'_i are definite integers, so comparisons (ties to the lower class) form a strict order. C = c_i − c_j
    and R = ρ_i − ρ_j are compared digit by digit; of 2·digits + 1 tests exactly one is zero, or none, and all are below
    the prime.

    Views: role 1 gets bits and words masked by streams it does not know. The dealer gets tests masked by the holders'
    stream; their *sums* are uniform non-zero values with at most one zero, at a uniform place (scale, turn), and which
    pairs of slots show one is the order of the classes under a uniform permutation, drawn afresh for every row by
    rejection. Halves of ρ by slot come under masks t and t' that the dealer does not know. It picks a slot whose class
    it does not know, and the holders, who know the classes, see only halves of the one-hot vector.
    """
    rows, classes = z.shape
    require_integer("classes (last axis)", classes, 2, 64)
    require_integer("unit_bits", unit_bits, 0, z.fraction_bits)
    require_integer("width", width, 1, 61 - unit_bits)
    party = z.party
    segments = row_segments(party, rows) if isinstance(z, ArithmeticTensor) else z.segments
    groups = order_groups(classes)
    ends = [0, *itertools.accumulate(groups)]
    coarse = z.fraction_bits - unit_bits
    source: Additive | TwoHolder = held(z, segments) if isinstance(z, ArithmeticTensor) else z
    words = party.machine.memory((rows, classes)) if isinstance(z, Additive) else source.words
    out = party.machine.memory((rows, 1))

    async def work(dealing: Dealing) -> None:
        mine = words[dealing.slice]
        opening = dealing.open(z.words[dealing.slice]) if isinstance(z, Additive) else None
        shifted = dealing.memory(mine.shape)
        if dealing.role == DEALER:
            rho = opening.words if opening is not None else mine
            dealing.call("shift_right", rho.reshape(-1), coarse, shifted.reshape(-1))
        parts = [dealing.contiguous(shifted[:, a:b]) for a, b in itertools.pairwise(ends)]
        orders = [_Order(dealing, part, width) for part in parts]
        await dealing.turn()
        if opening is not None:
            dealing.call("copy", opening.words, mine)
        if dealing.role != DEALER:
            dealing.call("shift_right", mine.reshape(-1), coarse, shifted.reshape(-1))
            parts = [dealing.contiguous(shifted[:, a:b]) for a, b in itertools.pairwise(ends)]
        if len(orders) == 1:
            await _largest(dealing, orders, parts, out[dealing.slice])
            return
        winners = dealing.memory((dealing.rows, len(orders)))
        await _largest(dealing, orders, parts, winners)
        second = dealing.open(winners, width + 1)
        final = _Order(dealing, second.words if dealing.role == DEALER else winners, width)
        await dealing.turn()
        await _largest(dealing, [final], [second.words], out[dealing.slice])

    operation, _ = await each_dealer("largest_coarse", source, (unit_bits, width), work)
    largest = Additive(party, out.reshape(rows), segments, unit_bits, operation.history(1), width + 1, dealer_adds=True)
    return TwoHolder(party, words, segments, z.fraction_bits, operation.history()), largest
