"""Local steps of the exponential in numba; ``accel.reference.exponential`` explains them."""

from __future__ import annotations

import numpy as np
from numba import njit

from accel.reference.exponential import TABLE_BITS, exp_deal

__all__ = ["exp_deal", "exp_hold"]  # the dealer's exp is numpy's: another one would differ in last bits


@njit(cache=True, nogil=True)
def exp_hold(c, half, fraction_bits, step, table, factors, scale, out):
    places = half.shape[1]
    low_bits = fraction_bits
    while step > 1:
        low_bits += 1
        step >>= 1
    low_mask = (np.uint64(1) << np.uint64(low_bits)) - np.uint64(1)
    place_mask = np.uint64(places - 1)
    shift = max(0, fraction_bits - TABLE_BITS)
    grow = np.uint64(max(0, TABLE_BITS - fraction_bits))
    rest_mask = (np.uint64(1) << np.uint64(shift)) - np.uint64(1)
    unit = 2.0**-fraction_bits
    for i in range(c.size):
        low = c[i] & low_mask
        exact = table[np.int64((low << grow) >> np.uint64(shift))]
        if shift > 0:
            r = np.float64(low & rest_mask) * unit
            series = r * (1 / 5) + 1.0
            series = series * r / 4.0 + 1.0
            series = series * r / 3.0 + 1.0
            series = series * r / 2.0 + 1.0
            series = series * r / 1.0 + 1.0
            exact = exact * series
        digit = c[i] >> np.uint64(low_bits)
        total = np.uint64(0)
        for place in range(places):
            distance = np.int64((digit - np.uint64(place)) & place_mask)
            total += half[i, place] * np.uint64(np.rint(exact * factors[distance] * scale))
        out[i] = total
