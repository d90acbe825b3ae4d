"""Results that take long, kept in the user's cache directory under a hash of everything they depend on.

``PPVFL_CACHE`` names another directory, and ``PPVFL_CACHE=off`` none. A file that cannot be read or says something else
counts as none; whoever can write there can change a σ, as whoever can write to the program can. Threads, and processes
with the same directory, that need the same result wait for the first to find it; ``announced`` says who hears of that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from accel.files import private_folder, write_bytes

__all__ = ["Say", "announced", "cached"]

VERSION = 1
_memory: dict[str, Any] = {}
_one_at_a_time = threading.RLock()  # what takes long may itself need something that takes long
_WHAT = {"allocation": "the certificate of the noise", "bands": "the number of bands"}

Result = TypeVar("Result")
Say = Callable[..., None]  # an event, and facts by name: as the methods of a log
_say: ContextVar[Say | None] = ContextVar("say", default=None)


@contextlib.contextmanager
def announced(say: Say) -> Iterator[None]:
    """In this thread, ``say`` hears when something that takes long begins, is waited for, and ends; nothing if it was
    kept."""
    before = _say.set(say)
    try:
        yield
    finally:
        _say.reset(before)


def cached(kind: str, name: tuple[object, ...], find: Callable[[], Result], result: type[Result]) -> Result:
    """``find()``, a dataclass of numbers, from memory or disk if it was found before."""
    said = repr((VERSION, kind, *name))
    key = hashlib.sha256(said.encode()).hexdigest()
    if key not in _memory:
        directory = _directory()
        file = None if directory is None else directory / f"{kind}-{key[:40]}.json"
        with _one_at_a_time:
            if key not in _memory:
                _memory[key] = _read(file, said, result) or _found_once(kind, file, said, find, result)
    kept: Result = _memory[key]
    return kept


def _directory() -> Path | None:
    chosen = os.environ.get("PPVFL_CACHE")
    if chosen == "off":
        return None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(chosen or Path(home, "ppvfl"))


def _read(file: Path | None, said: str, result: type[Result]) -> Result | None:
    if file is None:
        return None
    try:
        content = json.loads(file.read_text())
        return result(**content["result"]) if content["about"] == said else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _found_once(kind: str, file: Path | None, said: str, find: Callable[[], Result], result: type[Result]) -> Result:
    """``find()`` in one process at a time: the others wait, and read what it has kept."""
    say = _say.get() or (lambda event, **facts: None)
    what = _WHAT.get(kind, kind)
    with _alone(file, lambda: say("waiting", reason=f"another process computes {what}")):
        kept = _read(file, said, result)
        if kept is not None:
            say(f"{what} was read", file=file)
            return kept
        say(f"{what} is being computed", note="minutes at most; once, then it is kept", file=file)
        begun = time.monotonic()
        found = _found(file, said, find)
        say(f"{what} was computed", seconds=round(time.monotonic() - begun, 2))
        return found


@contextlib.contextmanager
def _alone(file: Path | None, on_waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock beside ``file``, which ends with the process; without one, if the directory takes none."""
    with contextlib.ExitStack() as held:
        try:
            if file is not None:
                private_folder(file.parent)
                lock = held.enter_context(file.with_suffix(".lock").open("w"))
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    on_waiting()
                    fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # found by each on its own
        yield


def _found(file: Path | None, said: str, find: Callable[[], Result]) -> Result:
    result = find()
    if file is not None:
        content = {"about": said, "result": dataclasses.asdict(result)}  # type: ignore[call-overload]
        try:
            private_folder(file.parent)
            write_bytes(file, json.dumps(content, indent=1).encode(), private=True)
        except OSError:
            pass  # not kept: found again next time
    return result
