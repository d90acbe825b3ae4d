"""Fixed-point scales of a step of hidden layers with public weights (``protocols.step.hidden_step``), proofs §4.11.

| what | bits |
|---|---|
| sums of the first layer; of further layers | 30; 32, on the grid of φ: 15 |
| a = φ(sum), exact as it is multiplied and replicated | 20 |
| φ', opened to be multiplied | 13 |
| W_2, W_3, … forward and back | 12 |
| what comes back, δ_l·W_lᵀ, opened to be multiplied | 13 |
| δ_l, opened: the integers of q and of u | ``delta_bits``, 9 to 13 |
| q/(γ²·4^j) | ``delta_bits`` twice, and what n_l/(γ²·4^j) needs to have 12 significant ones; 64 at most |
| F, opened to be multiplied | 10 |
| u = C·δ, exact; [A 1]ᵀu | ``gradient_bits`` less those of A; ``gradient_bits`` |

The level j of a step and the bounds of what is opened follow from the public weights (``vfl.hidden.HiddenClip``), so
nothing but the noised sums has a range that a run must promise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from accel.validate import require
from protocols.plan.scales import EMBEDDING_BITS, GRADIENT_BITS, NOISE_DEVIATIONS
from refmpc import Kept, Series
from refmpc.core.integer_logs import ceil_log2
from refmpc.mathematics.series import derivative, half_wave
from vfl.hidden import CLIP, CLIP_BITS, CLIP_EDGE, LEVEL_ROOM, MOST_LEVEL, ROUNDING, WAVE, WEIGHT_BITS, HiddenClip

__all__ = [
    "FACTOR",
    "OUTPUT_BITS",
    "SLOPE",
    "SmoothScales",
    "StepBounds",
    "clip_series",
    "plan_smooth",
    "prediction_wave",
    "require_start",
    "waves",
]

OUTPUT_BITS = 20  # of a
BACK_BITS = 13  # of what comes back
MOST_DELTA_BITS, FEWEST_DELTA_BITS = 13, 9
SQUARE_WEIGHT_BITS = 12  # significant ones of n_l
MOST_GRADIENT_BITS, ROOM = 52, 62
SLOPE = Kept(13, 2, Fraction(1))  # φ' is within ±0.92
FACTOR = Kept(10, 5, Fraction(1, 2))  # F is within −0.1 … 10


@functools.cache
def waves() -> tuple[Series, Series]:
    """φ and φ'."""
    period, terms = WAVE
    doubled = half_wave(period.bit_length(), terms, held_bits=10, dealt_bits=10).scaled(Fraction(2))
    wave = doubled.of_half_the_period()
    return wave, derivative(wave)


@functools.cache
def prediction_wave() -> Series:
    """φ, finer: what a prediction takes."""
    return replace(waves()[0], held_bits=18, dealt_bits=19)


@functools.cache
def clip_series() -> Series:
    """F, on a circle of length 1."""
    half = len(CLIP) // 2
    cosine, sine = CLIP[1 : half + 1], CLIP[half + 1 :]
    return Series(0, 20, CLIP[0], sine, cosine, held_bits=20, dealt_bits=20, coefficient_bits=CLIP_BITS)


@dataclass(frozen=True)
class SmoothScales:
    """Of a run."""

    public: HiddenClip
    gradient_bits: int


@dataclass(frozen=True)
class StepBounds:
    """Of a step: level j, how δ of every layer and what comes back to each are opened, the integers of q."""

    level: int
    delta_bits: int
    deltas: tuple[Kept, ...]
    backs: tuple[Kept, ...]
    square_words: tuple[int, ...]
    square_bits: int

    @property
    def update_bits(self) -> int:
        """Of u = C·δ."""
        return self.delta_bits + FACTOR.fraction_bits + self.level

    @classmethod
    def of_weights(cls, layers: Sequence[np.ndarray], scales: SmoothScales) -> StepBounds:
        """For the layers behind the first one, [W; b] at ``WEIGHT_BITS``; with the certificate of q, in integers:
        whatever the rows are, q/(γ²·4^j) stays below the edge of F."""
        public = scales.public
        level = public.level(layers)
        room = scales.gradient_bits - OUTPUT_BITS - FACTOR.fraction_bits - level
        require(
            room >= FEWEST_DELTA_BITS,
            "weights",
            f"gradients up to {public.clip_norm * 2.0**level:.3g}",
            f"gradients up to {public.clip_norm * 2.0 ** (level + room - FEWEST_DELTA_BITS):.3g}",
            "the training diverges: lower the learning rate",
        )
        bits = min(MOST_DELTA_BITS, room)
        _, entries = public.bounds(layers)
        backs = tuple(_symmetric(bound, BACK_BITS) for bound in entries)
        deltas = tuple(_symmetric(bound, bits) for bound in (*entries, public.error_bound))
        over = Fraction(public.clip_norm) ** 2 * 4**level
        ratios = [n / over for n in public.row_squares([len(layer) - 1 for layer in layers])]
        more = min(SQUARE_WEIGHT_BITS + ceil_log2(math.ceil(1 / min(ratios))), 64 - 2 * bits)
        words = tuple(math.ceil(ratio * 2**more) for ratio in ratios)
        largest = sum(
            word * math.ceil(bound**2 * 4**bits)
            for word, bound in zip(words, public.opened_bounds(layers), strict=True)
        )
        square_bits = 2 * bits + more
        fits = largest <= CLIP_EDGE * 2**square_bits
        require(fits, "weights", f"squares up to {largest / 2**square_bits:.4g} of the circle", f"{float(CLIP_EDGE)}")
        return cls(level, bits, deltas, backs, words, square_bits)


def _symmetric(bound: Fraction, bits: int) -> Kept:
    """The smallest interval −2^k … 2^k that holds ±bound, with units to spare; few different ones: steps are recorded
    for each."""
    low = 0
    while Fraction(2) ** low < bound + ROUNDING:
        low += 1
    return Kept(bits, low + 2, Fraction(2) ** low)


def plan_smooth(public: HiddenClip, batch_size: int, noise_std: float) -> SmoothScales:
    """As many bits of the gradient as noised sums leave, or refuse."""
    sums = batch_size * public.clip_norm + 1.0 + NOISE_DEVIATIONS * noise_std
    room = math.floor(ROOM - math.log2(sums) - 1e-9)
    fewest = max(GRADIENT_BITS, OUTPUT_BITS + FACTOR.fraction_bits + FEWEST_DELTA_BITS + 4)
    require(
        room >= fewest,
        "clip_norm",
        public.clip_norm,
        f"so small that noised sums stay below 2^{ROOM - fewest}",
        "lower the noise (larger epsilon) or the batch size",
    )
    return SmoothScales(public, min(MOST_GRADIENT_BITS, room))


def require_start(scales: SmoothScales, start: Sequence[np.ndarray], weight_bits: int) -> None:
    """Refuse a run whose first step would find no room for its gradients."""
    public, shift = scales.public, weight_bits - WEIGHT_BITS
    words = [np.rint(layer * 2.0**weight_bits).astype(np.int64) for layer in start[1:]]
    most = public.largest_square([(each + (1 << (shift - 1))) >> shift for each in words])
    level = min(MOST_LEVEL, scales.gradient_bits - OUTPUT_BITS - FACTOR.fraction_bits - FEWEST_DELTA_BITS)
    fewest = math.sqrt(most / LEVEL_ROOM) / 2.0**level
    require(
        public.clip_norm >= fewest * (1 + 1e-9),
        "clip_norm",
        public.clip_norm,
        f"at least {fewest:.4g} for the gradients of the starting weights, up to {math.sqrt(most):.3g}",
        "raise the clip norm, or lower the row bound, the hidden layers or the noise (larger epsilon)",
    )


assert EMBEDDING_BITS <= OUTPUT_BITS
