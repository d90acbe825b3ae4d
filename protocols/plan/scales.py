"""Fixed-point scales of a run, chosen from public numbers only. A run whose ranges do not fit refuses to start.

A value outside its range would make δ, then the clip, arbitrary, and the DP claim with it. So every bound here holds
for every input the clients may send (rows within the row bound) and for all noise but a probability that is part of δ.

**MLP.** The same worst case compounds over layers: with ‖W_l‖ ≤ ω_l (start, drift ηγT/(1−β) and noise) activations
would be bounded by R·Πω, errors by √2·Πω, and for two hidden layers and a few hundred steps that no longer fits 64
bits. So norms are *enforced*: a sample with ‖a_l‖ or ‖δ_l‖ above a public ``norm_limit`` at any hidden layer
contributes zero (its clip factor is multiplied by a secret bit), here and in the twin. That is a function of its own
row and of W, so the clip's proof is untouched, and it costs a comparison a *sample* and layer where clamping costs one
an *entry*. One layer ahead everything is in range: ‖W_l‖·limit fits, and so does its square, so the first layer that
leaves the limit is always seen; what later layers compute for such a sample may wrap around and is multiplied by zero.

ω_l: rows of an MLP's inner layers depend on the noise in W, so a coordinate's deviation is not enough. The noise in W_l
is a Gaussian matrix of norm at most dev·(√fan_in + √fan_out + 12) but for e^-72 a step and layer (Davidson & Szarek
2001). Each layer's drift is bounded by the whole clip norm.

What rounds: a_l, δ_l and W are integers when they enter norms *and* gradients, so their own rounding changes which
function is clipped, not the bound. ‖[a 1]‖²/γ² and ‖δ‖² are exact and rounded up, their products too, so q_j ≥
‖g_j‖²/γ² always and c_j is never too large. What is left is u_l = cut(c·δ_l), off by at most 2^-32 an entry: γ' − γ =
2^-32·sqrt(Σ_l fan_out_l·‖[a_{l−1} 1]‖²), the same as for one layer when there is only one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from scipy.stats import norm

from accel.validate import require
from protocols.plan.squared_norm_ratio import ERROR_NORM, MOST_CLIP_BOUND, ROOM, OverClip
from refmpc.mathematics.normalise import MANTISSA_BITS
from vfl.dp import Factorisation
from vfl.hidden import activation
from vfl.training import Schedule, TrainingConfig

if TYPE_CHECKING:
    from protocols.plan.bounded_softmax_scales import BoundedSoftmaxScales
    from protocols.plan.hidden_scales import HiddenScales
    from protocols.plan.low_round_scales import LowRoundScales
    from protocols.plan.one_output_scales import OneOutputScales
    from protocols.plan.smooth_scales import SmoothScales
    from vfl.bounded_softmax import BoundedSoftmax
    from vfl.hidden import HiddenClip
    from vfl.losses import OneOutput

__all__ = [
    "NOISE_DEVIATIONS",
    "LayerScales",
    "Scales",
    "enforced_row_bound",
    "fits_ring",
    "largest_reach",
    "plan_scales",
]

EMBEDDING_BITS = 14
LOGIT_BITS = 16
PROBABILITY_BITS = 18
UPDATE_BITS = 32  # u = c·δ: its rounding is the only slack of the clip
GRADIENT_BITS = EMBEDDING_BITS + UPDATE_BITS  # of the noise, and of [H 1]ᵀu but for steps in 18 rounds
RELEASE_BITS = 12  # of the noised, truncated gradient sum y
MOST_WEIGHT_BITS = 36
HEAD_BITS = 16  # of open weights as a step uses them: with 14 of the embeddings 30, the finest logits the softmax takes
NOISE_DEVIATIONS = 12.0  # ranges leave room for this many standard deviations
FEWEST_ERROR_BITS = 10  # of δ of a hidden layer
NORM_LIMITS = (256.0, 128.0, 64.0, 32.0, 16.0)  # tried in this order
ROW_TOLERANCE_BITS = (
    8  # squared norms of rows that pass the servers' test may be 2^-8 beyond their bound (proofs §11.2)
)
RESOLUTION_BITS = 6  # a limit on a square is compared to a relative 2^-6
LIMIT_TOLERANCE = math.sqrt(1 + 2.0**-RESOLUTION_BITS)
EXPLICIT_BITS = GRADIENT_BITS - MANTISSA_BITS  # of a per-sample gradient: times a clip factor, the scale of the noise
DECAY_BITS = 16  # of α
RATE_ERROR = 1.06  # the learning rate may be off by 5 % in fixed point


@dataclass(frozen=True)
class LayerScales:
    """One layer of the global model: what comes in, [a 1], and what comes back, δ, of samples that count."""

    fan_in: int
    fan_out: int
    norms: OverClip  # n = ‖[a 1]‖²/γ²
    error_bound: float  # of ‖δ‖
    error_bits: int
    square_bits: int  # of ‖δ‖² when it meets n
    weight_bound: float = 0.0  # ω ≥ ‖W‖, MLP only
    sum_bound: float = 0.0  # of ‖[a 1]·W‖, also for samples that do not count; MLP only
    back_bound: float = 0.0  # of ‖δ‖ before the limit is looked at; hidden layers only

    @property
    def reach(self) -> float:
        """Reach of ‖[a 1]‖."""
        return self.norms.bound

    @property
    def norm_bits(self) -> int:
        return self.norms.bits

    def with_norm_bits(self, bits: int) -> LayerScales:
        """With n at ``bits``, and ‖δ‖² as fine as their product then leaves room for."""
        norms = replace(self.norms, bits=bits)
        room = math.floor(ROOM - bits - math.log2(norms.largest * self.error_bound**2 + 1.0))
        return replace(self, norms=norms, square_bits=min(2 * self.error_bits, room))

    @property
    def largest_square(self) -> float:
        """The largest ‖δ‖² when it meets n, rounded up."""
        return self.error_bound**2 + 2 * 2.0**-self.square_bits

    @property
    def clip_part(self) -> float:
        """Bound of this layer's part of q, with everything that is rounded up on the way."""
        return self.norms.largest * self.largest_square + 2 * 2.0**-MANTISSA_BITS

    @property
    def sum_high_bit(self) -> int:
        """Compared bits of [a 1]·W, at the scale of the embeddings."""
        return EMBEDDING_BITS + math.ceil(math.log2(self.sum_bound)) + 1

    def outputs_range(self, norm_limit: float) -> tuple[int, int]:
        """(low, high): compared bits of norm_limit² + 1 − ‖[a 1]‖², a this layer's output."""
        return _square_range(EMBEDDING_BITS, norm_limit, math.hypot(self.sum_bound, 1.0))

    def errors_range(self, norm_limit: float) -> tuple[int, int]:
        """(low, high): compared bits of norm_limit² − ‖δ‖²."""
        return _square_range(self.error_bits, norm_limit, self.back_bound)


def largest_reach(limit: float) -> float:
    """Largest reach of ‖[a 1]‖ of a sample that counts, ‖a‖ limited."""
    return math.hypot(limit, 1.0) * LIMIT_TOLERANCE


def _square_range(bits: int, limit: float, bound: float) -> tuple[int, int]:
    low = 2 * bits + math.floor(2 * math.log2(limit)) - RESOLUTION_BITS
    return max(0, low), 2 * bits + math.ceil(2 * math.log2(max(bound, limit) + 1.0)) + 1


@dataclass(frozen=True)
class Scales:
    """All scales and public bounds of one run. ``learning_rate_words`` of a step are integers k with η/B = k/2^shift
    (Adam: η = k/2^shift)."""

    row_bound: float  # of the embeddings as the servers hold them: rounding, and what their test lets pass, included
    weight_bits: int
    logit_bound: float
    logit_high_bit: int
    overflow_probability: float
    divisor: float  # records of a batch on average: what sums are divided by; 1 for Adam, whose changes have no unit
    layers: tuple[LayerScales, ...]
    norm_limit: float | None = None  # of hidden activations and errors; None for one layer
    written_out: OverClip | None = None  # ‖g_j‖²/γ² of a per-sample gradient; explicit gradients only
    low_round: LowRoundScales | None = None  # of a step of one layer in 18 rounds, where it fits
    one_output: OneOutputScales | None = None  # of a step of one layer with one output
    bounded_softmax: BoundedSoftmaxScales | None = None  # of a step of one layer with that loss
    hidden_chain: HiddenScales | None = None  # of a step of one hidden layer in 21 or 27 rounds, where it fits

    smooth: SmoothScales | None = None  # of a step of hidden layers with waves

    @property
    def norms(self) -> OverClip:
        """n_j = (‖h_j‖²+1)/γ²."""
        return self.layers[0].norms

    @property
    def norm_bits(self) -> int:
        return self.norms.bits

    @property
    def bounded(self) -> OneOutput | BoundedSoftmax | HiddenClip | None:
        """What is public about loss and clip, where they are made of series."""
        chosen = self.one_output or self.bounded_softmax or self.smooth
        return None if chosen is None else chosen.public

    @property
    def row_bits(self) -> int:
        """Row bits of what is kept of each row: n_j, or with one output λ_j = ±γ/‖[h_j 1]‖."""
        return self.norm_bits if self.one_output is None else self.one_output.multiplier_bits

    @cached_property
    def gradient_bits(self) -> int:
        """Gradient bits of the sum of clipped gradients when the noise is added."""
        chain = self.low_round or self.hidden_chain or self.one_output or self.bounded_softmax or self.smooth
        return GRADIENT_BITS if chain is None else chain.gradient_bits

    @property
    def update_bits(self) -> int:
        """Update bits of u: what the gradient has beside the embeddings."""
        return self.gradient_bits - EMBEDDING_BITS

    @cached_property
    def noise_shift(self) -> int:
        """The noise has 46 bits: what lifts it to those of the gradient."""
        return self.gradient_bits - GRADIENT_BITS

    @cached_property
    def truncated_bits(self) -> int:
        """m: what the noised gradient loses."""
        return self.gradient_bits - RELEASE_BITS

    @property
    def rate_shift(self) -> int:
        """η/B = k/2^shift makes the update W −= k·y local and exact."""
        return self.weight_bits - RELEASE_BITS

    @property
    def clip_bound(self) -> float:
        """Bound of q = Σ_l n_lj·‖δ_lj‖², all rounding up included; above 1 also when nothing can be clipped."""
        if self.written_out is not None:
            return max(2.0, self.written_out.largest)
        return max(2.0, sum(layer.clip_part for layer in self.layers))

    @property
    def clip_rounding(self) -> float:
        """γ' − γ: what rounding u_l = c·δ_l may add to a clipped contribution, over all layers; 0 where u is exact."""
        if self.low_round is not None or self.bounded is not None:
            return 0.0
        squares = sum(layer.fan_out * layer.reach**2 for layer in self.layers)
        return 2.0**-UPDATE_BITS * math.sqrt(squares)

    def rate_word(self, learning_rate: float) -> int:
        """k for a learning rate."""
        return round(learning_rate / self.divisor * 2.0**self.rate_shift)

    def learning_rate_used(self, learning_rate: float) -> float:
        """The learning rate that the integer k stands for."""
        return self.rate_word(learning_rate) * 2.0**-self.rate_shift * self.divisor


def plan_scales(
    config: TrainingConfig,
    schedule: Schedule,
    factorisation: Factorisation,
    *,
    row_bound: float,
    width: int,
    outputs: int,
    noise_std: float,
    start_norms: Sequence[float] = (),
) -> Scales:
    """The scales of the global model; ``noise_std`` is that of z really present (outsiders' view).

    Weights: each step moves them by at most ηγ in norm (an average of clipped gradients), momentum by 1/(1−β) of that;
    Adam moves each by at most η, noise included. One layer: the noise in a logit is ‖[h 1]‖ times the deviation of one
    weight, because its coordinates are independent. MLP: norms of matrices, with ``start_norms`` those of the public
    starting weights.
    """
    if config.hidden:
        return _plan_layers(config, schedule, factorisation, row_bound, width, outputs, noise_std, start_norms)
    bounded, drift, deviation = _movement(config, schedule, factorisation, row_bound, width, noise_std)
    reach = math.hypot(bounded, 1.0)
    rounding = _release_rounding(config, schedule, (width + 1) * outputs)
    weight_bound = RATE_ERROR * (drift + NOISE_DEVIATIONS * deviation + rounding)
    if config.optimiser == "adam":
        weight_bound = _adam_bound(config, schedule, width + 1)  # of a column
    logit_bound = reach * weight_bound
    weight_bits = min(
        MOST_WEIGHT_BITS, math.floor(ROOM - max(EMBEDDING_BITS + _log2(logit_bound), _decay_room(config, weight_bound)))
    )
    require(
        weight_bits >= RELEASE_BITS + 8,
        "learning_rate",
        config.learning_rate,
        f"small enough that logits up to {logit_bound:.3g} fit the ring",
        "lower the learning rate, the epochs, the noise (larger epsilon) or the row bound",
    )
    squared = 2 * PROBABILITY_BITS  # bits of ‖δ‖², which is below 2.02: n·‖δ‖² needs two bits more than n
    norms = OverClip(config.clip_norm, reach, EMBEDDING_BITS, 0)
    norms = replace(norms, bits=min(12, math.floor(ROOM - squared - 2 - _log2(norms.ratio))))
    require(
        norms.bits >= 2,
        "clip_norm",
        config.clip_norm,
        f"at least {reach / 2**10.5:.5g} for rows bounded by {row_bound:g}",
        "raise the clip norm or lower the row bound",
    )
    norms.require_fine("row_bound", row_bound, "scale the rows and the clip norm down: nothing else changes")
    written_out = None
    if config.gradients == "explicit":
        longest = ERROR_NORM * reach + math.sqrt((width + 1) * outputs) * 2.0**-EXPLICIT_BITS
        written_out = OverClip(config.clip_norm, longest, EXPLICIT_BITS, MANTISSA_BITS)
        written_out.require_fine(
            "row_bound", row_bound, "use factored gradients, or scale the rows and the clip norm down"
        )
    # a difference of two logits, and the constant that exp adds, must stay inside the compared bits
    logit_high_bit = LOGIT_BITS + math.ceil(math.log2(2 * logit_bound + 64)) + 1
    logits = schedule.num_steps * schedule.batch_size * outputs
    scales = Scales(
        row_bound=bounded,
        weight_bits=weight_bits,
        logit_bound=logit_bound,
        logit_high_bit=logit_high_bit,
        overflow_probability=min(1.0, logits * 2 * float(norm.sf(NOISE_DEVIATIONS))),
        divisor=_divisor(config, schedule),
        layers=(LayerScales(width, outputs, norms, ERROR_NORM, PROBABILITY_BITS, squared),),
        written_out=written_out,
    )
    _require_rate(config, scales)
    return scales


def enforced_row_bound(row_bound: float, width: int) -> float:
    """The norm of the longest row that servers may hold: each column is rounded, and their test has a tolerance."""
    rounded = row_bound + math.sqrt(width) * 2.0 ** -(EMBEDDING_BITS + 1)
    return rounded * math.sqrt(1 + 2.0**-ROW_TOLERANCE_BITS)


def _movement(
    config: TrainingConfig,
    schedule: Schedule,
    factorisation: Factorisation,
    row_bound: float,
    width: int,
    noise_std: float,
) -> tuple[float, float, float]:
    """(row bound as it is enforced, how far gradients can move the weights, deviation of the noise in one weight)."""
    bounded = enforced_row_bound(row_bound, width)
    drift = config.learning_rate * config.clip_norm * schedule.num_steps / (1 - config.momentum)
    drift *= schedule.batch_size / schedule.divisor  # a padded batch may hold more records than the average
    # ranges follow the α, β of the run, whatever workload the factorisation was made for
    error = factorisation.workload_error("final", weight_decay=config.weight_decay, momentum=config.momentum)
    deviation = config.learning_rate / schedule.divisor * noise_std * error
    return bounded, drift, deviation


def _release_rounding(config: TrainingConfig, schedule: Schedule, entries: int) -> float:
    """How far rounding y in every step can move ‖W‖."""
    units = schedule.num_steps / (1 - config.momentum) * math.sqrt(entries)
    return config.learning_rate / schedule.divisor * units * 2.0**-RELEASE_BITS


def _adam_bound(config: TrainingConfig, schedule: Schedule, entries: int) -> float:
    """The norm of so many weights, each moved by at most η in every step, whatever the noise."""
    return RATE_ERROR * config.learning_rate * schedule.num_steps * math.sqrt(entries)


def _divisor(config: TrainingConfig, schedule: Schedule) -> float:
    return 1.0 if config.optimiser == "adam" else schedule.divisor


def _decay_room(config: TrainingConfig, weight_bound: float) -> float:
    """Bits that α·W needs besides those of W."""
    return 0.0 if config.weight_decay == 1.0 else DECAY_BITS + _log2(weight_bound)


def _log2(value: float) -> float:
    return math.log2(max(1.0, value))


def _require_rate(config: TrainingConfig, scales: Scales) -> None:
    word = scales.rate_word(config.learning_rate)
    exact = config.learning_rate / scales.divisor * 2.0**scales.rate_shift
    require(
        word >= 1 and abs(word - exact) <= 0.05 * exact,
        "learning_rate",
        config.learning_rate,
        f"at least {10 * 2.0**-scales.rate_shift * scales.divisor:.3g} at weight_bits = {scales.weight_bits}",
        "its fixed-point form would be off by more than 5 %: raise it, or train for fewer steps",
    )


def _plan_layers(
    config: TrainingConfig,
    schedule: Schedule,
    factorisation: Factorisation,
    row_bound: float,
    width: int,
    classes: int,
    noise_std: float,
    start_norms: Sequence[float],
) -> Scales:
    """The scales of an MLP: the largest limit on norms that leaves enough bits for weights and errors."""
    bounded, drift, deviation = _movement(config, schedule, factorisation, row_bound, width, noise_std)
    sizes = tuple(pairwise((width, *config.hidden, classes)))
    bounds = []
    for (fan_in, fan_out), start in zip(sizes, start_norms, strict=True):
        matrix = math.sqrt(fan_in + 1) + math.sqrt(fan_out) + NOISE_DEVIATIONS
        moved = RATE_ERROR * (drift + deviation * matrix + _release_rounding(config, schedule, (fan_in + 1) * fan_out))
        if config.optimiser == "adam":
            moved = _adam_bound(config, schedule, (fan_in + 1) * fan_out)
        bounds.append(start + moved)
    reach = math.hypot(bounded, 1.0)
    first = OverClip(config.clip_norm, reach, EMBEDDING_BITS, 0)
    first.require_fine("row_bound", row_bound, "scale the rows and the clip norm down")
    if activation(config.hidden, config.weights) == "tanh":
        scales = _waved(config, schedule, bounded, sizes, bounds)
        _require_rate(config, scales)
        return scales
    for limit in NORM_LIMITS:
        found = _layers_at(limit, config.clip_norm, reach, sizes, bounds)
        weight_bits = min(_weight_bits(found), math.floor(ROOM - _decay_room(config, max(bounds))))
        tried = Scales(
            row_bound=bounded,
            weight_bits=weight_bits,
            logit_bound=found[-1].sum_bound,
            logit_high_bit=LOGIT_BITS + math.ceil(math.log2(2 * found[-1].sum_bound + 64)) + 1,
            # e^-72 a step and layer: the norm of the noise in W
            overflow_probability=schedule.num_steps * len(found) * math.exp(-(NOISE_DEVIATIONS**2) / 2),
            divisor=_divisor(config, schedule),
            layers=found,
            norm_limit=limit,
        )
        if weight_bits >= 26 and fits_ring(tried, least_error_bits=14):
            break
    require(
        weight_bits >= RELEASE_BITS + 8 and fits_ring(tried, least_error_bits=FEWEST_ERROR_BITS),
        "learning_rate",
        config.learning_rate,
        f"small enough that layers of norm up to {max(bounds):.3g} leave room for hidden norms up to {limit:g}",
        "lower the learning rate, the epochs, the noise (larger epsilon), the row bound or the number of hidden "
        "layers, or"
        " raise the clip norm",
    )
    _require_rate(config, tried)
    return tried


def _waved(
    config: TrainingConfig,
    schedule: Schedule,
    bounded: float,
    sizes: Sequence[tuple[int, int]],
    bounds: Sequence[float],
) -> Scales:
    """With waves no sum, error or norm has a range: weights are as fine as what moves them leaves room for."""
    largest = max(bounds)
    weight_bits = min(MOST_WEIGHT_BITS, math.floor(ROOM - 1 - max(_log2(largest), _decay_room(config, largest))))
    require(
        weight_bits >= RELEASE_BITS + 8,
        "learning_rate",
        config.learning_rate,
        f"small enough that layers stay below norm 2^{ROOM - 1 - RELEASE_BITS - 8}, not {largest:.3g}",
        "lower the learning rate, the epochs or the noise (larger epsilon)",
    )
    norms = OverClip(config.clip_norm, math.hypot(bounded, 1.0), EMBEDDING_BITS, 0)
    layers = tuple(
        LayerScales(fan_in, fan_out, norms, ERROR_NORM, PROBABILITY_BITS, 0, weight_bound=bound)
        for (fan_in, fan_out), bound in zip(sizes, bounds, strict=True)
    )
    return Scales(
        row_bound=bounded,
        weight_bits=weight_bits,
        logit_bound=0.0,
        logit_high_bit=0,
        # e^-72 a step and layer: the norm of the noise in W, beyond which a run ends
        overflow_probability=schedule.num_steps * len(layers) * math.exp(-(NOISE_DEVIATIONS**2) / 2),
        divisor=_divisor(config, schedule),
        layers=layers,
    )


def _layers_at(
    limit: float, clip_norm: float, reach: float, sizes: Sequence[tuple[int, int]], bounds: Sequence[float]
) -> tuple[LayerScales, ...]:
    """Scales of all layers if hidden norms are limited to ``limit``."""
    reaches, sums = [reach], []
    for (_, fan_out), bound in zip(sizes, bounds, strict=True):  # forward
        sums.append(reaches[-1] * bound + math.sqrt(fan_out) * 2.0**-EMBEDDING_BITS)
        reaches.append(min(largest_reach(limit), math.hypot(sums[-1], 1.0)))
    error_bound, error_bits, back_bound = ERROR_NORM, PROBABILITY_BITS, 0.0
    layers: list[LayerScales] = []
    for depth in range(len(sizes) - 1, -1, -1):  # backward
        fan_in, fan_out = sizes[depth]
        if layers:
            through = error_bound * bounds[depth + 1]
            error_bits = min(PROBABILITY_BITS, math.floor(ROOM / 2 - math.log2(through + 1.0)))
            back_bound = through + math.sqrt(fan_out) * 2.0**-error_bits
            error_bound = min(back_bound, limit * LIMIT_TOLERANCE)
        norms = OverClip(clip_norm, reaches[depth], EMBEDDING_BITS, 0)
        layer = LayerScales(fan_in, fan_out, norms, error_bound, error_bits, 0)
        layer = replace(layer, weight_bound=bounds[depth], sum_bound=sums[depth], back_bound=back_bound)
        bits = min(12, math.floor(ROOM - _log2(norms.ratio * error_bound**2)) - 20)
        layers.insert(0, layer.with_norm_bits(bits))
    return tuple(layers)


def _weight_bits(layers: Sequence[LayerScales]) -> int:
    """What forward and backward products leave to the weights."""
    bits = [EMBEDDING_BITS + math.log2(max(1.0, layer.sum_bound)) for layer in layers]
    for layer, following in pairwise(layers):
        bits.append(following.error_bits + math.log2(max(1.0, layer.back_bound)))
    return min(MOST_WEIGHT_BITS, math.floor(ROOM - max(bits)))


def fits_ring(scales: Scales, least_error_bits: int = FEWEST_ERROR_BITS) -> bool:
    """Whether squares, norms and comparisons of all layers of an MLP stay in the ring, and q has bits to lose."""
    assert scales.norm_limit is not None
    hidden = scales.layers[:-1]
    return (
        scales.clip_bound <= MOST_CLIP_BOUND
        and all(layer.norms.is_fine and layer.norm_bits >= 2 and layer.square_bits >= 18 for layer in scales.layers)
        and all(layer.norm_bits + layer.square_bits > MANTISSA_BITS for layer in scales.layers)
        and all(layer.error_bits >= least_error_bits for layer in hidden)
        and all(layer.outputs_range(scales.norm_limit)[1] <= ROOM + 1 for layer in hidden)
        and all(layer.errors_range(scales.norm_limit)[1] <= ROOM + 1 for layer in hidden)
        and scales.logit_high_bit <= ROOM
    )
