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
from refmpc.core.primitive import Cost, primitive
from refmpc.core.tensor import ArithmeticTensor, BooleanTensor
from refmpc.core.words import Words
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
    "unslice_planes",
]

SOURCE_ADDER = "Mohassel, Rindal, CCS 2018 (ABY3, ePrint 2018/403), §5.3; adder after Sklansky 1960"


async def and_planes(operation: Operation, x: Words, y: Words) -> Words:
    """AND of replicated planes (2, rows, words): 1 round, 24 bytes a word."""
    machine = operation.machine
    message, shares = machine.memory(x.shape[1:]), machine.memory(x.shape)
    machine.call("and_pair", x, y, operation.zero_share(x.shape[1:], "xor"), message)
    round_ = operation.round()
    round_.send_previous(message)
    machine.call("copy", message, shares[0])
    round_.fill_next(shares[1])
    await round_
    return shares


def _and_words_cost(x: BooleanTensor, y: BooleanTensor) -> Cost:
    return Cost(1, 3 * kernels.packed_size(x.size, x.width))


@primitive(cost=_and_words_cost, source="Araki, Furukawa, Lindell, Nof, Ohara, CCS 2016 (ePrint 2016/768)")
async def and_words(x: BooleanTensor, y: BooleanTensor) -> BooleanTensor:
    """x & y. 1 round, 3 bits for each bit."""
    require(x.shape == y.shape and x.width == y.width, "y", y, f"a Boolean tensor like x, {x!r}")
    operation = x.party.operation("and_words", x, y)
    machine, size = operation.machine, kernels.packed_size(x.size, x.width)
    shares, message = machine.memory((2, x.size)), machine.memory(size, np.uint8)
    machine.call("and_pair", x.flat, y.flat, operation.zero_share((x.size,), "xor"), shares[0])
    machine.call("bitwise_and", shares[0], np.uint64((1 << x.width) - 1), shares[0])
    machine.call("pack_into", shares[0], x.width, message)
    round_ = operation.round()
    round_.send_previous(message)
    theirs = round_.expect_next(size, np.uint8)
    await round_
    machine.call("unpack_into", theirs, x.width, shares[1])
    return BooleanTensor(x.party, shares.reshape(2, *x.shape), x.width, operation.history())


# from arithmetic shares to the operands of an adder ---------------------------------------------


async def _boolean_operands(
    operation: Operation, x: ArithmeticTensor, *, negate_dealt: bool = True
) -> tuple[Words, Words]:
    """x = c − ρ as two XOR-shared words: c, known to two parties, and −ρ (or ρ), dealt by the third. 1 round, 8 bytes.

    Returns flat replicated words (2, n) each.
    """
    machine, me, flat = operation.machine, x.party.id, x.flat
    known, dealt = _zeros(operation, flat.shape), _zeros(operation, flat.shape)
    round_ = operation.round()
    for segment in operation.segments(x.size):
        n, at, role = segment.size, segment.slice, segment.role(me)
        if role == 2:
            value = machine.binary("add", flat[0, at], flat[1, at])
            if not negate_dealt:
                machine.call("negate", value, value)
            machine.call("copy", machine.masks(operation, "next", n), dealt[1, at])
            machine.call("xor", value, dealt[1, at], dealt[0, at])
            round_.send_previous(dealt[0, at])
        else:
            machine.call("copy", flat[1 - role, at], known[1 - role, at])
            if role == 0:
                machine.call("copy", machine.masks(operation, "previous", n), dealt[0, at])
            else:
                round_.fill_next(dealt[1, at])
    await round_
    return known, dealt


def _zeros(operation: Operation, shape: tuple[int, ...]) -> Words:
    zeros = operation.machine.memory(shape)
    operation.machine.call("copy", np.uint64(0), zeros)
    return zeros


def slice_planes(operation: Operation, words: Words, width: int = 64) -> Words:
    """Bit planes (2, width, ⌈n/64⌉) of replicated words (2, n): local."""
    planes = operation.machine.memory((2, width, plane_words(words.shape[1])))
    for share, out in zip(words, planes, strict=True):
        operation.machine.call("slice_bits", share, out)
    return planes


def unslice_planes(operation: Operation, planes: Words, count: int) -> Words:
    """Replicated words (2, count) of bit planes (2, width, ⌈count/64⌉): local."""
    words = operation.machine.memory((2, count))
    for share, out in zip(planes, words, strict=True):
        operation.machine.call("unslice_bits", share, out)
    return words


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


async def _top_carry(operation: Operation, generate: Words, propagate: Words) -> Words:
    """The carry out of the highest bit: (2, 1, words)."""
    machine = operation.machine
    while generate.shape[1] > 1:
        width = generate.shape[1]
        pairs, odd = divmod(width, 2)
        product = await _and_layer(
            operation, generate, propagate, np.arange(1, width, 2), np.arange(0, width - 1, 2), pairs - 1
        )
        merged, both = (machine.memory((2, pairs + odd, generate.shape[2])) for _ in range(2))
        machine.call("xor", generate[:, 1::2], product[:, :pairs], merged[:, :pairs])
        machine.call("copy", propagate[:, :1], both[:, :1])  # entry 0 is never used
        machine.call("copy", product[:, pairs:], both[:, 1:pairs])
        if odd:  # the highest bit waits for the next layer
            machine.call("copy", generate[:, -1:], merged[:, pairs:])
            machine.call("copy", propagate[:, -1:], both[:, pairs:])
        generate, propagate = merged, both
    return generate


async def _and_layer(
    operation: Operation, generate: Words, propagate: Words, high: np.ndarray, low: np.ndarray, wanted: int
) -> Words:
    """The products of a layer: P_high·G_low for all pairs, P_high·P_low for the last ``wanted`` of them."""
    machine = operation.machine
    left, right = (machine.memory((2, high.size + wanted, generate.shape[2])) for _ in range(2))
    machine.call("carry_layer", generate, propagate, machine.public(high), machine.public(low), wanted, left, right)
    return await and_planes(operation, left, right)


def _carry_sign_cost(x: ArithmeticTensor) -> Cost:
    rounds, planes = _carry_tree_planes(63)
    return Cost(rounds + 2, 8 * x.size + 24 * (63 + planes) * plane_words(x.size))


@primitive(cost=_carry_sign_cost, source=SOURCE_ADDER)
async def is_negative_by_carry_tree(x: ArithmeticTensor) -> TwoHolderBits:
    """[x < 0] for any x: 8 rounds, about 79 bytes. Exact. The reference for ``is_negative``."""
    operation = x.party.operation("is_negative_by_carry_tree", x)
    known, dealt = await _boolean_operands(operation, x)
    a, b = slice_planes(operation, known), slice_planes(operation, dealt)
    half = operation.machine.binary("xor", a, b)
    generate = await and_planes(operation, a[:, :63], b[:, :63])
    carry = await _top_carry(operation, generate, half[:, :63])
    words = unslice_planes(operation, operation.machine.binary("xor", half[:, 63:], carry), x.size)
    return two_holder(BooleanTensor(x.party, words.reshape(2, *x.shape), 1, operation.history()))


# the full adder ---------------------------------------------------------------------------------


def sklansky_layers(width: int) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """For each layer the (high, low) pairs to merge: ``high`` takes in the prefix that ends at ``low``; and how many of
    them, the last ones, still need their propagate afterwards (not those whose group now starts at bit 0)."""
    layers = []
    span = 1
    while span < width:
        high = np.array([j for j in range(width) if j & span], dtype=np.int64)
        layers.append((high, (high // span) * span - 1, int((high >= 2 * span).sum())))
        span *= 2
    return layers


def _adder_cost(count: int) -> Cost:
    layers = sklansky_layers(63)
    planes = 63 + sum(high.size + wanted for high, _, wanted in layers)
    return Cost(1 + len(layers), 24 * planes * plane_words(count))


async def _add_planes(operation: Operation, a: Words, b: Words) -> Words:
    """a + b modulo 2^64 on bit planes (2, 64, words); carries out of bits 0..62 are needed."""
    machine = operation.machine
    total = machine.binary("xor", a, b)
    propagate = machine.copy(total[:, :63])
    generate = await and_planes(operation, a[:, :63], b[:, :63])
    for high, low, wanted in sklansky_layers(63):
        product = await _and_layer(operation, generate, propagate, high, low, wanted)
        machine.call("carry_merge", product, machine.public(high), wanted, generate, propagate)
    machine.call("xor", total[:, 1:], generate, total[:, 1:])
    return total


def _a2b_cost(x: ArithmeticTensor) -> Cost:
    return Cost(1, 8 * x.size) + _adder_cost(x.size)


@primitive(cost=_a2b_cost, source=SOURCE_ADDER)
async def arithmetic_to_boolean(x: ArithmeticTensor) -> BooleanTensor:
    """All 64 bits of x, XOR-shared. 8 rounds, about 170 bytes. Exact."""
    operation = x.party.operation("arithmetic_to_boolean", x)
    known, dealt = await _boolean_operands(operation, x)
    planes = await _add_planes(operation, slice_planes(operation, known), slice_planes(operation, dealt))
    words = unslice_planes(operation, planes, x.size)
    return BooleanTensor(x.party, words.reshape(2, *x.shape), 64, operation.history())


def _b2a_cost(x: BooleanTensor, fraction_bits: int = 0) -> Cost:
    return Cost(2, 24 * x.size) + _adder_cost(x.size)


@primitive(cost=_b2a_cost, source="Mohassel, Rindal, CCS 2018 (ABY3, ePrint 2018/403), §5.4")
async def boolean_to_arithmetic(x: BooleanTensor, fraction_bits: int = 0) -> ArithmeticTensor:
    """XOR-shared words as arithmetic shares. 9 rounds, about 185 bytes. Exact.

    The dealer draws both outer shares with the holders and inputs minus their sum; the adder's result is the middle
    share, opened to the two holders only. Each of them sees it masked by the outer share it does not know.
    """
    operation = x.party.operation("boolean_to_arithmetic", x, fraction_bits)
    machine, me, flat = operation.machine, x.party.id, x.flat
    shares, dealt = machine.memory(flat.shape), _zeros(operation, flat.shape)
    segments = operation.segments(x.size)
    first, last = operation.round(), operation.round()
    for segment in segments:
        n, at, role = segment.size, segment.slice, segment.role(me)
        if role == 2:
            machine.call("copy", machine.masks(operation, "next", n), shares[1, at])
            machine.call("copy", machine.masks(operation, "next", n), dealt[1, at])
            machine.call("copy", machine.masks(operation, "previous", n), shares[0, at])
            machine.call("replicated_rho", shares[0, at], shares[1, at], dealt[0, at])
            machine.call("xor", dealt[0, at], dealt[1, at], dealt[0, at])
            first.send_previous(dealt[0, at])
        elif role == 0:
            machine.call("copy", machine.masks(operation, "previous", n), shares[0, at])
            machine.call("copy", machine.masks(operation, "previous", n), dealt[0, at])
        else:
            machine.call("copy", machine.masks(operation, "next", n), shares[1, at])
            first.fill_next(dealt[1, at])
    await first
    planes = await _add_planes(operation, slice_planes(operation, flat), slice_planes(operation, dealt))
    total = unslice_planes(operation, planes, x.size)
    pending = []
    for segment in segments:
        at, role = segment.slice, segment.role(me)
        if role == 0:
            last.send_next(total[0, at])
            pending.append((at, 1, last.expect_next(segment.size)))
        elif role == 1:
            last.send_previous(total[1, at])
            pending.append((at, 0, last.expect_previous(segment.size)))
    await last
    for at, index, missing in pending:
        machine.call("xor", total[0, at], total[1, at], shares[index, at])
        machine.call("xor", shares[index, at], missing, shares[index, at])
    return ArithmeticTensor(x.party, shares.reshape(2, *x.shape), fraction_bits, operation.history())


# equality ---------------------------------------------------------------------------------------


def _equal_cost(x: ArithmeticTensor, y: ArithmeticTensor | npt.ArrayLike) -> Cost:
    count = int(np.prod(np.broadcast_shapes(x.shape, np.shape(y))))
    return Cost(7, 8 * count + 24 * 63 * plane_words(count))


@primitive(cost=_equal_cost, source="AND tree over the bits of c ⊕ ρ")
async def equal(x: ArithmeticTensor, y: ArithmeticTensor | npt.ArrayLike) -> TwoHolderBits:
    """[x = y] in the ring; y may be public. 7 rounds, about 32 bytes. Exact: x − y = c − ρ is zero when all bits of c
    and ρ agree."""
    difference = x - y
    operation = x.party.operation("equal", difference)
    known, dealt = await _boolean_operands(operation, difference, negate_dealt=False)
    machine = operation.machine
    agree = slice_planes(operation, machine.binary("xor", known, dealt))
    if x.party.id != 1:  # the share x_0 takes in that bits agree where they do not differ
        mine = agree[0 if x.party.id == 0 else 1]
        machine.call("xor", mine, np.uint64(0xFFFFFFFFFFFFFFFF), mine)
    while agree.shape[1] > 1:
        half = agree.shape[1] // 2
        agree = await and_planes(operation, agree[:, :half], agree[:, half:])
    words = unslice_planes(operation, agree, difference.size)
    return two_holder(BooleanTensor(x.party, words.reshape(2, *difference.shape), 1, operation.history()))
