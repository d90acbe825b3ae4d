"""Functions of one number on a public range by one series each: two rounds, whatever the function.

Outside its range a function gives another of its values (it is periodic); inside, the error is ``Smooth.error`` at
most: the fit, the rounding of its factors, and half a unit of the grid times the slope. Wide ranges are for
``refmpc.reciprocal``, ``refmpc.inverse_sqrt`` and ``refmpc.exp``: a series needs more terms the further its range goes
from what it varies on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from accel.validate import require_choice
from refmpc.core.primitive import Cost, primitive
from refmpc.core.tensor import ArithmeticTensor
from refmpc.mathematics.series import MOST_ANGLE_BITS, SOURCE, Series, half_wave, series
from refmpc.primitives.dealing import Additive, TwoHolder, check_additive, held, replicate, row_segments

__all__ = ["FITS", "SMOOTH", "Smooth", "smooth"]

HELD_BITS, DEALT_BITS = 18, 19
STORED_BITS = 28
TURN_BITS = 40
INVERSE_TURN = 174_992_710_548  # 2^40/2π: an angle in radians becomes turns, off by 2^-41 of it

# period bits, turns, which parts, range: what the generator fits
FITS: dict[str, tuple[int, range, str, float, float]] = {
    "softplus": (5, range(1, 15), "both", -12.0, 12.0),
    "gelu": (5, range(1, 17), "both", -8.0, 8.0),
    "huber": (5, range(1, 17), "cosine", -8.0, 8.0),
    "clamp": (5, range(1, 33, 2), "sine", -15.0, 15.0),
    "exp": (5, range(1, 11), "both", -16.0, 0.0),
    "reciprocal": (4, range(1, 9), "both", 1.0, 8.0),
    "inverse_sqrt": (4, range(1, 7), "both", 1.0, 8.0),
}
# constant, sines, cosines at 28 bits: made by ``python -m bench.generators.series``, tested, not edited
STORED: dict[str, tuple[int, ...]] = {
    "softplus": (
        1080845486,
        1333342821,
        -618252765,
        363093110,
        -227486439,
        143787156,
        -89208338,
        53369099,
        -30339066,
        16145703,
        -7899792,
        3465415,
        -1308759,
        394584,
        -76632,
        -830709388,
        10677865,
        -65292976,
        4864602,
        -12626720,
        1391206,
        -2614261,
        142376,
        -421974,
        -92268,
        -26720,
        -57076,
        4675,
        -14254,
    ),
    "gelu": (
        1409980580,
        1476395008,
        -997690949,
        1085011714,
        -1311136942,
        1476395008,
        -1464450486,
        1261915614,
        -941258840,
        605631408,
        -333858616,
        155759791,
        -60269514,
        18712535,
        -4405355,
        705016,
        -58083,
        -992067886,
        -1029394874,
        1476395008,
        -939940992,
        -485955840,
        1476395008,
        -1433758715,
        401815943,
        784876525,
        -1476395008,
        1458630730,
        -1022712050,
        530195634,
        -202705339,
        52143145,
        -7495721,
    ),
    "huber": (
        2198789922,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        -1476395008,
        -1392753127,
        1476395008,
        -546619877,
        -1037387865,
        1476395008,
        -542808189,
        -921942566,
        1476395008,
        -742491717,
        -595861123,
        1470803853,
        -1476395008,
        924494714,
        -368499477,
        75761375,
    ),
    "clamp": (
        0,
        339631965,
        107577442,
        58080313,
        35066358,
        21305374,
        12154087,
        5846233,
        1523204,
        -1299638,
        -2981130,
        -3801128,
        -4045541,
        -4006961,
        -4050587,
        -4702865,
        4477705,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
    ),
    "exp": (
        979550646,
        1476395008,
        1476395008,
        402863472,
        -625643455,
        -594842193,
        17500471,
        152339114,
        16915217,
        -10405361,
        -757831,
        1079544026,
        -441469294,
        -1174229188,
        -705854773,
        208542226,
        349404195,
        25637273,
        -48570671,
        -5280089,
        1157640,
    ),
    "reciprocal": (
        647036352,
        -407887011,
        -1476395008,
        -1476395008,
        -117705694,
        529019096,
        194593863,
        -17281315,
        -8180178,
        1421289545,
        914664992,
        -627065377,
        -1136222513,
        -317826812,
        144274522,
        60226521,
        444698,
    ),
    "inverse_sqrt": (
        1060148460,
        -1476395008,
        -764317392,
        232021851,
        204957178,
        10337539,
        -5877779,
        684460959,
        -752143164,
        -495795284,
        23228123,
        50921875,
        3241547,
    ),
}


@dataclass(frozen=True)
class Smooth:
    """A series, the range on which it is its function, the largest error there, and what x is multiplied by first."""

    series: Series
    low: float
    high: float
    error: float
    factor: int = 1

    @property
    def factor_bits(self) -> int:
        """Bits of ``factor``."""
        return 0 if self.factor == 1 else TURN_BITS


def _stored(name: str) -> Series:
    period_bits, turns, _, _, _ = FITS[name]
    constant, *rest = STORED[name]
    sine, cosine = tuple(rest[: len(turns)]), tuple(rest[len(turns) :])
    fraction, odd = MOST_ANGLE_BITS - period_bits, turns.step == 2
    return Series(period_bits, fraction, constant, sine, cosine, odd, HELD_BITS, DEALT_BITS, STORED_BITS)


def _angle(sine: int, cosine: int) -> Series:
    return Series(0, MOST_ANGLE_BITS, 0, (sine << 30,), (cosine << 30,), False, HELD_BITS, DEALT_BITS)


_SIGMOID = half_wave(6, 16, held_bits=HELD_BITS, dealt_bits=DEALT_BITS)
_TANH = replace(_SIGMOID.scaled(Fraction(2)), period_bits=5, fraction_bits=15, constant=0)  # 2σ(2x) − 1
_ERRORS = {  # measured on the whole range by the tests, which also find that no smaller power of two holds
    "softplus": 2.0**-12,
    "gelu": 2.0**-12,
    "huber": 2.0**-6,
    "clamp": 2.0**-5,
    "exp": 2.0**-12,
    "reciprocal": 2.0**-12,
    "inverse_sqrt": 2.0**-12,
}
SMOOTH: dict[str, Smooth] = {
    "sigmoid": Smooth(_SIGMOID, -20.0, 20.0, 2.0**-14),
    "tanh": Smooth(_TANH, -10.0, 10.0, 2.0**-13),
    "sin": Smooth(_angle(1, 0), -1024.0, 1024.0, 2.0**-16, INVERSE_TURN),
    "cos": Smooth(_angle(0, 1), -1024.0, 1024.0, 2.0**-16, INVERSE_TURN),
    **{name: Smooth(_stored(name), *FITS[name][3:], _ERRORS[name]) for name in FITS},
}


def _cost(x: ArithmeticTensor, function: str) -> Cost:
    flat = x.first.reshape(-1)
    z = TwoHolder(x.party, flat, [], x.fraction_bits, 0)
    return series.cost(z, SMOOTH[function].series) + replicate.cost(Additive(x.party, flat, [], 0, 0))


@primitive(cost=_cost, source=SOURCE)
async def smooth(x: ArithmeticTensor, function: str) -> ArithmeticTensor:
    """``function`` of every entry, at 37 bits: sigmoid, tanh, sin, cos, softplus, gelu, huber, clamp (to ±1), exp,
    reciprocal, inverse_sqrt, on the range and with the error that ``SMOOTH`` names. 2 rounds, 16 bytes and 16 for each
    of its terms.

    x needs as many fraction bits as the grid, 20 less the bits of the period: x is replicated, so its two holders'
    numbers are cut, and no more than words and the replication is sent. Views: as ``series``.
    """
    require_choice("function", function, tuple(SMOOTH))
    chosen = SMOOTH[function]
    flat = x.reshape(-1)
    if flat.fraction_bits + chosen.factor_bits < chosen.series.fraction_bits:
        flat = flat.rescale(chosen.series.fraction_bits)
    await check_additive(
        flat, int(chosen.low * 2**flat.fraction_bits), int(chosen.high * 2**flat.fraction_bits) + 1, "smooth"
    )
    scaled = flat.scale_by_integers(chosen.factor).reinterpret(flat.fraction_bits + chosen.factor_bits)
    additive = await series(held(scaled, row_segments(x.party, flat.size)), chosen.series)
    return (await replicate(additive)).reshape(*x.shape)
