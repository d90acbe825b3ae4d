"""Hosts for soaks and end-to-end tests: network namespaces behind a bridge (as root), or loopback addresses; and their
processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Host", "Processes", "awake", "can_make_namespaces", "loopback", "namespaces", "plug"]

ROOT = Path(__file__).resolve().parents[2]
_STOPPED = 5.0  # seconds without a look at the clock, after which this process was not running


class _AwakeClock:
    """Seconds in which this process ran. Where it was stopped, and the federation with it (SIGSTOP, a machine that
    slept), the clock stood still: nobody is late on that account. Only for loops that look at it all the time."""

    def __init__(self) -> None:
        self._looked, self._slept = time.monotonic(), 0.0

    def __call__(self) -> float:
        looked, self._looked = self._looked, time.monotonic()
        if self._looked - looked > _STOPPED:
            self._slept += self._looked - looked - _STOPPED
        return self._looked - self._slept


awake = _AwakeClock()


@dataclass(frozen=True)
class Host:
    """Where a participant runs: its address, and what stands before a command."""

    address: str
    prefix: tuple[str, ...] = ()


def can_make_namespaces() -> bool:
    """Whether this process may make network namespaces (and the kernel has them)."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"ppvfl-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    made = subprocess.run(_within(name, "ip link add b0 type bridge"), capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made


def _within(namespace: str, command: str) -> list[str]:
    return ["ip", "netns", "exec", namespace, *command.split()]


@contextlib.contextmanager
def namespaces(names: Sequence[str]) -> Iterator[dict[str, Host]]:
    """A namespace each, and one for the bridge between them ("hub"), so that this machine's own network is not
    touched."""
    stem = f"pp{os.getpid() % 100000}"
    spaces = {name: f"{stem}-{name}" for name in (*names, "hub")}

    def run(command: str) -> None:
        subprocess.run(command.split(), check=True, capture_output=True)

    try:
        for space in spaces.values():
            run(f"ip netns add {space}")
            run(f"ip -n {space} link set lo up")
        hub = spaces["hub"]
        run(f"ip -n {hub} link add bridge0 type bridge")
        run(f"ip -n {hub} link set bridge0 up")
        hosts = {"hub": Host("", ("ip", "netns", "exec", hub))}
        for i, name in enumerate(names):
            run(f"ip -n {hub} link add port{i} type veth peer name eth0 netns {spaces[name]}")
            run(f"ip -n {hub} link set port{i} master bridge0 up")
            run(f"ip -n {spaces[name]} addr add 10.99.0.{i + 1}/24 dev eth0")
            run(f"ip -n {spaces[name]} link set eth0 up")
            hosts[name] = Host(f"10.99.0.{i + 1}", ("ip", "netns", "exec", spaces[name]))
        yield hosts
    finally:
        for space in spaces.values():
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def plug(host: Host, state: str) -> None:
    """Plug a namespace in (``up``) or out (``down``): not even a word of farewell gets through."""
    subprocess.run(["ip", "-n", host.prefix[3], "link", "set", "eth0", state], check=True, capture_output=True)


def loopback(names: Sequence[str]) -> dict[str, Host]:
    """An address of 127.0.0.0/8 each."""
    return {name: Host(f"127.0.0.{10 + i}") for i, name in enumerate(names)}


class Processes:
    """Commands ``ppvfl …`` at their hosts, with their output and structured logs in files."""

    def __init__(self, hosts: dict[str, Host], directory: Path):
        self._hosts = hosts
        self._directory = directory
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._running.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def start(self, name: str, host: str, *words: object, module: str = "protocols.deploy") -> None:
        """Start ``python -m module words…`` at a host, under a name of its own."""
        command = [*self._hosts[host].prefix, sys.executable, "-m", module, *map(str, words)]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with (self._directory / f"{name}.out").open("ab") as file:
            self._running[name] = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
                env={**os.environ, **threads, "PYTHONPATH": str(ROOT)},
            )

    def participant(self, command: str, name: str, *words: object) -> None:
        """Start ``ppvfl command --as name …`` at its host."""
        log = ("--log", self._directory / f"{name}.log")
        self.start(name, name, command, "--as", name, "--config", self.config(name), *log, *words)

    def config(self, name: str) -> Path:
        """The file that a participant uses: its own copy, if it has one."""
        own = self._directory / "federation" / name / "federation.toml"
        return own if own.exists() else self._directory / "federation" / "federation.toml"

    def wait(self, name: str, timeout: float = 60.0) -> str:
        """Wait until a process has ended well; returns its output."""
        until = awake() + timeout
        while (code := self._running[name].poll()) is None:
            assert awake() < until, f"{name} did not end in {timeout:g} s\n{self._tails()}"
            time.sleep(0.02)
        output = self.output(name)
        assert code == 0, f"{name} ended with {code}:\n{output[-3000:]}\n{self._tails()}"
        return output

    def output(self, name: str) -> str:
        return (self._directory / f"{name}.out").read_text()

    def is_running(self, name: str) -> bool:
        return self._running[name].poll() is None

    def pid(self, name: str) -> int:
        return self._running[name].pid

    def code(self, name: str) -> int | None:
        """What a process has ended with; None while it runs."""
        return self._running[name].poll()

    def kill(self, name: str) -> None:
        """As if the host had lost power."""
        self._running[name].kill()
        self._running[name].wait()

    def stop(self, name: str) -> None:
        """As systemd does it."""
        self._running[name].send_signal(signal.SIGTERM)

    def events(self, name: str) -> list[dict[str, Any]]:
        """A participant's structured log."""
        file = self._directory / f"{name}.log"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_for(
        self, name: str, event: str, timeout: float = 60.0, count: int = 1, reason: str = ""
    ) -> dict[str, Any]:
        """Wait until a participant has logged an event (for the ``count``-th time; with this in its ``reason``)."""
        until = awake() + timeout
        while awake() < until:
            found = [r for r in self.events(name) if r["event"] == event and reason in str(r.get("reason", ""))]
            if len(found) >= count:
                return found[count - 1]
            assert self.is_running(name), f"{name} ended before {event!r}:\n{self.output(name)[-3000:]}"
            time.sleep(0.05)
        raise AssertionError(f"{name} did not log {event!r} in {timeout:g} s\n{self._tails()}")

    def _tails(self) -> str:
        logs = sorted(self._directory.glob("*.log"))
        return "\n".join(f"--- {log.stem}\n" + "\n".join(log.read_text().splitlines()[-6:]) for log in logs)
