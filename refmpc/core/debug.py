"""The insecure debug mode (``insecure_check_ranges``): opens operands to name the first that leaves its domain.

Products are computed again from the opened operands, in doubles: the ring alone knows them modulo 2^64 only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from refmpc.core.errors import RangeError
from refmpc.core.party import Operation
from refmpc.core.tensor import ArithmeticTensor
from refmpc.core.words import Words, seal

__all__ = ["check_bounds", "check_product", "check_range", "check_spread", "check_words"]

_WRAPPED = 2.0**61  # doubles and residues of a product that did not wrap differ by less, others by 2^63 at least


async def _open_each(operation: Operation, summand: Words) -> list[np.ndarray]:
    machine = operation.machine
    mine, round_ = machine.contiguous(summand), operation.round()
    round_.send_next(mine)
    round_.send_previous(mine)
    others = round_.expect_next(summand.shape), round_.expect_previous(summand.shape)
    await round_
    return [machine.unsealed(part) for part in (mine, *others)]


async def _open(operation: Operation, summand: Words) -> np.ndarray:
    mine, following, preceding = await _open_each(operation, summand)
    return np.asarray(mine + following + preceding).view(np.int64)


async def check_product(
    operation: Operation,
    x: ArithmeticTensor,
    y: ArithmeticTensor | np.ndarray,
    product: Callable[[Any, Any], Any],
    limit: int,
    addend: np.ndarray | None = None,
) -> None:
    """Open x, y (a tensor, or public ring words) and the addends of all parties, and raise unless −limit ≤ product(x,
    y)
    + addends < limit everywhere, as integers (in units of the product's scale). Sealed addends may hold shares: their
      sum
    is taken modulo 2^64, like that of all shares; others are numbers of their own, noise say, and add up as
    integers."""
    left = await _open(operation, x.first)
    right = y.view(np.int64) if isinstance(y, np.ndarray) else await _open(operation, y.first)
    value = np.asarray(product(left.astype(np.float64), right.astype(np.float64)))
    residue = np.asarray(product(left.view(np.uint64), right.view(np.uint64)))
    own = np.zeros(value.shape, dtype=np.uint64) if addend is None else addend
    each = await _open_each(operation, seal(own).view(np.uint64))
    added = np.asarray(each[0] + each[1] + each[2])
    numbers = [added] if isinstance(own, Words) else each
    value = value + sum(number.view(np.int64).astype(np.float64) for number in numbers)
    signed = np.asarray(residue + added).view(np.int64)
    wrapped = np.abs(value - signed.astype(np.float64)) > _WRAPPED
    if wrapped.any():
        position = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrapped)), wrapped.shape))
        raise RangeError(
            f"'{operation.name}' left its domain: element {position} is {float(value[position])!r} before it wraps in "
            f"the ring, allowed is -{limit} ≤ value < {limit}; lower fraction_bits or bound the input"
        )
    _refuse_outside(signed, -limit, limit, operation.name)


async def check_words(operation: Operation, summand: Words, low: int, high: int, *, zero: bool = False) -> None:
    """Open Σ summands and raise unless low ≤ value < high everywhere (signed ring words, modulo 2^64; 0 too if
    ``zero``)."""
    values = await _open(operation, summand)
    _refuse_outside(values[values != 0] if zero else values, low, high, operation.name)


async def check_spread(operation: Operation, summand: Words, spread: float, fraction_bits: int) -> None:
    """Open Σ summands and raise unless the entries of every row differ by at most ``spread``."""
    values = (await _open(operation, summand)).astype(np.float64) * 2.0**-fraction_bits
    widest = values.max(axis=1, initial=-np.inf) - values.min(axis=1, initial=np.inf)
    if (widest > spread).any():
        row = int(np.argmax(widest))
        raise RangeError(
            f"'{operation.name}' left its domain: the entries of row {row} differ by {float(widest[row])!r}, allowed "
            f"is "
            f"{spread!r}; give a wider bound or bound the input"
        )


async def check_range(x: ArithmeticTensor, low: int, high: int, name: str) -> None:
    """Open x and raise unless low ≤ x < high everywhere (signed ring words)."""
    _refuse_outside(await _open(x.party.operation(name, x, low, high), x.first), low, high, name)


async def check_bounds(
    x: ArithmeticTensor, low: float, high: float, name: str, *, signed: bool = False, zero: bool = False
) -> None:
    """Open x and raise unless low ≤ x ≤ high everywhere (low ≤ |x| ≤ high if ``signed``; 0 too if ``zero``)."""
    values = await _open(x.party.operation(name, x), x.first) * 2.0**-x.fraction_bits
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
