"""Values that two holders have as summands, and the rounds in which they are opened and dealt.

The rules (the rest of the low-round protocols follows from them):

* An opening takes one round: the holders exchange z0 + r0 and z1 + r1 and both know c, the dealer knows ρ = r0 + r1 −
  z2 *before* the round, and z = c − ρ. So whatever the dealer has to say about ρ travels in the same round.
* After it, every Σ f_k(c)·g_k(ρ) is local: the dealer deals the g_k(ρ), the holders multiply by f_k(c). The result is
  additive at the holders, and the next opening takes it as it is.

Rows are cut into thirds with a dealer each, so that the links carry equal loads; a row keeps its dealer through a chain
of protocols. ``Dealing`` is one such stretch at one party: the protocols are written for one dealer, ``each_dealer``
runs them beside each other.

Views: an opened or dealt value reaches a party only under a mask that it does not know (r1 at role 0; r0 and the dealt
halves at role 1). The dealer receives nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import kernels
from accel.validate import require, require_integer
from refmpc.core.digest import digest, mix
from refmpc.core.party import Operation, Segment
from refmpc.core.primitive import Cost, primitive
from refmpc.core.rounds import Round, gather
from refmpc.core.tensor import ArithmeticTensor
from refmpc.core.words import Words
from refmpc.primitives.truncation import truncate_summands

if TYPE_CHECKING:
    from refmpc.core.party import Party

__all__ = [
    "Additive",
    "Dealing",
    "Lifted",
    "Opening",
    "TwoHolder",
    "at_holders",
    "check_additive",
    "each_dealer",
    "held",
    "nothing",
    "replicate",
    "row_segments",
    "row_sizes",
    "summands",
    "truncate_additive",
]

FEWEST_ROWS = 24  # below, one dealer has all rows
FIRST, SECOND, DEALER = 0, 1, 2  # roles
_SUM, _SCALE, _SUBTRACT, _SUMMANDS, _COLUMNS = range(200, 205)  # what a history says of local operations


def row_sizes(rows: int) -> list[int]:
    """Into how many stretches, and how long, rows are dealt."""
    if rows < FEWEST_ROWS:
        return [rows]
    third = -(-rows // 3)
    return [third, third, rows - 2 * third]


def row_segments(party: Party, rows: int) -> list[Segment]:
    """Stretches of rows with rotating dealers, beginning with another one each time."""
    begin, start, found = party.operation("dealers").number, 0, []
    for index, size in enumerate(row_sizes(rows)):
        found.append(Segment((begin + index) % 3, start, start + size))
        start += size
    return found


class _Shaped:
    """What additive and two-holder numbers have in common: words of this party, rows first, and the rows' dealers."""

    __slots__ = ("bits", "fraction_bits", "history", "party", "segments", "words")

    def __init__(
        self,
        party: Party,
        words: Words,
        segments: list[Segment],
        fraction_bits: int,
        history: int,
        bits: int = 64,
    ):
        self.party = party
        self.history = history  # as of every tensor
        self.words = words
        self.segments = segments
        self.fraction_bits = fraction_bits
        self.bits = bits  # of the ring

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, fraction_bits={self.fraction_bits}, party={self.party.id})"

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r} is secret: it has no truth value")

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows first."""
        return self.words.shape

    def public_digest(self) -> int:
        """Public digest of history, scales, shape and dealers."""
        dealers = (segment.dealer for segment in self.segments)
        return mix(self.history, self.fraction_bits, self.bits, self.shape, *dealers)

    def same_dealers(self, other: _Shaped) -> bool:
        """Whether the rows of both have the same dealers."""
        dealers = [[(s.dealer, s.slice) for s in each.segments] for each in (self, other)]
        return dealers[0] == dealers[1]


class Additive(_Shaped):
    """Secret numbers z = z0 + z1 + z2 modulo 2^bits, one summand at each party.

    The summand of a row's dealer is zero unless ``dealer_adds``. Not masked: summands are never sent as they are.
    """

    __slots__ = ("dealer_adds",)

    def __init__(
        self,
        party: Party,
        words: Words,
        segments: list[Segment],
        fraction_bits: int,
        history: int,
        bits: int = 64,
        *,
        dealer_adds: bool = False,
    ):
        super().__init__(party, words, segments, fraction_bits, history, bits)
        self.dealer_adds = dealer_adds

    def sum(self) -> Additive:
        """The sum of every row: local."""
        machine = self.party.machine
        total = machine.memory(len(self.words))
        machine.call("sum_axes", self.words, (1,), total)
        history = mix(_SUM, self.history)
        return self._like(total, history, self.dealer_adds)

    def _like(self, words: Words, history: int, dealer_adds: bool) -> Additive:
        scale = self.fraction_bits
        return Additive(self.party, words, self.segments, scale, history, self.bits, dealer_adds=dealer_adds)

    def reshape(self, *shape: int) -> Additive:
        """The same rows in another shape."""
        require(shape[0] == len(self.words), "shape", shape, f"of {len(self.words)} rows")
        return self._like(self.words.reshape(shape), self.history, self.dealer_adds)

    def first_columns(self, columns: int) -> Additive:
        """The first entries of every row: local."""
        words = self.party.machine.contiguous(self.words[:, :columns])
        return self._like(words, mix(_COLUMNS, self.history, columns), self.dealer_adds)

    def reinterpret(self, fraction_bits: int) -> Additive:
        """The same words read at another scale."""
        history = mix(_SCALE, self.history, fraction_bits)
        adds = self.dealer_adds
        return Additive(self.party, self.words, self.segments, fraction_bits, history, self.bits, dealer_adds=adds)

    def minus(self, x: ArithmeticTensor) -> Additive:
        """z − x for a replicated x of a scale that is no finer: local."""
        require(x.shape == self.shape, "x.shape", x.shape, f"{self.shape}")
        require_integer("fraction bits of x", x.fraction_bits, 0, self.fraction_bits)
        machine = self.party.machine
        out, shift = machine.memory(self.shape), self.fraction_bits - x.fraction_bits
        machine.call("subtract_scaled", self.words.reshape(-1), x.flat[0], shift, out.reshape(-1))
        return self._like(out, mix(_SUBTRACT, self.history, digest(x)), True)

    def minus_shifted(self, other: Additive, shift: int) -> Additive:
        """z − other·2^shift in ring words, for the same rows and dealers: local."""
        require(self.same_dealers(other) and self.shape == other.shape, "other", other, f"like {self!r}")
        machine = self.party.machine
        out = machine.memory(self.shape)
        machine.call("subtract_scaled", self.words.reshape(-1), other.words.reshape(-1), shift, out.reshape(-1))
        return self._like(
            out, mix(_SUBTRACT, self.history, digest(other), shift), self.dealer_adds or other.dealer_adds
        )

    def with_words(self, words: Words, history: int) -> Additive:
        """The same kind of numbers with other words, for a recorded step."""
        return self._like(words, history, self.dealer_adds)


class TwoHolder(_Shaped):
    """Secret numbers c − ρ modulo 2^bits: ``words`` are c at the two holders of a row and ρ at its dealer."""

    __slots__ = ()

    def with_words(self, words: Words, history: int) -> TwoHolder:
        """The same kind of numbers with other words, for a recorded step."""
        return TwoHolder(self.party, words, self.segments, self.fraction_bits, history, self.bits)


class Lifted(TwoHolder):
    """Secret integers x at ``fraction_bits``, open modulo 2^bits: x + ``offset`` lies in the lower half of the ring,
    so that the holders can multiply x itself, not x modulo 2^bits: x = c − offset + 1 − ρ + 2^bits·[c's top bit is
    clear and ρ's is set].
    """

    __slots__ = ("offset",)

    def __init__(
        self,
        party: Party,
        words: Words,
        segments: list[Segment],
        fraction_bits: int,
        history: int,
        bits: int,
        offset: int,
    ):
        super().__init__(party, words, segments, fraction_bits, history, bits)
        self.offset = offset

    def public_digest(self) -> int:
        """That of two-holder numbers, and the offset."""
        return mix(super().public_digest(), self.offset)

    def with_words(self, words: Words, history: int) -> Lifted:
        """The same kind of numbers with other words, for a recorded step."""
        return Lifted(self.party, words, self.segments, self.fraction_bits, history, self.bits, self.offset)


def summands(
    party: Party,
    words: Words,
    fraction_bits: int,
    segments: list[Segment] | None = None,
    *,
    of: Sequence[Any] = (),
) -> Additive:
    """This party's own summands of a secret (such as those of a product), rows first; ``of`` are the operands and
    public numbers that they were made of (needed inside a recorded step)."""
    segments = segments or row_segments(party, len(words))
    history = mix(_SUMMANDS, *map(digest, of)) if of else party.arrival()
    return Additive(party, party.machine.contiguous(words), segments, fraction_bits, history, dealer_adds=True)


def held(x: ArithmeticTensor, segments: list[Segment]) -> TwoHolder:
    """A replicated x in two-holder form: c is the share that both holders know. Local."""
    machine = x.party.machine
    words = machine.memory(x.shape)
    for segment in segments:
        role, at = segment.role(x.party.id), segment.slice
        if role == DEALER:
            first, second = (machine.contiguous(x.shares[index, at]).reshape(-1) for index in range(2))
            machine.call("replicated_rho", first, second, words[at].reshape(-1))
        else:
            machine.call("copy", x.shares[1 - role, at], words[at])
    return TwoHolder(x.party, words, segments, x.fraction_bits, x.history)


def at_holders(x: ArithmeticTensor, segments: list[Segment] | None = None) -> Additive:
    """A replicated x as summands of the two holders of each row, the dealer without one. Local."""
    segments = segments or row_segments(x.party, len(x))
    machine, words = x.party.machine, nothing(x.party, x.shape)
    for segment in segments:
        role, at = segment.role(x.party.id), segment.slice
        if role == FIRST:
            machine.call("add", x.shares[0, at], x.shares[1, at], words[at])
        elif role == SECOND:
            machine.call("copy", x.shares[1, at], words[at])
    return Additive(x.party, words, segments, x.fraction_bits, x.history)


class Opening:
    """A value that is being opened. ``words``: ρ at the dealer, at once; c at the holders, when the round is over."""

    __slots__ = ("_bits", "_dealing", "_mine", "_theirs", "_words", "mask")

    def __init__(self, dealing: Dealing, z: Words, bits: int):
        count, self._dealing, self._bits = z.size, dealing, bits
        self._words: Words | None = None
        self.mask: Words | None = None  # r0 or r1 of a holder: its share of ρ, if the dealer added nothing
        if dealing.role == DEALER:
            first, second = dealing.masks(FIRST, count), dealing.masks(SECOND, count)
            self._words = dealing.memory(z.shape)
            dealing.call("open_dealer", first, second, z.reshape(-1), bits, self._words.reshape(-1))
            return
        self.mask = dealing.masks(DEALER, *z.shape)
        self._mine = dealing.memory(z.shape)
        dealing.call("add_low", z.reshape(-1), self.mask.reshape(-1), bits, self._mine.reshape(-1))
        other = 1 - dealing.role
        dealing.send_packed(other, self._mine, bits)
        self._theirs = dealing.expect_packed(other, z.shape, bits)

    @property
    def words(self) -> Words:
        if self._words is None:
            self._words = self._dealing.memory(self._mine.shape)
            theirs = self._theirs.words.reshape(-1)
            self._dealing.call("add_low", self._mine.reshape(-1), theirs, self._bits, self._words.reshape(-1))
        return self._words


class _Arriving:
    """Packed words that arrive with the present round."""

    __slots__ = ("_dealing", "_packed", "bits", "shape")

    def __init__(self, dealing: Dealing, packed: Words, shape: tuple[int, ...], bits: int):
        self._dealing, self._packed, self.shape, self.bits = dealing, packed, shape, bits

    @property
    def words(self) -> Words:
        return self._packed if self.bits == 64 else self._unpacked(np.uint64)

    @property
    def small(self) -> Words:
        """Values below 256 as bytes."""
        return self._packed.reshape(self.shape) if self.bits == 8 else self._unpacked(np.uint8)

    def _unpacked(self, dtype: Any) -> Words:
        out = self._dealing.memory(self.shape, dtype)
        self._dealing.call("unpack_into", self._packed, self.bits, out.reshape(-1))
        return out


class Dealing:
    """Rows of one dealer in one operation, at one party: its role, its streams by role, and the round under way.

    Roles: 2 deals, 0 is the party after it, 1 the one before it. A protocol fills the round (``send``, ``expect``,
    ``open``, halves) and awaits ``turn``; draws of a pair happen in the same order at both its ends.
    """

    __slots__ = ("_round", "operation", "party", "role", "rows", "slice")

    def __init__(self, party: Party, name: str, segment: Segment, public: Sequence[Any] = ()):
        self.party = party
        self.operation = party.operation(name, *public)
        self.role = segment.role(party.id)
        self.rows, self.slice = segment.size, segment.slice
        self._round: Round = self.operation.round()

    async def turn(self) -> None:
        """The round that was filled takes place; the next one begins."""
        filled, self._round = self._round, self.operation.round()
        await filled

    @property
    def leads(self) -> bool:
        """Whether this party is the holder that adds public constants."""
        return self.role == FIRST

    # memory, masks, kernels ------------------------------------------------------------------------

    def memory(self, shape: int | tuple[int, ...], dtype: Any = np.uint64) -> Words:
        """Fresh memory for a kernel to fill."""
        return self.operation.machine.memory(shape, dtype)

    def contiguous(self, words: Words) -> Words:
        """The same words in one piece of memory."""
        return self.operation.machine.contiguous(words)

    def call(self, kernel: str, *arguments: Any) -> None:
        """Run a kernel; its results lie in the arrays among its arguments."""
        self.operation.machine.call(kernel, *arguments)

    def _side(self, other: int) -> str:
        return "next" if other == (self.role + 1) % 3 else "previous"

    def masks(self, other: int, *shape: int) -> Words:
        """Words that the party of role ``other`` draws alike."""
        return self.operation.machine.masks(self.operation, self._side(other), math.prod(shape)).reshape(shape)

    def mask_rows(self, other: int, rows: int, count: int) -> Words:
        """The same as several vectors."""
        return self.operation.machine.masks(self.operation, self._side(other), rows, count)

    def coins(self, other: int, count: int) -> Words:
        """Bytes that the party of role ``other`` draws alike."""
        return self.operation.machine.mask_bytes(self.operation, self._side(other), count)

    def uniform(self, other: int, bound: int, *shape: int) -> Words:
        """Values uniform in 0..bound−1 (uint8) that the party of role ``other`` draws alike."""
        return self.operation.machine.uniform(self.operation, self._side(other), bound, *shape)

    # messages ----------------------------------------------------------------------------------------

    def send(self, other: int, array: Words) -> None:
        """To the party of role ``other``."""
        (self._round.send_next if other == (self.role + 1) % 3 else self._round.send_previous)(array)

    def expect(self, other: int, shape: int | tuple[int, ...], dtype: Any = np.uint64) -> Words:
        """From the party of role ``other``."""
        expect = self._round.expect_next if other == (self.role + 1) % 3 else self._round.expect_previous
        return expect(shape, dtype)

    def fill(self, other: int, memory: Words) -> None:
        """From the party of role ``other``, into memory that is there."""
        (self._round.fill_next if other == (self.role + 1) % 3 else self._round.fill_previous)(memory)

    def send_packed(self, other: int, values: Words, bits: int) -> None:
        """Words, or small values (uint8), of ``bits`` bits each."""
        if bits < (8 if values.dtype == np.uint8 else 64):
            packed = self.memory(kernels.packed_size(values.size, bits), np.uint8)
            self.call("pack_into", values.reshape(-1), bits, packed)
            values = packed
        self.send(other, values)

    def expect_packed(self, other: int, shape: tuple[int, ...], bits: int) -> _Arriving:
        """The same at the other end."""
        if bits == 64:
            return _Arriving(self, self.expect(other, shape), shape, bits)
        size = kernels.packed_size(math.prod(shape), bits)
        return _Arriving(self, self.expect(other, size, np.uint8), shape, bits)

    def open(self, z: Words, bits: int = 64) -> Opening:
        """Open the sum of the parties' ``z`` in the round under way."""
        return Opening(self, z, bits)

    def halves(self, *shape: int) -> Words:
        """Shares of what the dealer deals: drawn at role 0 and at the dealer, who sends the rest (``send(SECOND, …)``)
        to role 1, where they arrive with this round."""
        if self.role == SECOND:
            return self.expect(DEALER, shape)
        return self.masks(DEALER if self.role == FIRST else FIRST, *shape)

    def deal(self, kernel: str, *arguments: Any, shape: tuple[int, ...]) -> Words:
        """``halves`` with the dealer's part: its words minus the halves by ``kernel(*arguments, halves, out)``."""
        halves = self.halves(*shape)
        if self.role == DEALER:
            rest = self.memory(shape)
            self.call(kernel, *arguments, halves, rest)
            self.send(SECOND, rest)
        return halves


def nothing(party: Party, shape: int | tuple[int, ...]) -> Words:
    """Memory for summands: zero where the party deals."""
    out = party.machine.memory(shape)
    party.machine.call("copy", np.uint64(0), out)
    return out


async def each_dealer(
    name: str,
    of: _Shaped,
    public: Sequence[Any],
    work: Callable[[Dealing], Coroutine[Round, None, Any]],
) -> tuple[Operation, list[Any]]:
    """Run ``work`` for every stretch of the rows of ``of``, in the same rounds; ``public`` are the other operands and
    all public arguments. Returns the first operation, for the histories of results, and what ``work`` returned."""
    dealings = [Dealing(of.party, name, segment, (of, *public)) for segment in of.segments]
    return dealings[0].operation, await gather(*map(work, dealings))


async def check_additive(z: Additive | ArithmeticTensor, low: int, high: int, name: str, *, zero: bool = False) -> None:
    """In debug mode, raise unless low ≤ z < high (ring words), or z = 0 where ``zero`` allows it."""
    if z.party.insecure_check_ranges:
        from refmpc.core.debug import check_words

        own = z.first if isinstance(z, ArithmeticTensor) else z.words
        await check_words(z.party.operation(name, z, low, high), own, low, high, zero=zero)


# back to replicated shares --------------------------------------------------------------------------


def _replicate_cost(z: Additive) -> Cost:
    return Cost(1, 16 * z.words.size)


@primitive(cost=_replicate_cost, source="this project: the outer shares are masks of an opening")
async def replicate(z: Additive) -> ArithmeticTensor:
    """Replicated shares of z. 1 round, 16 bytes. Exact.

    z is opened: c is the holders' common share, the masks are the outer ones. Views: each holder gets a word masked by
    the outer share that it does not know; the dealer gets nothing.
    """
    require(not z.dealer_adds and z.bits == 64, "z", z, "without a summand of the dealer", "truncate it instead")
    shares = z.party.machine.memory((2, *z.shape))

    async def work(dealing: Dealing) -> None:
        at, role = dealing.slice, dealing.role
        mine = shares[:, at]
        if role == DEALER:
            first, second = dealing.masks(FIRST, *mine.shape[1:]), dealing.masks(SECOND, *mine.shape[1:])
            await dealing.turn()
            dealing.call("copy", second, mine[0])
            dealing.call("copy", first, mine[1])
            return
        outer = dealing.masks(DEALER, *mine.shape[1:])
        sent = dealing.memory(mine.shape[1:])
        dealing.call("subtract_low", z.words[at].reshape(-1), outer.reshape(-1), 64, sent.reshape(-1))
        dealing.send(1 - role, sent)
        theirs = dealing.expect(1 - role, mine.shape[1:])
        await dealing.turn()
        dealing.call("copy", outer, mine[role])
        dealing.call("add_low", sent.reshape(-1), theirs.reshape(-1), 64, mine[1 - role].reshape(-1))

    operation, _ = await each_dealer("replicate", z, (), work)
    return ArithmeticTensor(z.party, shares, z.fraction_bits, operation.history())


def _truncate_cost(z: Additive, bits: int) -> Cost:
    each = z.words.size // max(1, len(z.words))
    return Cost(2, sum(24 * n * each + 3 * kernels.packed_size(n * each, bits) for n in row_sizes(len(z.words))))


@primitive(cost=_truncate_cost, source="this project, proofs §2.2")
async def truncate_additive(z: Additive, bits: int) -> ArithmeticTensor:
    """Replicated shares of z/2^bits: ⌊z/2^bits⌋ or one more. 2 rounds, 24 + 3·bits/8 bytes. Domain −2^62 ≤ z < 2^62."""
    require(z.bits == 64, "z", z, "modulo 2^64")
    await check_additive(z, -(2**62), 2**62, "truncate_additive")
    operation = z.party.operation("truncate_additive", z, bits)
    each = z.words.size // max(1, len(z.words))
    segments = [Segment(s.dealer, s.slice.start * each, s.slice.stop * each) for s in z.segments]
    shares = await truncate_summands(operation, z.words.reshape(-1), bits, segments)
    scale = max(0, z.fraction_bits - bits)
    return ArithmeticTensor(z.party, shares.reshape(2, *z.shape), scale, operation.history())
