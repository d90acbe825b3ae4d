"""Division by 2^bits with an error of at most one unit and no large failure, ever.

The dealer's own summand goes into the mask, so a product and its truncation cost two rounds together. Proofs §2.2
gives the message tables. Views: the holders of c receive only values under a fresh uniform mask that they do not know;
the dealer receives nothing. (Zero shares are not needed: every message is masked by r, A or M already.)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from accel import kernels
from accel.prg import Stream
from accel.validate import require_integer
from refmpc.core.party import Operation, segment_sizes
from refmpc.core.protocol import Cost, protocol
from refmpc.core.tensor import ArithmeticTensor

__all__ = ["OFFSET", "truncate", "truncate_summands", "truncated_product_cost"]

OFFSET = np.uint64(1 << 62)  # moves −2^62 ≤ z < 2^62 to 0 ≤ z < 2^63, where the wrap-around is one product of two bits


def truncated_product_cost(outputs: int, bits: int) -> Cost:
    """24 + 3·bits/8 bytes an output, two rounds."""
    return Cost(2, sum(24 * n + 3 * kernels.packed_size(n, bits) for n in segment_sizes(outputs)))


def _narrow_masks(stream: Stream, count: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Two independent uniform values of ``bits`` bits per element: both from one word when they fit."""
    words = stream.words(count)
    other = words >> np.uint64(64 - bits) if bits <= 32 else stream.words(count) >> np.uint64(64 - bits)
    return words & np.uint64((1 << bits) - 1), other


async def truncate_summands(operation: Operation, summand: np.ndarray, bits: int) -> np.ndarray:
    """From each party's own summand of z to replicated shares of ⌊z/2^bits⌋ or that plus one.

    Domain −2^62 ≤ z < 2^62, 1 ≤ bits ≤ 62. The result is exact on multiples of 2^bits and unbiased: it is
    ⌊(z + s)/2^bits⌋ with s uniform in 0..2^bits−1 and independent of the data. Returns shares (2, n), flat.
    """
    require_integer("bits", bits, 1, 62)
    me = operation.party.id
    z = np.ascontiguousarray(summand).reshape(-1)
    shares = np.empty((2, z.size), dtype=np.uint64)
    first_words, second_words = kernels.truncation_masks(bits)
    first, second = operation.round(), operation.round()
    holding: list[tuple[Any, ...]] = []
    for segment in operation.segments(z.size):
        n, at, packed = segment.size, segment.slice, kernels.packed_size(segment.size, bits)
        role = segment.role(me)
        if role == 0:  # holds c; shares r0, A0, A1, M0 with the dealer
            masks = operation.with_previous.rows(first_words, n)
            mine = kernels.truncation_hold(z[at], masks, bits, 0)
            first.send_next(mine)
            holding.append((at, role, mine, first.expect_next(n), masks, None, second.expect_next(packed, np.uint8)))
        elif role == 1:  # holds c; shares r1, M2 with the dealer
            masks = operation.with_next.rows(second_words, n)
            mine = kernels.truncation_hold(z[at], masks, bits, 1)
            first.send_previous(mine)
            theirs = first.expect_previous(n)
            half = first.expect_next(n), first.expect_next(packed, np.uint8)
            holding.append((at, role, mine, theirs, masks, half, second.expect_previous(packed, np.uint8)))
        else:  # deals ρ = r0 + r1 − z2, and is done: its own result shares are masks
            with_first = operation.with_next.rows(first_words, n)
            with_second = operation.with_previous.rows(second_words, n)
            b0, b1 = kernels.truncation_deal(z[at], with_first, with_second, bits, shares[:, at])
            first.send_previous(b0)
            first.send_previous(b1)
    await first
    open_values = []
    for at, role, mine, theirs, masks, half, reply in holding:
        c, share, answer, message = kernels.truncation_answer(mine, theirs, masks, half, bits)
        shares[role, at] = share
        (second.send_next if role == 0 else second.send_previous)(message)
        open_values.append((at, role, c, answer, reply))
    await second
    for at, role, c, answer, reply in open_values:
        shares[1 - role, at] = kernels.truncation_result(c, answer, reply, bits)
    return shares


def _truncate_cost(x: ArithmeticTensor, bits: int) -> Cost:
    return Cost(1, sum(8 * n + 6 * kernels.packed_size(n, bits) for n in segment_sizes(x.size)))


@protocol(cost=_truncate_cost, source="this project, proofs §2.3")
async def truncate(x: ArithmeticTensor, bits: int) -> ArithmeticTensor:
    """x / 2^bits at the scale fraction_bits − bits.

    Cost: 1 round, 8 + 6·bits/8 bytes an element. Domain: −2^62 ≤ x < 2^62 in the ring, 1 ≤ bits ≤ 62. Error: ⌊x/2^bits⌋
    or one more, exact on multiples. The rounding is that of the shares: unbiased if they are uniform (results of
    products and comparisons, inputs of clients), but not for a public tensor or a fresh input of one server, where a
    share is zero: +1/6 unit on average over the dealers, up to half a unit for one dealer. Take ``multiply_truncate``
    where that matters. The wrap-around bit reaches both holders of c by a three-party oblivious transfer: the dealer
    offers both answers under one-time keys, the other holder sends the right key.
    """
    require_integer("bits", bits, 1, 62)
    operation = x.party.operation("truncate", x, bits)
    await _check_domain(x, "truncate")
    me, low = x.party.id, np.uint64((1 << bits) - 1)
    shift = np.uint64(64 - bits)
    flat = x.shares.reshape(2, -1)
    shares = np.empty_like(flat)
    round_ = operation.round()
    holding: list[tuple[Any, ...]] = []
    for segment in operation.segments(x.size):
        n, at, packed = segment.size, segment.slice, kernels.packed_size(segment.size, bits)
        role = segment.role(me)
        if role == 2:
            to_0, to_1 = operation.with_next, operation.with_previous
            a0 = to_0.words(n)
            m0, key0_for_1, key1_for_1 = _offer_masks(to_0, n, bits)
            m2, key0_for_0, key1_for_0 = _offer_masks(to_1, n, bits)
            rho = np.uint64(0) - flat[0, at] - flat[1, at]
            b0 = (rho >> np.uint64(bits)) - a0
            mask = m0 + m2
            if_clear, if_set = mask + (rho >> np.uint64(63)), mask  # by the top bit of c
            round_.send_previous(b0)
            round_.send_previous(kernels.pack_bits((if_clear + key0_for_1) & low, bits))
            round_.send_previous(kernels.pack_bits((if_set + key1_for_1) & low, bits))
            round_.send_next(kernels.pack_bits((if_clear + key0_for_0) & low, bits))
            round_.send_next(kernels.pack_bits((if_set + key1_for_0) & low, bits))
            shares[0, at] = np.uint64(0) - b0 - (m2 << shift)
            shares[1, at] = np.uint64(0) - a0 - (m0 << shift)
            continue
        c = flat[1 - role, at] + OFFSET
        top = (c >> np.uint64(63)).astype(bool)
        stream = operation.with_previous if role == 0 else operation.with_next
        if role == 0:
            a0 = stream.words(n)
        mask, key0, key1 = _offer_masks(stream, n, bits)
        key = kernels.pack_bits(np.where(top, key1, key0), bits)  # opens the dealer's offer to the other holder
        if role == 0:
            round_.send_next(key)
            offers = [round_.expect_previous(packed, np.uint8) for _ in range(2)]
            my_key = round_.expect_next(packed, np.uint8)
            shares[0, at] = np.uint64(0) - a0 - (mask << shift)
            holding.append((at, c, top, offers, my_key, None, mask))
        else:
            round_.send_previous(key)
            b0 = round_.expect_next(n)
            offers = [round_.expect_next(packed, np.uint8) for _ in range(2)]
            my_key = round_.expect_previous(packed, np.uint8)
            holding.append((at, c, top, offers, my_key, b0, mask))
    await round_
    for at, c, top, offers, my_key, b0, mask in holding:
        clear, set_ = (kernels.unpack_bits(offer, bits, c.size) for offer in offers)
        wrap = np.where(top, set_, clear) - kernels.unpack_bits(my_key, bits, c.size)
        if b0 is None:
            shares[1, at] = kernels.truncate_finish(c, wrap, bits)
        else:
            shares[0, at] = kernels.truncate_finish(c, wrap, bits)
            shares[1, at] = np.uint64(0) - b0 - (mask << shift)
    result = shares.reshape(2, *x.shape)
    return ArithmeticTensor(x.party, result, max(0, x.fraction_bits - bits), operation.history())


def _offer_masks(stream: Stream, count: int, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A wrap mask and two one-time keys, drawn alike by the dealer and one holder."""
    wrap = stream.words(count) >> np.uint64(64 - bits)
    key0, key1 = _narrow_masks(stream, count, bits)
    return wrap, key0, key1


async def _check_domain(x: ArithmeticTensor, operation: str) -> None:
    if x.party.insecure_check_ranges:
        from refmpc.core.debug import check_range

        await check_range(x, -(2**62), 2**62, operation)
