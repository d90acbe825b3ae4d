"""Open a truncated product to one client without a round between the servers, or to all servers in one round.

Truncating a product and *keeping it shared* costs a protocol, because the shares live modulo 2^64. Opening it does not:
each server has a summand z_i of z (its local product, its own addend, and a zero share), cuts its low bits in the clear
and sends t_i = ⌊z_i/2^bits⌋ to the client, which adds modulo 2^(64−bits). Multiples of 2^64 vanish there, so there is
no wrap-around and no large failure.

What the client gets: write z_i = 2^bits·t_i + l_i. Then t_0 + t_1 + t_2 = ⌊(z − l_0 − l_1)/2^bits⌋. z_0 and z_1 are
uniform and independent of z (zero share), hence so are t_0, t_1, l_0, l_1: the client sees ⌊(z + s)/2^bits⌋ with s =
−(l_0 + l_1) independent of the data, and two uniform numbers. A corrupted server knows one of the l_i at most; that one
is a function of its view, which is independent of the data, and the others stay uniform. This is the form that the DP
theorem asks for (proofs §6.2 and §6.5): noise in the addends, at least tap_bits bits cut.

``open_words`` sends the same words to the two other servers: each adds the three up, as the client does. A corrupted
server has its own t_i and l_i, functions of its view before the opening, and receives two words of which one is uniform
and the other is what the sum leaves: it learns the sum and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from accel import kernels
from accel.validate import require, require_integer
from refmpc.core.party import Party
from refmpc.core.primitive import Cost, primitive
from refmpc.core.tensor import ArithmeticTensor
from refmpc.core.words import Words, unseal
from refmpc.net.framing import title
from refmpc.primitives.arithmetic import matmul_shape, matmul_summand, own_addend
from refmpc.primitives.io import Client

__all__ = [
    "added_words",
    "joined_words",
    "matmul_opening",
    "open_to_client",
    "open_words",
    "opening_bytes",
    "receive_opening",
    "tensor_opening",
    "unbiased_addend",
    "word_type",
]


def word_type(bits: int) -> type[np.uint32] | type[np.uint64]:
    """Type of the words of a product that lost ``bits``."""
    require_integer("bits", bits, 1, 62)
    return np.uint32 if 64 - bits <= 32 else np.uint64


def opening_bytes(bits: int) -> int:
    """Bytes a value, all three servers together: 12 from 32 cut bits on, 24 below."""
    return 3 * np.dtype(word_type(bits)).itemsize


def matmul_opening(x: ArithmeticTensor, y: ArithmeticTensor, bits: int, addend: np.ndarray | None = None) -> Words:
    """This server's words of (x@y + all servers' addends)/2^bits, ready to be sent: local, nothing is opened yet.

    Domain |z| < 2^62 in the ring, addends included. The opened value is z/2^bits off by at most 1.5 units, unbiased.
    """
    shape, kind = matmul_shape(x, y), word_type(bits)
    own = own_addend(shape, addend)
    operation = x.party.operation("matmul_opening", x, y, bits)
    if x.party.insecure_check_ranges:
        from refmpc.core.debug import check_product

        x.party.complete(check_product(operation, x, y, np.matmul, 2**62, addend))
    machine = operation.machine
    z, words = machine.memory(shape), machine.memory(shape, kind)
    zero_share = [machine.masks(operation, side, math.prod(shape)) for side in ("next", "previous")]
    matmul_summand(x, y, None, z)
    addend = None if own is None else machine.contiguous(own).reshape(-1)
    machine.call("cut_words", z.reshape(-1), *zero_share, addend, bits, words.reshape(-1))
    return words


def tensor_opening(x: ArithmeticTensor, bits: int, addend: np.ndarray | None = None) -> Words:
    """This server's words of (x + all servers' addends)/2^bits for shared x: as ``matmul_opening``, whose domain and
    error it has, for a product with public integers. Local, nothing is opened yet."""
    kind = word_type(bits)
    own = own_addend(x.shape, addend)
    operation = x.party.operation("tensor_opening", x, bits)
    machine = operation.machine
    z, words = machine.memory(x.shape), machine.memory(x.shape, kind)
    machine.call("add", x.first, operation.zero_share(x.shape), z)
    if own is not None:
        machine.call("add", z, own, z)
    if x.party.insecure_check_ranges:
        from refmpc.core.debug import check_words

        x.party.complete(check_words(operation, z, -(2**62), 2**62))
    machine.call("shift_right", z, np.uint64(bits), z)
    machine.call("copy", z, words)
    return words


def open_to_client(party: Party, words: np.ndarray, client: str, release: str) -> None:
    """Send this server's words to the client: the moment of the release, which the ledger records first."""
    party.machine.leave(f"the release {release!r}")
    party.ledger.record(release, words.size, title(client))
    party.send("open_to_client", client, [unseal(words)])


def receive_opening(
    client: Client, count: int, bits: int, fraction_bits: int, timeout: float | None = None
) -> np.ndarray:
    """What the three servers open to this client: ``count`` numbers with ``fraction_bits``, of products cut by
    ``bits``."""
    parts = [np.empty(count, dtype=word_type(bits)) for _ in range(3)]
    client.collect("open_to_client", {server: [part] for server, part in enumerate(parts)}, timeout)
    return joined_words(parts, bits, fraction_bits)


def joined_words(parts: Sequence[np.ndarray], bits: int, fraction_bits: int) -> np.ndarray:
    """The opened numbers from the three servers' words.

    The sum of the words is ⌊(z − l_0 − l_1)/2^bits⌋, on average 1.5 units below z/2^bits: those are added here.
    """
    return (added_words(parts, bits).astype(np.float64) + 1.5) * 2.0**-fraction_bits


# to all servers ----------------------------------------------------------------------------------


def unbiased_addend(party: Party, bits: int) -> np.uint64:
    """What this server adds to its summand, so that the sum of the words is z/2^bits on average: 1.5 units at server
    0."""
    return np.uint64(3 << (bits - 1) if party.id == 0 else 0)


def added_words(parts: Sequence[np.ndarray], bits: int) -> np.ndarray:
    """The sum of the three servers' words modulo 2^(64−bits), as signed integers."""
    total = parts[0].astype(np.uint64) + parts[1] + parts[2]
    return (total << np.uint64(bits)).view(np.int64) >> np.int64(bits)


def _open_cost(party: Party, words: Words, bits: int, release: str) -> Cost:
    return Cost(1, 6 * kernels.packed_size(words.size, 64 - bits))


@primitive(cost=_open_cost, source="this project; the sum of cut summands, as ``matmul_opening`` says")
async def open_words(party: Party, words: Words, bits: int, release: str) -> np.ndarray:
    """The opened numbers, signed integers, from all servers' words of products cut by ``bits``. 1 round, 6·(64 −
    bits)/8 bytes a number.

    ``words`` are this server's, of ``matmul_opening``, one axis. ``release`` must have been declared; the ledger
    records it before anything is sent. Exact: the sum of the words, which is off z/2^bits as ``matmul_opening`` says.
    """
    require(words.ndim == 1, "words.ndim", words.ndim, "1, a flat array", "reshape it")
    require_integer("bits", bits, 1, 62)
    party.machine.leave(f"the release {release!r}")
    party.ledger.record(release, words.size, "all servers")
    return unseal(await party.repeated(_sums)(words, bits, release))


async def _sums(party: Party, words: Words, bits: int, release: str) -> Words:
    """The exchange of an opening and its sums: what can be repeated of it. That it is a release was recorded before."""
    operation = party.operation("open_words", words.size, bits, release)
    machine, width = operation.machine, 64 - bits
    mine, packed = machine.contiguous(words), machine.memory(kernels.packed_size(words.size, width), np.uint8)
    machine.call("pack_into", mine, width, packed)
    round_ = operation.round()
    round_.send_next(packed)
    round_.send_previous(packed)
    others = round_.expect_next(packed.shape, np.uint8), round_.expect_previous(packed.shape, np.uint8)
    await round_
    sums = machine.memory(words.size, np.int64)
    machine.call("add_packed", mine, *others, width, sums)
    return sums
