"""Participants that end themselves with signal 9 at a chosen point, for commands that run as processes.

To the others this is kill -9. The point is a message or a checkpoint, not a moment, so no load on the machine moves it.
``marker`` makes it happen once: the resumed run finds the file and goes on.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import refmpc
from protocols.client import gl_client, upload
from protocols.methods import g_bmf, gl_bmf
from protocols.state.checkpoint import ServerDirectory
from protocols.state.step_log import OpenedSteps

PROGRAMS: dict[str, Callable[..., Any]] = {"g_bmf": upload.client_program, "gl_bmf": gl_client.client_program}


def _die_once(marker: Path) -> None:
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def _client(protocol: str, victim: str, shares: int, marker: Path, client: Any, job: Any) -> Any:
    real, left = client.share, [shares]

    def share(*arguments: Any) -> None:
        if client.name == victim:
            left[0] -= 1
            if left[0] < 0:
                _die_once(marker)
        real(*arguments)

    def receive(*arguments: Any, **options: Any) -> Any:
        if client.name == victim:
            _die_once(marker)
        return wait(*arguments, **options)

    wait = client.receive
    client.share, client.receive = share, receive
    return PROGRAMS[protocol](client, job)


def _server(victim: int, step: int, marker: Path, party: Any, job: Any) -> Any:
    write, write_state = ServerDirectory._write, OpenedSteps._write_state

    def die_when_all_have(file: Path) -> None:  # in the background: the others' may still be under way
        if party.id == victim and not marker.exists():
            while not all((file.parent.with_name(f"server-{other}") / file.name).exists() for other in range(3)):
                time.sleep(0.01)
            _die_once(marker)

    def writing(self: ServerDirectory, at: int, arrays: Any) -> None:
        write(self, at, arrays)
        if at == step:
            die_when_all_have(self.path / f"checkpoint-{at:08d}.npz")

    def writing_state(self: OpenedSteps, at: int, content: bytes) -> None:
        write_state(self, at, content)
        if at == step:
            die_when_all_have(self._file(at))

    ServerDirectory._write = writing  # type: ignore[method-assign,assignment]  # in a process of its own
    OpenedSteps._write_state = writing_state  # type: ignore[method-assign,assignment]
    return g_bmf.servers(party, job)


def _gl_server(victim: int, step: int, clients: int, marker: Path, party: Any, job: Any) -> Any:
    real, sent = refmpc.open_to_client, list[int]()

    def open_to_client(at: Any, *arguments: Any) -> None:
        if at.id == victim and at.step == step and len(sent) == clients:
            _die_once(marker)
        real(at, *arguments)
        sent.extend([step] if at.step == step else [])

    refmpc.open_to_client = open_to_client  # type: ignore[assignment]  # in a process of its own
    return gl_bmf.servers(party, job)


def killed_client(protocol: str, victim: str, shares: int, marker: Path) -> Callable[..., Any]:
    """The clients' program; ``victim`` dies when it has shared ``shares`` arrays and is about to share another, at the
    latest when it waits for the model."""
    return functools.partial(_client, protocol, victim, shares, marker)


def killed_server(victim: int, step: int, marker: Path) -> Callable[..., Any]:
    """G-BMF at the servers; ``victim`` dies when all have just written their checkpoints of ``step``, in the
    background."""
    return functools.partial(_server, victim, step, marker)


def killed_gl_server(victim: int, step: int, clients: int, marker: Path) -> Callable[..., Any]:
    """GL-BMF at the servers; in ``step``, ``victim`` dies when so many clients have its words, and the next has not."""
    return functools.partial(_gl_server, victim, step, clients, marker)
