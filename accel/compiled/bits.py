"""Bit packing, bit slicing and AND layers in numba."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from accel.compiled.calls import Call, Composed
from accel.reference.bits import carry_layer, carry_merge, packed_size

__all__ = [
    "and_pair",
    "carry_layer",  # this and carry_merge copy whole planes: numpy's copy is as fast
    "carry_merge",
    "pack_bits",
    "pack_into",
    "pack_small",
    "packed_size",
    "slice_bits",
    "unpack_bits",
    "unpack_into",
    "unpack_small",
    "unslice_bits",
]

_WHOLE = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def whole_words(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Fresh memory for ``size`` packed bytes, and the same memory rounded up to whole words."""
    words = np.empty(-(-size // 8), dtype=np.uint64)
    return words.view(np.uint8)[:size], words


@njit(cache=True, nogil=True)
def pack_words(values, width, out):
    """The low ``width`` bits of each value, one behind the other, into whole words."""
    low = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width)
    pending = np.uint64(0)
    filled = 0
    position = 0
    for i in range(values.size):
        value = values[i] & low
        pending |= value << np.uint64(filled)
        filled += width
        if filled >= 64:
            out[position] = pending
            position += 1
            filled -= 64
            pending = value >> np.uint64(width - filled) if filled > 0 else np.uint64(0)
    if filled > 0:
        out[position] = pending


@njit(cache=True, nogil=True)
def _pack_bytes_behind(values, width, words, tail):
    """The same into whole words and the bytes behind them that fill no word."""
    low = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width)
    pending = np.uint64(0)
    filled = 0
    position = 0
    for i in range(values.size):
        value = np.uint64(values[i]) & low
        pending |= value << np.uint64(filled)
        filled += width
        if filled >= 64:
            words[position] = pending
            position += 1
            filled -= 64
            pending = value >> np.uint64(width - filled) if filled > 0 else np.uint64(0)
    if position < words.size:  # the last values fill all bytes of a word, but not all its bits
        words[position] = pending
    for k in range(tail.size):
        tail[k] = np.uint8(pending >> np.uint64(8 * k))


def pack_bits(values: np.ndarray, width: int) -> np.ndarray:
    """See ``accel.reference.bits.pack_bits``."""
    if width in _WHOLE:
        return values.astype(_WHOLE[width]).view(np.uint8)
    packed, words = whole_words(packed_size(values.size, width))
    pack_words(np.ascontiguousarray(values), width, words)
    return packed


WIDEST_IN_EIGHT_BYTES = 57  # bits of a value that begins anywhere in the first of eight bytes


@intrinsic
def bytes_as_word(_typing: Any, packed: Any, at: Any) -> Any:
    """Eight bytes from ``at`` on as a word, the first lowest; wherever they lie. All eight must be there."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        word = ir.IntType(64)
        loaded = builder.load(builder.bitcast(builder.gep(data, [arguments[1]]), word.as_pointer()))
        loaded.align = 1
        if sys.byteorder == "big":
            return builder.bswap(loaded)
        return loaded

    return types.uint64(packed, types.int64), generate


@njit(cache=True, nogil=True)
def word_behind(words, tail, bit, width):
    """``width`` bits from ``bit`` on, of whole words and the bytes behind them that fill no word."""
    at, offset = bit >> 6, bit & 63
    last = np.uint64(0)
    for k in range(tail.size):
        last |= np.uint64(tail[k]) << np.uint64(8 * k)
    value = (words[at] if at < words.size else last) >> np.uint64(offset)
    if offset + width > 64:
        value |= (words[at + 1] if at + 1 < words.size else last) << np.uint64(64 - offset)
    return value & (np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width))


@njit(cache=True, nogil=True)
def unpack_words(words, tail, width, out):
    """The inverse of ``pack_words``: whole words, and the bytes behind them that fill no word."""
    inside = min(out.size, words.size * 64 // width)
    unpack_whole(words, width, out[:inside])
    for i in range(inside, out.size):
        out[i] = word_behind(words, tail, i * width, width)


@njit(cache=True, nogil=True)
def unpack_whole(words, width, out):
    """The inverse of ``pack_words`` from the same whole words; what follows the last value is not looked at."""
    low = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width)
    for i in range(out.size):
        bit = i * width
        at = bit >> 6
        offset = bit & 63
        value = words[at] >> np.uint64(offset)
        if offset + width > 64:
            value |= words[at + 1] << np.uint64(64 - offset)
        out[i] = value & low


def unpack_bits(packed: np.ndarray, width: int, count: int) -> np.ndarray:
    """See ``accel.reference.bits.unpack_bits``."""
    if width in _WHOLE:
        return packed.view(_WHOLE[width]).astype(np.uint64)
    out = np.empty(count, dtype=np.uint64)
    whole = packed.size // 8 * 8
    unpack_words(packed[:whole].view(np.uint64), packed[whole:], width, out)
    return out


@njit(cache=True, nogil=True)
def _cast(values, out):
    """The low bits of every value, in words that they fill; and back."""
    for i in range(out.size):
        out[i] = values[i]


@Composed
def pack_into(values: np.ndarray, width: int, out: np.ndarray) -> list[Call]:
    """See ``accel.reference.bits.pack_into``."""
    if values.dtype == np.uint8:
        return [(pack_bytes, (values, width, out))]
    if width in _WHOLE:
        return [(_cast, (values, out.view(_WHOLE[width])))]
    whole = out.size // 8 * 8
    return [(_pack_bytes_behind, (values, width, out[:whole].view(np.uint64), out[whole:]))]


@Composed
def unpack_into(packed: np.ndarray, width: int, out: np.ndarray) -> list[Call]:
    """See ``accel.reference.bits.unpack_into``."""
    if out.dtype == np.uint8:
        return [(unpack_bytes, (packed, width, out))]
    if width in _WHOLE:
        return [(_cast, (packed.view(_WHOLE[width]), out))]
    whole = packed.size // 8 * 8
    return [(unpack_words, (packed[:whole].view(np.uint64), packed[whole:], width, out))]


@njit(cache=True, nogil=True)
def pack_bytes(values, width, out):
    """Eight values fill ``width`` whole bytes."""
    shift = np.uint64(width)
    groups = values.size // 8
    position = 0
    if width == 4:  # of the primes that digits are tested modulo: two values a byte, as vectors
        for k in range(4 * groups):
            out[k] = values[2 * k] | values[2 * k + 1] << np.uint8(4)
        position = 4 * groups
    for group in range(groups if width != 4 else 0):
        word = np.uint64(0)
        for k in range(7, -1, -1):
            word = (word << shift) | np.uint64(values[8 * group + k])
        for k in range(width):
            out[position + k] = np.uint8(word >> np.uint64(8 * k))
        position += width
    word = np.uint64(0)
    for k in range(values.size - 1, 8 * groups - 1, -1):
        word = (word << shift) | np.uint64(values[k])
    for k in range(out.size - position):
        out[position + k] = np.uint8(word >> np.uint64(8 * k))


def pack_small(values: np.ndarray, width: int) -> np.ndarray:
    """See ``accel.reference.bits.pack_small``."""
    out = np.empty(packed_size(values.size, width), dtype=np.uint8)
    pack_bytes(np.ascontiguousarray(values), width, out)
    return out


@njit(cache=True, nogil=True)
def unpack_bytes(packed, width, out):
    """The inverse of ``pack_bytes``."""
    shift = np.uint64(width)
    low = (np.uint64(1) << shift) - np.uint64(1)
    groups = out.size // 8
    if width == 4:
        for k in range(4 * groups):
            out[2 * k] = packed[k] & np.uint8(15)
            out[2 * k + 1] = packed[k] >> np.uint8(4)
    for group in range(groups if width != 4 else 0):
        word = np.uint64(0)
        for k in range(width):
            word |= np.uint64(packed[width * group + k]) << np.uint64(8 * k)
        for k in range(8):
            out[8 * group + k] = (word >> (shift * np.uint64(k))) & low
    word = np.uint64(0)
    for k in range(packed.size - width * groups):
        word |= np.uint64(packed[width * groups + k]) << np.uint64(8 * k)
    for k in range(8 * groups, out.size):
        out[k] = word & low
        word >>= shift


def unpack_small(packed: np.ndarray, width: int, count: int) -> np.ndarray:
    """See ``accel.reference.bits.unpack_small``."""
    out = np.empty(count, dtype=np.uint8)
    unpack_bytes(packed, width, out)
    return out


@njit(cache=True, nogil=True)
def _transpose_block(block):
    """Transpose a 64×64 bit matrix in place: swap halves, quarters, ... (Hacker's Delight, 7-3)."""
    span = 32
    keep = np.uint64(0x00000000FFFFFFFF)
    while span:
        shift = np.uint64(span)
        k = 0
        while k < 64:
            swap = ((block[k] >> shift) ^ block[k + span]) & keep
            block[k] ^= swap << shift
            block[k + span] ^= swap
            k = (k + span + 1) & ~span
        span >>= 1
        keep ^= keep << np.uint64(span)


@njit(cache=True, nogil=True)
def _slice_bits(words, planes):
    width, columns = planes.shape
    block = np.empty(64, dtype=np.uint64)
    for column in range(columns):
        for i in range(64):
            at = column * 64 + i
            block[i] = words[at] if at < words.size else np.uint64(0)
        _transpose_block(block)
        for j in range(width):
            planes[j, column] = block[j]


def slice_bits(words: np.ndarray, planes: np.ndarray) -> None:
    """See ``accel.reference.bits.slice_bits``."""
    _slice_bits(np.ascontiguousarray(words), planes)


@njit(cache=True, nogil=True)
def _unslice_bits(planes, words):
    width, columns = planes.shape
    block = np.empty(64, dtype=np.uint64)
    for column in range(columns):
        for j in range(64):
            block[j] = planes[j, column] if j < width else np.uint64(0)
        _transpose_block(block)
        for i in range(min(64, words.size - column * 64)):
            words[column * 64 + i] = block[i]


def unslice_bits(planes: np.ndarray, words: np.ndarray) -> None:
    """See ``accel.reference.bits.unslice_bits``."""
    _unslice_bits(np.ascontiguousarray(planes), words)


@njit(cache=True, nogil=True)
def _and_pair(x0, x1, y0, y1, mask, out):
    for i in range(out.size):
        out[i] = (x0[i] & (y0[i] ^ y1[i])) ^ (x1[i] & y0[i]) ^ mask[i]


def and_pair(x: np.ndarray, y: np.ndarray, mask: np.ndarray, out: np.ndarray) -> None:
    """See ``accel.reference.bits.and_pair``."""
    a, b, c, d, e = (np.ascontiguousarray(words).reshape(-1) for words in (x[0], x[1], y[0], y[1], mask))
    _and_pair(a, b, c, d, e, out.reshape(-1))
