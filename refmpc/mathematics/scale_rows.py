"""A truncated factor of a row times its entries, and the weighted sum of squares of what is being truncated."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from accel import kernels
from accel.validate import require, require_integer
from refmpc.core.primitive import Cost, primitive
from refmpc.core.rounds import Round, gather
from refmpc.core.tensor import ArithmeticTensor
from refmpc.primitives.dealing import (
    DEALER,
    FIRST,
    SECOND,
    Additive,
    Dealing,
    check_additive,
    each_dealer,
    held,
    nothing,
    row_sizes,
)

__all__ = ["cut_and_square", "scale_rows"]


def _scale_cost(v: Additive, x: ArithmeticTensor, bits: int, margin: int = 0) -> Cost:
    return Cost(1, (16 + 16) * len(v.words) + 16 * x.size)


@primitive(cost=_scale_cost, source="this project: the quotient in two versions, one for each top bit of c")
async def scale_rows(v: Additive, x: ArithmeticTensor, bits: int, margin: int = 0) -> Additive:
    """(⌊v/2^bits⌋ or one more, minus ``margin``)·x_i for every entry of a row, additive at the sum of both scales.

    1 round, 32 bytes a row and 16 an entry. Exact but for the truncation, which is the same for all entries of a row.
    Domain: 0 ≤ v < 2^63, 1 ≤ bits ≤ 62; the products wrap around like all products.

    v = c − ρ and its quotient is (c≫bits) − R, where R is one of two numbers the dealer knows: ρ≫bits if c's top bit is
    set (or ρ's clear), 2^(64−bits) less otherwise. The dealer deals both, and both times ρ_x; the holders take the
    version that c says. Views: an opening, and dealt words under masks; the dealer gets nothing.
    """
    rows = len(v.words)
    require(x.ndim == 2 and len(x) == rows, "x.shape", x.shape, f"({rows}, entries)")
    require(not v.dealer_adds, "v", v, "without a summand of the dealer")
    require_integer("bits", bits, 1, 62)
    require_integer("margin", margin, 0, 2**31)
    await check_additive(v, 0, 2**63, "scale_rows")
    entries = x.shape[1]
    two_holder = held(x, v.segments)
    out = nothing(x.party, x.shape)

    async def work(dealing: Dealing) -> None:
        at = dealing.slice
        opening = dealing.open(v.words[at])
        shape = (dealing.rows, 2, 1 + entries)
        if dealing.role == DEALER:
            dealing.deal("scale_rows_deal", opening.words, two_holder.words[at], bits, shape=shape)
            await dealing.turn()
            return
        halves = dealing.deal("scale_rows_deal", shape=shape)
        await dealing.turn()
        outer = dealing.contiguous(x.shares[dealing.role, at])
        middle = two_holder.words[at]
        dealing.call("scale_rows_hold", opening.words, middle, outer, halves, bits, margin, dealing.leads, out[at])

    operation, _ = await each_dealer("scale_rows", v, (x, bits, margin), work)
    scale = x.fraction_bits + max(0, v.fraction_bits - bits)
    return Additive(v.party, out, v.segments, scale, operation.history())


def _square_cost(z: Additive, bits: int, weights: ArithmeticTensor) -> Cost:
    rows, entries = z.shape
    second = sum(2 * kernels.packed_size(n * entries, bits) for n in row_sizes(rows))
    first = sum(kernels.packed_size(n * entries, bits) for n in row_sizes(rows))
    return Cost(2, 24 * rows * entries + first + second + 8 * rows * (1 + 4 * entries))


Finish = Coroutine[Round, None, ArithmeticTensor]


async def begin_cut_and_square(z: Additive, bits: int, weights: ArithmeticTensor) -> tuple[Additive, Finish]:
    """``cut_and_square`` after its first round: q, and what remains to be awaited (one round) for δ."""
    rows, entries = z.shape
    require_integer("bits", bits, 1, 61)
    require(weights.shape == (rows,), "weights.shape", weights.shape, f"({rows},)")
    await check_additive(z, -(2**62), 2**62, "cut_and_square")
    norms = held(weights, z.segments)
    machine = z.party.machine
    q, shares = nothing(z.party, rows), machine.memory((2, rows, entries))
    fraction_bits = max(0, z.fraction_bits - bits)
    first_words, second_words = kernels.truncation_masks(bits)

    async def first(dealing: Dealing) -> tuple[Any, ...]:
        at, n = dealing.slice, dealing.rows
        count, role = n * entries, dealing.role
        mine = z.words[at].reshape(-1)
        shape = (n, 1 + 4 * entries)
        if role == DEALER:
            to_first = dealing.mask_rows(FIRST, first_words, count)
            to_second = dealing.mask_rows(SECOND, second_words, count)
            own = (shares[index, at].reshape(-1) for index in range(2))
            b0, b1 = dealing.memory(count), machine.packed(count, bits)
            dealing.call("truncation_deal", mine, to_first, to_second, bits, *own, b0, b1)
            dealing.send(SECOND, b0)
            dealing.send(SECOND, machine.packed_bytes(b1, count, bits))
            rho = dealing.memory((n, entries))
            dealing.call("open_dealer", to_first[0], to_second[0], mine, 64, rho.reshape(-1))
            halves, rest = dealing.masks(FIRST, *shape), dealing.memory(shape)
            dealing.call("squared_deal", rho, norms.words[at], bits, halves, rest, q[at])
            dealing.send(SECOND, rest)
            await dealing.turn()
            return dealing, None, None, None
        masks = dealing.mask_rows(DEALER, first_words if role == FIRST else second_words, count)
        sent = dealing.memory(count)
        dealing.call("truncation_hold", mine, masks[0], dealing.leads, sent)
        dealing.send(1 - role, sent)
        theirs = dealing.expect(1 - role, count)
        if role == SECOND:
            quotient, arriving = dealing.expect(DEALER, count), dealing.expect_packed(DEALER, (count,), bits)
        halves = dealing.halves(*shape)
        await dealing.turn()
        if role == SECOND:
            wrap, mask = arriving.words, masks[1]
        else:
            quotient, wrap, mask = masks[1], masks[2], masks[-1]
        c, answer, message = dealing.memory(count), dealing.memory(count), machine.packed(count, bits)
        share = shares[role, at].reshape(-1)
        dealing.call("truncation_answer", sent, theirs, quotient, wrap, mask, bits, c, share, answer, message)
        outer = dealing.contiguous(weights.shares[role, at])
        by_row = (n, entries)
        dealing.call(
            "squared_hold",
            c.reshape(by_row),
            quotient.reshape(by_row),
            wrap.reshape(by_row),
            norms.words[at],
            outer,
            halves,
            bits,
            dealing.leads,
            q[at],
        )
        return dealing, c, answer, message

    operation, begun = await each_dealer("cut_and_square", z, (bits, weights), first)

    async def second(dealing: Dealing, c: Any, answer: Any, message: Any) -> None:
        if dealing.role == DEALER:
            await dealing.turn()
            return
        other, reply = 1 - dealing.role, machine.packed(c.size, bits)
        dealing.send(other, machine.packed_bytes(message, c.size, bits))
        dealing.fill(other, machine.packed_bytes(reply, c.size, bits))
        await dealing.turn()
        dealing.call("truncation_result", c, answer, reply, bits, shares[other, dealing.slice].reshape(-1))

    async def finish() -> ArithmeticTensor:
        await gather(*(second(*each) for each in begun))
        return ArithmeticTensor(z.party, shares, fraction_bits, operation.history())

    scale = 2 * fraction_bits + weights.fraction_bits
    return Additive(z.party, q, z.segments, scale, operation.history(1), dealer_adds=True), finish()


@primitive(cost=_square_cost, source="this project: truncation of proofs §2.2; squares of c° − R in two versions")
async def cut_and_square(z: Additive, bits: int, weights: ArithmeticTensor) -> tuple[ArithmeticTensor, Additive]:
    """δ = z cut by ``bits`` (⌊z/2^bits⌋ or one more), replicated, and q = w·Σ_i δ_i² of every row, *exact*, additive.

    2 rounds; q is there after the first (``begin_cut_and_square``). 24 + 3·bits/8 + 32 bytes an entry and 8 a row.
    Domain: −2^62 ≤ z < 2^62; q is modulo 2^64.

    The opening of the truncation gives δ = c° − R with R one of two numbers the dealer knows (``scale_rows``); the
    dealer deals Σ R_1² and per entry R_0² − R_1², and what is needed of them times ρ_w: ``squared_hold`` has the sum.
    −ρ_w·Σ R_1² is its own summand of q. Views: those of a truncation, and dealt words under masks; the dealer gets
    nothing.
    """
    q, finish = await begin_cut_and_square(z, bits, weights)
    return await finish, q
