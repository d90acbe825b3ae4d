"""‖row‖²/γ² on shares, never below the true value: the one place that knows the scale of 1/γ² and the room of the ring.

1/γ² becomes the integer ⌈2^b/γ²⌉ at b bits, which is too large by less than γ²/2^b, relative. b is what the ring leaves
to squares of rows within the bound, and no more than 20 bits beyond γ². Every plan asks for at least 5 bits beyond γ²
(``OverClip.require_fine``): below that 1/γ² would be rounded up by more than 3 %, in the end to 1, and the clip would
cut far too much or, out of its domain, nothing at all. Bounds of q take the inflation from ``OverClip.largest``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import refmpc
from accel.validate import require
from refmpc import ArithmeticTensor

__all__ = [
    "ERROR_NORM",
    "MOST_CLIP_BOUND",
    "ROOM",
    "OverClip",
    "most_fraction_bits",
    "norms_over_clip",
    "squares_over_clip",
]

ROOM = 61  # |value| < 2^61 in the ring, half of what truncation allows
ERROR_NORM = 1.42  # ‖δ‖ ≤ √2 but for rounding, whatever exp does: p is e ≥ 0 over its own sum (proofs §3.5)
MOST_CLIP_BOUND = 2.0**32  # of q: the domain of refmpc.clip_factor
FINEST, COARSEST = 20, 5  # bits of 1/γ² beyond those of γ²
INFLATION = 1 + 2.0**-COARSEST


def most_fraction_bits(clip_norm: float, bound: float) -> int:
    """At which rows within ``bound`` leave 1/γ² enough bits."""
    return math.floor((ROOM - 1 - COARSEST - math.log2(INFLATION) - 2 * math.log2(max(bound, clip_norm))) / 2)


@dataclass(frozen=True)
class OverClip:
    """How squared norms of rows at ``fraction_bits``, within ``bound`` (rounding included), become ‖row‖²/γ² at
    ``bits``."""

    clip_norm: float
    bound: float
    fraction_bits: int
    bits: int

    @property
    def ratio(self) -> float:
        """Ratio of the longest row: bound²/γ²."""
        return (self.bound / self.clip_norm) ** 2

    @property
    def inverse_bits(self) -> int:
        """b, such that squares times ``inverse`` stay below 2^ROOM."""
        room = ROOM - 2 * self.fraction_bits - math.log2(INFLATION * max(1.0, self.ratio))
        return min(math.floor(room), FINEST + max(0, math.ceil(2 * math.log2(self.clip_norm))))

    @property
    def inverse(self) -> int:
        """⌈2^b/γ²⌉, exactly."""
        return math.ceil(Fraction(2) ** self.inverse_bits / Fraction(self.clip_norm) ** 2)

    @property
    def is_fine(self) -> bool:
        """Whether 1/γ² is rounded up by 3 % at most."""
        return self.inverse_bits >= COARSEST + 2 * math.log2(self.clip_norm)

    def require_fine(self, rows: str, longest: float, way_out: str) -> None:
        """Refuse a clip norm, or else the bound called ``rows``, that leaves 1/γ² too few bits."""
        most = 2.0 ** ((ROOM - 1 - 2 * self.fraction_bits - COARSEST) / 2) / math.sqrt(INFLATION)
        too_long = self.bound > self.clip_norm
        scale = longest / self.bound if too_long else 1.0
        require(
            self.is_fine,
            rows if too_long else "clip_norm",
            longest if too_long else self.clip_norm,
            f"at most {most * scale:.4g} at {self.fraction_bits} fraction bits, so that 1/clip_norm² is rounded up "
            f"by 3 %"
            " at most",
            way_out,
        )

    @property
    def largest(self) -> float:
        """The largest error of the result: 1/γ² rounded up, and both units of the truncation."""
        inflated = self.bound**2 * float(Fraction(self.inverse) / Fraction(2) ** self.inverse_bits)
        return inflated * (1 + 1e-9) + 2 * 2.0**-self.bits

    @property
    def cut(self) -> int:
        """What the truncation takes away."""
        return 2 * self.fraction_bits + self.inverse_bits - self.bits


async def squares_over_clip(squares: ArithmeticTensor, over: OverClip) -> ArithmeticTensor:
    """Exact squared norms over γ²: 1/γ² is rounded up, and so is the truncation. 1 round, 8 + 6·cut/8 bytes each."""
    scaled = squares.scale_by_integers(over.inverse).reinterpret(over.cut + over.bits)
    return await refmpc.truncate(scaled, over.cut) + 2.0**-over.bits


async def norms_over_clip(rows: ArithmeticTensor, over: OverClip) -> ArithmeticTensor:
    """‖row‖²/γ² of each row. 2 rounds, 24 bytes a row more."""
    return await squares_over_clip(await refmpc.dot(rows, rows), over)
