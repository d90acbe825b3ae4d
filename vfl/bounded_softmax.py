"""A softmax whose other classes are capped at odds 2 against the label, and a smooth clip: sums of sines throughout.

e_j = σ(z_j − z_y − log 2), p = e/Σe, and a row contributes [h 1] ⊗ C(‖δ‖²)·δ with δ = p − y and C below min(1, b/‖δ‖).
It is −log p_y with each other class's odds e^(z_j − z_y) replaced by e^v/(1 + e^v/2): near softmax where the label is
likely, bounded where it is not, so that Σe ≥ 1/3 and no maximum is needed. 1/Σe is taken in two steps: a crude factor
brings the sum into 0.2 … 1.1 whatever its rounding, a fine one into 1 ± 2^-11.

The secure step (``protocols.step.bounded_softmax``) and the twin use the same integers. They come from linear
programmes (``python -m bench.generators.series``), and are stored because servers must agree on them to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.validate import require
from vfl.losses import half_wave, wave_for

__all__ = ["COEFFICIENT_BITS", "MOST_CLASSES", "ODDS", "OFFSET", "BoundedSoftmax", "Sines"]

Floats = npt.NDArray[np.floating]
ODDS = 2.0
COEFFICIENT_BITS = 26
MOST_CLASSES = 64
CLIP_PERIOD_BITS = 2  # ‖δ‖² is below 2.2
WIDEST = Fraction(
    146, 100
)  # threshold of the first of CLIPS; beyond it nothing is clipped. Each next one: over 2^(1/4)
ROOTS = tuple(Fraction(root, 2**20) for root in (1048576, 881744, 741456, 623488))  # 2^(-j/4), rounded up
LEAST = Fraction(1, 64)  # threshold
OFFSET = Fraction(1, 256)  # of b, or of 1: taken off the clip factor for its rounding

# most classes, bits of the period, then constant, sines, cosines at 26 bits: s·R(s) is at most 1 and not much less
CRUDE: tuple[tuple[int, int, tuple[int, ...]], ...] = (
    (3, 2, (119425235, -26654439, -40871053, -16878256, 127506842, 46265806, 5379553)),
    (6, 3, (100445949, -53948115, -70931164, -40899681, -10854679, 127506842, 48089349, 428895, -6092165)),
    (10, 4, (99321389, -93454722, -104894210, -45504043, -4024288, 127506842, 20874938, -29695551, -16133347)),
    (
        16,
        5,
        (
            122064486,
            -127506842,
            -117403440,
            -127506842,
            -18485722,
            21744534,
            127506842,
            53538464,
            -32540526,
            -83441313,
            -14312256,
        ),
    ),
    (
        26,
        5,
        (
            30339381,
            -13713235,
            -24550328,
            -25726796,
            -19533558,
            -11096759,
            -4630994,
            47675248,
            31803514,
            15135092,
            3249473,
            -1761039,
            -1457206,
        ),
    ),
    (
        40,
        6,
        (
            70705353,
            -55399449,
            -110486400,
            -127506842,
            -77408518,
            -6141386,
            19868623,
            8660036,
            127506842,
            83505999,
            2725528,
            -64821592,
            -64247990,
            -23258945,
            -854759,
        ),
    ),
    (
        64,
        7,
        (
            119917757,
            -127506842,
            -86943603,
            -127506842,
            -127506842,
            -107038009,
            -61866966,
            67353086,
            58807180,
            2159928,
            127506842,
            67401098,
            59926368,
            -18864563,
            -50974580,
            -127506842,
            -97233105,
            13112161,
            15164026,
        ),
    ),
)
# most classes, then constant, sines, cosines: 1/t from the least sum of shares to 1.15, period 2, to 2^-11
LEAST_SHARES = {26: 0.3, 64: 0.22}
FINES: tuple[tuple[int, tuple[int, ...]], ...] = (
    (
        26,
        (
            158519042,
            65118003,
            10013874,
            -26635904,
            -18597856,
            -3601459,
            167829009,
            123212319,
            58081112,
            10803619,
            -494903,
        ),
    ),
    (
        64,
        (
            158260668,
            101391430,
            84916049,
            9072477,
            -57969942,
            -50899808,
            -15242527,
            -877705,
            167814489,
            167814489,
            164090457,
            93994309,
            16198485,
            -7486817,
            -2615297,
        ),
    ),
)
# the largest sums below min(1, b/√q), period 4, for thresholds b = 1.46·2^(-j/4)
CLIPS: tuple[tuple[int, ...], ...] = (
    (65501093, 2257833, -522655, -490902, 92060, 430189, 1318446, -320157, -88084),
    (63014462, 3799409, -1921001, 438848, -253895, 4130279, -622712, 500352, -188624),
    (63690717, -3895773, -3473110, 2614025, 527942, 10728286, -7256490, -1625928, 1310135),
    (41464512, 26156004, 779833, -7063654, -971114, 12758440, 14536577, 105361, -2128775),
    (57980221, -12639961, -6865975, 4313820, 1987181, 21547788, -7462989, -5344138, 125838),
    (62718755, -31808874, -7036055, 11667103, 2407672, 23211901, -18299869, -3930352, 3146285),
    (20639533, 31837735, 8020594, -6850979, -2233687, 11998258, 24670625, 8753674, -166349),
    (-17371012, 89834220, 9678425, -26144604, -4316646, 10725604, 65192294, 12462814, -4466375),
    (-7638386, 66559977, -4092006, -25033168, -2656859, 20338965, 54569199, 4706576, -5129634),
    (46293923, -32000746, -23744910, -3010883, 953460, 34139778, -4404168, -7954619, -1228194),
    (65744733, -70341892, -38988077, 3358021, 3451419, 44900510, -25732208, -17400214, -666102),
    (98431273, -131128150, -59484152, 16039831, 7265507, 59554976, -61697797, -30678153, 1236422),
    (93858231, -128893611, -56869323, 17022213, 7297696, 55552511, -62407417, -30025685, 1513321),
    (74174714, -100421248, -44814233, 12861450, 5630095, 44314590, -48016971, -23402182, 1094518),
)


@dataclass(frozen=True)
class Sines:
    """A constant and sines and cosines of 1, 2, 3, … turns, at ``COEFFICIENT_BITS``."""

    period_bits: int
    numbers: tuple[int, ...]

    @property
    def terms(self) -> int:
        """How many turns there are."""
        return len(self.numbers) // 2

    def __call__(self, x: Floats) -> Floats:
        turns = 2 * np.pi / 2.0**self.period_bits * np.arange(1, self.terms + 1)
        angles = np.multiply.outer(x, turns)
        constant, sines, cosines = np.split(np.array(self.numbers) * 2.0**-COEFFICIENT_BITS, [1, 1 + self.terms])
        return np.asarray(constant[0] + np.sin(angles) @ sines + np.cos(angles) @ cosines)


def threshold_of(level: int) -> Fraction:
    """b of one of ``CLIPS``, at least that it was made for by less than 2^-20."""
    return WIDEST * ROOTS[level % 4] / 2 ** (level // 4)


@dataclass(frozen=True)
class BoundedSoftmax:
    """What is public about a step of one layer with this loss: classes, γ, and a bound of ‖[h 1]‖ that rows are held
    to."""

    classes: int
    clip_norm: float
    reach: float

    def __post_init__(self) -> None:
        require(
            2 <= self.classes <= MOST_CLASSES, "classes", self.classes, f"2 to {MOST_CLASSES} with a bounded softmax"
        )

        least = f"at least {self.reach / 64:.3g} for rows of norm up to {self.reach:.3g} with a bounded softmax"
        require(self.threshold >= LEAST, "clip_norm", self.clip_norm, least, "raise it or lower the row bound")

    @classmethod
    def of_rows(cls, classes: int, clip_norm: float, row_bound: float, width: int) -> BoundedSoftmax:
        """For rows that servers hold within ``row_bound``, with room for their rounding and the test's tolerance."""
        return cls(
            classes, clip_norm, math.hypot((row_bound + math.sqrt(width) * 2.0**-15) * math.sqrt(1 + 2**-8), 1.0)
        )

    @property
    def threshold(self) -> Fraction:
        """b: a contribution is at most b·‖[h 1]‖ ≤ γ. Rounded down."""
        return Fraction(math.floor(Fraction(self.clip_norm) / Fraction(self.reach) * 2**30), 2**30)

    @property
    def crude(self) -> Sines:
        """R(s) with s·R(s) in 0.3 … 1 for every sum of this many classes."""
        bits, numbers = next((bits, numbers) for most, bits, numbers in CRUDE if self.classes <= most)
        return Sines(bits, numbers)

    @property
    def fine(self) -> Sines:
        """1/t."""
        return Sines(1, next(numbers for most, numbers in FINES if self.classes <= most))

    @property
    def clip(self) -> Sines:
        """C(q) ≤ min(1, b/√q) by more than its rounding: between two stored ones C_0, C_1 for thresholds b_0 < b ≤ b_1
        a convex sum of C_0 and C_1·b/b_1, which are both below; below the least, that times b over its threshold."""
        b, levels = self.threshold, range(len(CLIPS))
        above = max((level for level in levels if threshold_of(level) >= b), default=0)
        b = min(b, threshold_of(0))
        ratio = b / threshold_of(above)
        parts = [(ratio, CLIPS[above])]
        if above + 1 < len(CLIPS):
            share = (threshold_of(above) - b) / (threshold_of(above) - threshold_of(above + 1))
            parts = [((1 - share) * ratio, CLIPS[above]), (share, CLIPS[above + 1])]
        # q is opened cut by up to two units of 2^-16, which moves 1/√q by 2^-16/q at most, and matters from q = b² on
        shrunk = 1 - Fraction(1, 2**15) / b**2 - Fraction(1, 2**10)
        found = [sum((weight * own[i] for weight, own in parts), Fraction(0)) * shrunk for i in range(len(CLIPS[0]))]
        found[0] -= OFFSET * min(Fraction(1), b) * 2**COEFFICIENT_BITS
        return Sines(CLIP_PERIOD_BITS, tuple(math.floor(value) for value in found))

    def argument(self, logit_bound: float) -> float:
        """How far the link is asked for logits, centred over the classes, within a bound."""
        return 2.0 * logit_bound

    def wave(self, logit_bound: float) -> tuple[int, int]:
        """Period and sines of the link for such logits."""
        return wave_for(self.argument(logit_bound))

    def errors(self, logits: Floats, labels: npt.NDArray[Any], weights: Floats) -> Floats:
        """δ of every row."""
        longest = np.linalg.norm(weights - weights.mean(axis=1, keepdims=True), axis=0).max()
        return self.errors_on(logits, labels, self.wave(self.reach * float(longest)))

    def errors_on(self, logits: Floats, labels: npt.NDArray[Any], wave: tuple[int, int]) -> Floats:
        """δ of every row, with this link."""
        rows = np.arange(len(labels))
        e = half_wave(logits - logits[rows, labels][:, np.newaxis], wave, ODDS)
        e = e * self.crude(e.sum(axis=1))[:, np.newaxis]
        p = e * self.fine(e.sum(axis=1))[:, np.newaxis]
        p[rows, labels] -= 1
        return np.asarray(p)

    def updates(self, delta: Floats) -> Floats:
        """C(‖δ‖²)·δ."""
        return np.asarray(self.clip((delta**2).sum(axis=1))[:, np.newaxis] * delta)
