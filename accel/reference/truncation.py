"""Local steps of the truncated product (proofs §2.2): what each of the three roles computes between its messages.

``masks`` are rows of words that the dealer and one holder draw alike. For role 0 they are r0, A0, and a third from which
A1 (its low bits) and M0 (its high bits) are taken, M0 from a fourth if both do not fit into one word. For role 1 they are
r1, and a second whose high bits are M2.
"""

from __future__ import annotations

import numpy as np

from accel.reference.bits import pack_bits, unpack_bits

__all__ = ["truncation_answer", "truncation_deal", "truncation_hold", "truncation_masks", "truncation_result"]

OFFSET = np.uint64(1 << 62)  # moves −2^62 ≤ z < 2^62 to 0 ≤ z < 2^63, where the wrap-around is one product of two bits
TOP, ZERO, ONE = np.uint64(63), np.uint64(0), np.uint64(1)


def truncation_masks(bits: int) -> tuple[int, int]:
    """How many mask words an element takes, with role 0 and with role 1."""
    return (3 if bits <= 32 else 4), 2


def _high(words: np.ndarray, bits: int) -> np.ndarray:
    return words >> np.uint64(64 - bits)


def _low(words: np.ndarray, bits: int) -> np.ndarray:
    return words & np.uint64((1 << bits) - 1)


def truncation_deal(
    z: np.ndarray, first: np.ndarray, second: np.ndarray, bits: int, shares: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The dealer, with ρ = r0 + r1 − z: B0 = (ρ≫bits) − A0, and B1 = (top bit of ρ) − A1 packed.

    Fills ``shares`` (2, n) with the dealer's result: −B0 − M2·2^(64−bits) and −A0 − M0·2^(64−bits).
    """
    rho = first[0] + second[0] - z
    b0 = (rho >> np.uint64(bits)) - first[1]
    b1 = _low((rho >> TOP) - _low(first[2], bits), bits)
    shift = np.uint64(64 - bits)
    shares[0] = ZERO - b0 - (_high(second[1], bits) << shift)
    shares[1] = ZERO - first[1] - (_high(first[-1], bits) << shift)
    return b0, pack_bits(b1, bits)


def truncation_hold(z: np.ndarray, masks: np.ndarray, bits: int, role: int) -> np.ndarray:
    """What a holder opens to the other: z + r0 + 2^62 (role 0) or z + r1 (role 1)."""
    return z + masks[0] + OFFSET if role == 0 else z + masks[0]


def truncation_answer(
    mine: np.ndarray, theirs: np.ndarray, masks: np.ndarray, half: tuple[np.ndarray, np.ndarray] | None, bits: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """c, the share that a holder has with the dealer, and its masked half of the wrap-around bit, plain and packed.

    ``half`` is what role 1 received, (B0, B1 packed); role 0 has None and takes A0 and A1 from its masks. The wrap-around
    half is (1 − top bit of c)·half + mask modulo 2^bits.
    """
    c = mine + theirs
    if half is None:
        quotient, wrap_half, mask = masks[1], _low(masks[2], bits), _high(masks[-1], bits)
    else:
        quotient, wrap_half, mask = half[0], unpack_bits(half[1], bits, c.size), _high(masks[1], bits)
    share = ZERO - quotient - (mask << np.uint64(64 - bits))
    answer = _low((ONE - (c >> TOP)) * wrap_half + mask, bits)
    return c, share, answer, pack_bits(answer, bits)


def truncation_result(c: np.ndarray, answer: np.ndarray, reply: np.ndarray, bits: int) -> np.ndarray:
    """The share of the two holders, from both halves of the wrap-around bit (``reply`` comes packed):
    (c≫bits) + wrap·2^(64−bits) − 2^(62−bits)."""
    wrap = answer + unpack_bits(reply, bits, c.size)
    return (c >> np.uint64(bits)) + (wrap << np.uint64(64 - bits)) - np.uint64(1 << (62 - bits))
