"""Comparison of two-holder numbers, and what follows from it: sign, maximum, ReLU.

After SecureNN's private compare (Wagh, Gupta, Chandran, PoPETs 2019, Alg. 3) with three changes. Roles: the two holders
know c, the dealer knows ρ, and nothing has to be shared beforehand. Digits: c and ρ are compared in base 4 (or 8), so
the dealer sends three threshold bits per two bits and the holders answer with one test per two bits, modulo the
smallest prime above the number of digits: 20 bytes for 16 bits instead of 48. Order: at most one test is zero and the
others are uniform non-zero values, so a secret rotation hides where it is; a full permutation is not needed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from accel import kernels
from accel.validate import require, require_integer
from refmpc.core.party import Operation, Segment, segment_sizes
from refmpc.core.primitive import Cost, primitive
from refmpc.core.tensor import ArithmeticTensor, concatenate
from refmpc.core.words import Words
from refmpc.primitives.two_holder import TwoHolderBits, select

__all__ = [
    "THERMOMETER_DIGIT_BITS",
    "Layout",
    "aligned_low_bits",
    "is_negative",
    "maximum",
    "relu",
    "stretched",
    "thermometer",
]

_PRIMES = (5, 7, 11, 13, 17, 23, 31, 37)
_DIGIT_BITS = 2  # of a single comparison; a thermometer, whose thresholds share the dealer's message, takes 3
THERMOMETER_DIGIT_BITS = 3


@dataclass(frozen=True)
class Layout:
    """How numbers of ``width`` bits are compared: digits, threshold bits, modulus and its width in bits."""

    width: int
    digit_bits: int
    digits: int
    thresholds: int
    prime: int
    prime_bits: int

    @classmethod
    @functools.cache
    def of(cls, width: int, digit_bits: int) -> Layout:
        digits, thresholds = kernels.comparison_digits(width, digit_bits)
        prime = next(p for p in _PRIMES if p > digits)
        return cls(width, digit_bits, digits, thresholds, prime, prime.bit_length())

    def dealt_bytes(self, count: int) -> int:
        return kernels.packed_size(count * self.thresholds, self.prime_bits)

    def digits_of(self, width: int) -> int:
        return kernels.comparison_digits(width, self.digit_bits)[0]

    def reply_bytes(self, count: int, width: int) -> int:
        return kernels.packed_size(count * self.digits_of(width), self.prime_bits)


async def _borrows(
    operation: Operation,
    x: ArithmeticTensor,
    layout: Layout,
    thresholds: Sequence[int],
    low_bits: Sequence[int],
    high_bit: int,
    segments: list[Segment],
) -> Words:
    """Two-holder signs of x − t in a ring of high_bit+1 bits, for each threshold t at its own resolution.

    The sign of c − t − ρ is c_top ⊕ ρ_top ⊕ [c_low < ρ_low] with c − t in place of c: the dealer's ρ is the same for
    all thresholds, so its message is sent once. Returns each party's bits (thresholds, n).
    """
    machine, me, flat = operation.machine, x.party.id, x.flat
    held = machine.memory((len(thresholds), x.size), np.uint8)
    first, second = operation.round(), operation.round()
    numbers = layout.digit_bits, layout.prime
    dealing: list[tuple[Any, ...]] = []
    holding: list[tuple[Any, ...]] = []
    for segment in segments:
        n, at, role = segment.size, segment.slice, segment.role(me)
        size = layout.dealt_bytes(n)
        if role == 2:  # deals the digits of ρ
            halves = machine.uniform(operation, "next", layout.prime, layout.thresholds, n)
            top, dealt = machine.memory(n, np.uint8), machine.memory(size, np.uint8)
            machine.call(
                "compare_deal", flat[0, at], flat[1, at], halves, low_bits[0], layout.width, *numbers, top, dealt
            )
            first.send_previous(dealt)
            for index, low in enumerate(low_bits):
                count = layout.reply_bytes(n, high_bit - low)
                left, right = second.expect_next(count, np.uint8), second.expect_previous(count, np.uint8)
                digits = layout.digits_of(high_bit - low)
                dealing.append((left, right, digits, layout.prime, top, held[index, at]))
        elif role == 0:
            halves = machine.uniform(operation, "previous", layout.prime, layout.thresholds, n)
            holding.append((segment, role, halves, None))
        else:
            halves = machine.memory((layout.thresholds, n), np.uint8)
            holding.append((segment, role, halves, first.expect_next(size, np.uint8)))
    await first
    for segment, role, halves, packed in holding:
        n, at = segment.size, segment.slice
        coins = "next" if role == 0 else "previous"  # the stream of the two holders
        if packed is not None:
            machine.call("unpack_into", packed, layout.prime_bits, halves.reshape(-1))
        for index, (threshold, low) in enumerate(zip(thresholds, low_bits, strict=True)):
            width = high_bit - low
            digits = layout.digits_of(width)
            beta = machine.mask_bytes(operation, coins, n)
            scale = machine.uniform(operation, coins, layout.prime - 1, digits, n)
            mask = machine.uniform(operation, coins, layout.prime, digits, n)
            rotation = machine.uniform(operation, coins, digits, n)
            skipped = (low - low_bits[0]) // layout.digit_bits * (2**layout.digit_bits - 1)
            reply = machine.memory(layout.reply_bytes(n, width), np.uint8)
            blinding = halves[skipped:], beta, scale, mask, rotation
            word, bits = np.uint64(threshold % 2**64), held[index, at]
            machine.call(
                "compare_reply", flat[1 - role, at], word, *blinding, low, width, *numbers, role == 0, bits, reply
            )
            (second.send_previous if role == 0 else second.send_next)(reply)
    await second
    for arguments in dealing:
        machine.call("compare_decide", *arguments)
    return held


def _is_negative_cost(
    x: ArithmeticTensor, low_bit: int = 0, high_bit: int = 63, dealers: Sequence[Segment] | None = None
) -> Cost:
    sizes = None if dealers is None else [segment.size for segment in stretched(x, dealers)]
    return Cost(2, _comparison_bytes(x.size, high_bit - low_bit, sizes))


def _comparison_bytes(count: int, width: int, sizes: list[int] | None = None) -> int:
    layout = Layout.of(width, _DIGIT_BITS)
    each = segment_sizes(count) if sizes is None else sizes
    return sum(layout.dealt_bytes(n) + 2 * layout.reply_bytes(n, width) for n in each)


def stretched(x: ArithmeticTensor, dealers: Sequence[Segment]) -> list[Segment]:
    """Stretches of rows as stretches of entries."""
    each = x.size // max(1, len(x))
    return [Segment(s.dealer, s.slice.start * each, s.slice.stop * each) for s in dealers]


@primitive(
    cost=_is_negative_cost,
    source="Wagh, Gupta, Chandran, PoPETs 2019 (ePrint 2018/442), Alg. 3, with the changes of this file",
)
async def is_negative(
    x: ArithmeticTensor, low_bit: int = 0, high_bit: int = 63, dealers: Sequence[Segment] | None = None
) -> TwoHolderBits:
    """[x < 0] for |x| < 2^high_bit in the ring, at a resolution of 2^low_bit. ``dealers`` of x's rows, where they must
    be those of other numbers.

    2 rounds. Bytes: at w = high_bit − low_bit compared bits from 1.25 w to 1.9 w (w = 16: 20, w = 31: 49, w = 63: 119).
    Domain: −2^high_bit ≤ x ≤ 2^high_bit − 2^low_bit; bits above are not looked at. Error: none for low_bit = 0;
    otherwise −2^low_bit < x < 0 may count as not negative. A value that is not negative is never taken for negative.

    Views: role 1 receives threshold bits masked modulo the prime by a stream it does not know. The dealer receives
    digit tests whose masks cancel only in the sum: the sums are uniform non-zero values, with one zero at a uniform
    position or none, and which of the two is decided by the holders' secret coin β. The bit it learns is uniform.
    """
    require_integer("high_bit", high_bit, 1, 63)
    require_integer("low_bit", low_bit, 0, high_bit - 1)
    operation = x.party.operation("is_negative", x, low_bit, high_bit, [s.dealer for s in dealers or ()])
    await _check(x, low_bit, high_bit, operation.name)
    layout = Layout.of(high_bit - low_bit, _DIGIT_BITS)
    segments = operation.segments(x.size) if dealers is None else stretched(x, dealers)
    held = await _borrows(operation, x, layout, [0], [low_bit], high_bit, segments)
    return TwoHolderBits(x.party, held[0], segments, x.shape, operation.history())


async def _check(x: ArithmeticTensor, low_bit: int, high_bit: int, name: str) -> None:
    if x.party.insecure_check_ranges:
        from refmpc.core.debug import check_range

        await check_range(x, -(2**high_bit), 2**high_bit - 2**low_bit + 1, name)


def aligned_low_bits(low_bits: Sequence[int]) -> list[int]:
    """Each low bit moved down to a digit boundary counted from the first."""
    return [low - (low - low_bits[0]) % THERMOMETER_DIGIT_BITS for low in low_bits]


def _thermometer_cost(x: ArithmeticTensor, thresholds: Sequence[int], low_bits: Sequence[int], high_bit: int) -> Cost:
    lows = aligned_low_bits(low_bits)
    layout = Layout.of(high_bit - lows[0], THERMOMETER_DIGIT_BITS)
    each = [
        layout.dealt_bytes(n) + sum(2 * layout.reply_bytes(n, high_bit - low) for low in lows)
        for n in segment_sizes(x.size)
    ]
    return Cost(2, sum(each))


@primitive(cost=_thermometer_cost, source="is_negative; thresholds share the dealer's message")
async def thermometer(
    x: ArithmeticTensor, thresholds: Sequence[int], low_bits: Sequence[int], high_bit: int
) -> list[TwoHolderBits]:
    """[x ≥ t] for several public thresholds (ring integers), each at its own resolution 2^low_bit.

    2 rounds; 42 bytes once and 2 to 12 bytes a threshold for 36-bit numbers. ``low_bits`` must not decrease.
    Domain: −2^high_bit ≤ x − t ≤ 2^high_bit − 2^low_bit. Exact where low_bit is 0; otherwise −2^low_bit < x − t < 0 may
    count as reached.
    """
    require(len(thresholds) == len(low_bits) > 0, "low_bits", low_bits, "as many as thresholds, at least one")
    require(sorted(low_bits) == list(low_bits), "low_bits", low_bits, "in non-decreasing order")
    require_integer("high_bit", high_bit, low_bits[-1] + 1, 63)
    operation = x.party.operation("thermometer", x, list(thresholds), list(low_bits), high_bit)
    for threshold, low_bit in zip(thresholds, low_bits, strict=True):
        await _check(x.reinterpret(0) - threshold, low_bit, high_bit, operation.name)
    lows = aligned_low_bits(low_bits)
    layout = Layout.of(high_bit - lows[0], THERMOMETER_DIGIT_BITS)
    segments = operation.segments(x.size)
    held = await _borrows(operation, x, layout, thresholds, lows, high_bit, segments)
    return [
        ~TwoHolderBits(x.party, bits, segments, x.shape, operation.history(index)) for index, bits in enumerate(held)
    ]


def _relu_cost(x: ArithmeticTensor, low_bit: int = 0, high_bit: int = 63) -> Cost:
    return is_negative.cost(x, low_bit, high_bit) + Cost(2, 32 * x.size)


@primitive(cost=_relu_cost, source="is_negative, select")
async def relu(x: ArithmeticTensor, low_bit: int = 0, high_bit: int = 63) -> ArithmeticTensor:
    """max(x, 0). 4 rounds; bytes of ``is_negative`` + 32. Exact for low_bit = 0, else off by at most 2^low_bit."""
    return await select(~await is_negative(x, low_bit, high_bit), x)


def _tournament(entries: int) -> list[int]:
    """The number of comparisons in each level of a tournament among ``entries``."""
    levels = []
    while entries > 1:
        levels.append(entries // 2)
        entries -= entries // 2
    return levels


def _maximum_cost(x: ArithmeticTensor, axis: int = -1, low_bit: int = 0, high_bit: int = 63) -> Cost:
    total = Cost(0, 0)
    entries = x.shape[axis]
    others = x.size // entries if entries else 0
    for pairs in _tournament(entries):
        count = others * pairs
        total += Cost(4, _comparison_bytes(count, high_bit - low_bit) + 32 * count)
    return total


@primitive(cost=_maximum_cost, source="is_negative, select")
async def maximum(x: ArithmeticTensor, axis: int = -1, low_bit: int = 0, high_bit: int = 63) -> ArithmeticTensor:
    """The largest entry along an axis, by a tournament of ⌈log2 n⌉ levels, 4 rounds each.

    Domain: differences of two entries below 2^high_bit. Exact for low_bit = 0; otherwise the result is one of the
    entries and at most ⌈log2 n⌉·2^low_bit below the largest.
    """
    require_integer(f"entries along axis {axis}", x.shape[axis], 1)
    order = [a for a in range(x.ndim) if a != axis % x.ndim]
    entries = x.transpose(axis % x.ndim, *order)
    while len(entries) > 1:
        pairs = len(entries) // 2
        left, right, rest = entries[:pairs], entries[pairs : 2 * pairs], entries[2 * pairs :]
        difference = left - right
        bits = await is_negative(difference, low_bit, high_bit)
        entries = concatenate([right + await select(~bits, difference), rest])
    return entries[0]
