"""Functions put together from pieces in numba; ``accel.reference.pieces`` explains them.

No fast-math: LLVM then neither fuses nor reorders operations on doubles, and the words are those of the reference.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from accel.reference.pieces import (
    DEALT_SCALE,
    DEGREE,
    HELD_SCALE,
    LOW_BITS,
    PLACES,
    SERIES,
    SPLINE_DEALT,
    SPLINE_HELD,
)

__all__ = [
    "exp_below_argument",
    "exp_below_bits",
    "exp_below_deal",
    "exp_below_take",
    "octave_bits",
    "octave_deal",
    "spline_deal",
    "spline_hold",
    "split_codes",
]

_ONE, _SIX = np.uint64(1), np.uint64(6)
_IN_WORD = np.uint64(63)


@njit(cache=True, nogil=True)
def _low(bits):
    return np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits)


@njit(cache=True, nogil=True)
def split_codes(codes, out):
    """See ``accel.reference.pieces.split_codes``."""
    for row in range(out.shape[1]):
        for k in range(out.shape[0]):
            out[k, row] = np.uint8((np.uint64(codes[row]) >> np.uint64(k)) & np.uint64(1))


@njit(cache=True, nogil=True)
def exp_below_argument(z, largest, up, down, unit, extra, bits, out):
    """See ``accel.reference.pieces.exp_below_argument``."""
    ring = _low(bits)
    for row in range(z.shape[0]):
        taken = (largest[row] << np.uint64(unit)) + np.uint64(extra)
        for i in range(z.shape[1]):
            out[row, i] = (((z[row, i] << np.uint64(up)) >> np.uint64(down)) - taken) & ring


@njit(cache=True, nogil=True)
def exp_below_deal(rho, sizes, mu, falling, falling_fine, hot_halves, value_halves, hot, values):
    """See ``accel.reference.pieces.exp_below_deal``."""
    digits = sizes.size
    patterns = 1 << digits
    for row in range(rho.size):
        for k in range(hot.shape[1]):
            hot[row, k] = hot_halves[row, k]
        at, word = LOW_BITS, 0
        for b in range(digits):
            digit = (rho[row] >> np.uint64(at)) & _low(sizes[b])
            hot[row, word + np.int64(digit >> _SIX)] ^= _ONE << (digit & _IN_WORD)
            at += sizes[b]
            word += max(1, (1 << sizes[b]) // 64)
        low = np.int64(rho[row] & _low(LOW_BITS))
        exact = falling[low >> 8] * falling_fine[low & 255]
        g = np.uint64(np.rint(exact * DEALT_SCALE))
        for k in range(values.shape[1]):
            values[row, k] = np.uint64(0) - value_halves[row, k]
        for target in range(2):
            code = np.int64((mu[row] >> np.uint64(target * digits)) & _low(digits))
            if code < patterns - target:
                values[row, target * patterns + code] += g


@njit(cache=True, nogil=True)
def exp_below_bits(c, sizes, hot, mu, out):
    """See ``accel.reference.pieces.exp_below_bits``."""
    digits = sizes.size
    ring = _low(LOW_BITS + np.sum(sizes))
    for row in range(c.size):
        code = mu[row] & _low(2 * digits)
        for target in range(2):
            moved = (c[row] + np.uint64(target << LOW_BITS)) & ring
            at, word = LOW_BITS, 0
            for b in range(digits):
                digit = (moved >> np.uint64(at)) & _low(sizes[b])
                bit = (hot[row, word + np.int64(digit >> _SIX)] >> (digit & _IN_WORD)) & _ONE
                code ^= bit << np.uint64(target * digits + b)
                at += sizes[b]
                word += max(1, (1 << sizes[b]) // 64)
        out[row] = np.uint8(code)


@njit(cache=True, nogil=True)
def exp_below_take(c, mine, theirs, digits, values, rising, rising_fine, out):
    """See ``accel.reference.pieces.exp_below_take``."""
    patterns = 1 << digits
    for row in range(c.size):
        alpha = np.int64(mine[row] ^ theirs[row])
        low = np.int64(c[row] & _low(LOW_BITS))
        last = np.uint64(0)
        for k in range(patterns):
            last += values[row, k]
        for k in range(patterns - 1):
            last -= values[row, patterns + k]
        total = np.uint64(0)
        for target in range(2):
            place = ~(alpha >> (target * digits)) & (patterns - 1)
            exact = rising[target, low >> 8] * rising_fine[low & 255] * HELD_SCALE
            weight = np.uint64(np.rint(exact))
            taken = last if target == 1 and place == patterns - 1 else values[row, target * patterns + place]
            total += weight * taken
        out[row] = total


@njit(cache=True, nogil=True)
def octave_deal(rho, shift, places, hot_halves, hot):
    """See ``accel.reference.pieces.octave_deal``."""
    for row in range(rho.size):
        for k in range(hot.shape[1]):
            hot[row, k] = hot_halves[row, k]
        digit = (rho[row] >> np.uint64(shift)) & np.uint64(places - 1)
        hot[row, np.int64(digit >> _SIX)] ^= _ONE << (digit & _IN_WORD)


@njit(cache=True, nogil=True)
def octave_bits(c, hot, pads, shift, places, top, out):
    """See ``accel.reference.pieces.octave_bits``."""
    for row in range(c.size):
        start = np.int64((c[row] >> np.uint64(shift)) & np.uint64(places - 1))
        parity = (hot[row, start >> 6] >> np.uint64(start & 63)) & _ONE
        code = pads[row] & _low(top + 1)
        k = top
        for sigma in range(places - 1, 8, -1):
            at = (start - sigma) & (places - 1)
            parity ^= (hot[row, at >> 6] >> np.uint64(at & 63)) & _ONE
            if sigma == (8 << k) + 1:
                code ^= parity << np.uint64(k)
                k -= 1
        out[row] = np.uint8(code)


@njit(cache=True, nogil=True)
def spline_deal(rho, rho_t, scale, halves, out):
    """See ``accel.reference.pieces.spline_deal``."""
    unit = 2.0**-scale
    width = halves.shape[2]
    for row in range(rho.size):
        for k in range(width):
            out[row, 0, k] = np.uint64(0) - halves[row, 0, k]
            if out.shape[1] == 2:
                out[row, 1, k] = np.uint64(0) - halves[row, 1, k]
        place = np.int64((rho[row] >> np.uint64(scale - 2)) & np.uint64(PLACES - 1))
        low = np.float64(rho[row] & _low(scale - 2)) * unit
        tau = (low - 0.125) * 8.0
        power = 1.0
        for j in range(DEGREE + 1):
            word = np.uint64(np.int64(np.rint(power * SPLINE_DEALT)))
            at = place * (DEGREE + 1) + j
            out[row, 0, at] += word
            if out.shape[1] == 2:
                out[row, 1, at] += word * rho_t[row]
            power = power * tau


@njit(cache=True, nogil=True)
def spline_hold(c, c_t, halves, scale, function, out):
    """See ``accel.reference.pieces.spline_hold``."""
    unit = 2.0**-scale
    a = np.empty(7)
    for row in range(c.size):
        digit = (c[row] >> np.uint64(scale - 2)) & np.uint64(PLACES - 1)
        low = np.float64(c[row] & _low(scale - 2)) * unit
        total = np.uint64(0)
        for place in range(PLACES):
            x = np.float64((digit - np.uint64(place)) & np.uint64(PLACES - 1)) * 0.25 + low
            if x < 0.5:
                x = x + 2.0
            if x < 0.9375:
                continue
            centre = x - 0.125
            ratio = 0.125 / centre
            value = 1.0 / centre if function == 0 else 1.0 / np.sqrt(centre)
            for j in range(7):
                a[j] = value * SERIES[function, j]
                value = value * ratio
            a[3] = a[3] + a[5] * 1.25
            a[1] = a[1] - a[5] * 0.3125
            a[4] = a[4] + a[6] * 1.5
            a[2] = a[2] - a[6] * 0.5625
            a[0] = a[0] + a[6] * 0.03125
            for j in range(DEGREE + 1):
                word = np.uint64(np.int64(np.rint(a[j] * SPLINE_HELD)))
                at = place * (DEGREE + 1) + j
                if halves.shape[1] == 2:
                    total += word * (c_t[row] * halves[row, 0, at] - halves[row, 1, at])
                else:
                    total += word * halves[row, 0, at]
        out[row] = total
