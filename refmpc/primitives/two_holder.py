"""Two-holder bits, and what can be done with them: selection, conversion, table look-up.

A replicated x is c − ρ with c known to two parties and ρ to the third, the dealer. A *two-holder bit* is β ⊕ β' with β
at the two and β' at the dealer: each party holds exactly one bit per element. Comparisons produce such bits, and an
XOR-shared bit already has this form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import kernels
from accel.validate import require, require_choice
from refmpc.core.digest import mix
from refmpc.core.party import Operation, Segment, segment_sizes
from refmpc.core.primitive import Cost, primitive
from refmpc.core.tensor import ArithmeticTensor, BooleanTensor
from refmpc.core.words import Words, public_array, seal

if TYPE_CHECKING:
    from refmpc.core.party import Party

__all__ = [
    "TwoHolderBits",
    "bit_to_arithmetic",
    "bits_to_boolean",
    "lookup",
    "select",
    "two_holder",
    "weigh_bits",
    "where",
]


_NOT, _XOR = range(100, 102)  # what a history says of local operations


class TwoHolderBits:
    """Secret bits β ⊕ β'. Not and XOR are local; ``where``, ``arithmetic`` and ``boolean`` run protocols."""

    __slots__ = ("held", "history", "party", "segments", "shape")

    def __init__(self, party: Party, held: np.ndarray, segments: list[Segment], shape: tuple[int, ...], history: int):
        self.party = party
        self.held = seal(held)  # flat uint8: this party's bit of each element
        self.segments = segments
        self.shape = shape
        self.history = history  # as of every tensor

    def __repr__(self) -> str:
        return f"TwoHolderBits(shape={self.shape}, party={self.party.id})"

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r} is secret: it has no truth value; reveal it, or select with where()")

    def public_digest(self) -> int:
        """Public digest of history and shape."""
        return mix(self.history, self.shape)

    @property
    def size(self) -> int:
        """The number of bits."""
        return self.held.size

    def __invert__(self) -> TwoHolderBits:
        machine = self.party.machine
        flipped = machine.memory(self.held.shape, np.uint8)
        for segment in self.segments:
            holds = np.uint8(segment.role(self.party.id) != 2)
            machine.call("xor", self.held[segment.slice], holds, flipped[segment.slice])
        return TwoHolderBits(self.party, flipped, self.segments, self.shape, mix(_NOT, self.history))

    def __xor__(self, other: TwoHolderBits) -> TwoHolderBits:
        """XOR of two sets of bits; local when both have the same dealers, as results of one operation have."""
        same = [(s.dealer, s.slice) for s in self.segments] == [(s.dealer, s.slice) for s in other.segments]
        require(same and self.shape == other.shape, "other", other, "bits of the same shape dealt by the same parties")
        both = self.party.machine.memory(self.held.shape, np.uint8)
        self.party.machine.call("xor", self.held, other.held, both)
        history = mix(_XOR, self.history, other.history)
        return TwoHolderBits(self.party, both, self.segments, self.shape, history)

    def reshape(self, *shape: int | tuple[int, ...]) -> TwoHolderBits:
        """The same bits in another shape."""
        wanted: Any = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        target = self.held.reshape(wanted).shape
        return TwoHolderBits(self.party, self.held, self.segments, target, self.history)

    def where(self, if_set: Any, if_clear: Any) -> ArithmeticTensor:
        """``if_set`` where the bit is one, else ``if_clear``."""
        return self.party.complete(where(self, if_set, if_clear))

    def arithmetic(self) -> ArithmeticTensor:
        """The bits as integers 0 and 1."""
        return self.party.complete(bit_to_arithmetic(self))

    def boolean(self) -> BooleanTensor:
        """The bits as an XOR-shared tensor of width 1."""
        return self.party.complete(bits_to_boolean(self))


def two_holder(bits: BooleanTensor) -> TwoHolderBits:
    """XOR-shared bits (width 1) as two-holder bits: local."""
    require(bits.width == 1, "bits.width", bits.width, "1", "take one bit of each word with .bit(index)")
    party, flat = bits.party, bits.flat
    operation = party.operation("two_holder", bits)
    segments = operation.segments(bits.size)
    held = party.machine.memory(bits.size)
    for segment in segments:
        at, role = segment.slice, segment.role(party.id)
        if role == 2:
            party.machine.call("xor", flat[0, at], flat[1, at], held[at])
        else:
            party.machine.call("copy", flat[1 - role, at], held[at])
    narrow = party.machine.memory(bits.size, np.uint8)
    party.machine.call("copy", held, narrow)
    return TwoHolderBits(party, narrow, segments, bits.shape, operation.history())


async def reshare_pair(
    operation: Operation, segments: Sequence[Segment], summands: Sequence[Words | None], count: int
) -> Words:
    """From the two holders' summands v0 + v1 (nothing at the dealer) to replicated shares: 1 round, 16 bytes.

    The outer shares are drawn from the dealer's streams with each holder; the holders exchange the rest, each masked
    by the share that the other does not know.
    """
    machine, me = operation.machine, operation.party.id
    shares = machine.memory((2, count))
    round_ = operation.round()
    pending = []
    for segment, v in zip(segments, summands, strict=True):
        n, at, role = segment.size, segment.slice, segment.role(me)
        if role == 2:
            machine.call("copy", machine.masks(operation, "next", n), shares[1, at])
            machine.call("copy", machine.masks(operation, "previous", n), shares[0, at])
            continue
        mine = machine.memory(n)
        mask = machine.masks(operation, "previous" if role == 0 else "next", n)
        machine.call("reshare_hold", v, mask, shares[role, at], mine)
        (round_.send_next if role == 0 else round_.send_previous)(mine)
        theirs = (round_.expect_next if role == 0 else round_.expect_previous)(n)
        pending.append((mine, theirs, shares[1 - role, at]))
    await round_
    for mine, theirs, share in pending:
        machine.call("add", mine, theirs, share)
    return shares


async def _reshare_rows(
    operation: Operation, segments: Sequence[Segment], sums: Sequence[Words | None], rows: int, count: int
) -> Words:
    """``reshare_pair`` of several vectors with the same dealers, as one: ``sums`` holds (rows, n) per segment."""
    if len(segments) == 1:
        whole = [None if part is None else part.reshape(-1) for part in sums]
        return await reshare_pair(operation, [Segment(segments[0].dealer, 0, rows * count)], whole, rows * count)
    stretched = [
        Segment(segment.dealer, row * count + segment.slice.start, row * count + segment.slice.stop)
        for row in range(rows)
        for segment in segments
    ]
    summands = [None if part is None else part[row] for row in range(rows) for part in sums]
    return await reshare_pair(operation, stretched, summands, rows * count)


async def deal_halves(
    operation: Operation,
    segments: Sequence[Segment],
    shape_of: Callable[[int], tuple[int, int]],
    deal: Callable[[Segment, Words, Words], None],
) -> list[Words | None]:
    """The dealer shares ``shape_of(n)`` values between the holders: role 0 draws its halves with the dealer, role 1
    receives the others, which ``deal(segment, masks, out)`` computes. 1 round, 8 bytes a value. None at the dealer."""
    machine, me = operation.machine, operation.party.id
    round_ = operation.round()
    halves: list[Words | None] = []
    for segment in segments:
        shape, role = shape_of(segment.size), segment.role(me)
        if role == 0:
            halves.append(machine.masks(operation, "previous", *shape))
        elif role == 1:
            halves.append(round_.expect_next(shape))
        else:
            out = machine.memory(shape)
            deal(segment, machine.masks(operation, "next", *shape), out)
            round_.send_previous(out)
            halves.append(None)
    await round_
    return halves


@primitive(cost=lambda bits, d: Cost(2, 32 * bits.size), source="this project, proofs §2.5")
async def select(bits: TwoHolderBits, d: ArithmeticTensor) -> ArithmeticTensor:
    """bit·d element by element. 2 rounds, 32 bytes. Exact modulo 2^64.

    b·d = b·d1 + b·(d0+d2), b = β + (1−2β)β'. The dealer shares β' and w = β'(d0+d2) between the holders (16 bytes, the
    first halves are drawn from a stream). Since d0 lies at role 0 and d2 at role 1, d0+d2 is shared between them
    already, and b·d = β·d1 + (1−2β)·d1·β' + β(d0+d2) + (1−2β)w is linear in what they share: they reshare it
    (16 bytes). Views: role 1 gets two values masked by role 0's halves, then both get values masked by the other's
    outer share; the dealer gets nothing.
    """
    require(bits.shape == d.shape, "d.shape", d.shape, f"the shape of the bits, {bits.shape}")
    operation = d.party.operation("select", bits, d)
    machine, me, flat = operation.machine, d.party.id, d.flat

    def deal(segment: Segment, masks: Words, out: Words) -> None:
        at = segment.slice
        machine.call("select_deal", bits.held[at], flat[0, at], flat[1, at], masks, out)

    halves = await deal_halves(operation, bits.segments, lambda n: (2, n), deal)  # of β' and of β'(d0 + d2)
    summands: list[Words | None] = []
    for segment, half in zip(bits.segments, halves, strict=True):
        at, role = segment.slice, segment.role(me)
        v = None
        if half is not None:
            v = machine.memory(segment.size)
            machine.call("select_hold", bits.held[at], half, flat[role, at], flat[1 - role, at], role == 0, v)
        summands.append(v)
    shares = await reshare_pair(operation, bits.segments, summands, d.size)
    return ArithmeticTensor(d.party, shares.reshape(2, *d.shape), d.fraction_bits, operation.history())


def _where_cost(bits: TwoHolderBits, if_set: Any, if_clear: Any) -> Cost:
    return Cost(2, 32 * bits.size)


@primitive(cost=_where_cost, source="select")
async def where(bits: TwoHolderBits, if_set: Any, if_clear: Any) -> ArithmeticTensor:
    """``if_set`` where the bit is one, else ``if_clear``; one of them may be public. Cost of ``select``."""
    difference = if_set - if_clear
    if not isinstance(difference, ArithmeticTensor):
        raise TypeError("where() takes at least one secret tensor; use select or bit_to_arithmetic for public values")
    return if_clear + await select(bits, difference.broadcast_to(bits.shape))


def _bit_to_arithmetic_cost(bits: TwoHolderBits, rounds: int = 1) -> Cost:
    return Cost(rounds, (48 if rounds == 1 else 24) * bits.size)


@primitive(cost=_bit_to_arithmetic_cost, source="this project, proofs §2.5")
async def bit_to_arithmetic(bits: TwoHolderBits, rounds: int = 1) -> ArithmeticTensor:
    """The bits as integers. 1 round and 48 bytes, or 2 rounds and 24 bytes. Exact.

    One round: the dealer draws both outer shares and offers the middle share for β = 0 and for β = 1 under one-time
    keys to each holder; the other holder sends the key. Two rounds: the dealer shares β', the holders compute
    β + (1−2β)β' and reshare.
    """
    require_choice("rounds", str(rounds), ("1", "2"))
    operation = bits.party.operation("bit_to_arithmetic", bits, rounds)
    shares = await (_inject_one_round(operation, bits) if rounds == 1 else _inject_two_rounds(operation, bits))
    return ArithmeticTensor(bits.party, shares.reshape(2, *bits.shape), 0, operation.history())


async def _inject_two_rounds(operation: Operation, bits: TwoHolderBits) -> Words:
    machine = operation.machine

    def deal(segment: Segment, masks: Words, out: Words) -> None:
        machine.call("subtract", bits.held[segment.slice], masks[0], out[0])

    halves = await deal_halves(operation, bits.segments, lambda n: (1, n), deal)
    summands: list[Words | None] = []
    for segment, half in zip(bits.segments, halves, strict=True):
        v = None
        if half is not None:
            v = machine.memory(segment.size)
            leads = segment.role(bits.party.id) == 0
            machine.call("inject_hold", bits.held[segment.slice], half[0], leads, v)
        summands.append(v)
    return await reshare_pair(operation, bits.segments, summands, bits.size)


async def _inject_one_round(operation: Operation, bits: TwoHolderBits) -> Words:
    machine, me = operation.machine, bits.party.id
    shares = machine.memory((2, bits.size))
    round_ = operation.round()
    pending = []
    for segment in bits.segments:
        n, at, role = segment.size, segment.slice, segment.role(me)
        held = bits.held[at]
        if role == 2:  # masks: outer share, key for β = 0, key for β = 1
            with_0, with_1 = machine.masks(operation, "next", 3, n), machine.masks(operation, "previous", 3, n)
            to_0, to_1 = machine.memory((2, n)), machine.memory((2, n))
            machine.call("inject_deal", held, with_0, with_1, shares[0, at], shares[1, at], to_0, to_1)
            round_.send_next(to_0)
            round_.send_previous(to_1)
            continue
        masks = machine.masks(operation, "previous" if role == 0 else "next", 3, n)
        key = machine.memory(n)  # opens the dealer's offer to the *other* holder
        machine.call("inject_key", held, masks, shares[role, at], key)
        if role == 0:
            round_.send_next(key)
            offers, my_key = round_.expect_previous((2, n)), round_.expect_next(n)
        else:
            round_.send_previous(key)
            offers, my_key = round_.expect_next((2, n)), round_.expect_previous(n)
        pending.append((held, offers, my_key, shares[1 - role, at]))
    await round_
    for arguments in pending:
        machine.call("inject_result", *arguments)
    return shares


def _weigh_bits_cost(bits: Sequence[TwoHolderBits], weights: np.ndarray, fraction_bits: int = 0) -> Cost:
    return Cost(2, (8 * len(bits) + 16 * len(weights)) * bits[0].size)


@primitive(cost=_weigh_bits_cost, source="this project: bit_to_arithmetic of a weighted sum")
async def weigh_bits(bits: Sequence[TwoHolderBits], weights: np.ndarray, fraction_bits: int = 0) -> ArithmeticTensor:
    """Σ_k weights[o, k]·bit_k for each output o; the weights are public ring integers.

    2 rounds, 8 bytes a bit and 16 an output, instead of 24 for each bit. Exact. The bits come from one operation (same
    dealers). The dealer shares each β'_k; Σ w_k(β_k + (1−2β_k)β'_k) is linear in them and reshared once.
    The result has one leading axis for the outputs and the given scale.
    """
    kind = public_array(weights).dtype
    require(kind.kind in "biu", "weights", kind, "integers", "encode real weights first, and give their fraction_bits")
    words = np.asarray(weights).astype(np.int64).view(np.uint64)
    require(words.ndim == 2 and words.shape[1] == len(bits), "weights.shape", words.shape, f"(outputs, {len(bits)})")
    party, segments, count = bits[0].party, bits[0].segments, bits[0].size
    dealers = [[(s.dealer, s.slice) for s in each.segments] for each in bits]
    require(all(d == dealers[0] for d in dealers), "bits", list(bits), "dealt by the same parties (one operation)")
    operation = party.operation("weigh_bits", list(bits), words, fraction_bits)
    machine = operation.machine
    public = machine.public(words)
    held = machine.memory((len(bits), count), np.uint8)
    for each, row in zip(bits, held, strict=True):
        machine.call("copy", each.held, row)

    def deal(segment: Segment, masks: Words, out: Words) -> None:
        machine.call("subtract", held[:, segment.slice], masks, out)

    halves = await deal_halves(operation, segments, lambda n: (len(bits), n), deal)
    sums: list[Words | None] = []
    for segment, half in zip(segments, halves, strict=True):
        total = None
        if half is not None:
            total = machine.memory((len(words), segment.size))
            leads = segment.role(party.id) == 0
            machine.call("weigh_hold", machine.contiguous(held[:, segment.slice]), half, public, leads, total)
        sums.append(total)
    shares = await _reshare_rows(operation, segments, sums, len(words), count)
    result = shares.reshape(2, len(words), *bits[0].shape)
    return ArithmeticTensor(party, result, fraction_bits, operation.history())


def _bits_to_boolean_cost(bits: TwoHolderBits) -> Cost:
    return Cost(1, sum(kernels.packed_size(n, 1) for n in segment_sizes(bits.size)))


@primitive(cost=_bits_to_boolean_cost, source="this project")
async def bits_to_boolean(bits: TwoHolderBits) -> BooleanTensor:
    """Two-holder bits as an XOR-shared tensor: the dealer sends one masked bit. 1 round, 1/8 byte."""
    operation = bits.party.operation("bits_to_boolean", bits)
    machine, me = operation.machine, bits.party.id
    shares = machine.memory((2, bits.size))
    round_ = operation.round()
    pending = []
    for segment in bits.segments:
        n, at, role = segment.size, segment.slice, segment.role(me)
        held, size = bits.held[at], kernels.packed_size(n, 1)
        if role == 0:
            machine.call("unpack_into", machine.mask_bytes(operation, "previous", size), 1, shares[0, at])
            machine.call("copy", held, shares[1, at])
        elif role == 1:
            machine.call("copy", held, shares[0, at])
            pending.append((round_.expect_next(size, np.uint8), 1, shares[1, at]))
        else:
            packed = machine.memory(size, np.uint8)
            machine.call("unpack_into", machine.mask_bytes(operation, "next", size), 1, shares[1, at])
            machine.call("xor", held, shares[1, at], shares[0, at])
            machine.call("pack_into", shares[0, at], 1, packed)
            round_.send_previous(packed)
    await round_
    for arguments in pending:
        machine.call("unpack_into", *arguments)
    return BooleanTensor(bits.party, shares.reshape(2, *bits.shape), 1, operation.history())


def _lookup_cost(x: ArithmeticTensor, tables: np.ndarray, fraction_bits: int = 0) -> Cost:
    rows, entries = np.atleast_2d(tables).shape
    return Cost(2, (8 * entries + 16 * rows) * x.size)


@primitive(cost=_lookup_cost, source="this project, proofs §2.5")
async def lookup(x: ArithmeticTensor, tables: np.ndarray, fraction_bits: int = 0) -> ArithmeticTensor:
    """tables[:, x mod N] for secret integers x and public tables of N = 2^k words (one table: shape (N,)).

    2 rounds, 8N + 16 bytes a table look-up; more tables of the same size share the 8N. Exact. The result has the scale
    ``fraction_bits`` of the table words, and one leading axis per table if there were several.
    The dealer shares the one-hot vector of ρ mod N between the holders, who take the inner product with the table
    rotated by c.
    """
    words = np.atleast_2d(tables)
    require(words.dtype.kind in "iu", "tables", words.dtype, "ring words", "encode real values first")
    words = words.astype(np.uint64)
    entries = words.shape[1]
    require(entries & (entries - 1) == 0 and entries > 0, "entries of a table", entries, "a power of two")
    operation = x.party.operation("lookup", x, words, fraction_bits)
    machine, me, flat = operation.machine, x.party.id, x.flat
    public, segments = machine.public(words), operation.segments(x.size)

    def deal(segment: Segment, masks: Words, out: Words) -> None:
        machine.call("lookup_deal", flat[0, segment.slice], flat[1, segment.slice], masks, out)

    halves = await deal_halves(operation, segments, lambda n: (n, entries), deal)
    sums: list[Words | None] = []
    for segment, half in zip(segments, halves, strict=True):
        total = None
        if half is not None:
            total = machine.memory((len(words), segment.size))
            machine.call("lookup_hold", flat[1 - segment.role(me), segment.slice], half, public, total)
        sums.append(total)
    shares = await _reshare_rows(operation, segments, sums, len(words), x.size)
    shape = x.shape if np.ndim(tables) == 1 else (words.shape[0], *x.shape)
    return ArithmeticTensor(x.party, shares.reshape(2, *shape), fraction_bits, operation.history())
