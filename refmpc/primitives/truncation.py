"""Division by 2^bits with an error of at most one unit and no large failure, ever.

The dealer's own summand goes into the mask, so a product and its truncation cost two rounds together. Proofs §2.2
gives the message tables. Views: the holders of c receive only values under a fresh uniform mask that they do not know;
the dealer receives nothing. (Zero shares are not needed: every message is masked by r, A or M already.)
"""

from __future__ import annotations

from typing import Any

from accel import kernels
from accel.validate import require_integer
from refmpc.core.party import Operation, Segment, segment_sizes
from refmpc.core.primitive import Cost, primitive
from refmpc.core.tensor import ArithmeticTensor
from refmpc.core.words import Words

__all__ = ["truncate", "truncate_summands", "truncated_product_cost"]


def truncated_product_cost(outputs: int, bits: int) -> Cost:
    """24 + 3·bits/8 bytes an output, two rounds."""
    return Cost(2, sum(24 * n + 3 * kernels.packed_size(n, bits) for n in segment_sizes(outputs)))


async def truncate_summands(operation: Operation, z: Words, bits: int, segments: list[Segment] | None = None) -> Words:
    """From each party's own summand of z, flat, to replicated shares of ⌊z/2^bits⌋ or that plus one.

    Domain −2^62 ≤ z < 2^62, 1 ≤ bits ≤ 62. The result is exact on multiples of 2^bits and unbiased: it is
    ⌊(z + s)/2^bits⌋ with s uniform in 0..2^bits−1 and independent of the data. Returns shares (2, n), flat.
    ``segments`` are the dealers, if they are given.
    """
    require_integer("bits", bits, 1, 62)
    machine, me = operation.machine, operation.party.id
    shares = machine.memory((2, z.size))
    rows_0, rows_1 = kernels.truncation_masks(bits)
    first, second = operation.round(), operation.round()
    holding: list[tuple[Any, ...]] = []
    for segment in segments or operation.segments(z.size):
        n, at, role = segment.size, segment.slice, segment.role(me)
        if role == 2:  # deals ρ = r0 + r1 − z2, and is done: its own result shares are masks
            with_0, with_1 = (
                machine.masks(operation, "next", rows_0, n),
                machine.masks(operation, "previous", rows_1, n),
            )
            b0, b1 = machine.memory(n), machine.packed(n, bits)
            machine.call("truncation_deal", z[at], with_0, with_1, bits, shares[0, at], shares[1, at], b0, b1)
            first.send_previous(b0, machine.packed_bytes(b1, n, bits))
            continue
        mine, answer = machine.memory(n), machine.packed(n, bits)
        reply = machine.packed(n, bits)
        if role == 0:  # holds c; shares r0, A0, A1, M0 with the dealer
            masks = machine.masks(operation, "previous", rows_0, n)
            first.send_next(mine)
            theirs = first.expect_next(n)
            quotient, half, mask = masks[1], masks[2], masks[-1]
            second.fill_next(machine.packed_bytes(reply, n, bits))
        else:  # holds c; shares r1, M2 with the dealer
            masks = machine.masks(operation, "next", rows_1, n)
            first.send_previous(mine)
            theirs = first.expect_previous(n)
            quotient, half, mask = first.expect_next(n), machine.packed(n, bits), masks[1]
            first.fill_next(machine.packed_bytes(half, n, bits))
            second.fill_previous(machine.packed_bytes(reply, n, bits))
        machine.call("truncation_hold", z[at], masks[0], role == 0, mine)
        holding.append((segment, role, mine, theirs, quotient, half, mask, answer, reply))
    await first
    finishing = []
    for segment, role, mine, theirs, quotient, half, mask, answer, reply in holding:
        n, at = segment.size, segment.slice
        c, plain = machine.memory(n), machine.memory(n)
        kernel = "truncation_answer" if role == 0 else "truncation_answer_packed"
        machine.call(kernel, mine, theirs, quotient, half, mask, bits, c, shares[role, at], plain, answer)
        (second.send_next if role == 0 else second.send_previous)(machine.packed_bytes(answer, n, bits))
        finishing.append((c, plain, reply, shares[1 - role, at]))
    await second
    for c, plain, reply, share in finishing:
        machine.call("truncation_result", c, plain, reply, bits, share)
    return shares


def _truncate_cost(x: ArithmeticTensor, bits: int) -> Cost:
    return Cost(1, sum(8 * n + 6 * kernels.packed_size(n, bits) for n in segment_sizes(x.size)))


@primitive(cost=_truncate_cost, source="this project, proofs §2.3")
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
    machine, me, flat = operation.machine, x.party.id, x.flat
    shares = machine.memory((2, x.size))
    rows_0, rows_1 = kernels.truncate_masks(bits)
    round_ = operation.round()
    holding: list[tuple[Any, ...]] = []
    for segment in operation.segments(x.size):
        n, at, role = segment.size, segment.slice, segment.role(me)
        if role == 2:
            with_0, with_1 = (
                machine.masks(operation, "next", rows_0, n),
                machine.masks(operation, "previous", rows_1, n),
            )
            b0, offers = machine.memory(n), machine.packed(n, bits, 4)
            machine.call(
                "truncate_deal",
                flat[0, at],
                flat[1, at],
                with_0,
                with_1,
                bits,
                shares[0, at],
                shares[1, at],
                b0,
                offers,
            )
            to_1_clear, to_1_set, to_0_clear, to_0_set = (machine.packed_bytes(offer, n, bits) for offer in offers)
            round_.send_previous(b0, to_1_clear, to_1_set)
            round_.send_next(to_0_clear, to_0_set)
            continue
        c, key = flat[1 - role, at], machine.packed(n, bits)
        my_key, clear, set_ = (machine.packed(n, bits) for _ in range(3))
        arriving = [machine.packed_bytes(packed, n, bits) for packed in (my_key, clear, set_)]
        if role == 0:
            masks = machine.masks(operation, "previous", rows_0, n)
            quotient, mask, key_row = masks[0], masks[1], masks[2]
            round_.send_next(machine.packed_bytes(key, n, bits))
            round_.fill_next(arriving[0])
            round_.fill_previous(arriving[1])
            round_.fill_previous(arriving[2])
        else:
            masks = machine.masks(operation, "next", rows_1, n)
            quotient, mask, key_row = round_.expect_next(n), masks[0], masks[1]
            round_.send_previous(machine.packed_bytes(key, n, bits))
            round_.fill_previous(arriving[0])
            round_.fill_next(arriving[1])
            round_.fill_next(arriving[2])
        machine.call("truncate_key", c, key_row, masks[-1], bits, key)  # opens the dealer's offer to the other holder
        holding.append((c, clear, set_, my_key, quotient, mask, bits, shares[1 - role, at], shares[role, at]))
    await round_
    for arguments in holding:
        machine.call("truncate_finish", *arguments)
    return ArithmeticTensor(x.party, shares.reshape(2, *x.shape), max(0, x.fraction_bits - bits), operation.history())


async def _check_domain(x: ArithmeticTensor, operation: str) -> None:
    if x.party.insecure_check_ranges:
        from refmpc.core.debug import check_range

        await check_range(x, -(2**62), 2**62, operation)
