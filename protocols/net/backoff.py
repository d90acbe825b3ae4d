"""How long to wait before a peer is called again."""

from __future__ import annotations

import random
import time

__all__ = ["Backoff"]


class Backoff:
    """Pauses that double from ``first`` to ``longest`` seconds, each shortened by up to half at random: those who lost
    the same server must not all come back in the same moment."""

    def __init__(self, first: float = 0.2, longest: float = 5.0):
        self._first, self._longest = first, longest
        self._next = first

    def reset(self) -> None:
        """The peer answered: begin with the shortest pause again."""
        self._next = self._first

    def next_pause(self) -> float:
        """Seconds of the next pause."""
        whole, self._next = self._next, min(2 * self._next, self._longest)
        return random.uniform(0.5, 1.0) * whole

    def wait(self) -> None:
        """Sleep for the next pause."""
        time.sleep(self.next_pause())
