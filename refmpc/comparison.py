"""Comparison of two-holder numbers, and what follows from it: sign, maximum, ReLU.

After SecureNN's private compare (Wagh, Gupta, Chandran, PoPETs 2019, Alg. 3) with three changes. Roles: the two holders
know c, the dealer knows ρ, and nothing has to be shared beforehand. Digits: c and ρ are compared in base 4, so the
dealer sends three threshold bits per two bits and the holders answer with one test per two bits, modulo the smallest
prime above the number of digits: 20 bytes for 16 bits instead of 48. Order: at most one test is zero and the others are
uniform non-zero values, so a secret rotation hides where it is; a full permutation is not needed.
"""

from __future__ import annotations

import numpy as np

from accel import kernels
from accel.validate import require_integer
from refmpc.holders import TwoHolderBits, select
from refmpc.party import segment_sizes
from refmpc.protocol import Cost, protocol
from refmpc.tensor import ArithmeticTensor, concatenate

__all__ = ["is_negative", "maximum", "relu"]

_PRIMES = (5, 7, 11, 13, 17, 23, 31, 37)


def _modulus(digits: int) -> tuple[int, int]:
    """The smallest prime above ``digits``, and its width in bits."""
    prime = next(p for p in _PRIMES if p > digits)
    return prime, prime.bit_length()


def _comparison_bytes(count: int, width: int) -> int:
    digits, thresholds = kernels.comparison_digits(width)
    bits = _modulus(digits)[1]
    return sum(
        kernels.packed_size(n * thresholds, bits) + 2 * kernels.packed_size(n * digits, bits)
        for n in segment_sizes(count)
    )


def _is_negative_cost(x: ArithmeticTensor, low_bit: int = 0, high_bit: int = 63) -> Cost:
    return Cost(2, _comparison_bytes(x.size, high_bit - low_bit))


@protocol(
    cost=_is_negative_cost,
    source="Wagh, Gupta, Chandran, PoPETs 2019 (ePrint 2018/442), Alg. 3, with the changes of this file",
)
async def is_negative(x: ArithmeticTensor, low_bit: int = 0, high_bit: int = 63) -> TwoHolderBits:
    """[x < 0] for |x| < 2^high_bit in the ring, at a resolution of 2^low_bit.

    2 rounds. Bytes: at w = high_bit − low_bit compared bits about 1.25 w (w = 16: 20, w = 31: 49, w = 63: 119).
    Domain: −2^high_bit ≤ x ≤ 2^high_bit − 2^low_bit; bits above are not looked at. Error: none for low_bit = 0;
    otherwise −2^low_bit < x < 0 may count as not negative. A value that is not negative is never taken for negative.

    The sign of x = c − ρ in a ring of high_bit+1 bits is c_top ⊕ ρ_top ⊕ [c_low < ρ_low].
    Views: role 1 receives threshold bits masked modulo the prime by a stream it does not know. The dealer receives
    digit tests whose masks cancel only in the sum: the sums are uniform non-zero values, with one zero at a uniform
    position or none, and which of the two is decided by the holders' secret coin β. The bit it learns is uniform.
    """
    require_integer("high_bit", high_bit, 1, 63)
    require_integer("low_bit", low_bit, 0, high_bit - 1)
    width = high_bit - low_bit
    digits, thresholds = kernels.comparison_digits(width)
    prime, bits = _modulus(digits)
    party = x.party
    operation = party.operation("is_negative")
    if party.insecure_check_ranges:
        from refmpc.debug import check_range

        await check_range(x, -(2**high_bit), 2**high_bit - 2**low_bit + 1, "is_negative")
    flat = x.shares.reshape(2, -1)
    segments = operation.segments(x.size)
    held = np.empty(x.size, dtype=np.uint8)
    first, second = operation.round(), operation.round()
    work = []
    for segment in segments:
        n, at, role = segment.size, segment.slice, segment.role(party.id)
        packed = kernels.packed_size(n * thresholds, bits)
        if role == 2:
            rho = np.uint64(0) - flat[0, at] - flat[1, at]
            held[at] = (rho >> np.uint64(high_bit)) & np.uint64(1)
            halves = operation.uniform_below(operation.with_next, prime, (n, thresholds))
            dealt = kernels.compare_deal(rho >> np.uint64(low_bit), halves, width, prime)
            first.send_previous(_pack(dealt, bits))
            answer = kernels.packed_size(n * digits, bits)
            work.append((segment, second.expect_next(answer, np.uint8), second.expect_previous(answer, np.uint8)))
            continue
        c = flat[1 - role, at]
        held[at] = (c >> np.uint64(high_bit)) & np.uint64(1)
        if role == 0:
            halves = operation.uniform_below(operation.with_previous, prime, (n, thresholds))
            work.append((segment, c >> np.uint64(low_bit), halves))
        else:
            work.append((segment, c >> np.uint64(low_bit), first.expect_next(packed, np.uint8)))
    await first
    for segment, c, halves in work:
        n, at, role = segment.size, segment.slice, segment.role(party.id)
        if role == 2:
            continue
        if role == 1:
            halves = _unpack(halves, bits, (n, thresholds))
        coins = operation.with_next if role == 0 else operation.with_previous  # shared by the two holders
        beta = coins.bytes(n) & np.uint8(1)
        scale = operation.uniform_below(coins, prime - 1, (n, digits)) + np.uint8(1)
        mask = operation.uniform_below(coins, prime, (n, digits))
        rotation = operation.uniform_below(coins, digits, (n,))
        reply = kernels.compare_reply(c, halves, beta, scale, mask, rotation, width, prime, role == 0)
        held[at] ^= beta
        (second.send_previous if role == 0 else second.send_next)(_pack(reply, bits))
    await second
    for segment, left, right in work:
        if segment.role(party.id) == 2:
            shape = segment.size, digits
            held[segment.slice] ^= kernels.compare_decide(
                _unpack(left, bits, shape), _unpack(right, bits, shape), prime
            )
    return TwoHolderBits(party, held, segments, x.shape)


def _pack(values: np.ndarray, bits: int) -> np.ndarray:
    return kernels.pack_bits(values.reshape(-1).astype(np.uint64), bits)


def _unpack(packed: np.ndarray, bits: int, shape: tuple[int, int]) -> np.ndarray:
    return kernels.unpack_bits(packed, bits, shape[0] * shape[1]).astype(np.uint8).reshape(shape)


def _relu_cost(x: ArithmeticTensor, low_bit: int = 0, high_bit: int = 63) -> Cost:
    return is_negative.cost(x, low_bit, high_bit) + Cost(2, 32 * x.size)


@protocol(cost=_relu_cost, source="is_negative, select")
async def relu(x: ArithmeticTensor, low_bit: int = 0, high_bit: int = 63) -> ArithmeticTensor:
    """max(x, 0). 4 rounds; bytes of ``is_negative`` + 32. Exact for low_bit = 0, else off by at most 2^low_bit."""
    return await select(~await is_negative(x, low_bit, high_bit), x)


def _tournament(entries: int) -> list[int]:
    """The number of comparisons in each level of a tournament among ``entries``."""
    levels = []
    while entries > 1:
        levels.append(entries // 2)
        entries -= entries // 2
    return levels


def _maximum_cost(x: ArithmeticTensor, axis: int = -1, low_bit: int = 0, high_bit: int = 63) -> Cost:
    total = Cost(0, 0)
    entries = x.shape[axis]
    others = x.size // entries if entries else 0
    for pairs in _tournament(entries):
        count = others * pairs
        total += Cost(4, _comparison_bytes(count, high_bit - low_bit) + 32 * count)
    return total


@protocol(cost=_maximum_cost, source="is_negative, select")
async def maximum(x: ArithmeticTensor, axis: int = -1, low_bit: int = 0, high_bit: int = 63) -> ArithmeticTensor:
    """The largest entry along an axis, by a tournament of ⌈log2 n⌉ levels, 4 rounds each.

    Domain: differences of two entries below 2^high_bit. Exact for low_bit = 0; otherwise the result is one of the
    entries and at most ⌈log2 n⌉·2^low_bit below the largest.
    """
    require_integer(f"entries along axis {axis}", x.shape[axis], 1)
    order = [a for a in range(x.ndim) if a != axis % x.ndim]
    entries = x.transpose(axis % x.ndim, *order)
    while len(entries) > 1:
        pairs = len(entries) // 2
        left, right, rest = entries[:pairs], entries[pairs : 2 * pairs], entries[2 * pairs :]
        difference = left - right
        bits = await is_negative(difference, low_bit, high_bit)
        entries = concatenate([right + await select(~bits, difference), rest])
    return entries[0]
