"""Hidden layers as servers and twins train them: a bounded wave in place of tanh, and one smooth clip for all layers.

φ is tanh on ±12, continued as a half-wave of period 32 by six sines: |φ| and |φ'| are bounded whatever a sum is, so no
norm of a row has to be limited. A record contributes C·(δ_1 ⊗ [h 1], δ_2 ⊗ [a_1 1], …) with

    C = 2^−j·F(q/(γ²·4^j)),   q = n_1·‖δ_1‖² + n_2·‖δ_2‖² + …,   n_1 = ‖[h 1]‖² at most, n_l = hidden·max φ² + 1,

F(x)·√x ≤ 1 for all x up to ``CLIP_EDGE``, and j public: the smallest for which q cannot be beyond that edge, by the
norms of the public weights. C is γ/√q, the clip, where √q is above a tenth of γ·2^j, and constant below it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.validate import require
from vfl.bounded_softmax import BoundedSoftmax
from vfl.losses import half_wave, wave_for

__all__ = [
    "ACTIVATIONS",
    "CLIP",
    "CLIP_BITS",
    "CLIP_EDGE",
    "LARGEST_OUTPUT",
    "LARGEST_SLOPE",
    "LEVEL_ROOM",
    "MOST_LEVEL",
    "ROUNDING",
    "WAVE",
    "WEIGHT_BITS",
    "HiddenClip",
    "activated",
    "activation",
    "clip_wave",
    "wave",
    "wave_slope",
]

Floats = npt.NDArray[np.floating]
Integers = npt.NDArray[np.int64]

ACTIVATIONS = ("relu", "tanh")
WAVE = (32, 6)  # period and sines of φ
LARGEST_OUTPUT = Fraction(102, 100)  # of |φ|, with everything that is rounded
LARGEST_SLOPE = Fraction(92, 100)  # of |φ'|
WEIGHT_BITS = 12  # of the layers behind the first one, as a step uses them
ROUNDING = Fraction(1, 2**9)  # of an entry of δ or of what comes back, at most
MOST_LEVEL = 13
CLIP_EDGE = Fraction(15, 16)
LEVEL_ROOM = CLIP_EDGE * Fraction(99, 100)  # of the circle: what q may take of it
CLIP_BITS = 28
# constant, 40 cosines, 40 sines at CLIP_BITS: made by ``python -m bench.generators.series clip``, tested, not edited
# fmt: off
CLIP: tuple[int, ...] = (
    500667429, 192766310, 123015744, 95680792, 83865333, 80051000, 80912374, 84509682, 89500437, 94866445, 99810414,
    103720623, 106151878, 106821933, 105599365, 102492748, 97633414, 91247258, 83634085, 75142626, 66136453, 56974971,
    47990598, 39467064, 31627396, 24637879, 18593867, 13531414, 9432474, 6233569, 3839363, 2134214, 991744, 287033,
    -95480, -256945, -280970, -233315, -156885, -83786, -29724, 194482003, 167324017, 155275211, 148520630, 143371305,
    138074413, 131715939, 123853653, 114354935, 103309635, 90968681, 77697087, 63929825, 50130266, 36753320, 24215682,
    12871279, 2990197, -5245752, -11756084, -16547409, -19705920, -21386472, -21794090, -21163216, -19742323,
    -17775966, -15486456, -13070389, -10689707, -8466203, -6484330, -4789955, -3400417, -2306734, -1482495, -890318,
    -486702, -228856, -78247,
)
# fmt: on


def activation(hidden: Sequence[int], weights: str) -> str:
    """``tanh`` with hidden layers and open weights; ``relu`` with secret ones, and in files of before."""
    return "tanh" if hidden and weights == "open" else "relu"


def _sizes() -> tuple[Floats, Floats]:
    period, terms = WAVE
    omega = 2 * np.pi * np.arange(1, 2 * terms, 2) / period
    return omega, 4 * np.pi / period / np.sinh(np.pi * omega / 2)


def wave(sums: Floats) -> Floats:
    """φ."""
    omega, sizes = _sizes()
    return np.asarray(np.sin(np.multiply.outer(sums, omega)) @ sizes, dtype=sums.dtype)


def activated(sums: Floats, name: str) -> Floats:
    """What a hidden layer makes of its sums."""
    return np.maximum(sums, 0) if name == "relu" else wave(sums)


def wave_slope(sums: Floats) -> Floats:
    """φ'."""
    omega, sizes = _sizes()
    return np.asarray(np.cos(np.multiply.outer(sums, omega)) @ (sizes * omega), dtype=sums.dtype)


def clip_wave(x: Any) -> Floats:
    """F."""
    half = len(CLIP) // 2
    angle = 2 * np.pi * np.multiply.outer(np.asarray(x, dtype=np.float64), np.arange(1, half + 1))
    sums = CLIP[0] + np.cos(angle) @ np.array(CLIP[1 : half + 1]) + np.sin(angle) @ np.array(CLIP[half + 1 :])
    return np.asarray(sums * 2.0**-CLIP_BITS)


def _integers(layer: Floats) -> Integers:
    return np.rint(np.asarray(layer, np.float64) * 2.0**WEIGHT_BITS).astype(np.int64)


def _root_above(value: Fraction) -> Fraction:
    """√value, rounded up at 20 bits."""
    scaled = math.ceil(value * 4**20)
    return Fraction(math.isqrt(scaled) + 1, 2**20)


def _squared_norm_above(matrix: Integers) -> int:
    """At least the square of the largest singular value of a matrix of integers: of Gram's matrix the largest row sum,
    or the Frobenius norm if that is less."""
    lines = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    largest = int(np.abs(lines).max(initial=0))
    exact = 2 * largest.bit_length() + lines.shape[1].bit_length() <= 62
    used = lines if exact else lines.astype(object)
    gram = np.abs(used @ used.T).astype(object)
    return min(int(gram.sum(axis=1).max()), math.isqrt(int((gram * gram).sum())) + 1)


@dataclass(frozen=True)
class HiddenClip:
    """What is public about the clip of a model with hidden layers: γ, and a bound of ‖[h 1]‖."""

    task: str
    clip_norm: float
    reach: float
    loss: str = "softmax"
    classes: int = 0

    @classmethod
    def of_rows(
        cls, task: str, clip_norm: float, row_bound: float, width: int, loss: str = "softmax", classes: int = 0
    ) -> HiddenClip:
        """For rows within a bound, as servers hold and test them: rounded to 14 bits, squares up to 2^−8 above."""
        enforced = (row_bound + math.sqrt(width) * 2.0**-15) * math.sqrt(1 + 2.0**-8)
        return cls(task, clip_norm, math.hypot(enforced, 1.0) * (1 + 2.0**-30), loss, classes)

    @property
    def softmax(self) -> BoundedSoftmax | None:
        """Whose e, R and 1/t the outputs take, with that loss."""
        bounded = self.task == "classification" and self.loss == "bounded_softmax"
        return BoundedSoftmax(self.classes, self.clip_norm, self.reach) if bounded else None

    def start_deviation(self, width: int) -> float:
        """Of the first layer's starting weights: sums of usual rows have deviation 1, where φ bends."""
        return 1 / max(2.0**-10, min(math.sqrt(max(0.0, self.reach**2 - 1)), math.sqrt(width)))

    @property
    def error_bound(self) -> Fraction:
        """Of ‖δ‖ of the outputs, with everything that is rounded."""
        if self.task != "classification":
            return Fraction(102, 100)
        return Fraction(143, 100) if self.loss == "softmax" else Fraction(149, 100)

    def row_squares(self, widths: Sequence[int]) -> list[Fraction]:
        """n_l of every layer; ``widths`` of the hidden ones."""
        return [Fraction(self.reach) ** 2, *(width * LARGEST_OUTPUT**2 + 1 for width in widths)]

    def bounds(self, layers: Sequence[Integers]) -> tuple[list[Fraction], list[Fraction]]:
        """(‖δ_l‖ of every layer, an entry of what comes back to every hidden one), from above, for all rows; ``layers``
        are the [W; b] behind the first one at ``WEIGHT_BITS``."""
        errors, entries = [self.error_bound], list[Fraction]()
        for layer in reversed(layers):
            matrix = layer[:-1]
            rounding = _root_above(Fraction(len(matrix))) * ROUNDING
            lines = (matrix.astype(object) ** 2).sum(axis=1).max()
            scale = Fraction(1, 2**WEIGHT_BITS)
            entries.insert(0, errors[0] * _root_above(Fraction(int(lines))) * scale + ROUNDING)
            through = errors[0] * _root_above(Fraction(_squared_norm_above(matrix))) * scale + rounding
            errors.insert(0, LARGEST_SLOPE * through + rounding)
        return errors, entries

    def opened_bounds(self, layers: Sequence[Integers]) -> list[Fraction]:
        """Of ‖δ_l‖ as it is opened: each entry is rounded once more."""
        widths = [len(layer) - 1 for layer in layers] + [layers[-1].shape[1]]
        errors, _ = self.bounds(layers)
        return [e + ROUNDING * (math.isqrt(width) + 1) for e, width in zip(errors, widths, strict=True)]

    def largest_square(self, layers: Sequence[Integers]) -> Fraction:
        """Of q, for all rows."""
        squares = self.row_squares([len(layer) - 1 for layer in layers])
        bounds = self.opened_bounds(layers)
        return sum((n * bound**2 for n, bound in zip(squares, bounds, strict=True)), Fraction(0))

    def level(self, layers: Sequence[Integers]) -> int:
        """j for these public weights."""
        most = self.largest_square(layers)
        room = LEVEL_ROOM * Fraction(self.clip_norm) ** 2
        found = 0
        while room * 4**found < most and found <= MOST_LEVEL:
            found += 1
        require(
            found <= MOST_LEVEL,
            "weights",
            f"gradients up to {float(most) ** 0.5:.3g}",
            f"gradients up to {self.clip_norm * 2.0**MOST_LEVEL:.3g}",
            "the training diverges: lower the learning rate",
        )
        return found

    def output_bound(self, last: Integers) -> Fraction:
        """Of |[a 1]·w| for every output of the last layer."""
        columns = int((last.astype(object) ** 2).sum(axis=0).max())
        return _root_above(Fraction(columns) * (len(last) * LARGEST_OUTPUT**2)) / 2**WEIGHT_BITS

    def link(self, last: Integers) -> tuple[int, int]:
        """Period and sines of the outputs' function: the shortest wave that is a sigmoid for all outputs [a 1]·W of
        the last layer, or the longest there is."""
        output = self.output_bound(last)
        argument = {"regression": 2 * (output + 1), "binary": output}.get(self.task, 2 * output)
        return wave_for(math.ceil(argument))

    def errors(self, outputs: Floats, labels: npt.NDArray[Any], last: Floats) -> Floats:
        """δ of the outputs as a step computes it: σ(z) − y, tanh(z − y), or that of a bounded softmax."""
        link, bounded = self.link(_integers(last)), self.softmax
        if bounded is not None:
            return np.asarray(bounded.errors_on(outputs, labels, link), dtype=outputs.dtype)
        if self.task == "regression":
            targets = np.clip(labels, -1.0, 1.0).reshape(-1, 1)
            return np.asarray(2.0 * half_wave(2.0 * (outputs - targets), link) - 1.0, dtype=outputs.dtype)
        return np.asarray(half_wave(outputs, link) - labels.reshape(-1, 1), dtype=outputs.dtype)

    def factor(self, layers: Sequence[Floats], deltas: Sequence[Floats]) -> Floats:
        """C of every row; ``layers`` are all but the first."""
        level = self.level([_integers(layer) for layer in layers])
        squares = self.row_squares([len(layer) - 1 for layer in layers])
        q = np.zeros(len(deltas[0]))
        for n, delta in zip(squares, deltas, strict=True):
            q += float(n) * (delta.astype(np.float64) ** 2).sum(axis=1)
        return clip_wave(q / (self.clip_norm**2 * 4.0**level)) * 2.0**-level
