"""Digests of what is public: they go into the code of every frame, so that parties that diverge notice at once.

Every tensor has a *history*, a 64-bit digest of how it came about: the operation that made it, and every public number,
scale, index or order applied to it since. An operation digests the histories of its operands and its public arguments.
No secret goes in. These are checksums against mistakes, not against forgers: nothing here is cryptographic.
"""

from __future__ import annotations

import functools
import struct
import zlib
from typing import Any

import numpy as np

__all__ = ["digest", "mix", "name_digest"]

_ODD = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_DOUBLE, _WORD = struct.Struct("<d"), struct.Struct("<Q")


def mix(state: int, *words: int) -> int:
    """``state`` followed by integers. Begin with a constant of your own: the first two are interchangeable."""
    for word in words:
        state = ((state + word) * _ODD + 1) & _MASK
        state ^= state >> 32
    return state


@functools.lru_cache(maxsize=1024)
def name_digest(name: str) -> int:
    """The digest of a text."""
    return zlib.crc32(name.encode())


def digest(value: Any) -> int:
    """The digest of a public argument, or of all that is public about a tensor.

    An array is read once (about 1 ns a byte, less than encoding it costs), so there is no cache that could be stale.
    """
    kind = type(value)
    if kind is int:
        return value
    if kind is tuple or kind is list:
        return mix(_SEQUENCE, len(value), *map(digest, value))
    if kind is str:
        return name_digest(value)
    if value is None or value is Ellipsis:
        return name_digest(repr(value))
    if kind is slice:
        return mix(_SLICE, digest(value.start), digest(value.stop), digest(value.step))
    if isinstance(value, float):
        return _WORD.unpack(_DOUBLE.pack(value))[0]
    if isinstance(value, int | np.integer | np.bool_):
        return int(value)
    if isinstance(value, np.ndarray):
        content = zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        return mix(digest(value.shape), name_digest(value.dtype.str), content)
    return value.public_digest()


_SEQUENCE, _SLICE = name_digest("sequence"), name_digest("slice")
