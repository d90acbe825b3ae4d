"""Plans of sessions, one at a time for each client, in threads: a plan may need a certificate, which takes minutes at
worst.

Callers are answered within a few seconds, if not with the plan then with what is being computed and since when, and
call again.
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

    @property
    def words(self) -> str:
        return (
            f"plans a {self.facts['kind']} of {self.facts['rows']} rows and computes the certificate of its noise, "
            f"since {self.since:%Y-%m-%d %H:%M:%S} UTC"
        )


class Planner:
    """Makes tasks. ``say`` hears when something that takes long begins and ends."""

    def __init__(self, config: FederationConfig, say: Say, make: MakeTask = make_task):
        self._config, self._say, self._make = config, say, make
        self._lock = threading.Lock()
        self._slots: dict[str, _Work] = {}  # by client: nobody's numbers keep another one's from being planned

    @property
    def words(self) -> str:
        """What is being planned, or nothing."""
        with self._lock:
            under_way = dict.fromkeys(work for work in self._slots.values() if not work.finished.is_set())
        return "; ".join(work.words for work in under_way)

    def task(self, facts: Mapping[str, Any], trained: Callable[[], Path | None], client: str) -> Task:
        """The task that public facts describe, or why there is none; ``StillPlanning`` if that takes longer than a few
        seconds, or if ``client`` has asked for another one, which is being planned."""
        with self._lock:
            work = self._slots.get(client)
            if work is None or (work.finished.is_set() and work.facts != facts):
                same = next((other for other in self._slots.values() if other.facts == facts), None)
                work = self._slots[client] = same or _Work(facts)
                if same is None:
                    threading.Thread(target=self._plan, args=(work, trained), daemon=True).start()
        if not work.finished.wait(_PATIENCE) or work.facts != facts:
            raise StillPlanning(work.words)
        with self._lock:
            self._slots = {name: other for name, other in self._slots.items() if other is not work}
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
