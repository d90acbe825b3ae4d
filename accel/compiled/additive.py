"""Local steps on additive numbers in numba; ``accel.reference.additive`` explains them."""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = [
    "add_low",
    "open_dealer",
    "replicated_rho",
    "scale_rows_deal",
    "scale_rows_hold",
    "squared_deal",
    "squared_hold",
    "subtract_low",
    "subtract_scaled",
    "weigh_opened_deal",
    "weigh_opened_hold",
]


@njit(cache=True, nogil=True)
def _low(bits):
    return np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits)


@njit(cache=True, nogil=True)
def add_low(a, b, bits, out):
    """See ``accel.reference.additive.add_low``."""
    ring = _low(bits)
    for i in range(out.size):
        out[i] = (a[i] + b[i]) & ring


@njit(cache=True, nogil=True)
def subtract_low(a, b, bits, out):
    """See ``accel.reference.additive.subtract_low``."""
    ring = _low(bits)
    for i in range(out.size):
        out[i] = (a[i] - b[i]) & ring


@njit(cache=True, nogil=True)
def open_dealer(first, second, z, bits, out):
    """See ``accel.reference.additive.open_dealer``."""
    ring = _low(bits)
    for i in range(out.size):
        out[i] = (first[i] + second[i] - z[i]) & ring


@njit(cache=True, nogil=True)
def replicated_rho(first, second, out):
    """See ``accel.reference.additive.replicated_rho``."""
    for i in range(out.size):
        out[i] = np.uint64(0) - first[i] - second[i]


@njit(cache=True, nogil=True)
def subtract_scaled(z, y, shift, out):
    """See ``accel.reference.additive.subtract_scaled``."""
    for i in range(out.size):
        out[i] = z[i] - (y[i] << np.uint64(shift))


@njit(cache=True, nogil=True)
def weigh_opened_deal(pads, rho, halves, out):
    """See ``accel.reference.additive.weigh_opened_deal``."""
    for row in range(pads.shape[1]):
        for k in range(pads.shape[0]):
            bit = np.uint64(pads[k, row])
            out[row, 0, k] = bit - halves[row, 0, k]
            out[row, 1, k] = bit * rho[row] - halves[row, 1, k]


@njit(cache=True, nogil=True)
def weigh_opened_hold(alpha, halves, c, rho, weights, times, leads, out):
    """See ``accel.reference.additive.weigh_opened_hold``."""
    lead = np.uint64(1 if leads else 0)
    one, two = np.uint64(1), np.uint64(2)
    for row in range(alpha.shape[1]):
        for o in range(weights.shape[0]):
            plain = lead * weights[o, 0]
            cross = weights[o, 0] * rho[row]
            for k in range(alpha.shape[0]):
                a = np.uint64(alpha[k, row])
                sign = one - two * a
                plain += weights[o, k + 1] * (sign * halves[row, 0, k] + lead * a)
                cross += weights[o, k + 1] * (sign * halves[row, 1, k] + a * rho[row])
            out[o, row] = c[row] * plain - cross if times[o] else plain


@njit(cache=True, nogil=True)
def scale_rows_deal(rho, rho_x, bits, halves, out):
    """See ``accel.reference.additive.scale_rows_deal``."""
    for row in range(rho.size):
        if_set = rho[row] >> np.uint64(bits)
        for version in range(2):
            r = if_set
            if version == 0:
                r -= (rho[row] >> np.uint64(63)) << np.uint64(64 - bits)
            out[row, version, 0] = r - halves[row, version, 0]
            for i in range(rho_x.shape[1]):
                out[row, version, i + 1] = r * rho_x[row, i] - halves[row, version, i + 1]


@njit(cache=True, nogil=True)
def scale_rows_hold(c, middle, outer, halves, bits, margin, leads, out):
    """See ``accel.reference.additive.scale_rows_hold``."""
    for row in range(c.size):
        factor = (c[row] >> np.uint64(bits)) - np.uint64(margin)
        version = np.int64(c[row] >> np.uint64(63))
        r = halves[row, version, 0]
        for i in range(middle.shape[1]):
            own = outer[row, i] + middle[row, i] if leads else outer[row, i]
            out[row, i] = factor * own - r * middle[row, i] + halves[row, version, i + 1]


@njit(cache=True, nogil=True)
def squared_deal(rho, rho_n, bits, halves, out, own):
    """See ``accel.reference.additive.squared_deal``."""
    for row in range(rho.shape[0]):
        base = np.uint64(0)
        norm = rho_n[row]
        for i in range(rho.shape[1]):
            if_set = rho[row, i] >> np.uint64(bits)
            if_clear = if_set - ((rho[row, i] >> np.uint64(63)) << np.uint64(64 - bits))
            base += if_set * if_set
            jump = if_clear * if_clear - if_set * if_set
            at = 1 + 4 * i
            out[row, at] = jump - halves[row, at]
            out[row, at + 1] = norm * jump - halves[row, at + 1]
            out[row, at + 2] = norm * if_clear - halves[row, at + 2]
            out[row, at + 3] = norm * if_set - halves[row, at + 3]
        out[row, 0] = base - halves[row, 0]
        own[row] = np.uint64(0) - norm * base


@njit(cache=True, nogil=True)
def squared_hold(c, quotient, wrap, n_middle, n_outer, halves, bits, leads, out):
    """See ``accel.reference.additive.squared_hold``."""
    one, two = np.uint64(1), np.uint64(2)
    offset = one << np.uint64(62 - bits)
    for row in range(c.shape[0]):
        middle, outer = n_middle[row], n_outer[row]
        own = outer + middle if leads else outer
        total = middle * halves[row, 0]
        for i in range(c.shape[1]):
            clear = one - (c[row, i] >> np.uint64(63))
            value = (c[row, i] >> np.uint64(bits)) - offset
            r = quotient[row, i] - ((clear * wrap[row, i]) << np.uint64(64 - bits))
            at = 1 + 4 * i
            cross = halves[row, at + 2] if clear == one else halves[row, at + 3]
            total += own * value * value + two * value * (cross - middle * r)
            total += clear * (middle * halves[row, at] - halves[row, at + 1])
        out[row] = total
