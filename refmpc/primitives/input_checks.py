"""Tests of a whole upload on shares, with public random subsets, that end in a bit for each client: proofs §11.

The client has chosen its words before the coins are drawn. A *projection* of numbers x_1 … x_n is Σ r_i·x_i with public
r_i in {−1, 0, 1}, P(±1) = 1/4 each: local. Of honest numbers it is small; if one of them is large, whatever the others
are, it is large with probability 1/2 at least. So a few projections stand for all numbers, and only these are compared.

Who sees what: the coins are public. Everything else is one of the primitives; only parities are opened, masked, and
they depend on one client's words and the coins alone.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

from accel import kernels
from accel.prg import KEY_BYTES, Stream
from accel.validate import require, require_integer
from refmpc.core.party import Party
from refmpc.core.tensor import ArithmeticTensor, concatenate
from refmpc.core.words import Words, seal, unseal
from refmpc.primitives.comparison import is_negative
from refmpc.primitives.two_holder import TwoHolderBits

__all__ = [
    "PROJECTIONS",
    "REACH",
    "TAIL",
    "Faults",
    "Projected",
    "Subsets",
    "projection_limit",
    "public_coins",
    "shared_sums",
    "side_by_side",
]

PROJECTIONS = 40  # each misses a bad number with probability 1/2 at most, and so do as many parities of bits
TAIL = 9.0  # honest projections exceed TAIL·‖x‖ with probability 2·exp(−81) < 2^−115
REACH = 2.25  # what passes the comparison of all projections with a limit is below REACH·limit
_COARSE = 4  # bits of a limit above the resolution of its comparison: 2·(1 + 2^−3) = REACH
_SIDE = 8  # numbers side by side in a projection of many: 8 times faster, 8 times the comparisons
_FEW = 1 << 17  # numbers that are projected one by one
_SUBSETS = PROJECTIONS + 1
_STRETCH = 32  # rows of a pick
_PICKS = 2**64 - 1  # the stream of the subsets, beyond all places of uploads


def side_by_side(count: int) -> int:
    """How many of ``count`` numbers that are projected together have the same coins, each with a sum of its own."""
    return _SIDE if count > _FEW else 1


def projection_limit(count: int, largest: int) -> int:
    """What projections of ``count`` honest numbers, each at most ``largest``, do not exceed."""
    return math.isqrt(math.ceil(TAIL**2) * count * largest**2) + 1


async def public_coins(party: Party) -> bytes:
    """A fresh key that all three parties know and nobody knew before: 1 round, 96 bytes in all.

    The XOR of what each pair draws from its common stream; each sends the third what it lacks.
    """
    operation = party.operation("public_coins")
    machine = operation.machine
    machine.leave("public coins")
    words = KEY_BYTES // 8
    own = [machine.masks(operation, side, words) for side in ("next", "previous")]
    round_ = operation.round()
    round_.send_previous(own[0])
    missing = round_.expect_next(words)
    await round_
    return bytes((unseal(own[0]) ^ unseal(own[1]) ^ unseal(missing)).tobytes())


class Subsets:
    """Public random subsets, from coins that were drawn after what is tested was fixed: 41 bits for each number, or
    each eight side by side.

    Every test begins with the first again. Numbers that count in different verdicts may have common coins, numbers of
    one sum never.
    """

    def __init__(self, coins: bytes):
        self._stream = Stream(coins, _PICKS.to_bytes(8, "little"))
        self._picks = np.empty((0, _SUBSETS), dtype=np.uint32)

    def picks(self, start: int, stop: int) -> np.ndarray:
        """Rows ``start`` to ``stop`` of the picks of ``kernels.subset_sums``."""
        if stop > len(self._picks):
            count = max(stop, 2 * len(self._picks)) - len(self._picks)
            fresh = self._stream.bytes(4 * count * _SUBSETS).view(np.uint32).reshape(count, _SUBSETS)
            self._picks = np.concatenate([self._picks, fresh])
        return self._picks[start:stop]


class Projected:
    """Projections of numbers that come piece by piece, of each of ``parts`` arrays (a server's two shares, or its
    summands).

    ``side``: sums side by side, 1 or 8, as ``side_by_side`` says of the whole. Local: 13 additions a number.
    """

    def __init__(self, subsets: Subsets, parts: int, side: int):
        self._subsets, self._side, self._used = subsets, side, 0
        self._sums = np.zeros((parts, _SUBSETS, side), dtype=np.uint64)

    def add(self, *parts: np.ndarray, columns: slice | None = None) -> None:
        """Further numbers (n, d), of which only some columns may count."""
        rows, width = parts[0].shape
        first, stop = (0, width) if columns is None else (columns.start, columns.stop)
        if stop - first < self._side:  # narrow: in rows of eight
            count = rows * (stop - first)
            whole = np.zeros((len(parts), -(-count // self._side), self._side), dtype=np.uint64)
            for target, part in zip(whole, parts, strict=True):
                target.reshape(-1)[:count] = part[:, first:stop].reshape(-1)
            parts, first, stop = tuple(whole), 0, self._side
        elif self._side == 1:  # one after the other
            parts, first, stop = tuple(part[:, first:stop].reshape(-1, 1) for part in parts), 0, 1
        groups = -(-len(parts[0]) // _STRETCH) * -(-(stop - first) // self._side)
        picks = self._subsets.picks(self._used, self._used + groups)
        self._used += groups
        for part, total in zip(parts, self._sums, strict=True):
            kernels.subset_sums(part, first, stop, picks, total)

    @property
    def words(self) -> Words:
        """(parts, PROJECTIONS, side). The coins are differences of those of a subset and the first one: −1, 0 or 1."""
        return seal(self._sums[:, 1:] - self._sums[:, :1])


class Faults:
    """Collects bits that must all be zero, of one client's upload; at the end, one bit says whether they are.

    ``coins`` are drawn after what is tested was fixed, and used for one upload; several uploads that are tested with
    the same have a ``place`` of their own each.
    """

    def __init__(self, party: Party, coins: bytes, place: int = 0, subsets: Subsets | None = None):
        require_integer("place", place, 0, _PICKS - 1)
        self.party = party
        self._coins = Stream(coins, place.to_bytes(8, "little"))
        self._parities = np.zeros(1, dtype=np.uint64)  # this party's share of the parities of random subsets
        self.subsets = Subsets(coins) if subsets is None else subsets

    # tests ---------------------------------------------------------------------------------------

    def project_all(self, shares: Words) -> Words:
        """Projections over all numbers of (parts, …), a few side by side: (parts, PROJECTIONS, side). Local."""
        plain = self.party.machine.unsealed(shares)
        found = Projected(self.subsets, len(plain), side_by_side(plain[0].size))
        found.add(*plain.reshape(len(plain), -1, shares.shape[-1]))
        return found.words

    async def require_same_shares(self, projections: list[Words]) -> None:
        """Tests that the two parties that hold a share hold the same one, of all tensors that were projected. 1 round,
        96 bytes.

        The projections of a share are hashed and sent to the party that should hold it too; two different shares have
        the same projections with 2^−PROJECTIONS. What a party finds goes into the parities as a bit of its own."""
        first, second = (
            hashlib.sha256(b"".join(unseal(each)[side].tobytes() for each in projections)).digest() for side in (0, 1)
        )
        operation = self.party.operation("same_shares", len(projections))
        round_ = operation.round()
        round_.send_next(np.frombuffer(second, dtype=np.uint8))  # the next party's first share
        theirs = round_.expect_previous(len(first), np.uint8)
        await round_
        coins = self._coins.words(3)
        if unseal(theirs).tobytes() != first:
            self._parities[0] ^= coins[self.party.id]

    async def require_small(self, projections: Words, limit: int) -> None:
        """From projections (2, PROJECTIONS, …): tests that every number that was projected is below REACH·limit, where
        honest ones of a sum are of norm at most limit/TAIL together. 2 rounds, 110 to 220 bytes a projection; misses a
        larger one with 2^−PROJECTIONS."""
        require(0 < limit < 2**61, "limit", limit, "below 2^61, so that a sum can be told from one that wrapped")
        sums = ArithmeticTensor(self.party, projections, 0).reshape(-1)
        low_bit = max(0, limit.bit_length() - _COARSE)
        await self.require_not_negative(concatenate([sums + limit, (-sums) + limit]), 63, low_bit)

    async def require_zero(self, projections: Words) -> None:
        """From projections (1, PROJECTIONS, side) of additive numbers, one summand at each party: tests that all are
        zero modulo 2^64. 3 rounds, 24 + 240 bytes a projection; a number that is not zero is missed with
        2^−PROJECTIONS, also if it is a zero divisor."""
        sums = (await shared_sums(self.party, projections)).reshape(-1)
        await self.require_not_negative(concatenate([sums, -sums]))  # both, only if it is zero

    async def require_not_negative(self, x: ArithmeticTensor, high_bit: int = 63, low_bit: int = 0) -> None:
        """Tests x ≥ 0 for −2^high_bit ≤ x < 2^high_bit; −2^low_bit < x < 0 may pass. 2 rounds; bytes of
        ``is_negative``."""
        self.add(await is_negative(x.reshape(-1), low_bit, high_bit))

    def add(self, bits: TwoHolderBits) -> None:
        """Further bits that must be zero: this party's bits go into parities of random subsets, which is local."""
        held = self.party.machine.unsealed(bits.held)
        coins = self._coins.words(bits.size)
        for segment in bits.segments:
            if segment.role(self.party.id) != 1:  # the two holders have the same bit: it counts once
                kernels.subset_parities(held[segment.slice], coins[segment.slice], self._parities)

    # the end -------------------------------------------------------------------------------------

    async def opened(self, release: str) -> bool:
        """Opens the parities themselves: whether a bit that was added is one, but for 2^−PROJECTIONS. 1 round, 48
        bytes.

        Fit only for bits that depend on one client's own words and the coins: of a client that follows the protocol all
        parities are 0, of one that does not they tell something about its own words."""
        party = self.party
        party.machine.leave(f"the release {release!r}")
        party.ledger.record(release, 1, "all servers")
        operation = party.operation("open_parities", release)
        mine = self._parities ^ unseal(operation.zero_share((1,), "xor"))
        round_ = operation.round()
        round_.send_next(mine)
        round_.send_previous(mine)
        others = round_.expect_next(1), round_.expect_previous(1)
        await round_
        total = mine ^ unseal(others[0]) ^ unseal(others[1])
        return bool(total[0] & np.uint64((1 << PROJECTIONS) - 1))


async def shared_sums(party: Party, own: Words) -> ArithmeticTensor:
    """Replicated shares of additive numbers: 1 round, 24 bytes."""
    operation = party.operation("share_sums", own.shape)
    shares = operation.machine.memory((2, *own.shape))
    operation.machine.call("add", own, operation.zero_share(own.shape), shares[0])
    round_ = operation.round()
    round_.send_previous(shares[0])
    round_.fill_next(shares[1])
    await round_
    return ArithmeticTensor(party, shares, 0, operation.history())
