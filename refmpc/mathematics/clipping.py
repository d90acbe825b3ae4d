"""The clip factor 1/sqrt(max(1, q)), never above: its constants, and what they promise."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from accel.validate import require, require_real
from refmpc.core.integer_logs import ceil_log2
from refmpc.core.primitive import Cost, primitive
from refmpc.core.tensor import ArithmeticTensor
from refmpc.mathematics.powers import Weights, weigh_reached
from refmpc.mathematics.spline import ROOT_ERROR, SPLINE_BITS, spline_times
from refmpc.primitives.dealing import Additive, check_additive

__all__ = ["FACTOR_BITS", "ClipConstants", "clip_octaves", "clip_root"]

ROOT_BITS = 24  # of 2^(−k/2)
FACTOR_BITS = SPLINE_BITS + ROOT_BITS  # of the factor before it is cut
MARGIN_BITS = 17  # the roots are too small by a relative 2^-17: more than everything that may make the factor larger
KINK_BITS = 18  # [q ≥ 1] is compared to 2^-18
NARROW = 44  # up to so many bits of the mantissa a smaller ring is worth the packing
TOLERANCE_BITS = 4  # the other thresholds 2^k to a relative 2^-4


def clip_octaves(high: float, stops: bool = False) -> int:
    """K = ⌈log2 high⌉, at least one. With ``stops`` q ≤ high must not come near 2^K either: from 15/16 of it on a
    comparison may say that it was reached."""
    octaves = max(1, ceil_log2(high))
    near = high > 2.0**octaves * (1 - 2.0**-TOLERANCE_BITS)
    return octaves + (stops and near)


@dataclass(frozen=True)
class ClipConstants:
    """Thresholds 2^k, k = 0..octaves − 1, for q ≤ high at ``fraction_bits``, and the roots (1 − 2^-17)·2^(−k/2),
    floored.

    With ``stops`` there is one more threshold, ``stop`` = 2^octaves: q ≤ high never reaches it, and where 2^octaves was
    added to q the factor is exactly 0.
    """

    fraction_bits: int
    high: float
    stops: bool = False

    def __post_init__(self) -> None:
        require_real("high", self.high, 1.0, 2.0**32, open_low=True)
        room = 61 - self.fraction_bits - 2 * self.stops
        require(
            self.octaves <= room,
            "high",
            self.high,
            f"at most 2^{room} at fraction_bits = {self.fraction_bits}",
            "use fewer fraction bits, or scale q down: only min(q, 2^30) matters to a clip",
        )

    @property
    def octaves(self) -> int:
        """K of ``clip_octaves``."""
        return clip_octaves(self.high, self.stops)

    @property
    def thresholds(self) -> list[int]:
        """2^k as ring words."""
        return [1 << (self.fraction_bits + k) for k in range(self.octaves + self.stops)]

    @property
    def stop(self) -> int:
        """What must be added to q for the factor to be 0, as a power of two in ring words."""
        return self.fraction_bits + self.octaves

    @property
    def low_bits(self) -> list[int]:
        """To what each is compared."""
        above = (max(0, self.fraction_bits + k - TOLERANCE_BITS) for k in range(1, self.octaves + self.stops))
        return [max(0, self.fraction_bits - KINK_BITS), *above]

    @property
    def high_bit(self) -> int:
        return self.fraction_bits + self.octaves + 1 + self.stops

    @property
    def mantissa_bits(self) -> int:
        """Bits of q/2^k, exactly."""
        return self.fraction_bits + self.octaves - 1

    @property
    def ring(self) -> int:
        """Bits of the ring in which the mantissa is made: two more than those of 2; the whole one where that saves
        little."""
        return self.mantissa_bits + 3 if self.mantissa_bits <= NARROW else 64

    @functools.cached_property
    def roots(self) -> tuple[int, ...]:
        """⌊(1 − 2^-17)·2^(−k/2)·2^24⌋, exactly."""
        squared = ((1 << MARGIN_BITS) - 1) ** 2
        return tuple(math.isqrt((squared << (2 * ROOT_BITS)) >> (2 * MARGIN_BITS + k)) for k in range(self.octaves))

    @property
    def weights(self) -> Weights:
        """2^-k·q where q ≥ 1; [q ≥ 1] − 1; the root of the octave: rows for ``weigh_reached``."""
        last = self.octaves - 1
        normaliser = [0, 1 << last, *(-(1 << (last - k)) for k in range(1, self.octaves))]
        reached = [-1, 1, *[0] * last]
        steps = [0, *(after - before for before, after in zip(self.roots, self.roots[1:], strict=False))]
        if self.stops:  # the mantissa becomes 1 and the root 0
            normaliser.append(-1)
            reached.append(-1)
            steps.append(-self.roots[-1])
        return [(normaliser, True), (reached, False), ([self.roots[0], *steps], False)]

    def largest_loss(self, result_bits: int) -> float:
        """How much too small the factor may be, relative, when it is cut to ``result_bits`` and one unit is taken off:
        the spline, the floored roots as they are, two units of the result."""
        losses = []
        for k, root in enumerate(self.roots):
            least = 2.0 ** (-k / 2)
            smallest = 2.0 ** (-(min(k + 1, math.log2(self.high))) / 2)  # the least factor of this octave
            losses.append(1 - root / 2**ROOT_BITS / least + ROOT_ERROR + 2 * 2.0**-result_bits / smallest)
        return max(losses)


def _cost(q: Additive | ArithmeticTensor, high: float, stops: bool = False) -> Cost:
    constants = ClipConstants(q.fraction_bits, high, stops)
    weigh = weigh_reached.cost(
        q, constants.thresholds, constants.low_bits, constants.high_bit, constants.weights, constants.ring
    )
    return weigh + Cost(1, 672 * q.shape[0])


@primitive(cost=_cost, source="this project: thermometer of octaves, spline of the mantissa")
async def clip_root(q: Additive | ArithmeticTensor, high: float, stops: bool = False) -> Additive:
    """1/sqrt(max(1, q)) for −high ≤ q ≤ high at 62 bits, additive, *never above* the true factor. With ``stops``
    exactly 0 where 2^K, K = ``clip_octaves(high, True)``, was added to q ≥ 0, and nowhere else.

    4 rounds, the first of which opens an additive q; about 740 bytes and up to 25 an octave up to ``high``. Cut it with
    a margin of one unit (``scale_rows(…, margin=1)``), and the result is never above either, for every rounding. Too
    small by 2^-17 + 2^-17.94 and the floor of the roots, 2^(k/2 − 24) (``ClipConstants.largest_loss``).

    Never above, relative to the true factor C*. (a) [q ≥ 1] and the octaves are found on q itself, and the mantissa
    m = q/2^k (1 where q < 1) is exact. (b) The spline is off by at most ε = 2^-17.94. (c) root_k ≤ (1 −
    2^-17)·2^(−k/2), and t is exact. So v ≤ C*(1 + ε)(1 − 2^-17) < C* if q ≥ 1 or q counts as below 1. If 1 − 2^-18 ≤ q
    < 1 counts as reached, 1/sqrt(q) ≤ 1 + 2^-18.9, and ε + 2^-18.9 < 2^-17 still. (d) A truncation gives ⌊v⌋ or ⌊v⌋ +
    1: one unit is taken off.
    """
    constants = ClipConstants(q.fraction_bits, high, stops)
    if isinstance(q, ArithmeticTensor):
        require(q.ndim == 1, "q.shape", q.shape, "one number a row")
    bound = math.floor(high * 2.0**q.fraction_bits) + 1
    await check_additive(q, -bound, bound + (1 << constants.stop) * stops, "clip_root")
    scaled, unreached, root = await weigh_reached(
        q, constants.thresholds, constants.low_bits, constants.high_bit, constants.weights, constants.ring
    )
    scale = constants.mantissa_bits + 64 - constants.ring
    mantissa = scaled.minus_shifted(unreached, scale)
    return await spline_times(mantissa.reinterpret(scale), root.reinterpret(ROOT_BITS), "root")
