"""Local steps of the two-holder protocols in numba; ``accel.reference.holders`` explains them."""

from __future__ import annotations

import numpy as np
from numba import njit

from accel.reference.holders import comparison_digits

__all__ = [
    "compare_deal",
    "compare_decide",
    "compare_reply",
    "comparison_digits",
    "truncate_deal",
    "truncate_finish",
    "truncate_reply",
    "uniform_below",
]


@njit(cache=True, nogil=True)
def _truncate_deal(rho, quotient_mask, wrap_mask, bits, quotient, wrap):
    low = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for i in range(rho.size):
        quotient[i] = (rho[i] >> np.uint64(bits)) - quotient_mask[i]
        wrap[i] = ((rho[i] >> np.uint64(63)) - wrap_mask[i]) & low


def truncate_deal(
    rho: np.ndarray, quotient_mask: np.ndarray, wrap_mask: np.ndarray, bits: int
) -> tuple[np.ndarray, np.ndarray]:
    """See ``accel.reference.holders.truncate_deal``."""
    quotient, wrap = np.empty_like(rho), np.empty_like(rho)
    _truncate_deal(rho, quotient_mask, wrap_mask, bits, quotient, wrap)
    return quotient, wrap


@njit(cache=True, nogil=True)
def _truncate_reply(c, half, mask, bits, out):
    low = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for i in range(c.size):
        out[i] = ((np.uint64(1) - (c[i] >> np.uint64(63))) * half[i] + mask[i]) & low


def truncate_reply(c: np.ndarray, half: np.ndarray, mask: np.ndarray, bits: int) -> np.ndarray:
    """See ``accel.reference.holders.truncate_reply``."""
    out = np.empty_like(c)
    _truncate_reply(c, half, mask, bits, out)
    return out


@njit(cache=True, nogil=True)
def _truncate_finish(c, wrap, bits, out):
    offset = np.uint64(1) << np.uint64(62 - bits)
    for i in range(c.size):
        out[i] = (c[i] >> np.uint64(bits)) + (wrap[i] << np.uint64(64 - bits)) - offset


def truncate_finish(c: np.ndarray, wrap: np.ndarray, bits: int) -> np.ndarray:
    """See ``accel.reference.holders.truncate_finish``."""
    out = np.empty_like(c)
    _truncate_finish(c, wrap, bits, out)
    return out


@njit(cache=True, nogil=True)
def _uniform_below(random, bound, out):
    limit = 256 - 256 % bound
    inverse = np.uint32((1 << 16) // bound + 1)  # exact quotient for bytes
    found = 0
    for i in range(random.size):
        if found == out.size:
            break
        byte = np.uint32(random[i])
        out[found] = byte - np.uint32(bound) * ((byte * inverse) >> np.uint32(16))
        found += byte < limit
    return found


def uniform_below(random: np.ndarray, bound: int, count: int) -> tuple[np.ndarray, int]:
    """See ``accel.reference.holders.uniform_below``."""
    out = np.empty(count, dtype=np.uint8)
    found = _uniform_below(random, bound, out)
    return out[:found], int(found)


@njit(cache=True, nogil=True)
def _compare_deal(rho, halves, width, prime, out):
    digits = (width + 1) // 2
    for i in range(rho.size):
        value = rho[i]
        for d in range(digits):
            digit = (value >> np.uint64(2 * d)) & np.uint64(3)
            lone = d == width // 2
            if lone:
                digit &= np.uint64(1)
            for v in range(1 if lone else 3):
                share = np.int64(digit > np.uint64(v)) - np.int64(halves[i, 3 * d + v])
                out[i, 3 * d + v] = share + prime if share < 0 else share


def compare_deal(rho: np.ndarray, halves: np.ndarray, width: int, prime: int) -> np.ndarray:
    """See ``accel.reference.holders.compare_deal``."""
    out = np.empty_like(halves)
    _compare_deal(rho, halves, width, prime, out)
    return out


@njit(cache=True, nogil=True)
def _compare_reply(c, halves, reverse, scale, mask, rotation, width, prime, constant, out):
    digits = (width + 1) // 2
    low = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width)
    inverse = (np.int64(1) << np.int64(40)) // prime + 1  # exact quotient below 2^40 / 64
    share = np.zeros(5, dtype=np.int64)  # share[v+1] = share of [digit of ρ > v], v = -1..3
    share[0] = constant
    lift = np.int64(64 * prime)  # keeps every intermediate value non-negative
    for i in range(c.size):
        backwards = reverse[i] == 1
        value = (c[i] + np.uint64(1) if backwards else c[i]) & low
        always = backwards and value == np.uint64(0)
        differ_above = np.int64(0)
        at = np.int64(rotation[i]) + digits - 1
        for d in range(digits - 1, -1, -1):
            digit = np.int64((value >> np.uint64(2 * d)) & np.uint64(3))
            share[1] = halves[i, 3 * d]
            if d == width // 2:
                share[2] = 0
                share[3] = 0
            else:
                share[2] = halves[i, 3 * d + 1]
                share[3] = halves[i, 3 * d + 2]
            above_below = share[digit]
            above = share[digit + 1]
            decides = constant - above_below if backwards else above
            test = constant - decides + differ_above
            differ_above += constant - above_below + above
            if always:
                test = constant if d != 0 else np.int64(0)
            signed = np.int64(mask[i, d]) if constant == 1 else prime - np.int64(mask[i, d])
            product = np.int64(scale[i, d]) * (test + lift) + signed
            product -= prime * ((product * inverse) >> np.int64(40))
            out[i, at - digits if at >= digits else at] = product
            at -= 1


def compare_reply(
    c: np.ndarray,
    halves: np.ndarray,
    reverse: np.ndarray,
    scale: np.ndarray,
    mask: np.ndarray,
    rotation: np.ndarray,
    width: int,
    prime: int,
    leads: bool,
) -> np.ndarray:
    """See ``accel.reference.holders.compare_reply``."""
    out = np.empty((c.size, comparison_digits(width)[0]), dtype=np.uint8)
    _compare_reply(c, halves, reverse, scale, mask, rotation, width, prime, np.int64(leads), out)
    return out


@njit(cache=True, nogil=True)
def _compare_decide(left, right, prime, out):
    for i in range(out.size):
        zero = False
        for d in range(left.shape[1]):
            total = np.int64(left[i, d]) + np.int64(right[i, d])
            zero |= total == 0 or total == prime
        out[i] = zero


def compare_decide(left: np.ndarray, right: np.ndarray, prime: int) -> np.ndarray:
    """See ``accel.reference.holders.compare_decide``."""
    out = np.empty(left.shape[0], dtype=np.uint8)
    _compare_decide(left, right, prime, out)
    return out
