"""Local steps of truncation (proofs §2.2 and §1.2): what each of the three roles computes between its messages.

``masks`` are rows of words that the dealer and one holder draw alike. Truncated product (``truncation_…``): with role 0
r0, A0, and a third from which A1 (its low bits) and M0 (its high bits) are taken, M0 from a fourth if both do not fit
into one word; with role 1 r1, and a second whose high bits are M2. Truncation of a shared value (``truncate_…``): with
role 0 A0, M0 (high bits) and two keys (low and high bits, of two words if they do not fit into one); with role 1 M2 and
two keys.

Packed results and arguments are whole words: ``count`` values of ``bits`` bits, the rest of the last word is arbitrary.
"""

from __future__ import annotations

import numpy as np

from accel.reference.bits import pack_bits, packed_size, unpack_bits

__all__ = [
    "truncate_deal",
    "truncate_finish",
    "truncate_key",
    "truncate_masks",
    "truncation_answer",
    "truncation_answer_packed",
    "truncation_deal",
    "truncation_hold",
    "truncation_masks",
    "truncation_result",
]

OFFSET = np.uint64(1 << 62)  # moves −2^62 ≤ z < 2^62 to 0 ≤ z < 2^63, where the wrap-around is one product of two bits
TOP, ZERO, ONE = np.uint64(63), np.uint64(0), np.uint64(1)


def truncation_masks(bits: int) -> tuple[int, int]:
    """How many mask words an element of a truncated product takes, with role 0 and with role 1."""
    return (3 if bits <= 32 else 4), 2


def truncate_masks(bits: int) -> tuple[int, int]:
    """How many mask words an element of a truncation takes, with role 0 and with role 1."""
    return (3, 2) if bits <= 32 else (4, 3)


def _high(words: np.ndarray, bits: int) -> np.ndarray:
    return words >> np.uint64(64 - bits)


def _low(words: np.ndarray, bits: int) -> np.ndarray:
    return words & np.uint64((1 << bits) - 1)


def _pack(values: np.ndarray, bits: int, packed: np.ndarray) -> None:
    packed.view(np.uint8)[: packed_size(values.size, bits)] = pack_bits(values, bits)


def _unpack(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    return unpack_bits(packed.view(np.uint8)[: packed_size(count, bits)], bits, count)


# a product and its truncation ---------------------------------------------------------------------


def truncation_deal(
    z: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    bits: int,
    share_0: np.ndarray,
    share_1: np.ndarray,
    b0: np.ndarray,
    packed: np.ndarray,
) -> None:
    """The dealer, with ρ = r0 + r1 − z: B0 = (ρ≫bits) − A0, and B1 = (top bit of ρ) − A1 packed.

    Its shares of the result are −B0 − M2·2^(64−bits) and −A0 − M0·2^(64−bits).
    """
    rho = first[0] + second[0] - z
    b0[:] = (rho >> np.uint64(bits)) - first[1]
    _pack(_low((rho >> TOP) - _low(first[2], bits), bits), bits, packed)
    shift = np.uint64(64 - bits)
    share_0[:] = ZERO - b0 - (_high(second[1], bits) << shift)
    share_1[:] = ZERO - first[1] - (_high(first[-1], bits) << shift)


def truncation_hold(z: np.ndarray, mask: np.ndarray, leads: bool, out: np.ndarray) -> None:
    """What a holder opens to the other: z + r0 + 2^62 (role 0, which leads) or z + r1 (role 1)."""
    out[:] = z + mask + OFFSET if leads else z + mask


def truncation_answer(
    mine: np.ndarray,
    theirs: np.ndarray,
    quotient: np.ndarray,
    wrap_half: np.ndarray,
    mask: np.ndarray,
    bits: int,
    c: np.ndarray,
    share: np.ndarray,
    answer: np.ndarray,
    packed: np.ndarray,
) -> None:
    """c, the share that a holder has with the dealer, and its masked half of the wrap-around bit, plain and packed.

    ``quotient`` is A0 or B0, ``wrap_half`` A1 (the low bits of its words), ``mask`` M0 or M2 (the high bits). The
    wrap-around half is (1 − top bit of c)·half + mask modulo 2^bits.
    """
    c[:] = mine + theirs
    high = _high(mask, bits)
    share[:] = ZERO - quotient - (high << np.uint64(64 - bits))
    answer[:] = _low((ONE - (c >> TOP)) * wrap_half + high, bits)
    _pack(answer, bits, packed)


def truncation_answer_packed(
    mine: np.ndarray,
    theirs: np.ndarray,
    quotient: np.ndarray,
    packed_half: np.ndarray,
    mask: np.ndarray,
    bits: int,
    c: np.ndarray,
    share: np.ndarray,
    answer: np.ndarray,
    packed: np.ndarray,
) -> None:
    """The same for role 1, whose half B1 arrived packed."""
    half = _unpack(packed_half, bits, mine.size)
    truncation_answer(mine, theirs, quotient, half, mask, bits, c, share, answer, packed)


def truncation_result(c: np.ndarray, answer: np.ndarray, reply: np.ndarray, bits: int, out: np.ndarray) -> None:
    """The share of the two holders, from both halves of the wrap-around bit (``reply`` comes packed):
    (c≫bits) + wrap·2^(64−bits) − 2^(62−bits)."""
    _finish(c, answer + _unpack(reply, bits, c.size), bits, out)


def _finish(c: np.ndarray, wrap: np.ndarray, bits: int, out: np.ndarray) -> None:
    out[:] = (c >> np.uint64(bits)) + (wrap << np.uint64(64 - bits)) - np.uint64(1 << (62 - bits))


# a shared value -----------------------------------------------------------------------------------


def truncate_deal(
    x0: np.ndarray,
    x1: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    bits: int,
    share_0: np.ndarray,
    share_1: np.ndarray,
    b0: np.ndarray,
    offers: np.ndarray,
) -> None:
    """The dealer, with ρ = −x0 − x1: B0 = (ρ≫bits) − A0, and the wrap-around bit for both values of c's top bit under
    one-time keys. ``offers`` has four rows of packed words: (top bit clear, set) for role 1, then for role 0."""
    rho = ZERO - x0 - x1
    shift = np.uint64(64 - bits)
    m0, m2 = _high(first[1], bits), _high(second[0], bits)
    b0[:] = (rho >> np.uint64(bits)) - first[0]
    share_0[:] = ZERO - b0 - (m2 << shift)
    share_1[:] = ZERO - first[0] - (m0 << shift)
    if_set = m0 + m2
    if_clear = if_set + (rho >> TOP)
    for row, (keys, base) in enumerate(((first, 2), (second, 1))):
        _pack(_low(if_clear + keys[base], bits), bits, offers[2 * row])
        _pack(_low(if_set + _high(keys[-1], bits), bits), bits, offers[2 * row + 1])


def truncate_key(x: np.ndarray, key_0: np.ndarray, key_1: np.ndarray, bits: int, packed: np.ndarray) -> None:
    """A holder of c = x + 2^62 sends the other the key (low bits of ``key_0``, high bits of ``key_1``) for its top
    bit."""
    _pack(np.where((x + OFFSET) >> TOP == ONE, _high(key_1, bits), _low(key_0, bits)), bits, packed)


def truncate_finish(
    x: np.ndarray,
    clear: np.ndarray,
    set_: np.ndarray,
    key: np.ndarray,
    quotient: np.ndarray,
    mask: np.ndarray,
    bits: int,
    middle: np.ndarray,
    outer: np.ndarray,
) -> None:
    """A holder's shares: the middle one from the dealer's offer that the key opens, (c≫bits) + wrap·2^(64−bits) −
    2^(62−bits), and −quotient − mask·2^(64−bits), which it has with the dealer (quotient: A0 or B0; mask: M0 or M2)."""
    c = x + OFFSET
    count = x.size
    offer = np.where(c >> TOP == ONE, _unpack(set_, bits, count), _unpack(clear, bits, count))
    _finish(c, offer - _unpack(key, bits, count), bits, middle)
    outer[:] = ZERO - quotient - (_high(mask, bits) << np.uint64(64 - bits))
