"""Fixed-point scales of a step of one layer with ``vfl.bounded_softmax``: what is kept of each opened value, and in
which ring.

| what | bits | ring of what it comes from |
|---|---|---|
| z_j − z_y, an angle | 20 | 64 |
| e = σ(v) | 14 kept, of 31 | those and the period of R |
| s = Σe, an angle | period of R and 16, at most 20 | |
| p' = e·R(s) | 13 kept, of 14 + 22 (beyond 10 classes 26, beyond 16 30) | 38 (42, 46) |
| t = Σp', an angle | 17 | |
| δ = p'/t − y | 13 kept, of 13 + 24 | 40 |
| q = Σδ², exact | 26 | 28 |
| C(q), then u = C·δ, exact | 24, more for a small b, and 13 more | 64 |
| [H 1]ᵀu, and the noise | 14 more | |

Logits need no bound: beyond half a period e is another of its values, and every bound of proofs §4.12 holds.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from fractions import Fraction

from accel.validate import require
from protocols.plan.scales import EMBEDDING_BITS, NOISE_DEVIATIONS, RELEASE_BITS, Scales
from refmpc import Kept, Series, half_wave
from vfl.bounded_softmax import COEFFICIENT_BITS, ODDS, OFFSET, BoundedSoftmax, Sines
from vfl.training import TrainingConfig

__all__ = ["BoundedSoftmaxScales", "with_bounded_softmax"]

ODDS_KEPT = Kept(14, 2, Fraction(1, 2))  # e
SHARES_KEPT = Kept(13, 2, Fraction(1, 2))  # p'
ERRORS_KEPT = Kept(13, 3, Fraction(3, 2))  # δ
CLIP_BITS, FEWEST_CLIP_BITS = 24, 16
ROOM = 62


@dataclass(frozen=True)
class BoundedSoftmaxScales:
    """``clip_bits``: of the clip factor."""

    public: BoundedSoftmax
    clip_bits: int

    def link(self, wave: tuple[int, int]) -> Series:
        """e of z_j − z_y."""
        return _link(wave)

    @property
    def crude(self) -> Series:
        """R. Its error is multiplied by up to as many as there are classes."""
        half = 11 if self.public.classes <= 10 else 13 if self.public.classes <= 16 else 15
        return _series(self.public.crude, half, half, 16)

    @property
    def fine(self) -> Series:
        """1/t."""
        return _series(self.public.fine, 12, 12, 16)

    @property
    def clip(self) -> Series:
        """C."""
        return _clip(self.public, self.clip_bits)

    @property
    def is_fine(self) -> bool:
        """Whether the rounding of C is less than what is taken off it."""
        return self.clip.error <= OFFSET * min(Fraction(1), self.public.threshold)

    @property
    def square_bits(self) -> int:
        """The ring of q."""
        return 2 * ERRORS_KEPT.fraction_bits + self.clip.period_bits

    @property
    def update_bits(self) -> int:
        """The bits of u = C·δ."""
        return ERRORS_KEPT.fraction_bits + self.clip_bits

    @property
    def gradient_bits(self) -> int:
        """The bits of [H 1]ᵀu, and of the noise."""
        return EMBEDDING_BITS + self.update_bits


def _series(sines: Sines, held: int, dealt: int, fraction_bits: int) -> Series:
    constant, *rest = sines.numbers
    parts = tuple(rest[: sines.terms]), tuple(rest[sines.terms :])
    fraction = min(fraction_bits, 20 - sines.period_bits)
    return Series(sines.period_bits, fraction, constant, *parts, False, held, dealt, COEFFICIENT_BITS)


@functools.cache
def _link(wave: tuple[int, int]) -> Series:
    return half_wave(wave[0].bit_length() - 1, wave[1], ODDS, held_bits=15, dealt_bits=16)


@functools.cache
def _clip(public: BoundedSoftmax, bits: int) -> Series:
    return _series(public.clip, bits // 2, bits - bits // 2, 16)


def with_bounded_softmax(
    scales: Scales, training: TrainingConfig, batch_size: int, noise_std: float, momentum: float
) -> Scales:
    """The finest scales that fit, or refuse. ``noise_std`` is that of a coordinate of what is cut, ``momentum`` what
    β·v has in it (0 if v is public)."""
    (layer,) = scales.layers
    public = BoundedSoftmax(layer.fan_out, training.clip_norm, layer.reach)
    sums = (batch_size * training.clip_norm + 2 * 2.0**-RELEASE_BITS) / (1 - momentum)
    bound = sums + NOISE_DEVIATIONS * noise_std
    most = CLIP_BITS + 2 * max(0, -math.floor(math.log2(float(public.threshold))))
    room = math.floor(ROOM - EMBEDDING_BITS - ERRORS_KEPT.fraction_bits - math.log2(bound) - 1e-9)
    found = BoundedSoftmaxScales(public, min(most, room))
    allowed = f"such that noised sums up to {bound:.3g} leave the clip factor bits enough"
    way_out = "lower the batch size, the momentum or the noise (larger epsilon)"
    require(room >= FEWEST_CLIP_BITS and found.is_fine, "clip_norm", training.clip_norm, allowed, way_out)
    return replace(scales, bounded_softmax=found)
