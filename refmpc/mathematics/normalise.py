"""Normalisation: x = m·4^k with m in about [1, 4), k secret, by a thermometer of parallel comparisons."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from accel.validate import require, require_real
from refmpc.core.integer_logs import ceil_log2, floor_log2
from refmpc.core.primitive import Cost
from refmpc.core.tensor import ArithmeticTensor
from refmpc.primitives.arithmetic import multiply_truncate
from refmpc.primitives.comparison import thermometer
from refmpc.primitives.truncation import truncated_product_cost
from refmpc.primitives.two_holder import weigh_bits

__all__ = ["MANTISSA_BITS", "MANTISSA_HIGH", "MANTISSA_LOW", "Exponents", "normalise", "normalise_cost", "require_room"]

MANTISSA_BITS = 26
# Thresholds are compared to a relative 2^-4. A comparison errs on one side only: what reaches the threshold counts as
# reached, and what is just below may. So the mantissa may fall below 1 by as much, and never exceeds 4.
TOLERANCE_BITS = 4
MANTISSA_LOW, MANTISSA_HIGH = 1 - 2.0**-TOLERANCE_BITS, 4.0


@dataclass(frozen=True)
class Exponents:
    """The exponents k (of 4, or of 2^step) that values with low ≤ x ≤ high (or low ≤ |x| ≤ high) at a scale can
    have."""

    first: int
    last: int
    fraction_bits: int
    signed: bool = False
    step: int = 2

    @classmethod
    def of(cls, low: float, high: float, fraction_bits: int, signed: bool = False, step: int = 2) -> Exponents:
        require_real("low", low, 0, open_low=True)
        require_real("high", high, low, open_low=True)
        # the least positive number the scale knows is one unit: smaller bounds promise nothing more
        low = max(low, 2.0**-fraction_bits)
        first, last = floor_log2(low) // step, -(-ceil_log2(high) // step) - 1
        require(
            step * (last + 1) + fraction_bits <= 61,
            "high",
            high,
            f"below 2^{61 - fraction_bits} at fraction_bits = {fraction_bits}",
            "use fewer fraction bits",
        )
        return cls(first, max(first, last), fraction_bits, signed, step)

    @property
    def inner(self) -> range:
        """The exponents whose threshold 4^k has to be compared with."""
        return range(self.first + 1, self.last + 1)

    def _low_bit(self, k: int) -> int:
        return max(0, self.step * k + self.fraction_bits - TOLERANCE_BITS)

    @property
    def thresholds(self) -> list[int]:
        """4^k; if signed, 0 in front and −4^k beside, moved up by the resolution so that |x| ≥ 4^k is never missed."""
        powers = [(k, 1 << (self.step * k + self.fraction_bits)) for k in self.inner]
        if not self.signed:
            return [power for _, power in powers]
        return [0, *(t for k, power in powers for t in (power, (1 << self._low_bit(k)) - power))]

    @property
    def low_bits(self) -> list[int]:
        bits = [self._low_bit(k) for k in self.inner]
        if not self.signed:
            return bits
        sign = bits[0] if bits else max(0, self.step * self.first + self.fraction_bits)
        return [sign, *(bit for bit in bits for _ in range(2))]

    def weights(self, words: list[int]) -> tuple[int, list[int]]:
        """A constant and one weight per threshold whose weighted sum is the word of the exponent (with x's sign)."""
        steps = [after - before for before, after in itertools.pairwise(words)]
        if not self.signed:
            return words[0], steps
        return -words[-1], [2 * words[0], *(step for step in steps for _ in range(2))]

    @property
    def high_bit(self) -> int:
        return self.step * (self.last + 1) + self.fraction_bits + 1

    def scale(self, mantissa_bits: int = MANTISSA_BITS) -> int:
        """Bits at which 4^-k is exact and leaves something to truncate."""
        return max(0, 2 * self.last, mantissa_bits + 1 - self.fraction_bits)

    def words(self, value: Callable[[int], float], bits: int) -> list[int]:
        """The values at all exponents as integers at a scale."""
        return [round(value(k) * 2.0**bits) for k in range(self.first, self.last + 1)]


def require_room(bits: int, name: str, value: object, way_out: str) -> None:
    """Refuse bounds or scales for which a product would leave ±2^62 before it is truncated."""
    require(
        bits <= 61, name, value, f"{bits - 61} bits smaller: a product would have {bits} bits, and only 61 fit", way_out
    )


def normalise_cost(
    x: ArithmeticTensor,
    low: float,
    high: float,
    outputs: int,
    signed: bool = False,
    mantissa_bits: int = MANTISSA_BITS,
) -> Cost:
    """Thermometer, weighted sums (one for 4^-k and the outputs), one product."""
    exponents = Exponents.of(low, high, x.fraction_bits, signed)
    total = Cost(0, 0)
    if exponents.thresholds:
        total += thermometer.cost(x, exponents.thresholds, exponents.low_bits, exponents.high_bit)
        total += Cost(2, (8 * len(exponents.thresholds) + 16 * (1 + outputs)) * x.size)
    bits = x.fraction_bits + exponents.scale(mantissa_bits) - mantissa_bits
    return total + truncated_product_cost(x.size, bits)


async def normalise(
    x: ArithmeticTensor,
    low: float,
    high: float,
    outputs: Sequence[tuple[Callable[[int], float], int]],
    name: str,
    *,
    signed: bool = False,
    zero: bool = False,
    mantissa_bits: int = MANTISSA_BITS,
) -> tuple[ArithmeticTensor, list[ArithmeticTensor]]:
    """The mantissa m = |x|·4^-k at ``mantissa_bits``, and for each (function, bits) of ``outputs`` the value
    function(k), negative if x is.

    6 rounds; 42 bytes, about 15 bytes an exponent (30 if signed), 16 an output and 24 + 3·bits/8 for the product.
    Domain low ≤ x ≤ high, or low ≤ |x| ≤ high if ``signed``, which debug mode checks in the name of the caller
    (``zero`` allows 0 as well, with m = 0). m lies in [15/16, 4], up to one unit: it is exact but for a truncation.
    """
    exponents = Exponents.of(low, high, x.fraction_bits, signed)
    if x.party.insecure_check_ranges:
        from refmpc.core.debug import check_bounds

        await check_bounds(x, low, high, name, signed=signed, zero=zero)
    scale = exponents.scale(mantissa_bits)
    wanted = [(lambda k: 4.0**-k, scale), *outputs]
    tables = [exponents.weights(exponents.words(value, bits)) for value, bits in wanted]
    if exponents.thresholds:
        reached = await thermometer(x, exponents.thresholds, exponents.low_bits, exponents.high_bit)
        sums = await weigh_bits(reached, np.array([weights for _, weights in tables], dtype=np.int64))
    else:
        sums = ArithmeticTensor.zeros(x.party, (1, *x.shape), 0).broadcast_to((len(tables), *x.shape))
    values = [
        (sums[index] + constant).reinterpret(bits)
        for index, ((constant, _), (_, bits)) in enumerate(zip(tables, wanted, strict=True))
    ]
    shift = x.fraction_bits + scale - mantissa_bits
    return await multiply_truncate(x, values[0], shift), values[1:]
