"""Peak memory of other processes by phase, from Linux's /proc: what each holds is looked at many times a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["Held", "MemoryRecorder"]

_EVERY = 0.05  # seconds between two looks


@dataclass(frozen=True)
class Held:
    """Bytes at one moment (``time.time``): ``own`` memory, which nobody else can use, and pages of files, which the
    kernel takes back when it needs them. ``cpu``: seconds used so far."""

    when: float
    own: int
    files: int
    cpu: float


class MemoryRecorder:
    """Watches processes by name; use as a context manager."""

    def __init__(self, processes: Mapping[str, int]):
        """``processes``: process ids by name."""
        self._processes = dict(processes)
        self.held: dict[str, list[Held]] = {name: [] for name in processes}
        self.highest: dict[str, int] = dict.fromkeys(processes, 0)  # the kernel's own record of each, files included
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY):
            for name, pid in self._processes.items():
                self._look(name, pid)

    def _look(self, name: str, pid: int) -> None:
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            return
        facts = {key: value.split()[0] for key, _, value in (line.partition(":") for line in lines) if value.strip()}
        if "RssAnon" not in facts:  # it is ending
            return
        own, files = (1024 * int(facts[key]) for key in ("RssAnon", "RssFile"))
        self.held[name].append(Held(time.time(), own, files, (int(times[11]) + int(times[12])) / 100))
        self.highest[name] = max(self.highest[name], 1024 * int(facts["VmHWM"]))

    def peak(self, name: str, begin: float, end: float) -> int:
        """The most own memory of a process between two moments; 0 if it was never looked at then."""
        return max((held.own for held in self.held[name] if begin <= held.when <= end), default=0)

    def peak_of_all(self, begin: float, end: float) -> int:
        """The most own memory of all together between two moments."""
        latest = dict.fromkeys(self.held, 0)
        moments = sorted((held.when, name, held.own) for name, looks in self.held.items() for held in looks)
        most = 0
        for when, name, own in moments:
            latest[name] = own
            if begin <= when <= end:
                most = max(most, sum(latest.values()))
        return most

    def cpu(self, name: str, begin: float, end: float) -> float:
        """Seconds of computing between two moments."""
        used = [held.cpu for held in self.held[name] if begin <= held.when <= end]
        return used[-1] - used[0] if used else 0.0
