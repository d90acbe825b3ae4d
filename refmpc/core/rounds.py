"""Rounds: what one party sends and expects at the same time, and how independent protocols share them.

A protocol is an ``async`` function. It fills a ``Round`` and awaits it; when the await returns, the expected arrays
hold what arrived. ``gather`` runs several protocols in lock-step and puts the messages of each turn into one round,
so that k independent protocols of r rounds cost r rounds. There is no event loop and no thread: the order of
everything is the same at all parties.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any

import numpy as np

__all__ = ["Round", "complete", "gather"]

_ORDER = 0x85EBCA6B  # odd: the codes of a shared round count in their order


class Round:
    """The messages of one party in one round, to and from its two neighbours."""

    __slots__ = ("code", "from_next", "from_previous", "numbers", "operation", "to_next", "to_previous")

    def __init__(self, operation: str, code: int = 0, numbers: tuple[int, ...] = ()):
        self.operation = operation
        self.code = code  # of the frames: what all parties must agree on (``Operation.code``)
        self.numbers = numbers  # of the operations that take part
        self.to_next: list[np.ndarray] = []
        self.to_previous: list[np.ndarray] = []
        self.from_next: list[np.ndarray] = []
        self.from_previous: list[np.ndarray] = []

    def send_next(self, array: np.ndarray) -> None:
        """Send an array to party id+1. It must not be changed afterwards."""
        self.to_next.append(np.ascontiguousarray(array))

    def send_previous(self, array: np.ndarray) -> None:
        """Send an array to party id−1. It must not be changed afterwards."""
        self.to_previous.append(np.ascontiguousarray(array))

    def expect_next(self, shape: int | tuple[int, ...], dtype: Any = np.uint64) -> np.ndarray:
        """The array that will arrive from party id+1; filled when the round has been awaited."""
        array = np.empty(shape, dtype=dtype)
        self.from_next.append(array)
        return array

    def expect_previous(self, shape: int | tuple[int, ...], dtype: Any = np.uint64) -> np.ndarray:
        """The array that will arrive from party id−1; filled when the round has been awaited."""
        array = np.empty(shape, dtype=dtype)
        self.from_previous.append(array)
        return array

    def __await__(self) -> Generator[Round, None, None]:
        yield self


def complete(protocol: Coroutine[Round, None, Any], deliver: Any) -> Any:
    """Run a protocol to its end, handing each of its rounds to ``deliver``."""
    try:
        while True:
            deliver(protocol.send(None))
    except StopIteration as end:
        return end.value
    finally:
        protocol.close()


async def gather(*protocols: Coroutine[Round, None, Any]) -> list[Any]:
    """Run independent protocols together, one shared round at a time; returns their results in order.

    Rounds: the largest of theirs. Bytes: the sum of theirs.
    """
    results: list[Any] = [None] * len(protocols)
    running = dict(enumerate(protocols))
    try:
        while running:
            turn: list[Round] = []
            for index, protocol in list(running.items()):
                try:
                    turn.append(protocol.send(None))
                except StopIteration as end:
                    results[index] = end.value
                    del running[index]
            if turn:
                await _merge(turn)
    finally:
        for protocol in running.values():
            protocol.close()
    return results


def _merge(turn: list[Round]) -> Round:
    if len(turn) == 1:
        return turn[0]
    names = dict.fromkeys(round_.operation for round_ in turn)
    merged = Round(" + ".join(names))
    for round_ in turn:
        merged.code = (merged.code * _ORDER + round_.code) & 0xFFFFFFFF
        merged.numbers += round_.numbers
        merged.to_next += round_.to_next
        merged.to_previous += round_.to_previous
        merged.from_next += round_.from_next
        merged.from_previous += round_.from_previous
    return merged
