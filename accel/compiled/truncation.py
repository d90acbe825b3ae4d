"""Local steps of the truncated product in numba, one pass each; ``accel.reference.truncation`` explains them."""

from __future__ import annotations

import numpy as np
from numba import njit

from accel.compiled.bits import pack_words, unpack_words, whole_words
from accel.reference.bits import packed_size
from accel.reference.truncation import truncation_masks

__all__ = ["truncation_answer", "truncation_deal", "truncation_hold", "truncation_masks", "truncation_result"]


@njit(cache=True, nogil=True)
def _deal(z, first, second, bits, shares, b0, packed):
    shift, low_shift = np.uint64(64 - bits), np.uint64(bits)
    low = (np.uint64(1) << low_shift) - np.uint64(1)
    last = first.shape[0] - 1
    wrap = np.empty(z.size, dtype=np.uint64)
    for i in range(z.size):
        rho = first[0, i] + second[0, i] - z[i]
        quotient = (rho >> low_shift) - first[1, i]
        b0[i] = quotient
        wrap[i] = ((rho >> np.uint64(63)) - first[2, i]) & low
        shares[0, i] = np.uint64(0) - quotient - (second[1, i] >> shift << shift)
        shares[1, i] = np.uint64(0) - first[1, i] - (first[last, i] >> shift << shift)
    pack_words(wrap, bits, packed)


def truncation_deal(
    z: np.ndarray, first: np.ndarray, second: np.ndarray, bits: int, shares: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """See ``accel.reference.truncation.truncation_deal``."""
    b0 = np.empty_like(z)
    packed, words = whole_words(packed_size(z.size, bits))
    _deal(z, first, second, bits, shares, b0, words)
    return b0, packed


@njit(cache=True, nogil=True)
def _hold(z, mask, offset, out):
    for i in range(z.size):
        out[i] = z[i] + mask[i] + offset


def truncation_hold(z: np.ndarray, masks: np.ndarray, bits: int, role: int) -> np.ndarray:
    """See ``accel.reference.truncation.truncation_hold``."""
    out = np.empty_like(z)
    _hold(z, masks[0], np.uint64((1 << 62) * (role == 0)), out)
    return out


@njit(cache=True, nogil=True)
def _answer(mine, theirs, quotient, wrap_half, mask, bits, out, packed):
    shift = np.uint64(64 - bits)
    low = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for i in range(mine.size):
        c = mine[i] + theirs[i]
        high = mask[i] >> shift
        out[0, i] = c
        out[1, i] = np.uint64(0) - quotient[i] - (high << shift)
        out[2, i] = ((np.uint64(1) - (c >> np.uint64(63))) * wrap_half[i] + high) & low
    pack_words(out[2], bits, packed)


@njit(cache=True, nogil=True)
def _unpack_and_answer(mine, theirs, quotient, packed_half, tail, mask, bits, out, packed):
    wrap_half = np.empty(mine.size, dtype=np.uint64)
    unpack_words(packed_half, tail, bits, wrap_half)
    _answer(mine, theirs, quotient, wrap_half, mask, bits, out, packed)


def truncation_answer(
    mine: np.ndarray, theirs: np.ndarray, masks: np.ndarray, half: tuple[np.ndarray, np.ndarray] | None, bits: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """See ``accel.reference.truncation.truncation_answer``."""
    out = np.empty((3, mine.size), dtype=np.uint64)
    packed, words = whole_words(packed_size(mine.size, bits))
    if half is None:
        _answer(mine, theirs, masks[1], masks[2], masks[-1], bits, out, words)
    else:
        whole = half[1].size // 8 * 8
        _unpack_and_answer(
            mine, theirs, half[0], half[1][:whole].view(np.uint64), half[1][whole:], masks[1], bits, out, words
        )
    return out[0], out[1], out[2], packed


@njit(cache=True, nogil=True)
def _result(c, answer, packed, tail, bits, out):
    unpack_words(packed, tail, bits, out)
    offset = np.uint64(1) << np.uint64(62 - bits)
    for i in range(c.size):
        out[i] = (c[i] >> np.uint64(bits)) + ((answer[i] + out[i]) << np.uint64(64 - bits)) - offset


def truncation_result(c: np.ndarray, answer: np.ndarray, reply: np.ndarray, bits: int) -> np.ndarray:
    """See ``accel.reference.truncation.truncation_result``."""
    out = np.empty_like(c)
    whole = reply.size // 8 * 8
    _result(c, answer, reply[:whole].view(np.uint64), reply[whole:], bits, out)
    return out
