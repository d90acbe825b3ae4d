"""Structured logs: one JSON object a line, public facts only; on a terminal a short line for people instead."""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

__all__ = ["Log"]

_BURST = 20  # lines of one kind a minute; more are counted and summed up
_KEPT = 20  # warnings and errors that are remembered
_STYLES = {"info": "", "warning": "yellow", "error": "red"}


class Log:
    """Lines go to ``file`` as JSON if given; otherwise to stderr, as JSON, or readable if that is a terminal.

    Callers pass names, counts, addresses and reasons; never a value, a share or a key. A stranger who calls a thousand
    times does not fill the disk: lines of one kind are limited, and their number is logged afterwards. A line that
    cannot be written anywhere (a full disk under stderr too, a pipe that nobody reads) is lost, and whoever logs goes
    on.
    """

    def __init__(self, who: str, file: Path | None = None):
        self._who = who
        self._console = Console(stderr=True)
        self._file = file
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()  # a place that cannot be written to is refused before anything else is done
        self._lock = threading.Lock()
        self._minute: dict[str, tuple[int, int]] = {}
        self._last: deque[dict[str, str]] = deque(maxlen=_KEPT)

    def info(self, event: str, **facts: Any) -> None:
        self._write("info", event, facts)

    def warning(self, event: str, **facts: Any) -> None:
        self._write("warning", event, facts)

    def error(self, event: str, **facts: Any) -> None:
        self._write("error", event, facts)

    @property
    def last_errors(self) -> list[dict[str, str]]:
        """The last warnings and errors, oldest first, for this participant's own status page."""
        with self._lock:
            return list(self._last)

    @property
    def is_terminal(self) -> bool:
        """Whether people watch: progress bars are drawn then."""
        return self._console.is_terminal

    def _write(self, level: str, event: str, facts: dict[str, Any]) -> None:
        now = datetime.datetime.now(datetime.UTC)
        with self._lock:
            suppressed = self._limit(level, event, int(now.timestamp()) // 60)
            if suppressed is None:
                return
            if suppressed:
                facts = {**facts, "more_like_it_last_minute": suppressed}
            if level != "info":
                rest = ", ".join(f"{name} {value}" for name, value in facts.items())
                when = now.isoformat(timespec="seconds")
                self._last.append({"time": when, "level": level, "event": event, "facts": rest})
            line = {"time": now.isoformat(timespec="milliseconds"), "level": level, "who": self._who, "event": event}
            words = json.dumps({**line, **facts}, default=str)
            if self._file is not None:
                try:
                    with self._file.open("a", encoding="utf-8") as file:  # opened for every line: it may be rotated
                        file.write(words + "\n")
                except OSError as error:  # a full disk: whoever looks at stderr shall know, and work goes on
                    _to_stderr(f"{words} (not in the log file: {error})")
            if self._console.is_terminal:
                rest = ", ".join(f"{name} {value}" for name, value in facts.items())
                with contextlib.suppress(OSError, ValueError):
                    self._console.print(
                        Text(f"{now:%H:%M:%S} {event}{': ' if rest else ''}{rest}", style=_STYLES[level])
                    )
            elif self._file is None:
                _to_stderr(words)

    def _limit(self, level: str, event: str, minute: int) -> int | None:
        """How many like it were left out in the minute before, or None if this one is left out."""
        if level == "info":
            return 0
        last, count = self._minute.get(event, (minute, 0))
        left_out = max(0, count - _BURST) if last != minute else 0
        count = 1 if last != minute else count + 1
        self._minute[event] = minute, count
        return None if count > _BURST else left_out


def _to_stderr(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # ValueError: it was closed
        print(line, file=sys.stderr, flush=True)
