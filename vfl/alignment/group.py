"""Hashing to Curve25519 and blinding: the two operations of the intersection, on whole lists and on all cores.

An element is the 32-byte u-coordinate of a point of the prime-order subgroup. Blinding is X25519: scalars are clamped,
hence multiples of the cofactor, and a·(b·P) = b·(a·P), so that lists blinded by the same clients in any order compare.

Hashing is built like encode_to_curve of RFC 9380, §3, but is none of its suites and compares with no other program: one
field element from the id (SHA-512 over a length-prefixed domain and the id, 255 bits, where the suites expand the
message), mapped by Elligator 2 and freed from the cofactor. Its points are not quite uniform, and need not be: nobody
sees one that is not blinded. What the intersection needs is that values H(x)^k are as good as random, by DDH, for ids
that nobody else has. The reduction takes random points (r·G and its partner of the challenge) as hashes; of the eight
points Q with 8·Q = r·G it draws one, and keeps it if the map reaches Q, which half of all points are (the inverse map
says so, and names the field element that the oracle answers with). So the kept hashes are distributed as those of the
map, their partners are what the challenge says, and whoever tells them from random points decides DDH. (Two maps, added
up, would be uniform at twice the cost.)

Map, cofactor and X25519 are libsodium's, in constant time. ``montgomery_u`` is not: it takes Python's integers, at the
client whose ids they are, before these are blinded; who can time that host is outside the model (SECURITY.md). All run
without the interpreter's lock: lists are cut into pieces, one thread a core. 20 µs of CPU an id for the hash, 27 µs for
each blinding (one core of an AMD EPYC).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from nacl.bindings import crypto_core_ed25519_from_uniform, crypto_scalarmult
from nacl.exceptions import RuntimeError as SodiumError

from accel.errors import InvalidArgument

__all__ = ["ELEMENT", "Advance", "blind", "hash_and_blind", "hash_to_curve", "montgomery_u", "valid_elements"]

ELEMENT = 32  # bytes of an element
FIELD = 2**255 - 19
PIECE = 1024  # elements at a time
_DOMAIN = b"ppvfl alignment, version 2, curve25519"
_PREFIX = bytes([len(_DOMAIN)]) + _DOMAIN

Advance = Callable[[int], None]
Piece = TypeVar("Piece")


def hash_to_curve(values: Sequence[bytes]) -> bytes:
    """The elements of ids, one after the other."""
    points = [crypto_core_ed25519_from_uniform(hashlib.sha512(_PREFIX + value).digest()[:ELEMENT]) for value in values]
    return montgomery_u(points)


def montgomery_u(points: Sequence[bytes]) -> bytes:
    """The u-coordinates of Edwards points, by the birational map of RFC 7748 (not of the neutral element, y = 1).

    (1 + y)/(1 − y), with one inversion for all: from the inverse of the product of all denominators, backwards."""
    ys = [int.from_bytes(point, "little") & (2**255 - 1) for point in points]
    products, product = [], 1
    for y in ys:
        products.append(product)
        product = product * (1 - y) % FIELD
    inverse = pow(product, -1, FIELD)
    found = [b""] * len(ys)
    for place in range(len(ys) - 1, -1, -1):
        y = ys[place]
        found[place] = ((1 + y) * inverse * products[place] % FIELD).to_bytes(ELEMENT, "little")
        inverse = inverse * (1 - y) % FIELD
    return b"".join(found)


def blind(key: bytes, elements: bytes, advance: Advance) -> bytes:
    """Multiply elements, one after the other, by the secret key. Points of small order are refused: their product would
    be zero for every key."""
    step = PIECE * ELEMENT
    pieces = [elements[start : start + step] for start in range(0, len(elements), step)]
    return _on_all_cores(lambda piece: _blind_piece(key, piece), pieces, advance)


def hash_and_blind(key: bytes, values: Sequence[bytes], advance: Advance) -> bytes:
    """The blinded elements of ids."""
    pieces = [values[start : start + PIECE] for start in range(0, len(values), PIECE)]
    return _on_all_cores(lambda piece: _blind_piece(key, hash_to_curve(piece)), pieces, advance)


def _blind_piece(key: bytes, elements: bytes) -> bytes:
    try:
        return b"".join(
            crypto_scalarmult(key, elements[start : start + ELEMENT]) for start in range(0, len(elements), ELEMENT)
        )
    except SodiumError as error:
        raise InvalidArgument("a point of small order") from error


def _on_all_cores(work: Callable[[Piece], bytes], pieces: Sequence[Piece], advance: Advance) -> bytes:
    found = bytearray()
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        for done in threads.map(work, pieces):
            found += done
            advance(len(done) // ELEMENT)
    return bytes(found)


def valid_elements(data: bytes) -> bool:
    """Whether the bytes are distinct elements in their one canonical form (u < 2^255 − 19)."""
    if len(data) % ELEMENT:
        return False
    rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, ELEMENT)
    top = (rows[:, 1:-1] == 0xFF).all(axis=1) & (rows[:, -1] == 0x7F) & (rows[:, 0] >= 0xED)
    if (top | (rows[:, -1] > 0x7F)).any():
        return False
    words = np.frombuffer(data, dtype=np.uint64).reshape(-1, ELEMENT // 8)
    ordered = words[np.lexsort(words.T)]
    return not (ordered[1:] == ordered[:-1]).all(axis=1).any()
