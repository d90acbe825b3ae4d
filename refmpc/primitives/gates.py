"""A secret bit times a number, left at the two holders: selection without the round that shares the result again."""

from __future__ import annotations

from accel.validate import require
from refmpc.core.party import Segment
from refmpc.core.primitive import Cost, primitive
from refmpc.core.tensor import ArithmeticTensor
from refmpc.primitives.dealing import (
    DEALER,
    SECOND,
    Additive,
    Dealing,
    TwoHolder,
    each_dealer,
    held,
    nothing,
)
from refmpc.primitives.two_holder import TwoHolderBits

__all__ = ["gated"]


def _rows(bits: TwoHolderBits) -> list[Segment]:
    """The dealers of the bits' rows."""
    each = bits.size // max(1, bits.shape[0])
    whole = all(each > 0 and s.slice.start % each == 0 and s.slice.stop % each == 0 for s in bits.segments)
    require(whole or bits.size == 0, "bits", bits, "of whole rows", "compare with dealers= those of the rows")
    return [Segment(s.dealer, s.slice.start // max(1, each), s.slice.stop // max(1, each)) for s in bits.segments]


def _cost(bits: TwoHolderBits, d: ArithmeticTensor | Additive) -> Cost:
    opened = 0 if isinstance(d, ArithmeticTensor) else 24 if d.dealer_adds else 16
    return Cost(1, (16 + opened) * bits.size)


@primitive(cost=_cost, source="select, without its second round; what is opened may be additive")
async def gated(bits: TwoHolderBits, d: ArithmeticTensor | Additive) -> Additive:
    """bit·d element by element, rows first, additive at the two holders of each row. Exact modulo 2^64.

    1 round, 16 bytes; if d is additive it is opened in the same round: 32, or 40 if its dealer has a summand. The bits
    must have the dealers of whole rows, those of d if it is additive (``is_negative(…, dealers=…)``).

    d = c − ρ with c at the holders and ρ at the dealer, and b = β + (1 − 2β)·β'. So b·d = β·c − β·ρ + (1 − 2β)·(c·β' −
    β'ρ) is linear in what the dealer deals: β' and −β'ρ, and −ρ too if it contains the dealer's own summand (else the
    holders have shares of it: outer shares, or the masks of the opening). Views: those of an opening, and dealt words
    under masks that role 1 does not know; the dealer gets nothing.
    """
    require(bits.shape == d.shape, "d.shape", d.shape, f"the shape of the bits, {bits.shape}")
    rows = _rows(bits)
    party = d.party
    given = held(d, rows) if isinstance(d, ArithmeticTensor) else None
    source: Additive | TwoHolder = d if isinstance(d, Additive) else held(d, rows)
    if isinstance(d, Additive):
        same = [(s.dealer, s.slice) for s in rows] == [(s.dealer, s.slice) for s in d.segments]
        require(same, "bits", bits, "dealt by the dealers of d", "compare with dealers=d.segments")
    each = bits.size // max(1, bits.shape[0])
    deals_rho = isinstance(d, Additive) and d.dealer_adds
    out = nothing(party, d.shape)

    async def work(dealing: Dealing) -> None:
        at, count = dealing.slice, dealing.rows * each
        own = bits.held[at.start * each : at.stop * each]
        opening = None if given is not None else dealing.open(source.words[at])
        halves = dealing.halves(3 if deals_rho else 2, count)
        if dealing.role == DEALER:
            rho = (given.words[at] if given is not None else opening.words).reshape(-1)  # type: ignore[union-attr]
            negative, zero = dealing.memory(count), nothing(party, count)
            dealing.call("negate", rho, negative)
            rest = dealing.memory(halves.shape)
            dealing.call("select_deal", own, negative, zero, halves[:2], rest[:2])
            if deals_rho:
                dealing.call("subtract_low", negative, halves[2], 64, rest[2])
            dealing.send(SECOND, rest)
            await dealing.turn()
            return
        await dealing.turn()
        c = given.words[at] if given is not None else opening.words  # type: ignore[union-attr]
        outer = dealing.memory(count)
        if deals_rho:
            dealing.call("copy", halves[2], outer)
        elif isinstance(d, ArithmeticTensor):
            dealing.call("copy", dealing.contiguous(d.shares[dealing.role, at]).reshape(-1), outer)
        else:
            assert opening is not None and opening.mask is not None
            dealing.call("negate", opening.mask.reshape(-1), outer)
        result = dealing.memory(count)
        dealing.call("select_hold", own, halves[:2], outer, c.reshape(-1), dealing.leads, result)
        dealing.call("copy", result, out[at].reshape(-1))

    operation, _ = await each_dealer("gated", source, (bits, d), work)
    return Additive(party, out, rows, d.fraction_bits, operation.history())
