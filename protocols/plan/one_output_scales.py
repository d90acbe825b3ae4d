"""Fixed-point scales of a model with one output (a logit of two classes, or a number): its clip is one bounded
function.

A record contributes λ·F·[h 1] with a smooth |F| ≤ 1 of its output and label (``vfl.losses.OneOutput``) and λ = ±γ/‖[h
1]‖, rounded down, which does not depend on the weights: it is made once, when the rows arrive (proofs §4.9).

| what | bits |
|---|---|
| ‖[h 1]‖², rounded up | ``SQUARE_BITS`` (20) |
| 1/‖[h 1]‖, never too large | 26 |
| γ as an integer, rounded down; class weights over the largest, rounded down | 24 significant; 8 |
| λ, one unit taken off before its sign | ``multiplier_bits`` |
| F, |F| ≤ 1 for every rounding and every word | ``function_bits``, 23 to 31 |
| u = λ·F, exact | their sum, at least 32 |
| [H 1]ᵀu | 14 more, the scale of the noise once it is lifted |

No output needs a bound: beyond half a period F gives another of its values.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from fractions import Fraction

from accel.validate import require
from protocols.plan.scales import EMBEDDING_BITS, NOISE_DEVIATIONS, RELEASE_BITS, UPDATE_BITS, Scales
from protocols.plan.squared_norm_ratio import OverClip
from refmpc import Series
from refmpc.mathematics.normalise import MANTISSA_BITS
from refmpc.mathematics.series import half_wave, log_word
from vfl.losses import CEILING, OneOutput
from vfl.training import TrainingConfig

__all__ = ["OneOutputScales", "plan_one_output"]

SQUARE_BITS = 20
CLIP_BITS = 24  # significant ones of γ
MULTIPLIER_BITS, FEWEST_MULTIPLIER_BITS = 7, 3  # significant ones of the smallest λ, that of the longest row
FEWEST_FUNCTION_BITS, MOST_FUNCTION_BITS = 23, 31
MOST_UPDATE_BITS = 40
ROOM = 62


@dataclass(frozen=True)
class OneOutputScales:
    """``lengths``: ‖[h 1]‖² on shares."""

    public: OneOutput
    lengths: OverClip
    multiplier_bits: int
    function_bits: int
    class_weights: tuple[float, ...] = ()

    @property
    def task(self) -> str:
        return self.public.task

    @property
    def update_bits(self) -> int:
        """The bits of u = λ·F."""
        return self.multiplier_bits + self.function_bits

    @property
    def gradient_bits(self) -> int:
        """The bits of [H 1]ᵀu, and of the noise."""
        return EMBEDDING_BITS + self.update_bits

    @property
    def clip_bits(self) -> int:
        """At which γ is an integer of 24 bits."""
        return CLIP_BITS - math.ceil(math.log2(self.public.clip_norm))

    @property
    def clip_word(self) -> int:
        """⌊γ·2^clip_bits⌋, exactly."""
        return math.floor(Fraction(self.public.clip_norm) * Fraction(2) ** self.clip_bits)

    @property
    def cut(self) -> int:
        """What γ/‖[h 1]‖ loses, before class weights."""
        return MANTISSA_BITS + self.clip_bits - self.multiplier_bits

    def function(self, wave: tuple[int, int]) -> Series:
        """F for a wave: its argument is what ``argument_words`` makes."""
        return loss_function(self.public, self.function_bits, wave)

    def argument_words(self, output_bits: int, label_bits: int, wave: tuple[int, int]) -> tuple[int, int, int]:
        """(k, l, bits): the argument of F is k·z + l·y at these bits, for outputs z and labels y at theirs."""
        if self.task == "regression":
            word, more = self.public.slope_word
            return word, -(word << (output_bits - label_bits)), output_bits + more
        # −F(−z) = F(z + 2·log b) − 1, and half a period further it is −(F(z + 2·log b) − 1) that becomes F again
        logarithm = log_word(min(1.0, self.public.threshold), output_bits)
        return 1, 2 * logarithm + (wave[0] << (output_bits - 1)), output_bits


@functools.cache
def loss_function(public: OneOutput, bits: int, wave: tuple[int, int]) -> Series:
    period, terms = wave
    dealt = (bits - 1) // 2
    odds = min(1.0, public.threshold) if public.task == "binary" else 1.0
    made = half_wave(period.bit_length() - 1, terms, odds, held_bits=bits - dealt, dealt_bits=dealt)
    ceiling = Fraction(CEILING)
    if public.task == "regression":
        return replace(made.scaled(2 * ceiling), constant=0)
    return made.scaled(ceiling / Fraction(max(1.0, public.threshold)))


def plan_one_output(
    scales: Scales, training: TrainingConfig, public: OneOutput, batch_size: int, noise_std: float, momentum: float
) -> OneOutputScales:
    """The finest scales that fit, or refuse. ``noise_std`` is that of a coordinate of what is cut, ``momentum`` what
    β·v has in it (0 if v is public)."""
    (layer,) = scales.layers
    lengths = OverClip(1.0, layer.reach, EMBEDDING_BITS, SQUARE_BITS)
    lengths.require_fine("row_bound", scales.row_bound, "scale the rows and the clip norm down")
    sums = (batch_size * training.clip_norm + 2 * 2.0**-RELEASE_BITS) / (1 - momentum)
    room = math.floor(ROOM - EMBEDDING_BITS - math.log2(sums + NOISE_DEVIATIONS * noise_std) - 1e-9)
    update_bits = min(MOST_UPDATE_BITS, room)
    smallest = layer.reach / training.clip_norm
    if training.class_weights:
        smallest *= max(training.class_weights) / min(training.class_weights)
    fewest = max(0, FEWEST_MULTIPLIER_BITS + math.ceil(math.log2(smallest)))
    spare = update_bits - FEWEST_FUNCTION_BITS - fewest
    require(
        spare >= 0 and update_bits >= UPDATE_BITS,
        "clip_norm",
        training.clip_norm,
        f"at least {training.clip_norm * 2.0 ** max(0, -spare):.3g} for rows bounded by {scales.row_bound:.4g}, and so"
        f" small that noised sums stay below 2^{ROOM - EMBEDDING_BITS - UPDATE_BITS}",
        "raise the clip norm or epsilon, lower the row bound or the batch size, or give class weights that differ less",
    )
    more = max(0, spare - (MULTIPLIER_BITS - FEWEST_MULTIPLIER_BITS)) // 2
    function_bits = min(MOST_FUNCTION_BITS, FEWEST_FUNCTION_BITS + more)
    return OneOutputScales(public, lengths, update_bits - function_bits, function_bits, training.class_weights)
