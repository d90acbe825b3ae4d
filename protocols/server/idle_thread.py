"""A thread that runs only while a core would be idle, until another thread waits for its result."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

__all__ = ["SpareTime"]


class SpareTime:
    """A thread for one piece of work after the other, behind everything else on the machine.

    Three servers on one machine share its cores, and a step of theirs is a chain of rounds: what is needed later, on a
    core that the present round waits for, makes the step longer. Linux has a policy for that, SCHED_IDLE. Under it
    alone a busy machine could keep the thread waiting for seconds; so whoever waits for its work puts it among the
    others until it is done. Where the system has no such policy, or does not let an ordinary user's thread back out of
    it, or the process was given another policy than the usual one, the thread runs like any other.
    """

    def __init__(self, name: str):
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._thread = 0  # its number, if it steps behind the others
        if _can_step_behind_and_back():
            self._thread = self._pool.submit(threading.get_native_id).result()
            _step_behind(self._thread)

    def submit(self, work: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
        """Do this when all before is done."""
        return self._pool.submit(work, *arguments, **named)

    def wait_for(self, work: Future[Any]) -> Any:
        """The result of what was submitted; until it is there, the thread does not stand behind others."""
        if not self._thread or work.done():
            return work.result()
        _step_back(self._thread)
        try:
            return work.result()
        finally:
            _step_behind(self._thread)

    def close(self) -> None:
        """End the thread; what has not begun is not done."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _step_behind(thread: int) -> None:
    os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def _step_back(thread: int) -> None:
    os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def _can_step_behind_and_back() -> bool:
    """Tried in a thread of its own, because a thread that may not return keeps its low priority."""
    found = []

    def attempt() -> None:
        thread = threading.get_native_id()
        try:
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                _step_behind(thread)
                _step_back(thread)
                found.append(thread)
        except (AttributeError, OSError):
            pass

    trial = threading.Thread(target=attempt, name="a trial of priorities")
    trial.start()
    trial.join()
    return bool(found)
