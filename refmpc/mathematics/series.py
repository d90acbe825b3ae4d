"""Smooth bounded functions of a secret in one round: trigonometric sums whose sines and cosines the dealer deals.

F(z) = a + Σ_k p_k sin kθ + q_k cos kθ with θ = 2πz/P. A number that is opened is c − ρ, with c at two holders and ρ at
the dealer, so sin k(c − ρ) and cos k(c − ρ) are sums of products of a holder's number and a dealt one. Three facts
carry everything that is made of it (proofs §3.13):

* F is bounded whatever z is: an angle that leaves its range wraps around, and gives another number of the same
  interval.
* The words are wanted modulo the ring of the *next* opening only, so they are short.
* A product F(z)·x with an x that is open in the same sense costs words as well, and no round: [word·ρ_x]. The *lift*
  takes x from modulo 2^w to the integers: x lies in the lower half of its ring, so c − ρ has wrapped exactly if ρ's
  top bit is set and c's is not.

Fourier series with a dealer and one opening for all terms: Boura, Chillotti, Gama, Jetchev, Peceny, Petric,
"High-Precision Privacy-Preserving Real-Valued Function Evaluation", FC 2018; in one round: Zheng et al., ACSAC 2023;
Kei and Chow, NDSS 2025.
"""

from __future__ import annotations

import decimal
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import kernels
from accel.validate import require, require_integer
from refmpc.core.digest import mix, name_digest
from refmpc.core.primitive import Cost, primitive
from refmpc.core.words import Words
from refmpc.primitives.dealing import (
    DEALER,
    FIRST,
    SECOND,
    Additive,
    Dealing,
    Lifted,
    Opening,
    TwoHolder,
    check_additive,
    each_dealer,
    nothing,
    row_sizes,
)

if TYPE_CHECKING:
    from refmpc.core.party import Party

__all__ = ["Kept", "Series", "derivative", "half_wave", "log_word", "open_squares", "series", "series_times", "turns"]

SOURCE = "Boura et al., FC 2018; words of one dealer, lift: this project, proofs §3.13"
TABLE_BITS = 30
MOST_ANGLE_BITS = 20
ANGLE_ERROR = Fraction(3, 2**24)  # of a sine of up to 64 turns: the tests look at every word
_ROOT_2 = Fraction(99, 70)  # above √2
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")


# numbers that every server makes alike: decimal arithmetic is exact by its standard, no libm, no binary float
# -----------


def _exact() -> Any:
    return decimal.localcontext(decimal.Context(prec=70, rounding=decimal.ROUND_HALF_EVEN))


def _cosine_and_sine(angle: Decimal) -> tuple[Decimal, Decimal]:
    term, sums, k = Decimal(1), [Decimal(0), Decimal(0)], 0
    while abs(term) > Decimal("1e-60"):
        sums[k % 2] += term if k % 4 < 2 else -term
        k += 1
        term = term * angle / k
    return sums[0], sums[1]


def _rounded(value: Decimal, bits: int) -> int:
    return int((value * 2**bits).to_integral_value())


@functools.cache
def turns() -> np.ndarray:
    """Cosine and sine of i/1024 turns, then of i/2^20 turns, i = 0 … 1023, at 30 bits."""
    lines = []
    with _exact():
        for parts in (2**10, 2**20):
            (c, s), (up, across) = (Decimal(1), Decimal(0)), _cosine_and_sine(2 * _PI / parts)
            both = []
            for _ in range(1024):
                both.append((_rounded(c, TABLE_BITS), _rounded(s, TABLE_BITS)))
                c, s = c * up - s * across, c * across + s * up
            lines += [list(line) for line in zip(*both, strict=True)]
    return np.array(lines, dtype=np.int64)


@dataclass(frozen=True)
class Series:
    """F with P = 2^period_bits, coefficients at ``coefficient_bits``, of the turns 1, 2, 3, … or (``odd``) 1, 3, 5, …

    z is read on a grid of 2^−fraction_bits; holders' and dealt factors have ``held_bits`` and ``dealt_bits``, F their
    sum. Calling it gives the value in floating point, for the plaintext twin.
    """

    period_bits: int
    fraction_bits: int
    constant: int
    sine: tuple[int, ...]
    cosine: tuple[int, ...]
    odd: bool = False
    held_bits: int = 15
    dealt_bits: int = 16
    coefficient_bits: int = TABLE_BITS

    def __post_init__(self) -> None:
        require(
            self.period_bits >= 0 and 1 <= self.angle_bits <= MOST_ANGLE_BITS, "angle bits", self.angle_bits, "1 to 20"
        )
        require(len(self.sine) == len(self.cosine) > 0, "coefficients", len(self.sine), "as many sines as cosines")
        require(self.turns[-1] <= 64, "turns", self.turns[-1], "at most 64")
        size = max(map(math.hypot, self.sine, self.cosine))
        require(size < 2**32, "coefficients", size, "below 2^32", "give them fewer coefficient_bits")
        require_integer("held_bits", self.held_bits, 4, 28)
        require_integer("dealt_bits", self.dealt_bits, 4, 28)

    @property
    def angle_bits(self) -> int:
        """Angle bits of the word that is opened."""
        return self.period_bits + self.fraction_bits

    @property
    def terms(self) -> int:
        """How many turns there are: twice as many words are dealt."""
        return len(self.sine)

    @property
    def turns(self) -> range:
        """The multiples of θ."""
        return range(1, 2 * self.terms, 2) if self.odd else range(1, self.terms + 1)

    @property
    def bits(self) -> int:
        """Fraction bits of F."""
        return self.held_bits + self.dealt_bits

    @property
    def cut(self) -> int:
        """What a holder's factors lose."""
        return self.coefficient_bits + TABLE_BITS - self.held_bits

    @property
    def constant_word(self) -> int:
        """a at the bits of F."""
        up = self.bits - self.coefficient_bits
        return (self.constant << up if up >= 0 else self.constant >> -up) % 2**64

    @property
    def size(self) -> Fraction:
        """Σ √(p_k² + q_k²), from above: how far F can be from a, and, times 2π·turns/P, its slope."""
        return sum((self._radius(k) for k in range(self.terms)), Fraction(0))

    def _radius(self, k: int) -> Fraction:
        squared = self.sine[k] ** 2 + self.cosine[k] ** 2
        return Fraction(math.isqrt(squared) + 1, 2**self.coefficient_bits)

    @functools.cached_property
    def error(self) -> Fraction:
        """Bound of |result − F| for the word that is opened, whatever is rounded how: dealt and held factors to half a
        unit, angles by ``ANGLE_ERROR``, the constant down."""
        held, dealt = (Fraction(1, 2 ** (bits + 1)) for bits in (self.held_bits, self.dealt_bits))
        each = (self._radius(k) * (dealt + 2 * ANGLE_ERROR) + held for k in range(self.terms))
        return _ROOT_2 * sum(each, Fraction(0)) * (1 + 4 * dealt) + Fraction(1, 2**self.bits)

    def __call__(self, z: Any) -> np.ndarray:
        angle = 2 * np.pi * np.multiply.outer(np.asarray(z, dtype=float), np.array(self.turns)) / 2.0**self.period_bits
        found = (
            self.constant + np.sin(angle) @ np.array(self.sine, float) + np.cos(angle) @ np.array(self.cosine, float)
        )
        return np.asarray(found / 2.0**self.coefficient_bits)

    def scaled(self, factor: Fraction) -> Series:
        """factor·F: its coefficients are rounded towards zero, so that no |p|, |q| or |a| grows beyond the product."""
        values = [int(value * factor) for value in (self.constant, *self.sine, *self.cosine)]
        return replace(
            self, constant=values[0], sine=tuple(values[1:][: self.terms]), cosine=tuple(values[1:][self.terms :])
        )

    def of_half_the_period(self) -> Series:
        """F(2z) less its constant: the same turns of half the period."""
        return replace(self, period_bits=self.period_bits - 1, fraction_bits=self.fraction_bits + 1, constant=0)

    def public_digest(self) -> int:
        """Public digest of all its numbers."""
        numbers = (*self.sine, *self.cosine, self.constant)
        rest = (self.period_bits, self.fraction_bits, self.odd, self.held_bits, self.dealt_bits, self.coefficient_bits)
        return mix(name_digest("series"), *(int(n) % 2**64 for n in (*numbers, *rest)))


def half_wave(period_bits: int, terms: int, odds: float = 1, fraction_bits: int | None = None, **bits: int) -> Series:
    """σ(z − log odds), continued as a half-wave: up at log odds, down half a period further. Odd turns only, closed
    form.

    Σ_k (4π/P)/sinh(πω)·sin ω(z − log odds), ω = 2πk/P, is the wave itself: it differs from σ by less than e^−d at a
    distance d from the turning points, and what is cut after ``terms`` falls like e^(−π²·2k/P).
    """
    sine, cosine, period = [], [], 2**period_bits
    with _exact():
        for k in range(1, 2 * terms, 2):
            omega = 2 * _PI * k / period
            grown = (_PI * omega).exp()
            size = 4 * _PI / period * 2 / (grown - 1 / grown)
            c, s = _cosine_and_sine(omega * Decimal(odds).ln())
            sine.append(_rounded(size * c, TABLE_BITS))
            cosine.append(_rounded(-size * s, TABLE_BITS))
    fraction = MOST_ANGLE_BITS - period_bits if fraction_bits is None else fraction_bits
    return Series(period_bits, fraction, 1 << (TABLE_BITS - 1), tuple(sine), tuple(cosine), True, **bits)


def log_word(odds: float, bits: int) -> int:
    """log odds at these bits, the same at every server."""
    with _exact():
        return _rounded(Decimal(odds).ln(), bits)


def derivative(function: Series) -> Series:
    """dF/dz, its coefficients rounded: sines become cosines, so both share their words."""
    period, numbers = Fraction(2) ** function.period_bits, []
    with _exact():
        for values, sign in ((function.cosine, -1), (function.sine, 1)):
            speeds = (sign * 2 * _PI * k / int(period) for k in function.turns)
            numbers.append(tuple(_rounded(value * each, 0) for value, each in zip(values, speeds, strict=True)))
    sine, cosine = numbers
    return replace(function, constant=0, sine=sine, cosine=cosine)


# what is open and may be multiplied -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """How additive numbers are opened to be multiplied: their fraction bits, and the public interval −low …
    2^(range_bits − 1) − low that holds them, with a unit to spare at both ends."""

    fraction_bits: int
    range_bits: int
    low: Fraction

    @property
    def bits(self) -> int:
        """Bits of the ring."""
        return self.fraction_bits + self.range_bits

    def offset(self, fraction_bits: int) -> int:
        """``low`` at these bits."""
        return int(self.low * 2**fraction_bits)


class _Dealt:
    """Words of the dealer, shared between the holders: drawn at role 0, what is missing sent to role 1 in ``bits``
    bits each."""

    __slots__ = ("_arriving", "_words")

    def __init__(self, dealing: Dealing, kernel: str, arguments: Sequence[Any], shape: tuple[int, ...], bits: int):
        self._arriving = dealing.expect_packed(DEALER, shape, bits) if dealing.role == SECOND else None
        if self._arriving is not None:
            return
        self._words = dealing.masks(DEALER if dealing.role == FIRST else FIRST, *shape)
        if dealing.role == DEALER:
            out = dealing.memory(shape)
            dealing.call(kernel, *arguments, self._words, out)
            dealing.send_packed(SECOND, out, bits)

    @property
    def words(self) -> Words:
        return self._words if self._arriving is None else self._arriving.words


def _cut(dealing: Dealing, z: Additive | TwoHolder, offset: int, cut: int, low: int) -> Words:
    """This party's summand (or its c or ρ), cut."""
    own = dealing.contiguous(z.words[dealing.slice])
    out = dealing.memory(own.shape)
    lead = offset if dealing.leads else 0
    dealing.call("cut_low", own.reshape(-1), np.uint64(lead), z.bits, cut, low, out.reshape(-1))
    return out


def _require_angle(z: Additive | TwoHolder, function: Series) -> int:
    """What an angle loses on its way to the grid."""
    cut = z.fraction_bits - function.fraction_bits
    enough = cut >= 0 and cut + function.angle_bits <= z.bits
    require(enough, "z", z, f"at {function.fraction_bits} fraction bits or more, modulo at least its period")
    return cut


class _Public:
    """The numbers of a function as arguments of kernels."""

    def __init__(self, party: Party, function: Series):
        machine = party.machine
        self.tables = machine.public(turns())
        angle = function.angle_bits, function.odd
        self.deal = *angle, function.terms, function.dealt_bits
        coefficients = (machine.public(np.array(each, dtype=np.int64)) for each in (function.sine, function.cosine))
        self.hold = *angle, *coefficients, function.cut, np.uint64(function.constant_word)


def _series_cost(z: Additive | TwoHolder, function: Series, bits: int = 64) -> Cost:
    each = z.words.size // max(1, len(z.words))
    opened = 0 if isinstance(z, TwoHolder) else 2
    size = kernels.packed_size
    sizes = (n * each for n in row_sizes(len(z.words)))
    return Cost(1, sum(opened * size(n, function.angle_bits) + size(n * 2 * function.terms, bits) for n in sizes))


@primitive(cost=_series_cost, source=SOURCE)
async def series(z: Additive | TwoHolder, function: Series, bits: int = 64) -> Additive:
    """F(z) of every entry, additive modulo 2^bits. 1 round; bits·terms/4 bytes an entry, and angle_bits/4 if z is
    additive.

    No domain: z beyond half a period wraps. Error: that of the series, and F of an angle below z by less than two
    units of 2^−fraction_bits (three if the dealer adds, one unit to either side if two hold z, who then open nothing).
    Views: an opening, and at role 1 words under masks of role 0; the dealer receives nothing.
    """
    cut = _require_angle(z, function)
    require_integer("bits", bits, function.bits, 64)
    public, out = _Public(z.party, function), nothing(z.party, z.shape)

    async def work(dealing: Dealing) -> None:
        angle = _cut(dealing, z, 0, cut, function.angle_bits)
        opening = dealing.open(angle, function.angle_bits) if isinstance(z, Additive) else None
        rho = angle if opening is None or dealing.role != DEALER else opening.words
        shape = (angle.size, 2 * function.terms)
        arguments = (rho.reshape(-1), *public.deal, bits, public.tables)
        words = _Dealt(dealing, "series_deal", arguments, shape, bits)
        await dealing.turn()
        if dealing.role != DEALER:
            c = (angle if opening is None else opening.words).reshape(-1)
            found = out[dealing.slice].reshape(-1)
            dealing.call("series_hold", c, *public.hold, bits, public.tables, words.words, dealing.leads, found)

    operation, _ = await each_dealer("series", z, (function, bits), work)
    return Additive(z.party, out, z.segments, function.bits, operation.history(), bits)


@dataclass(frozen=True)
class _Known:
    """What was opened before."""

    words: Words


def _open_kept(dealing: Dealing, x: Additive | TwoHolder, kept: Kept) -> Opening | _Known:
    cut = x.fraction_bits - kept.fraction_bits
    return dealing.open(_cut(dealing, x, kept.offset(x.fraction_bits), cut, kept.bits), kept.bits)


def _require_kept(x: Additive, kept: Kept) -> None:
    require(not x.dealer_adds, "x", x, "without a summand of the dealer")
    cut = x.fraction_bits - kept.fraction_bits
    require(
        cut >= 0 and cut + kept.bits <= x.bits,
        "x",
        x,
        f"at {kept.fraction_bits} bits or more, modulo at least its range",
    )
    require(kept.low * 2**kept.fraction_bits % 1 == 0, "low", kept.low, "a multiple of the grid")


async def _check_kept(x: Additive, kept: Kept, name: str) -> None:
    """In debug mode, raise unless x is in its interval."""
    if x.bits == 64:
        low = -kept.offset(x.fraction_bits)
        await check_additive(x, low, low + (1 << (kept.range_bits - 1 + x.fraction_bits)), name)


def _times_cost(
    z: Additive | TwoHolder, function: Series, x: Additive | TwoHolder, bits: int = 64, kept: Kept | None = None
) -> Cost:
    entries, each, total = x.shape[1], 2 * function.terms + 1, 0
    width = kept.bits if kept is not None else x.bits
    for n in row_sizes(len(z.words)):
        total += 0 if isinstance(z, TwoHolder) else 2 * kernels.packed_size(n, function.angle_bits)
        total += 2 * kernels.packed_size(n * entries, width) if kept is not None else 0
        total += kernels.packed_size(n * (each - 1 + entries * each), bits)
        total += kernels.packed_size(n * entries * each, bits - width) if width < 64 else 0
    return Cost(1, total)


@primitive(cost=_times_cost, source=SOURCE)
async def series_times(
    z: Additive | TwoHolder, function: Series, x: Additive | TwoHolder, bits: int = 64, kept: Kept | None = None
) -> Additive:
    """F(z)·x_i for every entry of a row, additive modulo 2^bits. One number F for the whole row: errors of F scale the
    row.

    1 round. x is held by two modulo 2^64 (as a replicated number is), or lifted, or is additive and opened here as
    ``kept`` says: then x_i is the entry on that grid, off by less than one of its units. Exact from there. Domain: none
    of z; x in the interval that ``kept`` names. Bytes: 2·terms words of ``bits`` bits a row and 2·terms + 1 an entry,
    as many of bits − x.bits for the lift, beside the openings. Views: as ``series``.
    """
    cut = _require_angle(z, function)
    require(z.words.ndim == 1, "z", z, "a number of each row")
    require(len(x.shape) == 2 and z.same_dealers(x), "x", x, f"entries of the rows of {z!r}, with the same dealers")
    is_open = isinstance(x, TwoHolder)
    require((kept is None) == is_open, "kept", kept, "given for numbers that are additive, and only for them")
    if isinstance(x, Additive) and kept is not None:
        _require_kept(x, kept)
        await _check_kept(x, kept, "series_times")
    width, scale = (x.bits, x.fraction_bits) if kept is None else (kept.bits, kept.fraction_bits)
    offset = x.offset if isinstance(x, Lifted) else 1 if kept is None else kept.offset(scale)
    whole = is_open and not isinstance(x, Lifted)  # modulo 2^64: nothing is above
    require(width == 64 if whole else bits > width, "x.bits", width, "64, or less than those of the result if lifted")
    public, out = _Public(z.party, function), nothing(z.party, x.shape)
    entries, each = x.shape[1], 2 * function.terms + 1

    async def work(dealing: Dealing) -> None:
        own = _cut(dealing, z, 0, cut, function.angle_bits)
        angle = _Known(own) if isinstance(z, TwoHolder) else dealing.open(own, function.angle_bits)
        factor = _Known(dealing.contiguous(x.words[dealing.slice])) if kept is None else _open_kept(dealing, x, kept)
        rhos = (angle.words, factor.words) if dealing.role == DEALER else (None, None)
        dealt = []
        for begun, shift, ring in ((each - 1, 0, bits), (0, width - 1, bits - width))[: 1 if whole else 2]:
            arguments = rhos[0], *public.deal, rhos[1], shift, ring, public.tables
            dealt.append(_Dealt(dealing, "scaled_deal", arguments, (dealing.rows, begun + entries * each), ring))
        await dealing.turn()
        if dealing.role != DEALER:
            tops = dealing.memory((dealing.rows, 0)) if whole else dealt[1].words
            known = angle.words, *public.hold, factor.words, width, np.uint64(offset), bits, public.tables
            dealing.call("scaled_hold", *known, dealt[0].words, tops, dealing.leads, out[dealing.slice])

    operation, _ = await each_dealer("series_times", z, (x, function, bits, repr(kept)), work)
    return Additive(z.party, out, z.segments, function.bits + scale, operation.history(), bits)


def _squares_cost(x: Additive, kept: Kept, bits: int) -> Cost:
    entries, size = x.shape[1], kernels.packed_size
    rows = row_sizes(len(x.words))
    return Cost(1, sum(2 * size(n * entries, kept.bits) + size(n * (3 * entries + 1), bits) for n in rows))


@primitive(cost=_squares_cost, source="this project: a dealt square and the lift, proofs §3.13")
async def open_squares(x: Additive, kept: Kept, bits: int) -> tuple[Lifted, Additive]:
    """x on the grid of ``kept``, open to be multiplied, and Σx_i² of every row, modulo 2^bits: exactly of those
    integers.

    1 round, kept.bits/4 bytes an entry for the opening and 3 words of ``bits`` bits for the squares, one a row.
    Domain: x in the interval of ``kept``. Views: as ``series``.
    """
    _require_kept(x, kept)
    require(len(x.shape) == 2, "x", x, "entries of rows")
    require_integer("bits", bits, kept.bits, 64)
    await _check_kept(x, kept, "open_squares")
    rows, entries = x.shape
    q, words = nothing(x.party, rows), x.party.machine.memory(x.shape)
    offset = kept.offset(kept.fraction_bits)

    async def work(dealing: Dealing) -> None:
        opening, own = _open_kept(dealing, x, kept), words[dealing.slice]
        arguments = (opening.words if dealing.role == DEALER else None, kept.bits, bits)
        dealt = _Dealt(dealing, "lifted_squares_deal", arguments, (dealing.rows, 3 * entries + 1), bits)
        await dealing.turn()
        dealing.call("copy", opening.words, own)
        if dealing.role != DEALER:
            known = opening.words, kept.bits, np.uint64(offset), bits, dealt.words
            dealing.call("lifted_squares_hold", *known, dealing.leads, q[dealing.slice])

    operation, _ = await each_dealer("open_squares", x, (repr(kept), bits), work)
    lifted = Lifted(x.party, words, x.segments, kept.fraction_bits, operation.history(), kept.bits, offset)
    return lifted, Additive(x.party, q, x.segments, 2 * kept.fraction_bits, operation.history(1), bits)
