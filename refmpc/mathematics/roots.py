"""1/sqrt, sqrt and the clip factor 1/sqrt(max(1, q))."""

from __future__ import annotations

from accel.validate import require_integer
from refmpc.core.integer_logs import ceil_log2
from refmpc.core.primitive import Cost, primitive
from refmpc.core.tensor import ArithmeticTensor
from refmpc.mathematics.clipping import FACTOR_BITS, ClipConstants, clip_root
from refmpc.mathematics.inverse_power import InversePlan, inverse_power, inverse_power_cost
from refmpc.mathematics.normalise import MANTISSA_BITS, require_room
from refmpc.primitives.arithmetic import multiply_truncate
from refmpc.primitives.dealing import Additive, truncate_additive
from refmpc.primitives.truncation import truncated_product_cost

__all__ = ["clip_factor", "inverse_sqrt", "sqrt"]

LAST_UNIT = 2.0**-MANTISSA_BITS  # what the last truncation of a clip factor may add


def _plan(x: ArithmeticTensor, low: float, high: float, fraction_bits: int) -> tuple[InversePlan, int]:
    """The octaves, and the bits that the result loses."""
    plan = InversePlan.of(x.fraction_bits, low, high, "root")
    require_integer("fraction_bits", fraction_bits, 1, plan.result_bits - 1, way_out="ask for fewer fraction bits")
    return plan, plan.result_bits - fraction_bits


def _inverse_sqrt_cost(x: ArithmeticTensor, low: float, high: float, fraction_bits: int = 26) -> Cost:
    plan, cut = _plan(x, low, high, fraction_bits)
    column = Additive(x.party, x.shares[0].reshape(x.size), [], 0, 0)
    return inverse_power_cost(x, plan) + truncate_additive.cost(column, cut)


@primitive(cost=_inverse_sqrt_cost, source="this project: octaves by a thermometer, spline of the mantissa")
async def inverse_sqrt(x: ArithmeticTensor, low: float, high: float, fraction_bits: int = 26) -> ArithmeticTensor:
    """1/sqrt(x) for low ≤ x ≤ high (public bounds).

    7 rounds, about 340 bytes and 15 to 20 an octave between the bounds: 582 for 2^-8..2^8. Relative error below
    2^-16.9, plus one unit of the result. Domain: the bounds; half their octaves leave 17 bits of 2^(−k/2): high/low up
    to 2^40. Outside the bounds the result is arbitrary (``insecure_check_ranges`` finds such inputs).

    ``inverse_power``: spline 2^-17.94, 2^(−k/2) rounded 2^-18, the cut 2^-23.9; then the truncation.
    """
    return await _inverse_sqrt(x, low, high, fraction_bits, "inverse_sqrt", zero=False)


async def _inverse_sqrt(
    x: ArithmeticTensor, low: float, high: float, fraction_bits: int, name: str, *, zero: bool
) -> ArithmeticTensor:
    plan, cut = _plan(x, low, high, fraction_bits)
    if x.party.insecure_check_ranges:
        from refmpc.core.debug import check_bounds

        await check_bounds(x, low, high, name, zero=zero)
    found = await inverse_power(x.reshape(x.size), plan)
    return (await truncate_additive(found, cut)).reshape(x.shape)


def _sqrt_cost(x: ArithmeticTensor, low: float, high: float, fraction_bits: int = 16) -> Cost:
    return inverse_sqrt.cost(x, low, high) + truncated_product_cost(x.size, x.fraction_bits + 26 - fraction_bits)


@primitive(cost=_sqrt_cost, source="x · inverse_sqrt(x)")
async def sqrt(x: ArithmeticTensor, low: float, high: float, fraction_bits: int = 16) -> ArithmeticTensor:
    """sqrt(x) for low ≤ x ≤ high, and exactly 0 for x = 0.

    9 rounds, the bytes of ``inverse_sqrt`` + 24 + 3/8·(fraction bits of x + 26 − fraction_bits). Relative error below
    2^-16.9 + sqrt(x)·2^-26 (1/sqrt(x) has 26 bits), plus one unit. Domain: the bounds, and sqrt(x) below 2^(36 −
    fraction bits of x).
    """
    room = MANTISSA_BITS + x.fraction_bits + -(-ceil_log2(high) // 2)
    require_room(room, "high", high, "use fewer fraction bits")
    inverse = await _inverse_sqrt(x, low, high, MANTISSA_BITS, "sqrt", zero=True)
    return await multiply_truncate(x, inverse, x.fraction_bits + MANTISSA_BITS - fraction_bits)


# the clip factor ---------------------------------------------------------------------------------


def _clip_cost(q: ArithmeticTensor, high: float) -> Cost:
    column = Additive(q.party, q.shares[0].reshape(q.size), [], 0, 0)
    return clip_root.cost(q.reshape(q.size), high) + truncate_additive.cost(column, FACTOR_BITS - MANTISSA_BITS)


@primitive(cost=_clip_cost, source="clip_root")
async def clip_factor(q: ArithmeticTensor, high: float) -> ArithmeticTensor:
    """1/sqrt(max(1, q)) at 26 bits for q ≤ high, never more than that.

    6 rounds, about 710 bytes and 19 to 23 an octave up to ``high`` (882 at 2^9, 1177 at 2^20). It may be too small by
    2^-16.3 + 2^-23.4·sqrt(q), relative (2^-13 up to q = 2^20), never too large, for *every* way the truncation may
    round: ``clip_root`` has the proof, and one unit is taken off here. Everything below 1, negative values too, counts
    as 1 (at the margin of 2^-17). Domain: −high ≤ q ≤ high ≤ 2^32.
    """
    ClipConstants(q.fraction_bits, high)
    if q.party.insecure_check_ranges:
        from refmpc.core.debug import check_bounds

        await check_bounds(q, -high, high, "clip_factor")
    found = await clip_root(q.reshape(q.size), high)
    return (await truncate_additive(found, FACTOR_BITS - MANTISSA_BITS)).reshape(q.shape) - LAST_UNIT
