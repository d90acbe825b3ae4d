"""Faults from a seed: what happens to whom, when, for how long; and how it is done to a running federation.

kill       kill -9, started again some seconds later
restart    SIGTERM, as systemd does it, and started again
stop       SIGSTOP, later SIGCONT: a host that hangs (its kernel still answers)
unplug     its link is down (network namespaces): no packet gets through, in either direction
disk       the file system of a server's state is full (a tmpfs of its own); where that cannot be mounted, its process
may not
           write to any file (RLIMIT_FSIZE 0)
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accel.files import private_folder
from bench.soak.federation import PARTICIPANTS, SERVERS, start
from bench.soak.hosts import Host, Processes, awake, plug

__all__ = ["KINDS", "Fault", "Faults", "fill_disk", "planned", "small_disks"]

KINDS = ("kill", "restart", "stop", "unplug", "disk")
SURVIVOR = "server-0"  # not killed after the first third: its memory must show what a long life adds up to
FILLER = "filler"
DISK = 192 << 20  # bytes of a server's file system


@dataclass(frozen=True)
class Fault:
    """One fault, ``at`` and ``seconds`` counted from the beginning of the faults."""

    at: float
    kind: str
    victim: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.kind:8} {self.victim:9} for {self.seconds:4.1f} s"


def planned(seed: object, minutes: float, every: float, kinds: Sequence[str]) -> Iterator[Fault]:
    """A fault every so many seconds, without end; one in five hits two participants at once. Kinds come in shuffled
    rounds, so that a short soak has seen all of them, too."""
    draw = random.Random(f"soak {seed}")
    number, left = 0, list[str]()
    while True:
        number += 1
        at = number * every
        hit: list[str] = []
        for _ in range(2 if draw.random() < 0.2 else 1):
            left = left or draw.sample(list(kinds), len(kinds))
            kind = left.pop()
            spared = [SURVIVOR] if kind in ("kill", "restart") and at > 20 * minutes else []
            victims = [name for name in (SERVERS if kind == "disk" else PARTICIPANTS) if name not in (*hit, *spared)]
            hit.append(draw.choice(victims))
            longest = {"kill": 4.0, "restart": 0.0, "stop": 12.0, "unplug": 14.0, "disk": 10.0}[kind]
            yield Fault(at, kind, hit[-1], round(draw.uniform(min(1.0, longest), longest), 1))


@contextlib.contextmanager
def small_disks(directory: Path) -> Iterator[bool]:
    """A file system of its own for every server's state, if this process may mount one."""
    places = [directory / "federation" / name / "state" for name in SERVERS]
    mounted: list[Path] = []
    try:
        for place in places:
            private_folder(place)
            words = ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=0700", "tmpfs", str(place)]
            if os.geteuid() or subprocess.run(words, capture_output=True).returncode:
                break
            mounted.append(place)
        yield len(mounted) == len(places)
    finally:
        for place in mounted:
            subprocess.run(["umount", "--lazy", str(place)], capture_output=True)


class Faults:
    """Does faults to a federation and undoes them when their time is over."""

    def __init__(self, run: Processes, directory: Path, hosts: Mapping[str, Host], *, own_disks: bool):
        self._run, self._directory, self._hosts, self._own_disks = run, directory, hosts, own_disks
        self._over: dict[str, tuple[float, Fault]] = {}  # by victim: when its fault ends
        self.done: list[Fault] = []

    @property
    def active(self) -> bool:
        """Whether somebody suffers at this moment."""
        return bool(self._over)

    def suffers(self, name: str) -> bool:
        return name in self._over

    def begin(self, fault: Fault) -> bool:
        """False if the victim has ended by itself, well, or still suffers."""
        name, run = fault.victim, self._run
        if name in self._over or not run.is_running(name):
            return False
        if fault.kind == "kill":
            run.kill(name)
        elif fault.kind == "restart":
            run.stop(name)
        elif fault.kind == "stop":
            os.kill(run.pid(name), signal.SIGSTOP)
        elif fault.kind == "unplug":
            plug(self._hosts[name], "down")
        elif self._own_disks:
            fill_disk(self._state(name))
        else:
            _allow_writing(run.pid(name), False)
        self._over[name] = awake() + fault.seconds, fault
        self.done.append(fault)
        return True

    def end(self, *, everything: bool = False) -> list[Fault]:
        """Undo what is over."""
        ended = []
        for name, (when, fault) in list(self._over.items()):
            if not everything and awake() < when:
                continue
            if fault.kind == "restart" and self._run.is_running(name):
                continue  # it is still ending: it stays a victim until it has, and is started then
            self._undo(fault)
            del self._over[name]
            ended.append(fault)
        return ended

    def _undo(self, fault: Fault) -> None:
        name, run = fault.victim, self._run
        if fault.kind in ("kill", "restart"):
            start(run, name)
        elif fault.kind == "stop" and run.is_running(name):
            os.kill(run.pid(name), signal.SIGCONT)
        elif fault.kind == "unplug":
            plug(self._hosts[name], "up")
        elif fault.kind == "disk" and self._own_disks:
            (self._state(name) / FILLER).unlink(missing_ok=True)
        elif fault.kind == "disk" and run.is_running(name):
            _allow_writing(run.pid(name), True)

    def _state(self, name: str) -> Path:
        return self._directory / "federation" / name / "state"


def fill_disk(folder: Path) -> Path:
    """Take every byte that is free where ``folder`` is; returns the file that has them."""
    file = folder / FILLER
    with file.open("wb", buffering=0) as handle, contextlib.suppress(OSError):
        os.posix_fallocate(handle.fileno(), 0, max(1, shutil.disk_usage(folder).free))
        while True:
            handle.write(bytes(4096))
    return file


def _allow_writing(pid: int, allowed: bool) -> None:
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if allowed else 0, hard))
