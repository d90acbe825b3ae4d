"""Gaussian noise rounded to the integers, exactly, from AES-CTR words.

The law is that of ``round(ζ)`` with ζ ~ N(0, std²) a *real* Gaussian, by rejection from a histogram with
integer weights:

* half-units of the grid are cut into 512 strips of width h = 2^k, std/32 < h ≤ std/16;
* an integer alias table draws strip i with weight W_i ≥ K·exp(−(ih)²/2std²), and a place i+f in it uniformly;
* it is kept with probability (K/W_i)·exp(−((i+f)h)²/2std²): what is kept has the Gaussian density *exactly*,
  however the weights were rounded.

The acceptance coin and f are real numbers of which 32 and 63 bits are looked at. Where these and the
rounding of float64 (relative error below 2^-48, guard 2^-44) do not settle a decision, about once in 2^32
draws, more bits are drawn and compared with ``decimal`` at growing precision. So no approximation enters;
the only distance is the cut at 512h ≥ 16 std:

    total variation per sample ≤ 2Q(16) < 2^-188   (``SAMPLER_DISTANCE``), for words that are uniform.

Why round(ζ) and not a discrete Gaussian: an integer shift of round(ζ) is the same shift of ζ, so what is
proved for the continuous Gaussian holds for it as it stands. ``vfl.dp.slack`` treats sums of several.
The running time depends on the attempts rejected, and on how often exp is needed to decide: for places far from zero
more often. It is not the same for all values, so whoever could time single samples would learn about their size.
"""

from __future__ import annotations

import decimal
import math
from dataclasses import dataclass
from fractions import Fraction
from types import ModuleType

import numpy as np

import accel
from accel.prg import Stream
from accel.validate import require, require_integer, require_real

__all__ = ["SAMPLER_DISTANCE", "SAMPLER_VERSION", "SMALLEST_STD", "GridGaussian", "StripTable"]

SAMPLER_DISTANCE = 2.0**-188
SAMPLER_VERSION = 2  # which samples a stream gives: a run must not go on with others (since 2: settled from a reserve)
SMALLEST_STD = 8.0
LARGEST_STD = 2.0**52
STRIPS = 512
COLUMN_UNITS = 1 << 23  # coin of the alias table: 9 + 23 bits choose the strip, 32 bits are left to accept
GUARD = 2.0**-12  # in units of the 32-bit acceptance coin; 16 times the error of the float64 evaluation
_ATTEMPTS = 1 << 15  # at a time: a row of noise in a call or two, as each takes the interpreter from the step


@dataclass(frozen=True)
class StripTable:
    """What the kernels need: the alias table, and per strip the acceptance at its start and at its end."""

    thresholds: np.ndarray  # uint64: the coin stays in its column below this
    aliases: np.ndarray  # uint64
    ceilings: np.ndarray  # float64: 2^32 · acceptance at f = 0
    floors: np.ndarray  # float64: 2^32 · acceptance at f = 1, rounded down: below it no exp is needed
    curvature: float  # h²/(2 std²)
    strip_bits: int  # a strip is 2^strip_bits half-units wide
    guard: float


class GridGaussian:
    """Sampler of round(N(0, std²)) for one ``std`` in grid units: any float64 from 8 to 2^52, taken exactly.

    Cost: two words per attempt, 1.03 attempts per sample on average; the table takes a few milliseconds.
    """

    def __init__(self, std: float, kernels: ModuleType | None = None, guard: float = GUARD):
        self.std = require_real(
            "std_in_grid_units",
            std,
            SMALLEST_STD,
            LARGEST_STD,
            way_out="choose noise_bits so that the noise is well above one grid step",
        )
        require(guard >= GUARD, "guard", guard, f"at least {GUARD}")
        self._kernels = kernels or accel.kernels
        half_units = Fraction(self.std) * 2
        strip_bits = math.floor(math.log2(self.std)) - 3
        while Fraction(2) ** strip_bits * 16 > half_units:
            strip_bits -= 1
        self._curvature = Fraction(4) ** strip_bits / (2 * half_units**2)
        self._build(strip_bits, guard)

    @property
    def largest(self) -> int:
        """No sample is larger in absolute value: the end of the last strip."""
        return STRIPS << self.table.strip_bits >> 1

    def _build(self, strip_bits: int, guard: float) -> None:
        with decimal.localcontext() as context:
            context.prec = 60
            curvature = _decimal(self._curvature)
            envelope = [(-curvature * (i * i)).exp() for i in range(STRIPS)]
            total = STRIPS * COLUMN_UNITS
            scale = int((total - 2 * STRIPS) / sum(envelope))
            # +2 after the floor: at least scale·envelope whatever the last digits of exp did
            weights = [int(scale * e) + 2 for e in envelope]
            weights[0] += total - sum(weights)
            self._scale, self._weights = scale, weights
            start = [scale * e / w * 2**32 for e, w in zip(envelope, weights, strict=True)]
            end = [s * (-curvature * (2 * i + 1)).exp() for i, s in enumerate(start)]
        thresholds, aliases = _alias_table(weights, COLUMN_UNITS)
        self.table = StripTable(
            thresholds=thresholds,
            aliases=aliases,
            ceilings=np.array([float(s) for s in start]),
            floors=np.array([float(e) for e in end]) - guard,
            curvature=float(self._curvature),
            strip_bits=strip_bits,
            guard=guard,
        )

    def sample(self, stream: Stream, count: int) -> np.ndarray:
        """The next ``count`` samples as int64; the same stream gives the same samples on every backend."""
        out = np.empty(require_integer("count", count, 0), dtype=np.int64)
        self.fill(stream, out)
        return out

    def fill(self, stream: Stream, out: np.ndarray) -> None:
        """As many samples as ``out`` (int64, one axis) takes."""
        filled = 0
        while filled < out.size:
            begin = stream.position
            words = stream.words(2 * min(_ATTEMPTS, int(1.05 * (out.size - filled)) + 64))
            used = 0
            while 2 * used < words.size and filled < out.size:
                tried, kept, places, undecided = self._kernels.grid_gaussian_attempts(
                    words[2 * used :], self.table, out[filled:]
                )
                if undecided.size:
                    kept = self._settled(words, used + undecided, places, stream, begin, out[filled : filled + kept])
                used += tried
                filled += kept

    def _settled(
        self,
        words: np.ndarray,
        attempts: np.ndarray,
        places: np.ndarray,
        stream: Stream,
        begin: int,
        values: np.ndarray,
    ) -> int:
        """How many values are left, in front, when the undecided ones among them are settled."""
        refused = [
            place
            for place, attempt in zip(places.tolist(), attempts.tolist(), strict=True)
            if not self.settle(words, attempt, stream.reserve(begin + 2 * words.itemsize * attempt))
        ]
        left = np.delete(values, refused)
        values[: left.size] = left
        return left.size

    def settle(self, words: np.ndarray, attempt: int, stream: Stream) -> bool:
        """Decide one attempt with as many further words as it takes: exact, slow, once in 2^32 attempts."""
        first, second = int(words[2 * attempt]), int(words[2 * attempt + 1])
        column, coin, accept = first & (STRIPS - 1), (first >> 9) & (COLUMN_UNITS - 1), first >> 32
        strip = column if coin < int(self.table.thresholds[column]) else int(self.table.aliases[column])
        place, place_bits, accept_bits = second >> 1, 63, 32
        with decimal.localcontext() as context:
            context.prec = 40
            while True:
                margin = decimal.Decimal(10) ** (10 - context.prec)
                low, high = (self.acceptance(strip, Fraction(place + step, 1 << place_bits)) for step in (1, 0))
                if _decimal(Fraction(accept + 1, 1 << accept_bits)) <= low - margin:
                    return True
                if _decimal(Fraction(accept, 1 << accept_bits)) >= high + margin:
                    return False
                more = stream.words(2)
                accept, accept_bits = (accept << 64) | int(more[0]), accept_bits + 64
                place, place_bits = (place << 64) | int(more[1]), place_bits + 64
                context.prec += 20

    def acceptance(self, strip: int, fraction: Fraction) -> decimal.Decimal:
        """Probability to keep the place ``strip + fraction``, to the precision of the decimal context."""
        exponent = _decimal(-self._curvature * (strip + fraction) ** 2)
        return exponent.exp() * self._scale / self._weights[strip]


def _decimal(value: Fraction) -> decimal.Decimal:
    return decimal.Decimal(value.numerator) / decimal.Decimal(value.denominator)


def _alias_table(weights: list[int], capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Vose's alias table in integers: column j keeps threshold_j of its units, its alias gets the rest."""
    left = list(weights)
    thresholds, aliases = [capacity] * len(left), list(range(len(left)))
    small = [i for i, w in enumerate(left) if w < capacity]
    large = [i for i, w in enumerate(left) if w >= capacity]
    while small:
        i, j = small.pop(), large[-1]
        thresholds[i], aliases[i] = left[i], j
        left[j] -= capacity - left[i]
        if left[j] < capacity:
            small.append(large.pop())
    return np.array(thresholds, dtype=np.uint64), np.array(aliases, dtype=np.uint64)
