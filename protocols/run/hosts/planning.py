"""Plans of sessions, one at a time in a thread of their own: a plan may need a certificate, which takes minutes at worst.

Callers are answered within a few seconds, if not with the plan then with what is being computed and since when, and call again.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accel.errors import PpvflError
from protocols.federation.read import FederationConfig
from protocols.run.hosts.jobs import MakeTask, Task, make_task
from vfl.dp.certificate_cache import Say, announced

__all__ = ["Planner", "StillPlanning"]

_PATIENCE = 4.0  # seconds that a caller waits: less than it takes the silence of a server for its end


class StillPlanning(PpvflError):
    """The plan is not there yet; whoever asks again later gets it."""


class _Work:
    def __init__(self, facts: Mapping[str, Any]):
        self.facts, self.since = dict(facts), datetime.datetime.now(datetime.UTC)
        self.finished = threading.Event()
        self.task: Task | None = None
        self.error: Exception | None = None


class Planner:
    """Makes tasks. ``say`` hears when something that takes long begins and ends."""

    def __init__(self, config: FederationConfig, say: Say, make: MakeTask = make_task):
        self._config, self._say, self._make = config, say, make
        self._lock = threading.Lock()
        self._work: _Work | None = None

    @property
    def words(self) -> str:
        """What is being planned, or nothing."""
        work = self._work
        if work is None or work.finished.is_set():
            return ""
        return (
            f"plans a {work.facts['kind']} of {work.facts['rows']} rows and computes the certificate of its noise, "
            f"since {work.since:%Y-%m-%d %H:%M:%S} UTC"
        )

    def task(self, facts: Mapping[str, Any], trained: Callable[[], Path | None]) -> Task:
        """The task that public facts describe, or why there is none; ``StillPlanning`` if that takes longer than a few seconds."""
        with self._lock:
            work = self._work
            if work is None or (work.finished.is_set() and work.facts != facts):
                work = self._work = _Work(facts)
                threading.Thread(target=self._plan, args=(work, trained), daemon=True).start()
        if not work.finished.wait(_PATIENCE) or work.facts != facts:
            raise StillPlanning(self.words or "it plans something else")
        with self._lock:
            if self._work is work:
                self._work = None
        if work.error is not None:
            raise work.error
        assert work.task is not None
        return work.task

    def _plan(self, work: _Work, trained: Callable[[], Path | None]) -> None:
        try:
            with announced(self._say):
                work.task = self._make(self._config, work.facts, trained())
        except Exception as error:  # for the caller that asks for it
            work.error = error
        finally:
            work.finished.set()
