"""Weights that everybody knows, as integers: what a step computes with, how they move, and how large logits can be.

Everything here is exact integer arithmetic, so all servers come to the same words on any processor. W has
``weight_bits``, momentum and the opened sums y have ``RELEASE_BITS``:

    v ← round(β̂·v/2^20) + y,   W ← round(α̂·W/2^16) − k·v,   η/B = k/2^(weight_bits − RELEASE_BITS).

With ``optimiser = "adam"`` u takes the place of v, and η = k/2^(weight_bits − RELEASE_BITS), because u has no unit.
With the number t of steps so far, this one included, and τ² the public variance of the noise in y:

    m ← m + round((y − m)/min(t, 10)),   q ← q + round((y² − τ² − q)/min(t, 1000)),
    u = round(m/⌊√max(q, τ²/100)⌋), brought within ±1.

The last layer is used centred and rounded, W̃: subtracting the same vector from every class leaves the softmax as it
is and the norms small, and 14 + ``bits`` is then the scale that the softmax takes, with no truncation. The gradient is
that at W̃, a public function of what was opened before, so the theorem of ``vfl.dp.slack`` covers it.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import refmpc
from accel import kernels
from accel.validate import require
from protocols.plan.scales import DECAY_BITS, EMBEDDING_BITS, HEAD_BITS, RELEASE_BITS, Scales
from protocols.plan.squared_norm_ratio import ROOM
from refmpc import ArithmeticTensor
from refmpc.core.integer_logs import ceil_log2
from vfl.bounded_softmax import BoundedSoftmax
from vfl.losses import FARTHEST, OneOutput
from vfl.training import ADAM_FLOOR, ADAM_MEMORY, TrainingConfig

if TYPE_CHECKING:
    from protocols.step.hidden_step import HiddenWeights

__all__ = [
    "REACH_BITS",
    "Head",
    "PublicLayer",
    "PublicMatrix",
    "centred",
    "moved",
    "norm_above",
    "public_start",
    "rounded",
    "rounded_head",
    "times_weights",
    "widest_head",
]

_log = logging.getLogger("ppvfl.training")
FEWEST_HEAD_BITS = 6
MOMENTUM_BITS = 20  # of β̂
MEAN_BITS = 8  # of Adam's mean of y, beside those of y
REACH_BITS = 20  # of the bound on ‖[h 1]‖, rounded up
LARGEST = 1 << 61  # of a weight, in its integers


@dataclass
class PublicLayer:
    """One layer [W; b], int64 at ``weight_bits``, and what the optimiser remembers of what was opened, also int64:
    nothing, the momentum at ``RELEASE_BITS``, or Adam's two means."""

    values: np.ndarray
    memory: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True)
class PublicMatrix:
    """A matrix that everybody knows: integers at ``bits``."""

    words: np.ndarray
    bits: int

    @property
    def T(self) -> PublicMatrix:
        return PublicMatrix(self.words.transpose(), self.bits)


async def times_weights(x: ArithmeticTensor, matrix: ArithmeticTensor | PublicMatrix, cut: int) -> ArithmeticTensor:
    """x@matrix less ``cut`` bits: 2 rounds if the matrix is shared, 1 if it is public."""
    if isinstance(matrix, ArithmeticTensor):
        return await refmpc.matmul_truncate(x, matrix, cut)
    exact = refmpc.matmul_public(x, matrix.words).reinterpret(x.fraction_bits + matrix.bits)
    return await refmpc.truncate(exact, cut)


@dataclass(frozen=True)
class Head:
    """The last layer as a step uses it: integers at ``bits``, and a bound of the logits of this very step, a power of
    two."""

    words: np.ndarray
    bits: int
    logit_bound: float
    wave: tuple[int, int] | None = (
        None  # where loss and clip are series: period and sines of the link in this very step
    )
    hidden: HiddenWeights | None = None  # of hidden layers

    @property
    def logit_bits(self) -> int:
        """Logit bits of [H 1]·W̃."""
        return EMBEDDING_BITS + self.bits

    @property
    def high_bit(self) -> int:
        """Compared bits of the logits: a difference of two, and the constant that exp adds, stay inside."""
        return self.logit_bits + ceil_log2(2 * self.logit_bound + 64) + 1


def public_start(start: Sequence[np.ndarray], scales: Scales, training: TrainingConfig) -> list[PublicLayer]:
    """The starting weights, and nothing remembered yet."""
    parts = 2 if training.optimiser == "adam" else 1 if training.momentum else 0
    layers = []
    for values in start:
        words = np.rint(values * 2.0**scales.weight_bits).astype(np.int64)
        layers.append(PublicLayer(words, tuple(np.zeros_like(words) for _ in range(parts))))
    return layers


def norm_above(columns: np.ndarray) -> int:
    """An integer that is at least the largest norm of a column of integers; above it by 2 and, for columns longer than
    about 2^24, by what rounding their entries up costs."""
    keep = (62 - ceil_log2(max(1, len(columns)))) // 2  # bits whose squares add up in 64
    lines = np.ascontiguousarray(columns.T)
    shift = max(0, kernels.largest_absolute(lines).bit_length() + 1 - keep)
    return (math.isqrt(kernels.largest_square_sum(lines, shift)) + 1) << shift


def rounded(values: np.ndarray, bits: int) -> np.ndarray:
    """values/2^bits, to the nearest integer."""
    return values if bits == 0 else (values + (1 << (bits - 1))) >> bits


@functools.cache
def warn_of_the_range() -> None:
    """Once a process."""
    _log.warning(
        "the weights allow outputs beyond what a step's sigmoid reaches (%g): if the training diverges, lower the"
        " learning rate or raise the clip norm; the claim does not depend on it",
        FARTHEST,
    )


def rounded_head(
    values: np.ndarray, weight_bits: int, reach: float, bounded: OneOutput | BoundedSoftmax | None = None
) -> Head:
    """W̃ of the last layer: as fine as the softmax takes and the ring holds. ``reach`` bounds ‖[h 1]‖. One output is
    not centred: nothing may be taken from it."""
    fitting = rounded if values.shape[1] == 1 else centred
    longest = math.ceil(reach * 2.0**REACH_BITS)
    for bits in range(min(HEAD_BITS, weight_bits), FEWEST_HEAD_BITS - 1, -1):
        words = fitting(values, weight_bits - bits)
        product = norm_above(words) * longest
        if bounded is not None:
            size = product * 2.0 ** -(REACH_BITS + bits)
            if bounded.argument(size) > FARTHEST:
                warn_of_the_range()
            return Head(words, bits, 0.0, bounded.wave(size))
        bound = product >> (REACH_BITS + bits)
        head = Head(words, bits, float(1 << bound.bit_length()))  # few different ones: steps are recorded for each
        if head.high_bit <= ROOM:
            return head
    require(
        False,
        "weights",
        f"logits up to {float(bound):.3g}",
        f"small enough for the ring at {FEWEST_HEAD_BITS} bits",
        "the training diverges: lower the learning rate",
    )
    raise AssertionError


def widest_head(shape: tuple[int, int], logit_bound: float) -> Head:
    """A head of zeros for logits within a bound: what a step with such logits costs."""
    bits, bound = HEAD_BITS, 2.0 ** ceil_log2(max(1.0, logit_bound))
    while (head := Head(np.zeros(shape, dtype=np.int64), bits, bound)).high_bit > ROOM and bits > FEWEST_HEAD_BITS:
        bits -= 1
    return head


def centred(values: np.ndarray, bits: int) -> np.ndarray:
    """Less the mean over classes, rounded, then over 2^bits to the nearest integer: the softmax of products with it is
    the same but for the rounding. It lies class by class in memory, as products want it."""
    found = np.empty(values.shape[::-1], dtype=np.int64).T
    kernels.centred_rounded(values, bits, found)
    return found


def moved(
    layers: Sequence[PublicLayer],
    sums: Sequence[np.ndarray],
    rate_word: int,
    training: TrainingConfig,
    step: int = 0,
    noise_square: int = 0,
) -> list[PublicLayer]:
    """The layers after a step whose opened sums are ``sums``, at ``RELEASE_BITS``. Exact, the same at every server.

    Adam needs ``step``, from 0, and ``noise_square``, the variance of the noise in ``sums`` at twice their bits.
    """
    momentum = round(training.momentum * 2**MOMENTUM_BITS), MOMENTUM_BITS
    decay = (1, 0) if training.weight_decay == 1.0 else (round(training.weight_decay * 2**DECAY_BITS), DECAY_BITS)
    found = []
    for layer, y in zip(layers, sums, strict=True):
        values, memory, velocity, change = np.empty_like(layer.values), layer.memory, None, y
        if training.optimiser == "adam":
            change, memory = _adam(memory, y, step, noise_square)
        elif memory:
            velocity = memory[0].copy()
            memory = (velocity,)
        flat = [None if part is None else part.reshape(-1) for part in (layer.values, velocity, change, values)]
        largest = kernels.moved_weights(*flat[:3], momentum, decay, rate_word, flat[3])
        require(
            largest < LARGEST,
            "weights",
            "larger than 64 bits hold",
            "those of a training that does not diverge",
            "lower the learning rate",
        )
        found.append(PublicLayer(values, memory))
    return found


def _adam(
    memory: Sequence[np.ndarray], y: np.ndarray, step: int, noise_square: int
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """u, and what is remembered. |y| < 2^29, because y lost 35 bits or more: squares fit."""
    mean, square = memory
    first, second = (min(step + 1, steps) for steps in ADAM_MEMORY)
    mean = mean + _divided((y << MEAN_BITS) - mean, first)
    square = square + _divided(y * y - noise_square - square, second)
    size = _root(np.maximum(square, max(1, noise_square // ADAM_FLOOR**2)))
    one = 1 << RELEASE_BITS
    change = np.clip(_divided(mean << (RELEASE_BITS - MEAN_BITS), size), -one, one)
    return change, (mean, square)


def _divided(values: np.ndarray, by: int | np.ndarray) -> np.ndarray:
    """values/by, to the nearest integer; 2·|values| must fit 64 bits."""
    return np.floor_divide(2 * values + by, 2 * by)


def _root(squares: np.ndarray) -> np.ndarray:
    """⌊√squares⌋ of integers below 2^60: what floating point is off by, at most one unit, is put right."""
    root = np.sqrt(squares.astype(np.float64)).astype(np.int64)
    root -= root * root > squares
    root += (root + 1) * (root + 1) <= squares
    return root
