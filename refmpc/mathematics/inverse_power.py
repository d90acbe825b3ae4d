"""1/x and 1/sqrt(x) over wide ranges, additive, in five rounds: octaves, a spline of the mantissa, one product."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from accel.validate import require
from refmpc.core.primitive import Cost
from refmpc.core.rounds import gather
from refmpc.core.tensor import ArithmeticTensor
from refmpc.mathematics.normalise import Exponents
from refmpc.mathematics.powers import weigh_reached
from refmpc.mathematics.scale_rows import scale_rows
from refmpc.mathematics.spline import FUNCTION_BITS as SPLINE_BITS
from refmpc.mathematics.spline import spline_times
from refmpc.primitives.dealing import Additive, replicate

__all__ = ["InversePlan", "inverse_power", "inverse_power_cost"]

FUNCTION_BITS = 24  # f(m), below 2^25 at this scale
ROOM = 62 - FUNCTION_BITS - 1  # for the power
ROOT_PRECISION = 17  # bits of the smallest 2^(−k/2): its rounding is 2^-18 relative


@dataclass(frozen=True)
class InversePlan:
    """Octaves of x, and the scales of its mantissa and of 2^-k or 2^(−k/2)."""

    exponents: Exponents
    function: str
    power_bits: int

    @classmethod
    def of(cls, fraction_bits: int, low: float, high: float, function: str, signed: bool = False) -> InversePlan:
        """Refuses ranges over which the power has no room."""
        exponents = Exponents.of(low, high, fraction_bits, signed, step=1)
        if not exponents.inner and not signed:  # one octave: compared all the same
            exponents = replace(exponents, first=exponents.first - 1)
        share = 1.0 if function == "reciprocal" else 0.5
        most = ROOM - math.ceil(-exponents.first * share)
        least = exponents.last if function == "reciprocal" else ROOT_PRECISION + math.ceil(exponents.last * share)
        require(
            least <= most and fraction_bits + exponents.last <= 61,
            "high / low",
            high / low,
            f"{max(1, least - most)} bits smaller",
            "give narrower bounds",
        )
        return cls(exponents, function, max(0, most))

    @property
    def extra(self) -> int:
        """What a short mantissa is moved up by."""
        return max(0, 6 - self.exponents.fraction_bits - self.exponents.last)

    @property
    def mantissa_bits(self) -> int:
        return self.exponents.fraction_bits + self.exponents.last + self.extra

    @property
    def ring(self) -> int:
        """Bits of the ring in which the mantissa is made: two more than those of 2, so that its range can be
        checked."""
        return self.mantissa_bits + 3

    @property
    def result_bits(self) -> int:
        """The scale of the additive result, below 2^62."""
        return FUNCTION_BITS + self.power_bits

    def power(self, k: int) -> int:
        """2^-k, exactly, or 2^(−k/2) rounded, as a word."""
        if self.function == "reciprocal":
            return 1 << (self.power_bits - k)
        doubled = math.isqrt(1 << (2 * self.power_bits + 2 - k))  # ⌊2·2^(power_bits − k/2)⌋
        return (doubled + 1) // 2

    def weights(self) -> list[tuple[list[int], bool]]:
        """Rows for ``weigh_reached``: x·2^-k (the mantissa), and the power with the sign of x."""
        octaves = range(self.exponents.first, self.exponents.last + 1)
        rows = []
        for words, times in (
            ([1 << (self.exponents.last - k + self.extra) for k in octaves], True),
            ([self.power(k) for k in octaves], False),
        ):
            start, steps = self.exponents.weights(words)
            rows.append(([start, *steps], times))
        return rows


def inverse_power_cost(x: ArithmeticTensor, plan: InversePlan) -> Cost:
    """Cost of ``inverse_power``."""
    column = x.reshape(x.size)
    exponents = plan.exponents
    weigh = weigh_reached.cost(
        column, exponents.thresholds, exponents.low_bits, exponents.high_bit, plan.weights(), plan.ring
    )
    mantissa = Additive(x.party, column.shares[0], [], 61, 0)
    return weigh + spline_times.cost(mantissa, None, plan.function) + Cost(0, 16 * x.size) + Cost(1, 48 * x.size)


async def inverse_power(x: ArithmeticTensor, plan: InversePlan) -> Additive:
    """1/x or 1/sqrt(x) of a flat x, additive at ``plan.result_bits``. 5 rounds; about 310 bytes and 17 an octave.

    Thermometer of octaves, whose weighted sums give m = x/2^k exactly, in [15/16, 2), and the power; f(m) by a spline
    while the power is made replicated; ⌊f(m)⌋ at 24 bits or one more, times the power. Relative error: the spline's
    (2^-16.5, or 2^-17.94 for the root), 2^-23.9 of the cut, and 2^-18 where the power is not exact (roots).
    """
    exponents = plan.exponents
    scaled, power = await weigh_reached(
        x, exponents.thresholds, exponents.low_bits, exponents.high_bit, plan.weights(), plan.ring
    )
    mantissa = scaled.reinterpret(plan.mantissa_bits + 64 - plan.ring)
    function, factor = await gather(
        spline_times(mantissa, None, plan.function), replicate(power.reinterpret(plan.power_bits))
    )
    found = await scale_rows(function, factor.reshape(x.size, 1), SPLINE_BITS - FUNCTION_BITS)
    return found.reshape(x.size)
