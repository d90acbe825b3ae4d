"""Fixed point in Z_2^64: a real v is the integer round(v·2^fraction_bits), read as signed.

The scale belongs to the tensor. ``DEFAULT_FRACTION_BITS`` is a sensible start: ±2^46 with a step of 2^-16.
Values must stay below 2^62 in the ring, which is the domain of truncation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from accel import kernels
from accel.errors import InvalidArgument
from accel.validate import require, require_integer
from refmpc.core.words import public_array

__all__ = ["DEFAULT_FRACTION_BITS", "decode", "encode", "encode_number", "largest_value"]

DEFAULT_FRACTION_BITS = 16


def largest_value(fraction_bits: int) -> float:
    """The bound on |value| at a scale: 2^(62−fraction_bits)."""
    return 2.0 ** (62 - fraction_bits)


def encode(values: Any, fraction_bits: int = DEFAULT_FRACTION_BITS, name: str = "value") -> np.ndarray:
    """Real or integer values as ring words.

    Refuses NaN, infinity and |value| ≥ 2^(62−fraction_bits). Rounds to the nearest step, error ≤ 2^-(fraction_bits+1).
    """
    require_integer("fraction_bits", fraction_bits, 0, 60)
    array = public_array(values)
    require(array.dtype.kind in "biuf", name, array.dtype, "real numbers, integers or booleans")
    limit = largest_value(fraction_bits)
    if array.dtype.kind in "biu":
        bound = 1 << (62 - fraction_bits)
        if array.size and not (-bound < int(array.min()) and int(array.max()) < bound):
            bad = int(array.max()) if int(array.max()) >= bound else int(array.min())
            _refuse(name, bad, limit, fraction_bits)
        return array.astype(np.int64).view(np.uint64) << np.uint64(fraction_bits)
    words, first_bad = kernels.encode_fixed(np.ascontiguousarray(array, dtype=np.float64), fraction_bits, limit)
    if first_bad >= 0:
        position = tuple(int(i) for i in np.unravel_index(first_bad, array.shape))
        _refuse(f"{name}{list(position)}" if position else name, float(array[position]), limit, fraction_bits)
    return words.reshape(array.shape)


def encode_number(value: float, fraction_bits: int, name: str = "value") -> np.uint64:
    """One Python number as a ring word, like ``encode``."""
    limit = largest_value(fraction_bits)
    if not -limit < value < limit:  # not a number is not in between either
        _refuse(name, value, limit, fraction_bits)
    return np.uint64(round(value * 2**fraction_bits) % 2**64)


def decode(words: np.ndarray, fraction_bits: int) -> np.ndarray:
    """Ring words as float64 (integers when ``fraction_bits`` is 0)."""
    if fraction_bits == 0:
        return np.ascontiguousarray(words).view(np.int64).reshape(words.shape)
    return kernels.decode_fixed(np.ascontiguousarray(words), fraction_bits).reshape(words.shape)


def _refuse(name: str, value: float, limit: float, fraction_bits: int) -> None:
    raise InvalidArgument(
        f"{name} = {value!r}: must be finite with absolute value below {limit:g} at fraction_bits = {fraction_bits}; "
        "scale the data down or use fewer fraction bits"
    )
