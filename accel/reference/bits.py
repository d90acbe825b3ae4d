"""Bits: packing to any width, 64×64 transposition (bit slicing), and the layers of a prefix adder."""

from __future__ import annotations

import numpy as np

__all__ = [
    "and_pair",
    "carry_layer",
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


def packed_size(count: int, width: int) -> int:
    """Bytes that ``count`` values of ``width`` bits take."""
    return (count * width + 7) // 8


def pack_bits(values: np.ndarray, width: int) -> np.ndarray:
    """The low ``width`` bits of each word of a flat array, one after another, as uint8 (little-endian)."""
    bits = np.unpackbits(values.reshape(-1, 1).view(np.uint8), axis=1, bitorder="little")[:, :width]
    return np.packbits(bits, bitorder="little")


def unpack_bits(packed: np.ndarray, width: int, count: int) -> np.ndarray:
    """The inverse of ``pack_bits``: ``count`` words below 2^width."""
    bits = np.zeros((count, 64), dtype=np.uint8)
    bits[:, :width] = np.unpackbits(packed, count=count * width, bitorder="little").reshape(count, width)
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint64).reshape(count)


def pack_into(values: np.ndarray, width: int, out: np.ndarray) -> None:
    """``pack_bits`` of words (or, for width ≤ 7, of bytes) into ``out``, as many bytes as they take."""
    out[:] = pack_bits(values, width)


def unpack_into(packed: np.ndarray, width: int, out: np.ndarray) -> None:
    """``unpack_bits`` into ``out``, a flat array of words (or, for width ≤ 7, of bytes)."""
    out[:] = unpack_bits(packed, width, out.size)


def pack_small(values: np.ndarray, width: int) -> np.ndarray:
    """``pack_bits`` for a flat uint8 array of values below 2^width, width ≤ 7."""
    return pack_bits(values.astype(np.uint64), width)


def unpack_small(packed: np.ndarray, width: int, count: int) -> np.ndarray:
    """The inverse of ``pack_small``: ``count`` bytes."""
    return unpack_bits(packed, width, count).astype(np.uint8)


def slice_bits(words: np.ndarray, planes: np.ndarray) -> None:
    """Bit slicing: plane j gets bit j of each word, 64 words to a plane word. ``planes`` is (width, ⌈n/64⌉)."""
    bits = np.zeros((len(planes), planes.shape[1] * 64), dtype=np.uint8)
    for j in range(len(planes)):
        bits[j, : words.size] = (words >> np.uint64(j)) & np.uint64(1)
    planes[:] = np.packbits(bits, axis=1, bitorder="little").view(np.uint64)


def unslice_bits(planes: np.ndarray, words: np.ndarray) -> None:
    """The inverse of ``slice_bits``: as many words as there is memory for."""
    words[:] = 0
    for j, plane in enumerate(planes):
        bits = np.unpackbits(np.ascontiguousarray(plane).view(np.uint8), count=words.size, bitorder="little")
        words |= bits.astype(np.uint64) << np.uint64(j)


def and_pair(x: np.ndarray, y: np.ndarray, mask: np.ndarray, out: np.ndarray) -> None:
    """x0·(y0⊕y1) ⊕ x1·y0 ⊕ mask on pairs of shares of one shape: one party's summand of a replicated AND."""
    out[:] = (x[0] & (y[0] ^ y[1])) ^ (x[1] & y[0]) ^ mask


def carry_layer(
    generate: np.ndarray,
    propagate: np.ndarray,
    high: np.ndarray,
    low: np.ndarray,
    wanted: int,
    left: np.ndarray,
    right: np.ndarray,
) -> None:
    """The operands of one prefix-adder layer on replicated planes (2, width, words): P_high·G_low for the pairs
    (high, low), and P_high·P_low for the last ``wanted`` of them, whose propagate is still needed, in one AND."""
    pairs = high.size
    left[:, :pairs], left[:, pairs:] = propagate[:, high], propagate[:, high[pairs - wanted :]]
    right[:, :pairs], right[:, pairs:] = generate[:, low], propagate[:, low[pairs - wanted :]]


def carry_merge(
    product: np.ndarray, high: np.ndarray, wanted: int, generate: np.ndarray, propagate: np.ndarray
) -> None:
    """Take the product of ``carry_layer``'s operands into the planes ``high``: G_high ⊕= P_high·G_low, and P_high·P_low
    in place of the last ``wanted`` P_high."""
    pairs = high.size
    generate[:, high] ^= product[:, :pairs]
    propagate[:, high[pairs - wanted :]] = product[:, pairs:]
