"""Kernels called one behind the other: numpy has no compiled code, so no call can be put into a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["CallTable"]


class CallTable:
    """See ``accel.compiled.calls``: a table that stays empty."""

    def __len__(self) -> int:
        return 0

    def add(self, function: Callable[..., Any], arguments: Sequence[Any], result: int | None = None) -> bool:
        """Takes no call."""
        return False

    def finish(self, origin: Callable[[np.ndarray], tuple[int, int]]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """There are no arrays to bind."""
        return {}

    def bind(self, places: np.ndarray, offsets: np.ndarray, address: int) -> None:
        """Nothing."""

    def run(self, first: int, stop: int) -> int:
        """Nothing is left to do."""
        return stop
