"""The insecure debug mode (``insecure_check_ranges``): opens operands to name the first that leaves its domain."""

from __future__ import annotations

import numpy as np

from refmpc.errors import RangeError
from refmpc.party import Operation
from refmpc.tensor import ArithmeticTensor
from refmpc.words import Words

__all__ = ["check_bounds", "check_range", "check_summand_range"]


async def _open(operation: Operation, summand: Words) -> np.ndarray:
    round_ = operation.round()
    mine = operation.machine.contiguous(summand)
    round_.send_next(mine)
    round_.send_previous(mine)
    others = round_.expect_next(summand.shape), round_.expect_previous(summand.shape)
    await round_
    return np.asarray(sum(operation.machine.unsealed(part) for part in (mine, *others)), np.uint64).view(np.int64)


async def check_summand_range(operation: Operation, summand: Words, low: int, high: int) -> None:
    """Open Σ summands and raise unless low ≤ value < high everywhere (signed ring words)."""
    _refuse_outside(await _open(operation, summand), low, high, operation.name)


async def check_range(x: ArithmeticTensor, low: int, high: int, name: str) -> None:
    """Open x and raise unless low ≤ x < high everywhere (signed ring words)."""
    await check_summand_range(x.party.operation(name), x.first, low, high)


async def check_bounds(
    x: ArithmeticTensor, low: float, high: float, name: str, *, signed: bool = False, zero: bool = False
) -> None:
    """Open x and raise unless low ≤ x ≤ high everywhere (low ≤ |x| ≤ high if ``signed``; 0 too if ``zero``)."""
    values = await _open(x.party.operation(name), x.first) * 2.0**-x.fraction_bits
    size = np.abs(values) if signed else values
    bad = ((size < low) | (size > high)) & ~(zero & (values == 0))
    if bad.any():
        position = tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), values.shape))
        shown = "|value|" if signed else "value"
        raise RangeError(
            f"'{name}' left its domain: element {position} is {float(values[position])!r}, "
            f"allowed is {low!r} ≤ {shown} ≤ {high!r}; give wider bounds or bound the input"
        )


def _refuse_outside(values: np.ndarray, low: int, high: int, name: str) -> None:
    bad = (values < low) | (values >= high)
    if bad.any():
        position = tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), values.shape))
        raise RangeError(
            f"'{name}' left its domain: element {position} is {int(values[position])} in the ring, "
            f"allowed is {low} ≤ value < {high}; lower fraction_bits or bound the input"
        )
