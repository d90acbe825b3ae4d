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

from accel import kernels

__all__ = ["digest", "mix", "name_digest"]

_DOUBLE, _WORD = struct.Struct("<d"), struct.Struct("<Q")


def mix(*words: int | tuple[int, ...]) -> int:
    """The digest of integers in their order, for local operations: Python's hash of a tuple of integers, which is the
    same in every process (only that of texts is not) and takes a tenth of a microsecond."""
    return hash(words)


@functools.lru_cache(maxsize=1024)
def name_digest(name: str) -> int:
    """The digest of a text."""
    return zlib.crc32(name.encode())


def digest(value: Any) -> int:
    """The digest of a public argument, or of all that is public about a tensor.

    An array is read once (less than encoding it costs), so there is no cache that could be stale.
    """
    kind = type(value)
    if kind is int:  # Python's hash has a modulus of 61 bits, and takes −1 for −2
        return value if 0 <= value < 1 << 60 else mix((value >> 60) + 16, value & (1 << 60) - 1)
    of_tensor = getattr(value, "public_digest", None)
    if of_tensor is not None:
        return of_tensor()
    if kind is tuple or kind is list:
        return mix(_SEQUENCE, *map(digest, value))
    if kind is str:
        return name_digest(value)
    if value is None or value is Ellipsis:
        return name_digest(repr(value))
    if kind is slice:
        return mix(_SLICE, digest(value.start), digest(value.stop), digest(value.step))
    if isinstance(value, float):
        return digest(_WORD.unpack(_DOUBLE.pack(value))[0])
    if isinstance(value, int | np.integer | np.bool_):
        return digest(int(value))
    turned = value.ndim == 2 and value.flags.f_contiguous and not value.flags.c_contiguous
    flat = np.ascontiguousarray(value.T if turned else value).reshape(-1)
    content = (
        kernels.checksum(flat.view(np.uint64)) if flat.dtype.itemsize == 8 else zlib.crc32(flat.view(np.uint8).data)
    )
    return mix(_ARRAY, value.shape, turned, name_digest(value.dtype.str), content)


_SEQUENCE, _SLICE, _ARRAY = (name_digest(name) for name in ("sequence", "slice", "array"))
