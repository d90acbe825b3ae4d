"""What a person sees while a run goes on: a bar per phase, in the terminal only."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["ProgressBars"]


class ProgressBars:
    """A bar per phase, fed by the reports of server 0; bytes are of all three servers."""

    def __init__(self, console: Console, quiet: bool):
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True) if quiet else console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._tasks: dict[str, Any] = {}
        self._bytes: dict[Any, int] = {}
        self._begun: dict[str, tuple[float, int]] = {}

    def __enter__(self) -> Callable[[Any, Any], None]:
        self._bar.start()
        return self._on_report

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def _on_report(self, peer: Any, message: dict[str, Any]) -> None:
        self._bytes[peer] = message.get("bytes", 0)
        if peer != 0:
            return
        phase, done = message["phase"], message["done"]
        if phase not in self._tasks:
            self._tasks[phase] = self._bar.add_task(phase, total=message["total"], note="")
            self._begun[phase] = time.monotonic(), done
        note = ""
        if phase == "training":
            began, first = self._begun[phase]
            rate = (done - first) / max(1e-9, time.monotonic() - began)
            note = f"{rate:.0f} steps/s, {sum(self._bytes.values()) / 1e6:.0f} MB"
        self._bar.update(self._tasks[phase], completed=done, note=note)
