"""Fixed-point scales of a model with one output (a logit of two classes, or a number): its clip is a clamp.

The gradient of a row is δ·[h 1] with one number δ, so clipping it to γ is clamping δ to ±b, b = γ/‖[h 1]‖, and b does
not depend on the weights: it is computed once, when the rows arrive, and rounded down (proofs §4.9). A step then needs
no norms, no roots and no division by them:

| what | bits |
|---|---|
| ‖[h 1]‖², rounded up | ``SQUARE_BITS`` (20) |
| 1/‖[h 1]‖, never too large | 26 |
| γ as an integer, rounded down | ``clip_bits``, at most 36, so that it has 30 bits where it can |
| b, one unit taken off | 32, ``UPDATE_BITS`` |
| δ, then u = clamp(δ, ±b), exact | 32 |
| [H 1]ᵀu | 46, the scale of the noise |

|u| ≤ b holds in integers, so ‖[h 1]‖·|u| ≤ γ for every rounding, and γ' = γ. A residual z − y needs no bound of its
own: where it is large it is clamped like all others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from accel.validate import require
from protocols.plan.scales import EMBEDDING_BITS, UPDATE_BITS, Scales
from protocols.step.squared_norm_ratio import OverClip
from refmpc.mathematics.normalise import MANTISSA_BITS
from vfl.training import TrainingConfig

__all__ = ["RESOLUTION_BITS", "OneOutputScales", "plan_one_output"]

SQUARE_BITS = 20
CLIP_BITS = 30  # significant ones of γ
RESOLUTION_BITS = 12  # δ is compared with b to 2^-20: beyond that it may be clamped though it need not
LARGEST_OUTPUT = 2.0**27
SMALLEST_BOUND = 2.0**-12
ROOM = 62


@dataclass(frozen=True)
class OneOutputScales:
    """``lengths``: ‖[h 1]‖² on shares. ``error_bound``: of |δ| besides the output itself (1 and its rounding, times a
    weight)."""

    task: str
    clip_norm: float
    lengths: OverClip
    error_bound: float

    @property
    def clip_bits(self) -> int:
        """At which γ is an integer of 30 bits, or of fewer if γ is so small that γ/‖[h 1]‖ would not fit."""
        return min(CLIP_BITS - math.ceil(math.log2(self.clip_norm)), ROOM - MANTISSA_BITS)

    @property
    def clip_word(self) -> int:
        """⌊γ·2^clip_bits⌋, exactly."""
        return math.floor(Fraction(self.clip_norm) * Fraction(2) ** self.clip_bits)

    @property
    def cut(self) -> int:
        """What γ/‖[h 1]‖ loses."""
        return MANTISSA_BITS + self.clip_bits - UPDATE_BITS

    def high_bit(self, output_bound: float) -> int:
        """Compared bits of δ ± b, for outputs within a bound."""
        reach = self.error_bound + self.clip_norm + (output_bound if self.task == "regression" else 0.0)
        return UPDATE_BITS + math.ceil(math.log2(reach)) + 1


def plan_one_output(scales: Scales, training: TrainingConfig) -> OneOutputScales:
    """The scales of one output, or refuse."""
    (layer,) = scales.layers
    lengths = OverClip(1.0, layer.reach, EMBEDDING_BITS, SQUARE_BITS)
    lengths.require_fine("row_bound", scales.row_bound, "scale the rows and the clip norm down")
    smallest = training.clip_norm / layer.reach
    require(
        smallest >= SMALLEST_BOUND and training.clip_norm <= 2.0**20,
        "clip_norm",
        training.clip_norm,
        f"from {SMALLEST_BOUND * layer.reach:.3g} to 2^20 for rows bounded by {scales.row_bound:.4g}",
        "raise the clip norm or lower the row bound",
    )
    require(
        scales.logit_bound <= LARGEST_OUTPUT,
        "learning_rate",
        training.learning_rate,
        f"small enough that outputs stay below 2^27, not {scales.logit_bound:.3g}",
        "lower the learning rate, the epochs, the noise (larger epsilon) or the row bound",
    )
    found = OneOutputScales(training.task, training.clip_norm, lengths, 1.001 * max((1.0, *training.class_weights)))
    assert found.high_bit(2 * LARGEST_OUTPUT) <= ROOM and found.cut >= 1
    return found
