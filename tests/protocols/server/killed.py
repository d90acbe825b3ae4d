"""Participants that end themselves with signal 9 at a chosen point, for commands that run as processes.

To the others this is kill -9. The point is a message or a checkpoint, not a moment, so no load on the machine moves it.
``marker`` makes it happen once: the resumed run finds the file and goes on.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import refmpc
from protocols import g_bmf, gl_bmf
from protocols.client import gl_client, upload
from protocols.server.checkpoint import ServerDirectory
from protocols.server.opened import OpenedSteps

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
    real = ServerDirectory.save

    def save(self: ServerDirectory, at: int, *layers: Any) -> None:
        real(self, at, *layers)
        if party.id == victim and at == step:
            _die_once(marker)

    keep_state = OpenedSteps.keep_state

    def keep(self: OpenedSteps, at: int, state: Any) -> int:
        oldest = keep_state(self, at, state)
        if party.id == victim and at == step:
            _die_once(marker)
        return oldest

    ServerDirectory.save = save  # type: ignore[method-assign,assignment]  # in a process of its own
    OpenedSteps.keep_state = keep  # type: ignore[method-assign,assignment]
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
    """G-BMF at the servers; ``victim`` dies when it has just written its checkpoint of ``step``."""
    return functools.partial(_server, victim, step, marker)


def killed_gl_server(victim: int, step: int, clients: int, marker: Path) -> Callable[..., Any]:
    """GL-BMF at the servers; in ``step``, ``victim`` dies when so many clients have its words, and the next has not."""
    return functools.partial(_gl_server, victim, step, clients, marker)
