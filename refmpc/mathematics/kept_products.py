"""Products of numbers that were opened to be multiplied, and several functions of one number: one round each.

x = X − ρ_x + v_x·T_x with X, v_x at the holders and ρ_x, T_x at the dealer (``refmpc.Lifted``). A product x·y is then a
sum of what holders know times ρ_x, T_x, ρ_y, T_y and their four products: words that travel in the round in which the
last of both is opened (proofs §3.13).
"""

from __future__ import annotations

from collections.abc import Sequence

from accel import kernels
from accel.validate import require, require_integer
from refmpc.core.primitive import Cost, primitive
from refmpc.mathematics.series import (
    SOURCE,
    Kept,
    Series,
    _check_kept,
    _cut,
    _Dealt,
    _open_kept,
    _Public,
    _require_angle,
    _require_kept,
    _series_cost,
)
from refmpc.primitives.dealing import DEALER, Additive, Dealing, Lifted, TwoHolder, each_dealer, nothing, row_sizes

__all__ = ["open_kept", "open_product", "series_together"]

ROW_WORDS, ENTRY_WORDS = 2, 6


def _together_cost(z: Additive | TwoHolder, functions: Sequence[Series], bits: int = 64) -> Cost:
    return _series_cost(z, functions[0], bits)


@primitive(cost=_together_cost, source=SOURCE)
async def series_together(z: Additive | TwoHolder, functions: Sequence[Series], bits: int = 64) -> list[Additive]:
    """F_1(z), F_2(z), … of every entry, additive modulo 2^bits, for the bytes and the round of one ``series``.

    The functions have the same period, grid, turns and dealt bits, so the words are the same. Errors and views: as
    ``series``. The result of each is uniform given the others' to nobody: they are functions of one z.
    """
    first = functions[0]
    alike = all(
        (each.angle_bits, each.period_bits, each.turns, each.dealt_bits)
        == (first.angle_bits, first.period_bits, first.turns, first.dealt_bits)
        for each in functions
    )
    require(alike, "functions", functions, "of the same period, grid, turns and dealt bits")
    cut = _require_angle(z, first)
    require_integer("bits", bits, max(each.bits for each in functions), 64)
    public = [_Public(z.party, each) for each in functions]
    out = [nothing(z.party, z.shape) for _ in functions]

    async def work(dealing: Dealing) -> None:
        angle = _cut(dealing, z, 0, cut, first.angle_bits)
        opening = dealing.open(angle, first.angle_bits) if isinstance(z, Additive) else None
        rho = angle if opening is None or dealing.role != DEALER else opening.words
        arguments = (rho.reshape(-1), *public[0].deal, bits, public[0].tables)
        words = _Dealt(dealing, "series_deal", arguments, (angle.size, 2 * first.terms), bits)
        await dealing.turn()
        if dealing.role != DEALER:
            c, halves = (angle if opening is None else opening.words).reshape(-1), words.words
            for each, result in zip(public, out, strict=True):
                found = result[dealing.slice].reshape(-1)
                dealing.call("series_hold", c, *each.hold, bits, each.tables, halves, dealing.leads, found)

    operation, _ = await each_dealer("series_together", z, (tuple(functions), bits), work)
    return [
        Additive(z.party, words, z.segments, each.bits, operation.history(index), bits)
        for index, (each, words) in enumerate(zip(functions, out, strict=True))
    ]


def _kept_cost(x: Additive, kept: Kept) -> Cost:
    each = x.words.size // max(1, len(x.words))
    return Cost(1, sum(2 * kernels.packed_size(n * each, kept.bits) for n in row_sizes(len(x.words))))


@primitive(cost=_kept_cost, source="this project, proofs §3.13")
async def open_kept(x: Additive, kept: Kept) -> Lifted:
    """x on the grid of ``kept``, open to be multiplied: off by less than a unit, one integer for all its products.

    1 round, kept.bits/4 bytes an entry. Domain: x in the interval of ``kept``. Views: one opening.
    """
    _require_kept(x, kept)
    await _check_kept(x, kept, "open_kept")
    words = x.party.machine.memory(x.shape)

    async def work(dealing: Dealing) -> None:
        opening = _open_kept(dealing, x, kept)
        await dealing.turn()
        dealing.call("copy", opening.words, words[dealing.slice])

    operation, _ = await each_dealer("open_kept", x, (repr(kept),), work)
    offset = kept.offset(kept.fraction_bits)
    return Lifted(x.party, words, x.segments, kept.fraction_bits, operation.history(), kept.bits, offset)


def _product_cost(x: Additive, kept: Kept, y: Lifted, bits: int = 64) -> Cost:
    total, entries = 0, y.shape[1]
    for n in row_sizes(len(y.words)):
        factors = n if len(x.shape) == 1 else n * entries
        each = entries if len(x.shape) == 1 else 1
        total += 2 * kernels.packed_size(factors, kept.bits)
        total += kernels.packed_size(factors * (ROW_WORDS + ENTRY_WORDS * each), bits)
    return Cost(1, total)


@primitive(cost=_product_cost, source="this project, proofs §3.13")
async def open_product(x: Additive, kept: Kept, y: Lifted, bits: int = 64) -> Additive:
    """x·y of every entry, additive modulo 2^bits: exactly of the integer that x is on the grid of ``kept``, a number of
    each row (one integer for the whole row) or of each entry, and the integer y.

    1 round: the opening, and 6 words of ``bits`` bits an entry, 2 for each x. Domain: x in the interval of ``kept``.
    Views: as ``series``. A value that is opened for two products has a mask of its own in each.
    """
    _require_kept(x, kept)
    require(len(y.shape) == 2 and x.same_dealers(y), "y", y, f"entries of the rows of {x!r}, with the same dealers")
    require(x.shape in (y.shape, y.shape[:1]), "x", x, "a number of each row, or of each entry, of y")
    require_integer("bits", bits, max(kept.bits, y.bits), 64)
    await _check_kept(x, kept, "open_product")
    out, entries = nothing(x.party, y.shape), y.shape[1] if len(x.shape) == 1 else 1
    offset = kept.offset(kept.fraction_bits)

    async def work(dealing: Dealing) -> None:
        opening = _open_kept(dealing, x, kept)
        other = dealing.contiguous(y.words[dealing.slice]).reshape(-1, entries)
        rho = opening.words.reshape(-1) if dealing.role == DEALER else None
        shape = (len(other), ROW_WORDS + ENTRY_WORDS * entries)
        dealt = _Dealt(dealing, "lifted_product_deal", (rho, kept.bits, other, y.bits, bits), shape, bits)
        await dealing.turn()
        if dealing.role != DEALER:
            known = opening.words.reshape(-1), kept.bits, offset, other, y.bits, y.offset, bits, dealt.words
            found = out[dealing.slice].reshape(-1, entries)
            dealing.call("lifted_product_hold", *known, dealing.leads, found)

    operation, _ = await each_dealer("open_product", x, (y, repr(kept), bits), work)
    return Additive(x.party, out, x.segments, kept.fraction_bits + y.fraction_bits, operation.history(), bits)
