"""Checks of arguments, with one wording: the argument, its value, what is allowed, and the way out.

It lives in ``accel`` because that is the one package that every other may import.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from accel.errors import InvalidArgument

__all__ = ["require", "require_choice", "require_integer", "require_real"]


def require(condition: bool, argument: str, value: Any, allowed: str, way_out: str = "") -> None:
    """Raise ``InvalidArgument`` naming argument, value, allowed range and way out unless ``condition`` holds."""
    if not condition:
        hint = f"; {way_out}" if way_out else ""
        raise InvalidArgument(f"{argument} = {value!r}: must be {allowed}{hint}")


def require_integer(
    argument: str, value: Any, low: int | None = None, high: int | None = None, way_out: str = ""
) -> int:
    """``value`` as an int within ``low..high`` (both included)."""
    if type(value) is int and (low is None or value >= low) and (high is None or value <= high):
        return value
    allowed = f"an integer{_interval(low, high)}"
    integral = not isinstance(value, bool) and hasattr(value, "__index__")
    require(integral, argument, value, allowed, way_out)
    number = int(value)
    require(
        (low is None or number >= low) and (high is None or number <= high),
        argument,
        number,
        allowed,
        way_out,
    )
    return number


def require_real(
    argument: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
    way_out: str = "",
) -> float:
    """``value`` as a finite float within the interval; ``open_low``/``open_high`` exclude an end."""
    left, right = "(" if open_low or math.isinf(low) else "[", ")" if open_high or math.isinf(high) else "]"
    allowed = f"a finite number in {left}{low:g}, {high:g}{right}"
    try:
        number = float(value)
    except (TypeError, ValueError):
        require(False, argument, value, allowed, way_out)
    above = number > low if open_low else number >= low
    below = number < high if open_high else number <= high
    require(math.isfinite(number) and above and below, argument, value, allowed, way_out)
    return number


def require_choice(argument: str, value: Any, choices: Collection[str], way_out: str = "") -> str:
    """``value`` if it is one of ``choices``."""
    require(value in choices, argument, value, f"one of {', '.join(map(repr, choices))}", way_out)
    return value


def _interval(low: int | None, high: int | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f" of at least {low}"
    return f" of at most {high}" if high is not None else ""
