"""Two-holder bits, and what can be done with them: selection, conversion, table look-up.

A replicated x is c − ρ with c known to two parties and ρ to the third, the dealer. A *two-holder bit* is β ⊕ β' with β
at the two and β' at the dealer: each party holds exactly one bit per element. Comparisons produce such bits, and an
XOR-shared bit already has this form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import kernels
from accel.validate import require, require_choice
from refmpc.core.digest import mix
from refmpc.core.party import Operation, Segment, segment_sizes
from refmpc.core.protocol import Cost, protocol
from refmpc.core.tensor import ArithmeticTensor, BooleanTensor

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
        self.held = held  # flat uint8: this party's bit of each element
        self.segments = segments
        self.shape = shape
        self.history = history  # as of every tensor

    def __repr__(self) -> str:
        return f"TwoHolderBits(shape={self.shape}, party={self.party.id})"

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r} is secret: it has no truth value; reveal it, or select with where()")

    def public_digest(self) -> int:
        """Of history and shape."""
        return mix(self.history, self.shape)

    @property
    def size(self) -> int:
        """The number of bits."""
        return self.held.size

    def __invert__(self) -> TwoHolderBits:
        flip = np.zeros_like(self.held)
        for segment in self.segments:
            flip[segment.slice] = segment.role(self.party.id) != 2
        return TwoHolderBits(self.party, self.held ^ flip, self.segments, self.shape, mix(_NOT, self.history))

    def __xor__(self, other: TwoHolderBits) -> TwoHolderBits:
        """XOR of two sets of bits; local when both have the same dealers, as results of one operation have."""
        same = [(s.dealer, s.slice) for s in self.segments] == [(s.dealer, s.slice) for s in other.segments]
        require(same and self.shape == other.shape, "other", other, "bits of the same shape dealt by the same parties")
        history = mix(_XOR, self.history, other.history)
        return TwoHolderBits(self.party, self.held ^ other.held, self.segments, self.shape, history)

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
    party = bits.party
    flat = bits.shares.reshape(2, -1).astype(np.uint8)
    operation = party.operation("two_holder", bits)
    segments = operation.segments(bits.size)
    held = np.empty(bits.size, dtype=np.uint8)
    for segment in segments:
        at, role = segment.slice, segment.role(party.id)
        held[at] = flat[0, at] ^ flat[1, at] if role == 2 else flat[1 - role, at]
    return TwoHolderBits(party, held, segments, bits.shape, operation.history())


async def reshare_pair(
    operation: Operation, segments: Sequence[Segment], summands: Sequence[np.ndarray | None], count: int
) -> np.ndarray:
    """From the two holders' summands v0 + v1 (nothing at the dealer) to replicated shares: 1 round, 16 bytes.

    The outer shares are drawn from the dealer's streams with each holder; the holders exchange the rest, each masked
    by the share that the other does not know.
    """
    me = operation.party.id
    shares = np.empty((2, count), dtype=np.uint64)
    round_ = operation.round()
    pending = []
    for segment, v in zip(segments, summands, strict=True):
        n, at, role = segment.size, segment.slice, segment.role(me)
        if role == 2:
            shares[1, at] = operation.with_next.words(n)
            shares[0, at] = operation.with_previous.words(n)
            continue
        assert v is not None
        if role == 0:
            shares[0, at] = operation.with_previous.words(n)
            mine = v - shares[0, at]
            round_.send_next(mine)
            pending.append((at, 1, mine, round_.expect_next(n)))
        else:
            shares[1, at] = operation.with_next.words(n)
            mine = v - shares[1, at]
            round_.send_previous(mine)
            pending.append((at, 0, mine, round_.expect_previous(n)))
    await round_
    for at, index, mine, theirs in pending:
        shares[index, at] = mine + theirs
    return shares


async def _reshare_rows(
    operation: Operation, segments: Sequence[Segment], sums: Sequence[np.ndarray | None], rows: int, count: int
) -> np.ndarray:
    """``reshare_pair`` of several vectors with the same dealers, as one: ``sums`` holds (rows, n) per segment."""
    stretched = [
        Segment(segment.dealer, row * count + segment.slice.start, row * count + segment.slice.stop)
        for row in range(rows)
        for segment in segments
    ]
    summands = [None if part is None else part[row] for row in range(rows) for part in sums]
    return await reshare_pair(operation, stretched, summands, rows * count)


@protocol(cost=lambda bits, d: Cost(2, 32 * bits.size), source="this project, proofs §2.5")
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
    me = d.party.id
    flat = d.shares.reshape(2, -1)
    round_ = operation.round()
    halves: list[tuple[np.ndarray, np.ndarray] | None] = []
    for segment in bits.segments:
        n, at, role = segment.size, segment.slice, segment.role(me)
        if role == 0:
            halves.append((operation.with_previous.words(n), operation.with_previous.words(n)))
        elif role == 1:
            halves.append((round_.expect_next(n), round_.expect_next(n)))
        else:
            bit = bits.held[at].astype(np.uint64)
            round_.send_previous(bit - operation.with_next.words(n))
            round_.send_previous(bit * (flat[0, at] + flat[1, at]) - operation.with_next.words(n))
            halves.append(None)
    await round_
    summands: list[np.ndarray | None] = []
    for segment, half in zip(bits.segments, halves, strict=True):
        if half is None:
            summands.append(None)
            continue
        at, role = segment.slice, segment.role(me)
        s, w = half
        beta = bits.held[at].astype(np.uint64)
        sign = np.uint64(1) - np.uint64(2) * beta
        outer, middle = flat[role, at], flat[1 - role, at]
        v = sign * (middle * s + w) + beta * outer
        if role == 0:
            v += beta * middle
        summands.append(v)
    shares = await reshare_pair(operation, bits.segments, summands, d.size)
    return ArithmeticTensor(d.party, shares.reshape(2, *d.shape), d.fraction_bits, operation.history())


def _where_cost(bits: TwoHolderBits, if_set: Any, if_clear: Any) -> Cost:
    return Cost(2, 32 * bits.size)


@protocol(cost=_where_cost, source="select")
async def where(bits: TwoHolderBits, if_set: Any, if_clear: Any) -> ArithmeticTensor:
    """``if_set`` where the bit is one, else ``if_clear``; one of them may be public. Cost of ``select``."""
    difference = if_set - if_clear
    if not isinstance(difference, ArithmeticTensor):
        raise TypeError("where() takes at least one secret tensor; use select or bit_to_arithmetic for public values")
    return if_clear + await select(bits, difference.broadcast_to(bits.shape))


def _bit_to_arithmetic_cost(bits: TwoHolderBits, rounds: int = 1) -> Cost:
    return Cost(rounds, (48 if rounds == 1 else 24) * bits.size)


@protocol(cost=_bit_to_arithmetic_cost, source="this project, proofs §2.5")
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


async def _inject_two_rounds(operation: Operation, bits: TwoHolderBits) -> np.ndarray:
    me = bits.party.id
    round_ = operation.round()
    halves: list[np.ndarray | None] = []
    for segment in bits.segments:
        n, role = segment.size, segment.role(me)
        if role == 0:
            halves.append(operation.with_previous.words(n))
        elif role == 1:
            halves.append(round_.expect_next(n))
        else:
            round_.send_previous(bits.held[segment.slice].astype(np.uint64) - operation.with_next.words(n))
            halves.append(None)
    await round_
    summands: list[np.ndarray | None] = []
    for segment, half in zip(bits.segments, halves, strict=True):
        if half is None:
            summands.append(None)
            continue
        beta = bits.held[segment.slice].astype(np.uint64)
        v = (np.uint64(1) - np.uint64(2) * beta) * half
        summands.append(v + beta if segment.role(me) == 0 else v)
    return await reshare_pair(operation, bits.segments, summands, bits.size)


async def _inject_one_round(operation: Operation, bits: TwoHolderBits) -> np.ndarray:
    me = bits.party.id
    shares = np.empty((2, bits.size), dtype=np.uint64)
    round_ = operation.round()
    pending = []
    for segment in bits.segments:
        n, at, role = segment.size, segment.slice, segment.role(me)
        held = bits.held[at].astype(np.uint64)
        if role == 2:
            outer0, keys_for_1 = operation.with_next.words(n), [operation.with_next.words(n) for _ in range(2)]
            outer2, keys_for_0 = operation.with_previous.words(n), [operation.with_previous.words(n) for _ in range(2)]
            for beta in range(2):
                middle = (held ^ np.uint64(beta)) - outer0 - outer2
                round_.send_next(middle + keys_for_0[beta])
                round_.send_previous(middle + keys_for_1[beta])
            shares[0, at], shares[1, at] = outer2, outer0
            continue
        stream = operation.with_previous if role == 0 else operation.with_next
        shares[role, at] = stream.words(n)
        keys = [stream.words(n) for _ in range(2)]  # they open the dealer's offer to the *other* holder
        chosen = np.where(held == 1, keys[1], keys[0])
        if role == 0:
            round_.send_next(chosen)
            offers, key = [round_.expect_previous(n) for _ in range(2)], round_.expect_next(n)
        else:
            round_.send_previous(chosen)
            offers, key = [round_.expect_next(n) for _ in range(2)], round_.expect_previous(n)
        pending.append((at, 1 - role, held, offers, key))
    await round_
    for at, index, held, offers, key in pending:
        shares[index, at] = np.where(held == 1, offers[1], offers[0]) - key
    return shares


def _weigh_bits_cost(bits: Sequence[TwoHolderBits], weights: np.ndarray, fraction_bits: int = 0) -> Cost:
    return Cost(2, (8 * len(bits) + 16 * len(weights)) * bits[0].size)


@protocol(cost=_weigh_bits_cost, source="this project: bit_to_arithmetic of a weighted sum")
async def weigh_bits(bits: Sequence[TwoHolderBits], weights: np.ndarray, fraction_bits: int = 0) -> ArithmeticTensor:
    """Σ_k weights[o, k]·bit_k for each output o; the weights are public ring integers.

    2 rounds, 8 bytes a bit and 16 an output, instead of 24 for each bit. Exact. The bits come from one operation (same
    dealers). The dealer shares each β'_k; Σ w_k(β_k + (1−2β_k)β'_k) is linear in them and reshared once.
    The result has one leading axis for the outputs and the given scale.
    """
    kind = np.asarray(weights).dtype
    require(kind.kind in "biu", "weights", kind, "integers", "encode real weights first, and give their fraction_bits")
    words = np.asarray(weights).astype(np.int64).view(np.uint64)
    require(words.ndim == 2 and words.shape[1] == len(bits), "weights.shape", words.shape, f"(outputs, {len(bits)})")
    party, segments, count = bits[0].party, bits[0].segments, bits[0].size
    dealers = [[(s.dealer, s.slice) for s in each.segments] for each in bits]
    require(all(d == dealers[0] for d in dealers), "bits", list(bits), "dealt by the same parties (one operation)")
    operation = party.operation("weigh_bits", list(bits), words, fraction_bits)
    held = np.stack([each.held for each in bits]).astype(np.uint64)
    round_ = operation.round()
    halves: list[np.ndarray | None] = []
    for segment in segments:
        shape, role = (len(bits), segment.size), segment.role(party.id)
        if role == 0:
            halves.append(operation.with_previous.words(shape[0] * shape[1]).reshape(shape))
        elif role == 1:
            halves.append(round_.expect_next(shape))
        else:
            mask = operation.with_next.words(shape[0] * shape[1]).reshape(shape)
            round_.send_previous(held[:, segment.slice] - mask)
            halves.append(None)
    await round_
    sums: list[np.ndarray | None] = []
    for segment, half in zip(segments, halves, strict=True):
        if half is None:
            sums.append(None)
            continue
        beta = held[:, segment.slice]
        terms = (np.uint64(1) - np.uint64(2) * beta) * half
        if segment.role(party.id) == 0:
            terms += beta
        sums.append(words @ terms)
    shares = await _reshare_rows(operation, segments, sums, len(words), count)
    result = shares.reshape(2, len(words), *bits[0].shape)
    return ArithmeticTensor(party, result, fraction_bits, operation.history())


def _bits_to_boolean_cost(bits: TwoHolderBits) -> Cost:
    return Cost(1, sum(kernels.packed_size(n, 1) for n in segment_sizes(bits.size)))


@protocol(cost=_bits_to_boolean_cost, source="this project")
async def bits_to_boolean(bits: TwoHolderBits) -> BooleanTensor:
    """Two-holder bits as an XOR-shared tensor: the dealer sends one masked bit. 1 round, 1/8 byte."""
    operation = bits.party.operation("bits_to_boolean", bits)
    me = bits.party.id
    shares = np.empty((2, bits.size), dtype=np.uint64)
    round_ = operation.round()
    pending = []
    for segment in bits.segments:
        n, at, role = segment.size, segment.slice, segment.role(me)
        held = bits.held[at].astype(np.uint64)
        if role == 0:
            shares[0, at], shares[1, at] = _random_bits(operation.with_previous, n), held
        elif role == 1:
            shares[0, at] = held
            pending.append((at, n, round_.expect_next(kernels.packed_size(n, 1), np.uint8)))
        else:
            shares[1, at] = _random_bits(operation.with_next, n)
            shares[0, at] = held ^ shares[1, at]
            round_.send_previous(kernels.pack_bits(np.ascontiguousarray(shares[0, at]), 1))
    await round_
    for at, n, packed in pending:
        shares[1, at] = kernels.unpack_bits(packed, 1, n)
    return BooleanTensor(bits.party, shares.reshape(2, *bits.shape), 1, operation.history())


def _random_bits(stream: Any, count: int) -> np.ndarray:
    return kernels.unpack_bits(stream.bytes(kernels.packed_size(count, 1)), 1, count)


def _lookup_cost(x: ArithmeticTensor, tables: np.ndarray, fraction_bits: int = 0) -> Cost:
    rows, entries = np.atleast_2d(tables).shape
    return Cost(2, (8 * entries + 16 * rows) * x.size)


@protocol(cost=_lookup_cost, source="this project, proofs §2.5")
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
    me, low = x.party.id, np.uint64(entries - 1)
    flat = x.shares.reshape(2, -1)
    round_ = operation.round()
    segments = operation.segments(x.size)
    halves: list[np.ndarray | None] = []
    for segment in segments:
        n, at, role = segment.size, segment.slice, segment.role(me)
        if role == 0:
            halves.append(operation.with_previous.words(n * entries).reshape(n, entries))
        elif role == 1:
            halves.append(round_.expect_next((n, entries)))
        else:
            rho = (np.uint64(0) - flat[0, at] - flat[1, at]) & low
            one_hot = np.zeros((n, entries), dtype=np.uint64)
            one_hot[np.arange(n), rho.astype(np.int64)] = 1
            round_.send_previous(one_hot - operation.with_next.words(n * entries).reshape(n, entries))
            halves.append(None)
    await round_
    columns = np.arange(entries, dtype=np.uint64)
    sums: list[np.ndarray | None] = []
    for segment, half in zip(segments, halves, strict=True):
        if half is None:
            sums.append(None)
            continue
        c = flat[1 - segment.role(me), segment.slice]
        rotated = words[:, ((c[:, np.newaxis] - columns) & low).astype(np.int64)]
        sums.append((half * rotated).sum(axis=2, dtype=np.uint64))
    shares = await _reshare_rows(operation, segments, sums, len(words), x.size)
    shape = x.shape if np.ndim(tables) == 1 else (words.shape[0], *x.shape)
    return ArithmeticTensor(x.party, shares.reshape(2, *shape), fraction_bits, operation.history())
