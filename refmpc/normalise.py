"""Normalisation: x = m·4^k with m in about [1, 4), k secret, by a thermometer of parallel comparisons."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from accel.validate import require, require_real
from refmpc.arithmetic import multiply_truncate
from refmpc.comparison import thermometer
from refmpc.holders import weigh_bits
from refmpc.protocol import Cost
from refmpc.tensor import ArithmeticTensor
from refmpc.truncation import truncated_product_cost

__all__ = ["MANTISSA_BITS", "MANTISSA_HIGH", "MANTISSA_LOW", "Exponents", "normalise", "normalise_cost"]

MANTISSA_BITS = 26
TOLERANCE_BITS = 4  # thresholds are compared to a relative 2^-4, so the mantissa may leave [1, 4) by as much
MANTISSA_LOW, MANTISSA_HIGH = 1 - 2.0**-TOLERANCE_BITS, 4 * (1 + 2.0**-TOLERANCE_BITS)


@dataclass(frozen=True)
class Exponents:
    """The exponents k (of 4) that values in [low, high] at a scale can have."""

    first: int
    last: int
    fraction_bits: int

    @classmethod
    def of(cls, low: float, high: float, fraction_bits: int) -> Exponents:
        require_real("low", low, 0, open_low=True)
        require_real("high", high, low, open_low=True)
        # the least positive number the scale knows is one unit: smaller bounds promise nothing more
        low = max(low, 2.0**-fraction_bits)
        first, last = math.floor(math.log2(low) / 2), math.ceil(math.log2(high) / 2) - 1
        require(
            2 * (last + 1) + fraction_bits <= 61,
            "high",
            high,
            f"below 2^{61 - fraction_bits} at fraction_bits = {fraction_bits}",
            "use fewer fraction bits",
        )
        return cls(first, max(first, last), fraction_bits)

    @property
    def inner(self) -> range:
        """The exponents whose threshold 4^k has to be compared with."""
        return range(self.first + 1, self.last + 1)

    @property
    def thresholds(self) -> list[int]:
        return [1 << (2 * k + self.fraction_bits) for k in self.inner]

    @property
    def low_bits(self) -> list[int]:
        return [max(0, 2 * k + self.fraction_bits - TOLERANCE_BITS) for k in self.inner]

    @property
    def high_bit(self) -> int:
        return 2 * (self.last + 1) + self.fraction_bits + 1

    @property
    def scale(self) -> int:
        """Bits at which 4^-k is exact and leaves something to truncate."""
        return max(2 * self.last, MANTISSA_BITS + 1 - self.fraction_bits)

    def words(self, value: Callable[[int], float], bits: int) -> list[int]:
        """The values at all exponents as integers at a scale."""
        return [round(value(k) * 2.0**bits) for k in range(self.first, self.last + 1)]


def normalise_cost(x: ArithmeticTensor, low: float, high: float, outputs: int) -> Cost:
    """Thermometer, weighted sums (one for 4^-k and the outputs), one product."""
    exponents = Exponents.of(low, high, x.fraction_bits)
    total = Cost(0, 0)
    if exponents.inner:
        total += thermometer.cost(x, exponents.thresholds, exponents.low_bits, exponents.high_bit)
        total += Cost(2, (8 * len(exponents.inner) + 16 * (1 + outputs)) * x.size)
    bits = x.fraction_bits + exponents.scale - MANTISSA_BITS
    return total + truncated_product_cost(x.size, bits)


async def normalise(
    x: ArithmeticTensor, low: float, high: float, outputs: Sequence[tuple[Callable[[int], float], int]]
) -> tuple[ArithmeticTensor, list[ArithmeticTensor]]:
    """The mantissa m = x·4^-k at 26 bits, and for each (function, bits) of ``outputs`` the value function(k).

    6 rounds; 42 bytes, about 15 bytes an exponent, 16 an output and 24 + 3·bits/8 for the product. Domain low ≤ x ≤
    high. m lies in [15/16, 4.25] and is exact up to one unit.
    """
    exponents = Exponents.of(low, high, x.fraction_bits)
    wanted = [(lambda k: 4.0**-k, exponents.scale), *outputs]
    tables = [exponents.words(value, bits) for value, bits in wanted]
    if exponents.inner:
        bits_ge = await thermometer(x, exponents.thresholds, exponents.low_bits, exponents.high_bit)
        sums = await weigh_bits(bits_ge, np.array([np.diff(np.array(t, dtype=object)) for t in tables], dtype=np.int64))
    else:
        zero = ArithmeticTensor(x.party, np.zeros((2, 1, *x.shape), dtype=np.uint64), 0)
        sums = zero.broadcast_to((len(tables), *x.shape))
    values = [
        (sums[index] + table[0]).reinterpret(bits)
        for index, (table, (_, bits)) in enumerate(zip(tables, wanted, strict=True))
    ]
    shift = x.fraction_bits + exponents.scale - MANTISSA_BITS
    return await multiply_truncate(x, values[0], shift), values[1:]
