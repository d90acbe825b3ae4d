"""Local steps of the comparison in numba; ``accel.reference.comparison`` explains them."""

from __future__ import annotations

import numpy as np
from numba import njit

from accel.compiled.bits import pack_bytes, unpack_bytes
from accel.reference.comparison import comparison_digits

__all__ = ["compare_deal", "compare_decide", "compare_reply", "comparison_digits"]

_BLOCK = 1024  # elements whose running sums stay in the first-level cache


@njit(cache=True, nogil=True)
def _bits(prime):
    width = 0
    while prime >> width:
        width += 1
    return width


@njit(cache=True, nogil=True)
def compare_deal(x0, x1, halves, low, width, digit_bits, prime, top, packed):
    modulus, one = np.uint8(prime), np.uint64(1)
    below = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width)
    per_digit = (1 << digit_bits) - 1
    digit_mask = np.uint64(per_digit)
    values = np.empty(x0.size, dtype=np.uint64)
    for i in range(x0.size):
        rho = np.uint64(0) - x0[i] - x1[i]
        values[i] = (rho >> np.uint64(low)) & below
        top[i] = (rho >> np.uint64(low + width)) & one
    out = np.empty(halves.shape, dtype=np.uint8)
    for row in range(halves.shape[0]):
        d = row // per_digit
        threshold = np.uint64(row - per_digit * d)
        shift = np.uint64(digit_bits * d)
        for i in range(values.size):
            bit = np.uint8(((values[i] >> shift) & digit_mask) > threshold)
            half = halves[row, i]
            out[row, i] = bit - half if bit >= half else bit + modulus - half
    pack_bytes(out.reshape(-1), _bits(prime), packed)


@njit(cache=True, nogil=True)
def compare_reply(
    c, threshold, halves, coins, scale, mask, rotation, low, width, digit_bits, prime, leads, held, packed
):
    """Digit by digit over a block of elements and without branches, so that LLVM vectorises the loops over elements.

    Byte v+1 of ``shares`` is the share of [digit of ρ > v], v = −1..6: the two that matter are one shift away.
    """
    digits = (width + digit_bits - 1) // digit_bits
    per_digit = (1 << digit_bits) - 1
    thresholds = width // digit_bits * per_digit + (1 << width % digit_bits) - 1
    below_width = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width)
    low_shift, top_shift, less = np.uint64(low), np.uint64(low + width), np.uint64(threshold)
    byte, half_word, unit = np.uint64(0xFF), np.uint64(0xFFFFFFFF), np.uint64(1)
    modulus, one = np.uint64(prime), np.uint64(leads)
    inverse = np.uint64((1 << 20) // prime + 1)  # exact quotient for values below 2^20 / prime
    values = np.empty(_BLOCK, dtype=np.uint64)
    backwards = np.empty(_BLOCK, dtype=np.uint64)
    usual = np.empty(_BLOCK, dtype=np.uint64)  # 0 where c + 1 = 2^width, that is ρ ≤ c always
    differ = np.empty(_BLOCK, dtype=np.uint64)
    shares = np.empty(_BLOCK, dtype=np.uint64)
    result = np.empty(_BLOCK, dtype=np.uint8)
    out = np.empty((digits, c.size), dtype=np.uint8)
    for start in range(0, c.size, _BLOCK):
        count = min(_BLOCK, c.size - start)
        for i in range(count):
            shifted = c[start + i] - less
            backwards[i] = np.uint64(coins[start + i]) & unit
            values[i] = ((shifted >> low_shift) + backwards[i]) & below_width
            usual[i] = unit - (backwards[i] & np.uint64(values[i] == np.uint64(0)))
            differ[i] = np.uint64(0)
            held[start + i] = ((shifted >> top_shift) & unit) ^ backwards[i]
        for d in range(digits - 1, -1, -1):
            rows = min(per_digit, thresholds - per_digit * d)
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
                factor = np.uint64(scales[i]) + unit
                product = factor * test + one * entry + (unit - one) * (modulus - entry)
                product &= half_word
                result[i] = np.uint8(product - modulus * ((product * inverse) >> np.uint64(20)))
            for i in range(count):
                at = d + np.int64(rotation[start + i])
                at -= digits * np.int64(at >= digits)
                out[at, start + i] = result[i]
    pack_bytes(out.reshape(-1), _bits(prime), packed)


@njit(cache=True, nogil=True)
def compare_decide(left, right, digits, prime, top, held):
    modulus = np.uint8(prime)
    tests = np.empty((2, digits, top.size), dtype=np.uint8)
    unpack_bytes(left, _bits(prime), tests[0].reshape(-1))
    unpack_bytes(right, _bits(prime), tests[1].reshape(-1))
    held[:] = np.uint8(0)
    for d in range(digits):
        for i in range(top.size):
            total = np.uint8(tests[0, d, i] + tests[1, d, i])
            held[i] |= np.uint8(total == 0) | np.uint8(total == modulus)
    for i in range(top.size):
        held[i] ^= top[i]
