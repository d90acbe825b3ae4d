"""Rounds: what one party sends and expects at the same time, and how independent protocols share them.

A protocol is an ``async`` function. It fills a ``Round`` and awaits it; when the await returns, the expected arrays
hold what arrived. ``gather`` runs several protocols in lock-step and puts the messages of each turn into one round,
so that k independent protocols of r rounds cost r rounds. There is no event loop and no thread: the order of
everything is the same at all parties.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from refmpc.core.words import Words, unseal

if TYPE_CHECKING:
    from refmpc.core.machine import Machine

__all__ = ["Round", "complete", "gather"]

_ORDER = 0x85EBCA6B  # odd: the codes of a shared round count in their order


class Round:
    """The messages of one party in one round, to and from its two neighbours."""

    __slots__ = (
        "_machine",
        "code",
        "from_next",
        "from_previous",
        "numbers",
        "operation",
        "to_next",
        "to_previous",
        "weight",
    )

    def __init__(self, operation: str, code: int = 0, numbers: tuple[int, ...] = (), machine: Machine | None = None):
        self.operation = operation
        self.code = code  # of the frames: what all parties must agree on (``Operation.code``)
        self.weight = 1  # how much ``code`` grows if the codes of all operations that take part grow by one
        self.numbers = numbers  # of the operations that take part
        self._machine = machine
        self.to_next: list[np.ndarray] = []
        self.to_previous: list[np.ndarray] = []
        self.from_next: list[np.ndarray] = []
        self.from_previous: list[np.ndarray] = []

    def send_next(self, *arrays: np.ndarray) -> None:
        """Send arrays to party id+1. They must not be changed afterwards."""
        self.to_next += [_outgoing(array) for array in arrays]

    def send_previous(self, *arrays: np.ndarray) -> None:
        """Send arrays to party id−1. They must not be changed afterwards."""
        self.to_previous += [_outgoing(array) for array in arrays]

    def expect_next(self, shape: int | tuple[int, ...], dtype: Any = np.uint64) -> Any:
        """The array that will arrive from party id+1; filled when the round has been awaited."""
        return self.fill_next(self._memory(shape, dtype))

    def expect_previous(self, shape: int | tuple[int, ...], dtype: Any = np.uint64) -> Any:
        """The array that will arrive from party id−1; filled when the round has been awaited."""
        return self.fill_previous(self._memory(shape, dtype))

    def fill_next(self, array: Any) -> Any:
        """Receive from party id+1 into ``array``, which is in one piece; returns it."""
        self.from_next.append(unseal(array))
        return array

    def fill_previous(self, array: Any) -> Any:
        """Receive from party id−1 into ``array``, which is in one piece; returns it."""
        self.from_previous.append(unseal(array))
        return array

    def _memory(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        return np.empty(shape, dtype) if self._machine is None else self._machine.memory(shape, dtype)

    def __await__(self) -> Generator[Round, None, None]:
        yield self


def _outgoing(array: np.ndarray) -> np.ndarray:
    if isinstance(array, Words) and not array.flags.c_contiguous:
        raise TypeError(f"{array!r} is not in one piece of memory: send a copy (machine.contiguous)")
    return np.ascontiguousarray(unseal(array))


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
    merged.weight = 0
    for round_ in turn:
        merged.code = (merged.code * _ORDER + round_.code) & 0xFFFFFFFF
        merged.weight = (merged.weight * _ORDER + round_.weight) & 0xFFFFFFFF
        merged.numbers += round_.numbers
        merged.to_next += round_.to_next
        merged.to_previous += round_.to_previous
        merged.from_next += round_.from_next
        merged.from_previous += round_.from_previous
    return merged
