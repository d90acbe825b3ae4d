"""Boolean circuits on XOR shares: AND, a prefix adder, the sign by a carry tree, equality, conversions.

These are the all-purpose reference: more rounds than the two-holder protocols, no domain to respect. Numbers are bit
sliced (plane j holds bit j of 64 elements a word), so that one AND of planes is 64 ANDs of elements.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from accel import kernels
from accel.validate import require
from refmpc.core.party import Operation
from refmpc.core.protocol import Cost, protocol
from refmpc.core.tensor import ArithmeticTensor, BooleanTensor
from refmpc.primitives.two_holder import TwoHolderBits, two_holder

__all__ = [
    "and_planes",
    "and_words",
    "arithmetic_to_boolean",
    "boolean_to_arithmetic",
    "equal",
    "is_negative_by_carry_tree",
    "plane_words",
    "sklansky_layers",
    "slice_planes",
]

SOURCE_ADDER = "Mohassel, Rindal, CCS 2018 (ABY3, ePrint 2018/403), §5.3; adder after Sklansky 1960"


async def _reshare_xor(operation: Operation, summand: np.ndarray) -> np.ndarray:
    round_ = operation.round()
    round_.send_previous(summand)
    shares = np.empty((2, *summand.shape), dtype=np.uint64)
    shares[0] = summand
    round_.fill_next(shares[1])
    await round_
    return shares


async def and_planes(operation: Operation, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """AND of replicated planes (2, rows, words): 1 round, 24 bytes a word."""
    mask = operation.machine.unsealed(operation.zero_share(x.shape[1:], "xor"))
    return await _reshare_xor(operation, kernels.and_pair(x[0], x[1], y[0], y[1], mask))


def _and_words_cost(x: BooleanTensor, y: BooleanTensor) -> Cost:
    return Cost(1, 3 * kernels.packed_size(x.size, x.width))


@protocol(cost=_and_words_cost, source="Araki, Furukawa, Lindell, Nof, Ohara, CCS 2016 (ePrint 2016/768)")
async def and_words(x: BooleanTensor, y: BooleanTensor) -> BooleanTensor:
    """x & y. 1 round, 3 bits for each bit."""
    require(x.shape == y.shape and x.width == y.width, "y", y, f"a Boolean tensor like x, {x!r}")
    operation = x.party.operation("and_words", x, y)
    left, right, mask = map(operation.machine.unsealed, (x.shares, y.shares, operation.zero_share(x.shape, "xor")))
    mine = kernels.and_pair(*left, *right, mask) & np.uint64((1 << x.width) - 1)
    round_ = operation.round()
    round_.send_previous(kernels.pack_bits(mine.reshape(-1), x.width))
    packed = round_.fill_next(np.empty(kernels.packed_size(x.size, x.width), np.uint8))
    await round_
    theirs = kernels.unpack_bits(packed, x.width, x.size).reshape(x.shape)
    return BooleanTensor(x.party, np.stack([mine, theirs]), x.width, operation.history())


# from arithmetic shares to the operands of an adder ---------------------------------------------


async def _boolean_operands(
    operation: Operation, x: ArithmeticTensor, *, negate_dealt: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """x = c − ρ as two XOR-shared words: c, known to two parties, and −ρ (or ρ), dealt by the third. 1 round, 8 bytes.

    Returns flat replicated words (2, n) each.
    """
    me = x.party.id
    flat = operation.machine.unsealed(x.flat)
    known = np.zeros((2, x.size), dtype=np.uint64)
    dealt = np.zeros((2, x.size), dtype=np.uint64)
    round_ = operation.round()
    for segment in operation.segments(x.size):
        n, at, role = segment.size, segment.slice, segment.role(me)
        if role == 2:
            value = flat[0, at] + flat[1, at]
            if not negate_dealt:
                value = np.uint64(0) - value
            dealt[1, at] = operation.stream("next").words(n)
            dealt[0, at] = value ^ dealt[1, at]
            round_.send_previous(dealt[0, at])
        else:
            known[1 - role, at] = flat[1 - role, at]
            if role == 0:
                dealt[0, at] = operation.stream("previous").words(n)
            else:
                round_.fill_next(dealt[1, at])
    await round_
    return known, dealt


def slice_planes(words: np.ndarray, width: int = 64) -> np.ndarray:
    return np.stack([kernels.slice_bits(np.ascontiguousarray(share), width) for share in words])


def plane_words(count: int) -> int:
    return -(-count // 64)


# the carry tree: only the top carry -------------------------------------------------------------


def _carry_tree_planes(width: int) -> tuple[int, int]:
    """(rounds, ANDed planes) to reduce ``width`` (generate, propagate) pairs to one carry."""
    rounds = planes = 0
    while width > 1:
        pairs = width // 2
        planes += 2 * pairs - 1  # the lowest group needs no propagate
        width -= pairs
        rounds += 1
    return rounds, planes


async def _top_carry(operation: Operation, generate: np.ndarray, propagate: np.ndarray) -> np.ndarray:
    """The carry out of the highest bit: (2, words)."""
    while generate.shape[1] > 1:
        width = generate.shape[1]
        high = np.arange(1, width, 2)
        low = high - 1
        left, right = kernels.carry_layer(generate, propagate, high, low, high[1:], low[1:])
        product = await and_planes(operation, left, right)
        pairs = high.size
        merged = generate[:, high] ^ product[:, :pairs]
        both = np.concatenate([propagate[:, :1], product[:, pairs:]], axis=1)  # entry 0 is never used
        if width % 2:  # the highest bit waits for the next layer
            merged = np.concatenate([merged, generate[:, -1:]], axis=1)
            both = np.concatenate([both, propagate[:, -1:]], axis=1)
        generate, propagate = merged, both
    return generate[:, 0]


def _carry_sign_cost(x: ArithmeticTensor) -> Cost:
    rounds, planes = _carry_tree_planes(63)
    return Cost(rounds + 2, 8 * x.size + 24 * (63 + planes) * plane_words(x.size))


@protocol(cost=_carry_sign_cost, source=SOURCE_ADDER)
async def is_negative_by_carry_tree(x: ArithmeticTensor) -> TwoHolderBits:
    """[x < 0] for any x: 8 rounds, about 79 bytes. Exact. The reference for ``is_negative``."""
    operation = x.party.operation("is_negative_by_carry_tree", x)
    known, dealt = await _boolean_operands(operation, x)
    a, b = slice_planes(known), slice_planes(dealt)
    generate = await and_planes(operation, a[:, :63], b[:, :63])
    carry = await _top_carry(operation, generate, a[:, :63] ^ b[:, :63])
    sign = a[:, 63] ^ b[:, 63] ^ carry
    words = np.stack([kernels.unslice_bits(share[np.newaxis], x.size) for share in sign])
    return two_holder(BooleanTensor(x.party, words.reshape(2, *x.shape), 1, operation.history()))


# the full adder ---------------------------------------------------------------------------------


def sklansky_layers(width: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For each layer the (high, low) pairs to merge: ``high`` takes in the prefix that ends at ``low``; and which of
    them still need their propagate afterwards (not those whose group now starts at bit 0)."""
    layers = []
    span = 1
    while span < width:
        high = np.array([j for j in range(width) if j & span], dtype=np.int64)
        layers.append((high, (high // span) * span - 1, high >= 2 * span))
        span *= 2
    return layers


def _adder_cost(count: int) -> Cost:
    layers = sklansky_layers(63)
    planes = 63 + sum(high.size + int(wanted.sum()) for high, _, wanted in layers)
    return Cost(1 + len(layers), 24 * planes * plane_words(count))


async def _add_planes(operation: Operation, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b modulo 2^64 on bit planes (2, 64, words); carries out of bits 0..62 are needed."""
    half = a ^ b
    propagate = half[:, :63].copy()
    generate = await and_planes(operation, a[:, :63], b[:, :63])
    for high, low, wanted in sklansky_layers(63):
        left, right = kernels.carry_layer(generate, propagate, high, low, high[wanted], low[wanted])
        product = await and_planes(operation, left, right)
        generate[:, high] ^= product[:, : high.size]
        propagate[:, high[wanted]] = product[:, high.size :]
    total = half
    total[:, 1:] ^= generate
    return total


def _a2b_cost(x: ArithmeticTensor) -> Cost:
    return Cost(1, 8 * x.size) + _adder_cost(x.size)


@protocol(cost=_a2b_cost, source=SOURCE_ADDER)
async def arithmetic_to_boolean(x: ArithmeticTensor) -> BooleanTensor:
    """All 64 bits of x, XOR-shared. 8 rounds, about 170 bytes. Exact."""
    operation = x.party.operation("arithmetic_to_boolean", x)
    known, dealt = await _boolean_operands(operation, x)
    planes = await _add_planes(operation, slice_planes(known), slice_planes(dealt))
    words = np.stack([kernels.unslice_bits(share, x.size) for share in planes])
    return BooleanTensor(x.party, words.reshape(2, *x.shape), 64, operation.history())


def _b2a_cost(x: BooleanTensor, fraction_bits: int = 0) -> Cost:
    return Cost(2, 24 * x.size) + _adder_cost(x.size)


@protocol(cost=_b2a_cost, source="Mohassel, Rindal, CCS 2018 (ABY3, ePrint 2018/403), §5.4")
async def boolean_to_arithmetic(x: BooleanTensor, fraction_bits: int = 0) -> ArithmeticTensor:
    """XOR-shared words as arithmetic shares. 9 rounds, about 185 bytes. Exact.

    The dealer draws both outer shares with the holders and inputs minus their sum; the adder's result is the middle
    share, opened to the two holders only. Each of them sees it masked by the outer share it does not know.
    """
    operation = x.party.operation("boolean_to_arithmetic", x, fraction_bits)
    me = x.party.id
    flat = operation.machine.unsealed(x.flat)
    shares = np.empty_like(flat)
    dealt = np.zeros_like(flat)
    segments = operation.segments(x.size)
    first, last = operation.round(), operation.round()
    for segment in segments:
        n, at, role = segment.size, segment.slice, segment.role(me)
        if role == 2:
            shares[1, at], dealt[1, at] = operation.stream("next").words(n), operation.stream("next").words(n)
            shares[0, at] = operation.stream("previous").words(n)
            dealt[0, at] = (np.uint64(0) - shares[0, at] - shares[1, at]) ^ dealt[1, at]
            first.send_previous(dealt[0, at])
        elif role == 0:
            shares[0, at], dealt[0, at] = operation.stream("previous").words(n), operation.stream("previous").words(n)
        else:
            shares[1, at] = operation.stream("next").words(n)
            first.fill_next(dealt[1, at])
    await first
    planes = await _add_planes(operation, slice_planes(flat), slice_planes(dealt))
    total = np.stack([kernels.unslice_bits(share, x.size) for share in planes])
    pending = []
    for segment in segments:
        at, role = segment.slice, segment.role(me)
        if role == 0:
            last.send_next(total[0, at])
            pending.append((at, 1, last.fill_next(np.empty(segment.size, np.uint64))))
        elif role == 1:
            last.send_previous(total[1, at])
            pending.append((at, 0, last.fill_previous(np.empty(segment.size, np.uint64))))
    await last
    for at, index, missing in pending:
        shares[index, at] = total[0, at] ^ total[1, at] ^ missing
    return ArithmeticTensor(x.party, shares.reshape(2, *x.shape), fraction_bits, operation.history())


# equality ---------------------------------------------------------------------------------------


def _equal_cost(x: ArithmeticTensor, y: ArithmeticTensor | npt.ArrayLike) -> Cost:
    count = int(np.prod(np.broadcast_shapes(x.shape, np.shape(y))))
    return Cost(7, 8 * count + 24 * 63 * plane_words(count))


@protocol(cost=_equal_cost, source="AND tree over the bits of c ⊕ ρ")
async def equal(x: ArithmeticTensor, y: ArithmeticTensor | npt.ArrayLike) -> TwoHolderBits:
    """[x = y] in the ring; y may be public. 7 rounds, about 32 bytes. Exact: x − y = c − ρ is zero when all bits of c and
    ρ agree."""
    difference = x - y
    operation = x.party.operation("equal", difference)
    known, dealt = await _boolean_operands(operation, difference, negate_dealt=False)
    agree = slice_planes(known ^ dealt)
    ones = np.uint64(0xFFFFFFFFFFFFFFFF)
    if x.party.id == 0:
        agree[0] ^= ones
    elif x.party.id == 2:
        agree[1] ^= ones
    while agree.shape[1] > 1:
        half = agree.shape[1] // 2
        agree = await and_planes(operation, agree[:, :half], agree[:, half:])
    words = np.stack([kernels.unslice_bits(share, difference.size) for share in agree])
    return two_holder(BooleanTensor(x.party, words.reshape(2, *difference.shape), 1, operation.history()))
