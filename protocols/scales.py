"""Fixed-point scales of a run, chosen from public numbers only. A run whose ranges do not fit refuses to start.

A value outside its range would make δ, then the clip, arbitrary, and the DP claim with it. So every bound here holds for
every input the clients may send (rows within the row bound) and for all noise but a probability that is part of δ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.stats import norm

from accel.validate import require
from vfl.dp import Factorisation
from vfl.twins.config import Schedule, TrainingConfig

__all__ = ["NOISE_DEVIATIONS", "Scales", "plan_scales"]

EMBEDDING_BITS = 14
LOGIT_BITS = 16
PROBABILITY_BITS = 18
UPDATE_BITS = 32  # u = c·δ: its rounding is the only slack of the clip
GRADIENT_BITS = EMBEDDING_BITS + UPDATE_BITS  # of [H 1]ᵀu, and of the noise
RELEASE_BITS = 12  # of the noised, truncated gradient sum y
MOST_WEIGHT_BITS = 36
NOISE_DEVIATIONS = 12.0  # ranges leave room for this many standard deviations


@dataclass(frozen=True)
class Scales:
    """All scales and public bounds of one run. ``learning_rate_words`` of a step are integers k with η/B = k/2^shift."""

    row_bound: float  # of the embeddings as the servers hold them, rounding included
    weight_bits: int
    norm_bits: int
    norm_bound: float  # of n_j = (‖h_j‖²+1)/γ²
    logit_bound: float
    logit_high_bit: int
    overflow_probability: float
    batch_size: int

    @property
    def truncated_bits(self) -> int:
        """m: what the noised gradient loses."""
        return GRADIENT_BITS - RELEASE_BITS

    @property
    def rate_shift(self) -> int:
        """η/B = k/2^shift makes the update W −= k·y local and exact."""
        return self.weight_bits - RELEASE_BITS

    @property
    def clip_bound(self) -> float:
        """Bound of q = n_j·‖δ_j‖², with room for the rounding up; above 1 also when nothing can be clipped."""
        return max(2.0, 4.0 * self.norm_bound)

    def rate_word(self, learning_rate: float) -> int:
        """k for a learning rate."""
        return round(learning_rate / self.batch_size * 2.0**self.rate_shift)

    def learning_rate_used(self, learning_rate: float) -> float:
        """The learning rate that the integer k stands for."""
        return self.rate_word(learning_rate) * 2.0**-self.rate_shift * self.batch_size


def plan_scales(
    config: TrainingConfig,
    schedule: Schedule,
    factorisation: Factorisation,
    *,
    row_bound: float,
    width: int,
    classes: int,
    noise_std: float,
) -> Scales:
    """The scales of a linear global model; ``noise_std`` is that of z really present (outsiders' view).

    Weights: each step moves them by at most ηγ in norm (an average of clipped gradients), momentum by 1/(1−β) of that;
    the noise in a logit is ‖[h 1]‖ times the deviation of one weight, because its coordinates are independent.
    """
    bounded = row_bound + math.sqrt(width) * 2.0 ** -(EMBEDDING_BITS + 1)  # each column is rounded
    reach = math.hypot(bounded, 1.0)
    drift = config.learning_rate * config.clip_norm * schedule.num_steps / (1 - config.momentum)
    deviation = config.learning_rate / config.batch_size * noise_std * factorisation.workload_error("final")
    logit_bound = reach * (drift + NOISE_DEVIATIONS * deviation)
    weight_bits = min(MOST_WEIGHT_BITS, math.floor(61 - EMBEDDING_BITS - math.log2(max(1.0, logit_bound))))
    require(
        weight_bits >= RELEASE_BITS + 8,
        "learning_rate",
        config.learning_rate,
        f"small enough that logits up to {logit_bound:.3g} fit the ring",
        "lower the learning rate, the epochs, the noise (larger epsilon) or the row bound",
    )
    norm_bound = reach**2 / config.clip_norm**2
    norm_bits = min(12, math.floor(61 - 2 * PROBABILITY_BITS - 2 - math.log2(max(1.0, norm_bound))))
    require(
        norm_bits >= 2,
        "clip_norm",
        config.clip_norm,
        f"at least {reach / 2**10.5:.3g} for rows bounded by {row_bound:g}",
        "raise the clip norm or lower the row bound",
    )
    # a difference of two logits, and the constant that exp adds, must stay inside the compared bits
    logit_high_bit = LOGIT_BITS + math.ceil(math.log2(2 * logit_bound + 64)) + 1
    logits = schedule.num_steps * schedule.batch_size * classes
    scales = Scales(
        row_bound=bounded,
        weight_bits=weight_bits,
        norm_bits=norm_bits,
        norm_bound=norm_bound,
        logit_bound=logit_bound,
        logit_high_bit=logit_high_bit,
        overflow_probability=min(1.0, logits * 2 * float(norm.sf(NOISE_DEVIATIONS))),
        batch_size=config.batch_size,
    )
    word = scales.rate_word(config.learning_rate)
    exact = config.learning_rate / config.batch_size * 2.0**scales.rate_shift
    require(
        word >= 1 and abs(word - exact) <= 0.05 * exact,
        "learning_rate",
        config.learning_rate,
        f"at least {10 * 2.0**-scales.rate_shift * config.batch_size:.3g} at weight_bits = {weight_bits}",
        "its fixed-point form would be off by more than 5 %: raise it, or train for fewer steps",
    )
    return scales
