"""Hashing to Curve25519 and blinding: the two operations of the intersection.

An element is the 32-byte u-coordinate of a point of the prime-order subgroup. Blinding is X25519: scalars are clamped,
hence multiples of the cofactor, and a·(b·P) = b·(a·P), so that lists blinded by the same clients in any order compare.

Hashing is hash_to_curve of RFC 9380, §3: two field elements from the id, each mapped by Elligator 2 and freed from the
cofactor, then added, which makes the result indistinguishable from a random point (one map alone reaches about half
of the curve). Map and addition are libsodium's; hash_to_field is SHA-512 over a length-prefixed domain and the id, 255
bits each, as libsodium takes them, so the bytes are our own and not one of the RFC's suites.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from nacl.bindings import crypto_core_ed25519_add, crypto_core_ed25519_from_uniform

__all__ = ["ELEMENT", "Advance", "blind", "hash_to_curve", "montgomery_u", "valid_elements"]

ELEMENT = 32  # bytes of an element
FIELD = 2**255 - 19
_DOMAIN = b"ppvfl alignment, version 1, curve25519"
_PREFIX = bytes([len(_DOMAIN)]) + _DOMAIN

Advance = Callable[[int], None]


def hash_to_curve(value: bytes) -> bytes:
    """The element of an id. About 0.1 ms."""
    digest = hashlib.sha512(_PREFIX + value).digest()
    point = crypto_core_ed25519_add(
        crypto_core_ed25519_from_uniform(digest[:32]), crypto_core_ed25519_from_uniform(digest[32:])
    )
    return montgomery_u(point)


def montgomery_u(point: bytes) -> bytes:
    """The u-coordinate of an Edwards point, by the birational map of RFC 7748 (not of the neutral element, y = 1)."""
    y = int.from_bytes(point, "little") & (2**255 - 1)
    return ((1 + y) * pow(1 - y, -1, FIELD) % FIELD).to_bytes(ELEMENT, "little")


def blind(key: bytes, elements: Iterable[bytes], advance: Advance) -> list[bytes]:
    """Multiply elements by the secret key, about 45 µs each. Points of small order raise ``ValueError``: their product
    would be zero for every key."""
    private = X25519PrivateKey.from_private_bytes(key)
    blinded = []
    for element in elements:
        blinded.append(private.exchange(X25519PublicKey.from_public_bytes(element)))
        if len(blinded) % 1024 == 0:
            advance(1024)
    advance(len(blinded) % 1024)
    return blinded


def valid_elements(data: bytes) -> bool:
    """Whether the bytes are distinct elements in their one canonical form (u < 2^255 − 19)."""
    if len(data) % ELEMENT:
        return False
    rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, ELEMENT)
    top = (rows[:, 1:-1] == 0xFF).all(axis=1) & (rows[:, -1] == 0x7F) & (rows[:, 0] >= 0xED)
    distinct = len({bytes(row) for row in rows}) == len(rows)
    return bool(distinct and not (top | (rows[:, -1] > 0x7F)).any())
