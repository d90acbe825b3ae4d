"""How fast a phase goes."""

from __future__ import annotations

import math
import time

__all__ = ["Pace"]


class Pace:
    """How fast a phase goes, from its own reports."""

    def __init__(self) -> None:
        self._phase, self._first, self._begun = "", 0, 0.0
        self.rate = 0.0  # steps a second
        self.left = math.inf  # seconds

    def report(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if phase != self._phase or done < self._first:
            self._phase, self._first, self._begun = phase, done, now
        elapsed = now - self._begun
        self.rate = (done - self._first) / elapsed if elapsed > 0 else 0.0
        self.left = (total - done) / self.rate if self.rate > 0 else math.inf
