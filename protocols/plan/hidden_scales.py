"""Fixed-point scales of a step of one hidden layer in 21 rounds (27 with secret weights), proofs §4.11; what does not
fit takes longer.

δ of both layers has ``delta_bits``, so that u = C·δ has one scale; q = n_1·‖δ_1‖² + n_2·‖δ_2‖² is exact, as in
``protocols.plan.low_round_scales``. No sample may leave a range, not even one that does not count: sums, logits and δ_1
are bounded for every row, by the worst case of the run if weights are secret, by the weights themselves if they are
open. Only ‖a‖ is limited: a sample beyond ``norm_limit`` has n_2 = 0, 2^K added to its q, and so the factor 0, exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from accel.errors import InvalidArgument
from accel.validate import require, require_integer
from protocols.plan.low_round_scales import (
    DELTA_BITS,
    ERROR_SQUARE,
    FEWEST_CLIP_BITS,
    FEWEST_DELTA_BITS,
    MOST_NORM_BITS,
    ROOM,
)
from protocols.plan.scales import EMBEDDING_BITS, NOISE_DEVIATIONS, RELEASE_BITS, Scales, fits_ring, largest_reach
from protocols.plan.squared_norm_ratio import ERROR_NORM, OverClip
from refmpc.mathematics.clipping import FACTOR_BITS, ClipConstants, clip_octaves
from refmpc.mathematics.probabilities import high_bits
from vfl.training import TrainingConfig

__all__ = ["HiddenScales", "with_hidden_chain"]

FEWEST_NORM_BITS = 4
MOST_CLIP_LOSS = 2.0**-10
ERROR_LIMITS = (256.0, 128.0, 64.0, 32.0, 16.0, 8.0)  # of ‖δ_1‖, tried in this order


@dataclass(frozen=True)
class HiddenScales:
    """Scales of one step. ``sum_bound`` (of a sum of the hidden layer), ``output_bound`` (of ‖a‖) and ``logit_bound``
    hold for every row; with open weights those of the step take their place."""

    hidden: int
    classes: int
    norms: OverClip  # n_2 of samples that count
    norm_limit: float  # of ‖a‖
    error_limit: float  # of ‖δ_1‖: what the weights must allow
    clip_bound: float
    clip_bits: int
    delta_bits: int
    sum_bound: float
    output_bound: float
    logit_bound: float

    def __post_init__(self) -> None:
        require_integer("clip_bits", self.clip_bits, FEWEST_CLIP_BITS, 40)
        self.clip.roots  # noqa: B018 - the constants refuse a bound that does not fit

    @property
    def q_bits(self) -> int:
        """Bits of q."""
        return 2 * self.delta_bits + self.norms.bits

    @cached_property
    def clip(self) -> ClipConstants:
        """Thresholds and roots of the clip, with one from which on the factor is 0."""
        return ClipConstants(self.q_bits, self.clip_bound, stops=True)

    @property
    def factor_cut(self) -> int:
        """What the clip factor loses."""
        return FACTOR_BITS - self.clip_bits

    @property
    def gradient_bits(self) -> int:
        """Gradient bits of [A 1]ᵀu, and of the noise."""
        return EMBEDDING_BITS + self.delta_bits + self.clip_bits

    @property
    def clip_loss(self) -> float:
        """How much too small a clip factor may be, relative; never too large."""
        return self.clip.largest_loss(self.clip_bits)


def with_hidden_chain(
    scales: Scales, training: TrainingConfig, batch_size: int, noise_std: float, momentum: float
) -> Scales:
    """The scales of an MLP of one hidden layer with those of the shorter step, or ``scales`` as they are where it does
    not fit.

    Arguments as of ``with_low_round``. The largest limit of ‖δ_1‖ is taken that leaves the clip factor a loss of 2^-10.
    """
    first, last = scales.layers
    assert scales.norm_limit is not None
    sums = (batch_size * training.clip_norm + 2 * 2.0**-RELEASE_BITS) / (1 - momentum)
    gradient_bound = sums + NOISE_DEVIATIONS * noise_std
    logit_bound = math.hypot(first.sum_bound, 1.0) * last.weight_bound
    for limit in ERROR_LIMITS:
        if limit > scales.norm_limit or limit < first.back_bound:
            continue
        for delta_bits in range(DELTA_BITS, FEWEST_DELTA_BITS - 1, -1):
            try:
                found = _at_limit(scales, limit, delta_bits, gradient_bound, first.sum_bound, logit_bound)
                _require_secret_ranges(scales, found)
            except InvalidArgument:
                continue
            # the norms of rows are shared once, and a step whose weights outgrow these scales takes the longer way with
            # them
            both = replace(scales, layers=(first.with_norm_bits(found.norms.bits), last), hidden_chain=found)
            if found.clip_loss <= MOST_CLIP_LOSS and fits_ring(both):
                return both
    return scales


def _at_limit(
    scales: Scales, limit: float, delta_bits: int, gradient_bound: float, output_bound: float, logit_bound: float
) -> HiddenScales:
    """The finest scales for this limit of ‖δ_1‖, or InvalidArgument."""
    first, last = scales.layers
    assert scales.norm_limit is not None
    norms = replace(last.norms, bound=min(largest_reach(scales.norm_limit), math.hypot(output_bound, 1.0)))
    require(norms.is_fine, "norm_limit", scales.norm_limit, "small enough for the scale of 1/clip_norm²")
    longest = limit + math.sqrt(first.fan_out) * 2.0**-delta_bits
    for bits in range(min(MOST_NORM_BITS, first.norm_bits), FEWEST_NORM_BITS - 1, -1):
        one, two = replace(first.norms, bits=bits), replace(norms, bits=bits)
        clip_bound = max(2.0, one.largest * longest**2 + two.largest * ERROR_SQUARE)
        octaves = clip_octaves(clip_bound, stops=True)
        if 2 * delta_bits + bits + octaves + 2 <= 61:
            break
    wanted = max(FEWEST_CLIP_BITS, 18 + math.ceil((octaves - 1) / 2))
    room = math.floor(ROOM - EMBEDDING_BITS - delta_bits - math.log2(max(1.0, gradient_bound)) - 1e-9)
    require(room >= FEWEST_CLIP_BITS, "gradient_bound", gradient_bound, "smaller", "lower the noise or the batch size")
    return HiddenScales(
        hidden=first.fan_out,
        classes=last.fan_out,
        norms=two,
        norm_limit=scales.norm_limit,
        error_limit=limit,
        clip_bound=clip_bound,
        clip_bits=min(wanted, room),
        delta_bits=delta_bits,
        sum_bound=first.sum_bound,
        output_bound=output_bound,
        logit_bound=logit_bound,
    )


def _require_secret_ranges(scales: Scales, found: HiddenScales) -> None:
    """With secret weights every product must fit by the worst case of the run."""
    first, _ = scales.layers
    bits = {
        "logits": EMBEDDING_BITS + scales.weight_bits + math.log2(max(1.0, found.logit_bound)),
        "errors": found.delta_bits + scales.weight_bits + math.log2(max(1.0, first.back_bound)),
        "squared outputs": 2 * EMBEDDING_BITS + 2 * math.log2(found.output_bound + 1.0),
    }
    for name, needed in bits.items():
        require(needed <= 60, name, needed, "60 bits at most")
    high_bits(2 * found.logit_bound)
    require(found.error_limit >= ERROR_NORM, "error_limit", found.error_limit, f"at least {ERROR_NORM}")
