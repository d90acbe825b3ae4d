"""Whom this participant waits for, since when and why: in its log, and for doctors and status.

A wait is logged at once, then after 30 s, 1 min, 2 min, 4 min, and then every 5 minutes, so a night of waiting is a
hundred lines. Only names and reasons are logged.
"""

from __future__ import annotations

import datetime
import threading
import time
from dataclasses import dataclass, field

from protocols.log import Log

__all__ = ["Wait", "Waiting"]

QUIET, _LONGEST = 30.0, 300.0  # seconds between two lines on the same wait, at first and at most


@dataclass
class Wait:
    """One thing that is waited for."""

    whom: str
    why: str
    since: datetime.datetime = field(default_factory=lambda: datetime.datetime.now(datetime.UTC))
    begun: float = field(default_factory=lambda: time.monotonic())
    next_line: float = 0.0
    pause: float = QUIET

    @property
    def words(self) -> str:
        """For people: whom, since when, why."""
        why = f" ({self.why})" if self.why else ""
        return f"waiting for {self.whom} since {self.since:%Y-%m-%d %H:%M:%S} UTC{why}"


class Waiting:
    """The waits of one participant, by any number of threads."""

    def __init__(self, log: Log):
        self._log = log
        self._waits: dict[str, Wait] = {}
        self._lock = threading.Lock()

    def on(self, whom: str, why: str = "") -> None:
        """This participant cannot go on without ``whom``; called as often as it is noticed."""
        now = time.monotonic()
        with self._lock:
            wait = self._waits.setdefault(whom, Wait(whom, why))
            changed, wait.why = why != wait.why, why or wait.why
            if now < wait.next_line and not (changed and now > wait.next_line - wait.pause + 1.0):
                return
            wait.next_line = now + wait.pause
            wait.pause = min(2 * wait.pause, _LONGEST)
        since, seconds = wait.since.isoformat(timespec="seconds"), now - wait.begun
        say = self._log.info if seconds < QUIET else self._log.warning  # that somebody comes a little later is usual
        say("waiting", peer=whom, since=since, seconds=round(seconds), reason=wait.why)

    def over(self, whom: str | None = None) -> None:
        """``whom`` is here (None: everybody who was waited for)."""
        with self._lock:
            ended = [self._waits.pop(name) for name in list(self._waits) if whom in (None, name)]
        for wait in ended:
            seconds = time.monotonic() - wait.begun
            if seconds > 1.0:
                self._log.info("no longer waiting", peer=wait.whom, seconds=round(seconds, 1))

    @property
    def now(self) -> list[Wait]:
        """What is waited for at this moment, the oldest first."""
        with self._lock:
            return sorted(self._waits.values(), key=lambda wait: wait.begun)

    @property
    def words(self) -> str:
        """All of it in one line, or nothing."""
        return "; ".join(wait.words for wait in self.now)
