"""Fixed-point scales of the low-round step, from public numbers only; what does not fit is refused.

| what | bits |
|---|---|
| logits z | ``logit_bits``, with logit_bits + log2 of their bound at most 61 |
| p − y, then δ | 40, cut to ``delta_bits`` (15) |
| q = n·Σδ², exact | 2·delta_bits + norm_bits |
| clip factor C, cut from 62 bits, one unit taken off | ``clip_bits`` = 18 + ⌈(K − 1)/2⌉ for K octaves |
| u = C·δ, exact | delta_bits + clip_bits (37) |
| [H 1]ᵀu | 14 more (51) |

q is the exact integer n·Σδ² of the very δ that u uses, n is rounded up and C is never above 1/sqrt(max(1, q)): so
sqrt(n)·‖u‖ ≤ 1 holds exactly, for every rounding, and γ' = γ: the clip leaves no slack to account for.

Class weights w make p − y into w·(p − y), at ``weight_bits`` more, before the cut: δ and q are those of the weighted
error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from accel.errors import InvalidArgument
from accel.validate import require, require_integer, require_real
from protocols.plan.scales import EMBEDDING_BITS, NOISE_DEVIATIONS, RELEASE_BITS, Scales
from refmpc.mathematics.clipping import FACTOR_BITS, ClipConstants
from refmpc.mathematics.probabilities import PROBABILITY_BITS, high_bits, order_width
from vfl.losses import WEIGHT_BITS
from vfl.training import TrainingConfig

__all__ = ["LowRoundScales", "plan_low_round", "with_low_round"]

DELTA_BITS, FEWEST_DELTA_BITS = 15, 13
MOST_NORM_BITS = 12
FEWEST_CLIP_BITS = 20
ERROR_SQUARE = 2.01  # bound of ‖δ‖², whatever exp does: p is e ≥ 0 over its own sum (proofs §3.5)
ROOM = 62  # what a truncation takes
MOST_CLIP_LOSS = 2.0**-12


@dataclass(frozen=True)
class LowRoundScales:
    """Scales of one step from logits to u. ``logit_bound`` may be that of this step alone."""

    classes: int
    logit_bits: int
    logit_bound: float
    norm_bits: int
    clip_bound: float  # of q
    clip_bits: int
    delta_bits: int = DELTA_BITS
    weight_bits: int = 0  # of class weights; 0: none

    def __post_init__(self) -> None:
        require_integer("classes", self.classes, 2, 64)
        require_real("logit_bound", self.logit_bound, 0, open_low=True)
        fits = self.logit_bits + math.log2(max(1.0, self.logit_bound)) <= 61
        require(fits, "logit_bits", self.logit_bits, f"smaller for logits up to {self.logit_bound:g}", "61 bits fit")
        require_integer("delta_bits", self.delta_bits, FEWEST_DELTA_BITS, 20)
        require_integer("norm_bits", self.norm_bits, 2, 20, way_out="raise the clip norm or lower the row bound")
        require_integer("clip_bits", self.clip_bits, FEWEST_CLIP_BITS, 40)
        high_bits(self.spread)
        self.clip.roots  # noqa: B018 - the constants refuse a bound that does not fit

    @property
    def spread(self) -> float:
        """How far two logits of a row may be apart."""
        return 2.0 * self.logit_bound

    @property
    def order_bits(self) -> tuple[int, int]:
        """Compared bits of the coarse logits, and the digits of exp above 16."""
        return order_width(self.spread), high_bits(self.spread)

    @property
    def cut_bits(self) -> int:
        """What p − y loses."""
        return PROBABILITY_BITS + self.weight_bits - self.delta_bits

    @property
    def q_bits(self) -> int:
        """Bits of q = n·Σδ²."""
        return 2 * self.delta_bits + self.norm_bits

    @cached_property
    def clip(self) -> ClipConstants:
        """Thresholds and roots of the clip."""
        return ClipConstants(self.q_bits, self.clip_bound)

    @property
    def factor_cut(self) -> int:
        """What the clip factor loses."""
        return FACTOR_BITS - self.clip_bits

    @property
    def update_bits(self) -> int:
        """Update bits of u = C·δ."""
        return self.delta_bits + self.clip_bits

    @property
    def gradient_bits(self) -> int:
        """Gradient bits of [H 1]ᵀu, and of the noise."""
        return EMBEDDING_BITS + self.update_bits

    @property
    def clip_loss(self) -> float:
        """How much too small a clip factor may be, relative; never too large. From the root constants themselves."""
        return self.clip.largest_loss(self.clip_bits)

    @property
    def gradient_room(self) -> float:
        """|sum of clipped gradients + noise (+ momentum)| of a coordinate must stay below this."""
        return 2.0 ** (ROOM - self.gradient_bits)


def plan_low_round(
    classes: int,
    logit_bits: int,
    logit_bound: float,
    norm_bound: float,
    gradient_bound: float,
    norm_bits: int | None = None,
    largest_weight: float | None = None,
) -> LowRoundScales:
    """The finest scales that fit: ``norm_bound`` bounds n = ‖[h 1]‖²/γ², ``gradient_bound`` a coordinate of the noised
    sum.

    Fewer bits of the clip factor (down to 20) and of δ (14, 13) are tried in this order. ``norm_bits`` if n is shared
    already. ``largest_weight`` of a class, if there are class weights.
    """
    require_real("norm_bound", norm_bound, 0, open_low=True)
    clip_bound = max(2.0, ERROR_SQUARE * norm_bound * (largest_weight or 1.0) ** 2)
    octaves = math.ceil(math.log2(clip_bound))
    wanted = max(FEWEST_CLIP_BITS, 18 + math.ceil((octaves - 1) / 2))
    tried = [(DELTA_BITS, bits) for bits in range(wanted, FEWEST_CLIP_BITS - 1, -1)]
    tried += [(bits, FEWEST_CLIP_BITS) for bits in range(DELTA_BITS - 1, FEWEST_DELTA_BITS - 1, -1)]
    for delta_bits, clip_bits in tried:
        room = 2.0 ** (ROOM - EMBEDDING_BITS - delta_bits - clip_bits)
        if gradient_bound < room:
            break
    require(
        gradient_bound < room,
        "gradient_bound",
        gradient_bound,
        f"below {room:g}, the range of a clipped, noised sum at {EMBEDDING_BITS + delta_bits + clip_bits} bits",
        "lower the noise (larger epsilon), the batch size or the momentum",
    )
    bits = min(MOST_NORM_BITS, 61 - 2 * delta_bits - octaves) if norm_bits is None else norm_bits
    weight_bits = 0 if largest_weight is None else WEIGHT_BITS
    return LowRoundScales(classes, logit_bits, logit_bound, bits, clip_bound, clip_bits, delta_bits, weight_bits)


def with_low_round(
    scales: Scales, training: TrainingConfig, batch_size: int, noise_std: float, momentum: float
) -> Scales:
    """The scales of a step of one layer with factored gradients in 18 rounds (17 with open weights).

    ``noise_std`` is that of a coordinate of what is truncated, ``momentum`` what β·v has in it (0 if v is public). A
    run that leaves the finer gradient no room, or the clip factor more loss than 2^-12, keeps ``scales`` and its longer
    step.
    """
    sums = (batch_size * training.clip_norm + 2 * 2.0**-RELEASE_BITS) / (1 - momentum)
    gradient_bound = sums + NOISE_DEVIATIONS * noise_std
    (layer,) = scales.layers
    logits = layer.fan_out, EMBEDDING_BITS + scales.weight_bits, scales.logit_bound
    weight = max(1.0, *training.class_weights) if training.class_weights else None
    for bits in range(MOST_NORM_BITS, 1, -1):
        norms = replace(layer.norms, bits=bits)
        try:
            found = plan_low_round(*logits, norms.largest, gradient_bound, bits, weight)
        except InvalidArgument:
            continue
        if found.clip_loss > MOST_CLIP_LOSS:
            break
        return replace(scales, layers=(replace(layer, norms=norms),), low_round=found)
    return scales
