"""512 oblivious transfers of keys between two clients, on ed25519 (Bellare and Micali); the group is libsodium's,
nothing of it is ours.

The evaluator has r and sends R = r·G. For every bit Δ_i the holder has k_i and sends P_i = k_i·G if the bit is 0, else
D − k_i·G, where nobody knows the logarithm of D (it is hashed to the curve). The evaluator's two keys are hashes of
r·P_i and r·D − r·P_i, the holder's is that of k_i·R: the one of its bit.

*What the evaluator sees*: P_i is uniform in the group for either bit, so Δ is hidden perfectly. *What the holder can
know*: both keys of one i would give r·D, which is the Diffie-Hellman problem. Points that are not in the prime-order
group are refused on both sides. Keys depend on ``label``, hence on both clients' nonces, and are used for one attempt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import nacl.bindings as sodium

from vfl.alignment.steps import AlignmentRefused, Randomness

__all__ = ["COUNT", "POINT", "answer", "has_the_group", "key_pairs", "offer"]

COUNT = 512
POINT = 32
_KEY = 16


def has_the_group() -> bool:
    """Whether libsodium was built with the functions that this needs."""
    return bool(sodium.has_crypto_core_ed25519 and sodium.has_crypto_scalarmult_ed25519)


def _without_logarithm() -> bytes:
    return sodium.crypto_core_ed25519_from_uniform(
        hashlib.sha512(b"ppvfl alignment: nobody knows its logarithm").digest()[:32]
    )


def _scalar(randomness: Randomness) -> bytes:
    return sodium.crypto_core_ed25519_scalar_reduce(randomness(64))


def _key(label: bytes, number: int, offered: bytes, answered: bytes, shared: bytes) -> bytes:
    hashed = hashlib.blake2b(label, digest_size=_KEY, person=b"ppvfl base OT")
    hashed.update(number.to_bytes(2, "little") + offered + answered + shared)
    return hashed.digest()


def _checked(point: bytes, name: str) -> bytes:
    if not sodium.crypto_core_ed25519_is_valid_point(point):
        raise AlignmentRefused(f"client {name!r} sent a point that is not in the group of ed25519: refused")
    return point


def offer(randomness: Randomness) -> tuple[bytes, bytes]:
    """The evaluator's secret r, and what it sends."""
    secret = _scalar(randomness)
    return secret, sodium.crypto_scalarmult_ed25519_base_noclamp(secret)


def answer(
    offered: bytes, bits: Sequence[int], label: bytes, randomness: Randomness, name: str
) -> tuple[bytes, list[bytes]]:
    """What the holder sends for its bits, and its keys. ``name``: the evaluator, for messages."""
    _checked(offered, name)
    hidden, points, keys = _without_logarithm(), [], []
    for number, bit in enumerate(bits):
        secret = _scalar(randomness)
        point = sodium.crypto_scalarmult_ed25519_base_noclamp(secret)
        points.append(sodium.crypto_core_ed25519_sub(hidden, point) if bit else point)
        shared = sodium.crypto_scalarmult_ed25519_noclamp(secret, offered)
        keys.append(_key(label, number, offered, points[-1], shared))
    return b"".join(points), keys


def key_pairs(secret: bytes, offered: bytes, answered: bytes, label: bytes, name: str) -> list[tuple[bytes, bytes]]:
    """The evaluator's keys for bit 0 and bit 1. ``name``: the holder, for messages."""
    hidden = sodium.crypto_scalarmult_ed25519_noclamp(secret, _without_logarithm())
    pairs = []
    for number in range(COUNT):
        point = _checked(answered[POINT * number : POINT * (number + 1)], name)
        first = sodium.crypto_scalarmult_ed25519_noclamp(secret, point)
        second = sodium.crypto_core_ed25519_sub(hidden, first)
        pairs.append((_key(label, number, offered, point, first), _key(label, number, offered, point, second)))
    return pairs
