"""Tests of a whole upload on shares, with public random signs, that end in one bit: proofs §11.

The client has chosen its words before the coins are drawn. A *projection* of numbers x_1 … x_n is Σ r_i·x_i with public
r_i in {−1, 0, 1}, P(±1) = 1/4 each: local. Of honest numbers it is small; if one of them is large, whatever the others are,
it is large with probability 1/2 at least. So a few projections stand for all numbers, and only these are compared.

Who sees what: the coins are public. Everything else is one of the primitives; only what the caller reveals is opened.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

from accel import kernels
from accel.prg import KEY_BYTES, Stream
from accel.validate import require, require_integer
from refmpc.core.party import Party
from refmpc.core.rounds import gather
from refmpc.core.tensor import ArithmeticTensor, concatenate
from refmpc.core.words import Words, seal, unseal
from refmpc.primitives.arithmetic import multiply
from refmpc.primitives.comparison import is_negative
from refmpc.primitives.io import input_from_party
from refmpc.primitives.two_holder import TwoHolderBits, bit_to_arithmetic

__all__ = ["PROJECTIONS", "TAIL", "Faults", "projection_limit", "public_coins", "side_by_side"]

PROJECTIONS = 40  # each misses a bad number with probability 1/2 at most, and so do as many parities of bits
TAIL = 9.0  # honest projections exceed TAIL·‖x‖ with probability 2·exp(−81) < 2^−115
_PIECE = 1 << 16  # rows at a time
_SIDE = 8  # numbers side by side in a projection of all numbers of a tensor: 1/8 of the coins, 8 times the comparisons
_FEW = 1 << 17  # numbers that are projected one by one


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


class Faults:
    """Collects bits that must all be zero; at the end, one bit says whether they are.

    ``coins`` are drawn after what is tested was fixed, and used for one upload; several uploads that are tested with the same
    have a ``place`` of their own each.
    """

    def __init__(self, party: Party, coins: bytes, place: int = 0):
        self._party = party
        self._coins = Stream(coins, place.to_bytes(8, "little"))
        self._parities = np.zeros(1, dtype=np.uint64)  # this party's share of the parities of random subsets

    # tests ---------------------------------------------------------------------------------------

    def project(self, shares: Words, onto: Words | None = None) -> Words:
        """Projections along the rows: (2, n, d) to (2, PROJECTIONS, d), or without the axis of shares. Local. Added to ``onto``
        (the projections of rows before these), if given."""
        machine, rows = self._party.machine, shares.shape[-2]
        plain = machine.unsealed(shares)
        parts = plain.reshape(-1, rows, shares.shape[-1])
        out = np.zeros((len(parts), PROJECTIONS, shares.shape[-1]), dtype=np.uint64)
        if onto is not None:
            out += machine.unsealed(onto).reshape(out.shape)
        for start in range(0, rows, _PIECE):
            piece = slice(start, min(rows, start + _PIECE))
            coins = self._coins.words(2 * (piece.stop - piece.start)).reshape(-1, 2)
            for part, total in zip(parts, out, strict=True):
                kernels.project_signs(part[piece], coins, total)
        return seal(out if shares.ndim == 3 else out[0])

    def project_all(self, shares: Words) -> Words:
        """Projections over all numbers of (2, …), a few side by side: (2, PROJECTIONS, side). Local."""
        plain = self._party.machine.unsealed(shares).reshape(2, -1)
        side = side_by_side(plain.shape[1])
        rows = -(-plain.shape[1] // side)
        whole = np.zeros((2, rows * side), dtype=np.uint64)
        whole[:, : plain.shape[1]] = plain
        return self.project(seal(whole.reshape(2, rows, side)))

    async def require_same_shares(self, projections: list[Words]) -> None:
        """Tests that the two parties that hold a share hold the same one, of all tensors that were projected. 1 round, 96 bytes.

        The projections of a share are hashed and sent to the party that should hold it too; two different shares have the
        same projections with 2^−PROJECTIONS. What a party finds goes into the parities as a bit of its own."""
        first, second = (
            hashlib.sha256(b"".join(unseal(each)[side].tobytes() for each in projections)).digest() for side in (0, 1)
        )
        operation = self._party.operation("same_shares", len(projections))
        round_ = operation.round()
        round_.send_next(np.frombuffer(second, dtype=np.uint8))  # the next party's first share
        theirs = round_.expect_previous(len(first), np.uint8)
        await round_
        coins = self._coins.words(3)
        if unseal(theirs).tobytes() != first:
            self._parities[0] ^= coins[self._party.id]

    async def require_small(self, x: ArithmeticTensor, largest_honest: int) -> int:
        """Of x (n, d): tests that |x_ij| ≤ 2·limit for all, where honest columns have a norm of at most ``largest_honest``
        ·√n, and gives 2·limit. 2 rounds, 240 bytes a projection and column; misses a larger one with 2^−PROJECTIONS."""
        return await self.require_small_sums(self.project(x.shares), len(x), largest_honest)

    async def require_small_sums(self, projections: Words, rows: int, largest_honest: int) -> int:
        """``require_small`` of so many rows, from their projections."""
        limit = projection_limit(rows, largest_honest)
        require(limit < 2**62, "rows · largest²", limit, "below 2^62, so that a sum can be told from one that wrapped")
        sums = ArithmeticTensor(self._party, projections, 0)
        await self.require_not_negative(concatenate([sums + limit, (-sums) + limit]))
        return 2 * limit

    async def require_zero(self, summands_of_rows: Words) -> None:
        """Of additive numbers (n, d), one summand at each party: tests that all are zero modulo 2^64. 3 rounds, 16 + 240 bytes
        a projection and column; a number that is not zero is missed with 2^−PROJECTIONS, also if it is a zero divisor."""
        await self.require_zero_sums(self.project(summands_of_rows))

    async def require_zero_sums(self, projections: Words) -> None:
        """``require_zero`` from projections (PROJECTIONS, d) of all rows."""
        sums = await _shared(self._party, projections)
        await self.require_not_negative(concatenate([sums, -sums]))  # both, only if it is zero

    async def require_not_negative(self, x: ArithmeticTensor, high_bit: int = 63) -> None:
        """Tests x ≥ 0 for −2^high_bit ≤ x < 2^high_bit. 2 rounds; bytes of ``is_negative``."""
        require_integer("high_bit", high_bit, 1, 63)
        self.add(await is_negative(x.reshape(-1), 0, high_bit))

    def add(self, bits: TwoHolderBits) -> None:
        """Further bits that must be zero: this party's bits go into parities of random subsets, which is local."""
        held = self._party.machine.unsealed(bits.held)
        coins = self._coins.words(bits.size)
        for segment in bits.segments:
            if segment.role(self._party.id) != 1:  # the two holders have the same bit: it counts once
                kernels.subset_parities(held[segment.slice], coins[segment.slice], self._parities)

    # the end -------------------------------------------------------------------------------------

    async def opened(self, release: str) -> bool:
        """Opens the parities themselves: whether a bit that was added is one, but for 2^−PROJECTIONS. 1 round, 48 bytes.

        Cheaper than ``any``, and fit only for bits that depend on one client's own words and the coins: of a client that
        follows the protocol all parities are 0, of one that does not they tell something about its own words."""
        party = self._party
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

    async def any(self) -> ArithmeticTensor:
        """One secret bit (shape (1,)): 1 if a bit that was added is one, but for 2^−PROJECTIONS; 0 if none is.

        8 rounds. The parities P_t = q_0 ⊕ q_1 ⊕ q_2, a bit at each party, are shared, added up and compared with 1.
        """
        places = np.arange(PROJECTIONS, dtype=np.uint64)
        own = (self._parities[0] >> places & np.uint64(1)).astype(np.int64)
        inputs = [
            input_from_party(self._party, source, own if self._party.id == source else None, (PROJECTIONS,), 0)
            for source in range(3)
        ]
        first, second, third = await gather(*inputs)
        both = first + second - await multiply(first, second) * 2
        parities = both + third - await multiply(both, third) * 2
        none = await is_negative(parities.sum().reshape(1) - 1, 0, 8)
        return await bit_to_arithmetic(~none)


async def _shared(party: Party, own: Words) -> ArithmeticTensor:
    """Replicated shares of additive numbers: 1 round, 24 bytes."""
    operation = party.operation("share_sums", own.shape)
    shares = operation.machine.memory((2, *own.shape))
    operation.machine.call("add", own, operation.zero_share(own.shape), shares[0])
    round_ = operation.round()
    round_.send_previous(shares[0])
    round_.fill_next(shares[1])
    await round_
    return ArithmeticTensor(party, shares, 0, operation.history())
