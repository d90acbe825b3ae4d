"""What a test knows to be there."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["not_none"]

Value = TypeVar("Value")


def not_none(value: Value | None) -> Value:
    """The value, which the test's own setting makes certain: None is a failure."""
    assert value is not None
    return value
