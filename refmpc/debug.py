"""The insecure debug mode (``insecure_check_ranges``): opens operands to name the first that leaves its domain."""

from __future__ import annotations

import numpy as np

from refmpc.errors import RangeError
from refmpc.party import Operation
from refmpc.tensor import ArithmeticTensor

__all__ = ["check_range", "check_summand_range"]


async def check_summand_range(operation: Operation, summand: np.ndarray, low: int, high: int) -> None:
    """Open Σ summands and raise unless low ≤ value < high everywhere (signed ring words)."""
    round_ = operation.round()
    round_.send_next(summand)
    round_.send_previous(summand)
    others = round_.expect_next(summand.shape), round_.expect_previous(summand.shape)
    await round_
    _refuse_outside((summand + others[0] + others[1]).view(np.int64), low, high, operation.name)


async def check_range(x: ArithmeticTensor, low: int, high: int, name: str) -> None:
    """Open x and raise unless low ≤ x < high everywhere (signed ring words)."""
    await check_summand_range(x.party.operation(name), np.ascontiguousarray(x.first), low, high)


def _refuse_outside(values: np.ndarray, low: int, high: int, name: str) -> None:
    bad = (values < low) | (values >= high)
    if bad.any():
        position = tuple(int(i) for i in np.unravel_index(int(np.argmax(bad)), values.shape))
        raise RangeError(
            f"'{name}' left its domain: element {position} is {int(values[position])} in the ring, "
            f"allowed is {low} ≤ value < {high}; lower fraction_bits or bound the input"
        )
