"""Local steps of the two-holder protocols in numba; ``accel.reference.two_holder`` explains them."""

from __future__ import annotations

import numpy as np
from numba import njit

from accel.reference.two_holder import comparison_digits

__all__ = [
    "compare_deal",
    "compare_decide",
    "compare_reply",
    "comparison_digits",
    "truncate_finish",
    "uniform_below",
]


@njit(cache=True, nogil=True)
def _truncate_finish(c, wrap, bits, out):
    offset = np.uint64(1) << np.uint64(62 - bits)
    for i in range(c.size):
        out[i] = (c[i] >> np.uint64(bits)) + (wrap[i] << np.uint64(64 - bits)) - offset


def truncate_finish(c: np.ndarray, wrap: np.ndarray, bits: int) -> np.ndarray:
    """See ``accel.reference.two_holder.truncate_finish``."""
    out = np.empty_like(c)
    _truncate_finish(c, wrap, bits, out)
    return out


@njit(cache=True, nogil=True)
def _uniform_below(random, bound, out):
    limit = np.uint8(256 - 256 % bound) if 256 % bound else np.uint8(0)  # 0: nothing is rejected
    inverse = np.uint32((1 << 16) // bound + 1)  # exact quotient for bytes
    modulus = np.uint32(bound)
    found = np.int64(0)
    i = 0
    while i + 16 <= random.size and found + 16 <= out.size:
        rejected = np.uint8(0)
        for k in range(16):
            rejected |= np.uint8(limit != 0 and random[i + k] >= limit)
        if rejected == 0:  # the usual case, which LLVM turns into vector code
            for k in range(16):
                byte = np.uint32(random[i + k])
                out[found + k] = byte - modulus * ((byte * inverse) >> np.uint32(16))
            found += 16
        else:
            for k in range(16):
                byte = np.uint32(random[i + k])
                out[found] = byte - modulus * ((byte * inverse) >> np.uint32(16))
                found += np.int64(limit == 0 or random[i + k] < limit)
        i += 16
    while i < random.size and found < out.size:
        byte = np.uint32(random[i])
        out[found] = byte - modulus * ((byte * inverse) >> np.uint32(16))
        found += np.int64(limit == 0 or random[i] < limit)
        i += 1
    return found


def uniform_below(random: np.ndarray, bound: int, count: int) -> tuple[np.ndarray, int]:
    """See ``accel.reference.two_holder.uniform_below``."""
    out = np.empty(count, dtype=np.uint8)
    found = _uniform_below(random, bound, out)
    return out[:found], int(found)


@njit(cache=True, nogil=True)
def _compare_deal(rho, halves, width, digit_bits, prime, out):
    modulus = np.uint8(prime)
    low = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width)
    per_digit = (1 << digit_bits) - 1
    digit_mask = np.uint64(per_digit)
    for row in range(halves.shape[0]):
        d = row // per_digit
        threshold = np.uint64(row - per_digit * d)
        shift = np.uint64(digit_bits * d)
        for i in range(rho.size):
            bit = np.uint8((((rho[i] & low) >> shift) & digit_mask) > threshold)
            half = halves[row, i]
            out[row, i] = bit - half if bit >= half else bit + modulus - half


def compare_deal(rho: np.ndarray, halves: np.ndarray, width: int, digit_bits: int, prime: int) -> np.ndarray:
    """See ``accel.reference.two_holder.compare_deal``."""
    out = np.empty_like(halves)
    _compare_deal(rho, halves, width, digit_bits, prime, out)
    return out


_BLOCK = 1024  # elements whose running sums stay in the first-level cache


@njit(cache=True, nogil=True)
def _compare_reply(c, halves, reverse, scale, mask, rotation, width, digit_bits, prime, constant, out):
    """Digit by digit over a block of elements and without branches, so that LLVM vectorises the loops over elements.

    Byte v+1 of ``shares`` is the share of [digit of ρ > v], v = −1..6: the two that matter are one shift away.
    """
    digits = (width + digit_bits - 1) // digit_bits
    per_digit = (1 << digit_bits) - 1
    low = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width)
    byte, half_word, unit = np.uint64(0xFF), np.uint64(0xFFFFFFFF), np.uint64(1)
    modulus, one = np.uint64(prime), np.uint64(constant)
    inverse = np.uint64((1 << 20) // prime + 1)  # exact quotient for values below 2^20 / prime
    values = np.empty(_BLOCK, dtype=np.uint64)
    backwards = np.empty(_BLOCK, dtype=np.uint64)
    usual = np.empty(_BLOCK, dtype=np.uint64)  # 0 where c + 1 = 2^width, that is ρ ≤ c always
    differ = np.empty(_BLOCK, dtype=np.uint64)
    shares = np.empty(_BLOCK, dtype=np.uint64)
    result = np.empty(_BLOCK, dtype=np.uint8)
    for start in range(0, c.size, _BLOCK):
        count = min(_BLOCK, c.size - start)
        for i in range(count):
            backwards[i] = np.uint64(reverse[start + i])
            values[i] = (c[start + i] + backwards[i]) & low
            usual[i] = unit - (backwards[i] & np.uint64(values[i] == np.uint64(0)))
            differ[i] = np.uint64(0)
        for d in range(digits - 1, -1, -1):
            rows = min(per_digit, halves.shape[0] - per_digit * d)
            shares[:count] = one
            for v in range(rows):
                half = halves[per_digit * d + v, start : start + count]
                place = np.uint64(8 * (v + 1))
                for i in range(count):
                    shares[i] |= np.uint64(half[i]) << place
            scales = scale[d, start : start + count]
            masks = mask[d, start : start + count]
            exception = np.uint64(0) if d == 0 else one
            place = np.uint64(digit_bits * d)
            for i in range(count):
                chosen = shares[i] >> (((values[i] >> place) & np.uint64(per_digit)) << np.uint64(3))
                below, above = chosen & byte, (chosen >> np.uint64(8)) & byte
                forwards = unit - backwards[i]
                test = differ[i] + (below & -backwards[i]) + ((one + modulus - above) & -forwards)
                differ[i] += one + above + modulus - below
                test = (test & -usual[i]) | (exception & (usual[i] - unit))
                test = (test - modulus * (((test & half_word) * inverse) >> np.uint64(20))) & half_word
                entry = np.uint64(masks[i])
                product = np.uint64(scales[i]) * test + one * entry + (unit - one) * (modulus - entry)
                product &= half_word
                result[i] = np.uint8(product - modulus * ((product * inverse) >> np.uint64(20)))
            for i in range(count):
                at = d + np.int64(rotation[start + i])
                at -= digits * np.int64(at >= digits)
                out[at, start + i] = result[i]


def compare_reply(
    c: np.ndarray,
    halves: np.ndarray,
    reverse: np.ndarray,
    scale: np.ndarray,
    mask: np.ndarray,
    rotation: np.ndarray,
    width: int,
    digit_bits: int,
    prime: int,
    leads: bool,
) -> np.ndarray:
    """See ``accel.reference.two_holder.compare_reply``."""
    digits, thresholds = comparison_digits(width, digit_bits)
    out = np.empty((digits, c.size), dtype=np.uint8)
    lead = np.int64(leads)
    _compare_reply(c, halves[:thresholds], reverse, scale, mask, rotation, width, digit_bits, prime, lead, out)
    return out


@njit(cache=True, nogil=True)
def _compare_decide(left, right, prime, out):
    modulus = np.uint8(prime)
    for d in range(left.shape[0]):
        for i in range(out.size):
            total = np.uint8(left[d, i] + right[d, i])
            out[i] |= np.uint8(total == 0) | np.uint8(total == modulus)


def compare_decide(left: np.ndarray, right: np.ndarray, prime: int) -> np.ndarray:
    """See ``accel.reference.two_holder.compare_decide``."""
    out = np.zeros(left.shape[1], dtype=np.uint8)
    _compare_decide(left, right, prime, out)
    return out
