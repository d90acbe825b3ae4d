"""Local steps of truncation in numba, one pass each; ``accel.reference.truncation`` explains them."""

from __future__ import annotations

import numpy as np
from numba import njit

from accel.compiled.bits import pack_words, unpack_whole
from accel.reference.truncation import truncate_masks, truncation_masks

__all__ = [
    "truncate_deal",
    "truncate_finish",
    "truncate_key",
    "truncate_masks",
    "truncation_answer",
    "truncation_answer_packed",
    "truncation_deal",
    "truncation_hold",
    "truncation_masks",
    "truncation_result",
]


@njit(cache=True, nogil=True)
def truncation_deal(z, first, second, bits, share_0, share_1, b0, packed):
    shift, low_shift = np.uint64(64 - bits), np.uint64(bits)
    low = (np.uint64(1) << low_shift) - np.uint64(1)
    last = first.shape[0] - 1
    wrap = np.empty(z.size, dtype=np.uint64)
    for i in range(z.size):
        rho = first[0, i] + second[0, i] - z[i]
        quotient = (rho >> low_shift) - first[1, i]
        b0[i] = quotient
        wrap[i] = ((rho >> np.uint64(63)) - first[2, i]) & low
        share_0[i] = np.uint64(0) - quotient - (second[1, i] >> shift << shift)
        share_1[i] = np.uint64(0) - first[1, i] - (first[last, i] >> shift << shift)
    pack_words(wrap, bits, packed)


@njit(cache=True, nogil=True)
def truncation_hold(z, mask, leads, out):
    offset = np.uint64(leads) << np.uint64(62)
    for i in range(z.size):
        out[i] = z[i] + mask[i] + offset


@njit(cache=True, nogil=True)
def truncation_answer(mine, theirs, quotient, wrap_half, mask, bits, c, share, answer, packed):
    shift = np.uint64(64 - bits)
    low = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for i in range(mine.size):
        opened = mine[i] + theirs[i]
        high = mask[i] >> shift
        c[i] = opened
        share[i] = np.uint64(0) - quotient[i] - (high << shift)
        answer[i] = ((np.uint64(1) - (opened >> np.uint64(63))) * wrap_half[i] + high) & low
    pack_words(answer, bits, packed)


@njit(cache=True, nogil=True)
def truncation_answer_packed(mine, theirs, quotient, packed_half, mask, bits, c, share, answer, packed):
    half = np.empty(mine.size, dtype=np.uint64)
    unpack_whole(packed_half, bits, half)
    truncation_answer(mine, theirs, quotient, half, mask, bits, c, share, answer, packed)


@njit(cache=True, nogil=True)
def truncation_result(c, answer, reply, bits, out):
    unpack_whole(reply, bits, out)
    offset = np.uint64(1) << np.uint64(62 - bits)
    for i in range(c.size):
        out[i] = (c[i] >> np.uint64(bits)) + ((answer[i] + out[i]) << np.uint64(64 - bits)) - offset


@njit(cache=True, nogil=True)
def truncate_deal(x0, x1, first, second, bits, share_0, share_1, b0, offers):
    shift, low_shift = np.uint64(64 - bits), np.uint64(bits)
    low = (np.uint64(1) << low_shift) - np.uint64(1)
    last_0, last_1 = first.shape[0] - 1, second.shape[0] - 1
    values = np.empty((4, x0.size), dtype=np.uint64)
    for i in range(x0.size):
        rho = np.uint64(0) - x0[i] - x1[i]
        m0, m2 = first[1, i] >> shift, second[0, i] >> shift
        quotient = (rho >> low_shift) - first[0, i]
        b0[i] = quotient
        share_0[i] = np.uint64(0) - quotient - (m2 << shift)
        share_1[i] = np.uint64(0) - first[0, i] - (m0 << shift)
        if_set = m0 + m2
        if_clear = if_set + (rho >> np.uint64(63))
        values[0, i] = (if_clear + first[2, i]) & low
        values[1, i] = (if_set + (first[last_0, i] >> shift)) & low
        values[2, i] = (if_clear + second[1, i]) & low
        values[3, i] = (if_set + (second[last_1, i] >> shift)) & low
    for row in range(4):
        pack_words(values[row], bits, offers[row])


@njit(cache=True, nogil=True)
def truncate_key(x, key_0, key_1, bits, packed):
    shift, offset = np.uint64(64 - bits), np.uint64(1) << np.uint64(62)
    low = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    chosen = np.empty(x.size, dtype=np.uint64)
    for i in range(x.size):
        top = np.uint64(0) - ((x[i] + offset) >> np.uint64(63))
        chosen[i] = (top & (key_1[i] >> shift)) | (~top & key_0[i] & low)
    pack_words(chosen, bits, packed)


@njit(cache=True, nogil=True)
def truncate_finish(x, clear, set_, key, quotient, mask, bits, middle, outer):
    shift, low_shift = np.uint64(64 - bits), np.uint64(bits)
    offset, less = np.uint64(1) << np.uint64(62), np.uint64(1) << np.uint64(62 - bits)
    offers = np.empty((3, x.size), dtype=np.uint64)
    unpack_whole(clear, bits, offers[0])
    unpack_whole(set_, bits, offers[1])
    unpack_whole(key, bits, offers[2])
    for i in range(x.size):
        c = x[i] + offset
        top = np.uint64(0) - (c >> np.uint64(63))
        wrap = ((top & offers[1, i]) | (~top & offers[0, i])) - offers[2, i]
        middle[i] = (c >> low_shift) + (wrap << shift) - less
        outer[i] = np.uint64(0) - quotient[i] - (mask[i] >> shift << shift)
