"""Points at which a server of a run with open weights may die, and everything that was ever sent."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocols.state.shuffled_rows import ShuffledRows
from protocols.state.step_log import OpenedSteps
from refmpc.core.party import Party

__all__ = ["Crash", "Watch"]

OPERATIONS = (
    "open_words",
    "open_to_client",
    "the words are written",
    "agree on what was opened",
    "first step",
    "reveal_to_client",
)


class Crash(Exception):
    """What a test makes a server die of."""


class Watch:
    """Points at which a server may die: around every record it appends and every message that opens or agrees. ``sent``
    holds all words that were ever sent, by server and step; a word that is sent before all three have written theirs is
    noted in ``too_early``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: Path):
        self.points: dict[int, list[str]] = defaultdict(list)
        self.kill: tuple[int, int] | None = None  # server, number of the point
        self.dies_at: tuple[int, str] | None = None  # server, name of the point
        self.sent: dict[tuple[Any, ...], list[np.ndarray]] = defaultdict(list)  # by server, step and receiver
        self._first: dict[int, int] = {}
        self.too_early: list[str] = []
        self.run = run
        self._lock = threading.Lock()
        monkeypatch.setenv("REFMPC_RECORD", "0")  # what is repeated does not pass ``Party._exchange``
        append, exchange, save = OpenedSteps._append, Party._exchange, ShuffledRows.save
        write_state = OpenedSteps._write_state

        def appending(opened: OpenedSteps, kind: bytes, step: int, content: bytes) -> None:
            server, what = int(opened._directory.name[-1]), f"{kind.decode()} {step}"
            self._point(server, f"before {what}")
            append(opened, kind, step, content)
            self._point(server, f"after {what}")

        def writing_state(opened: OpenedSteps, position: int, content: bytes) -> None:
            server = int(opened._directory.name[-1])
            self._point(server, f"before stat {position}")
            write_state(opened, position, content)
            self._point(server, f"after stat {position}")

        def exchanging(
            party: Party, operation: str, sends: dict[Any, Any], receives: dict[Any, Any], *code: int
        ) -> None:
            if operation not in OPERATIONS:
                exchange(party, operation, sends, receives, *code)
                return
            self._point(party.id, f"before {operation} {party.step}")
            if operation == "first step":
                self._first[party.id] = int(next(iter(sends.values()))[0][0])
            if operation in ("open_words", "open_to_client"):
                self._note(party, sends)
            exchange(party, operation, sends, receives, *code)
            self._point(party.id, f"after {operation} {party.step}")

        def saving(shuffled: ShuffledRows, epoch: int, tensors: Any) -> None:
            server = int(shuffled._directory.name[-1])
            self._point(server, f"before rows {epoch}")
            save(shuffled, epoch, tensors)
            self._point(server, f"after rows {epoch}")

        monkeypatch.setattr(OpenedSteps, "_append", appending)
        monkeypatch.setattr(OpenedSteps, "_write_state", writing_state)
        monkeypatch.setattr(ShuffledRows, "save", saving)
        monkeypatch.setattr(Party, "_exchange", exchanging)

    def _point(self, server: int, name: str) -> None:
        with self._lock:
            self.points[server].append(name)
            now = server, len(self.points[server]) - 1
        if now == self.kill or (server, name) == self.dies_at:
            raise Crash(name)

    def _note(self, party: Party, sends: dict[Any, list[np.ndarray]]) -> None:
        """Words go to both other servers, or to a client, whom a run that goes on sends the last ones again."""
        step = self._first[party.id] - 1 if party._phase == "greeting" else party.step
        with self._lock:
            for peer, parts in sends.items():
                receiver = "servers" if isinstance(peer, int) else peer
                self.sent[party.id, step, receiver] += [part.copy() for part in parts]
        for server in range(3):
            disk = self._disk(server)
            if disk.written <= step or (server == party.id and disk.marked <= step):
                self.too_early.append(f"step {step} of server {party.id}: server {server} is not ready")

    def _disk(self, server: int) -> OpenedSteps:
        """What a server has on disk; it may begin a new file, and remove the old one, while we look."""
        for _ in range(100):
            with contextlib.suppress(FileNotFoundError):
                return OpenedSteps(self.run / f"server-{server}", np.uint32, 0, synced=False)
        raise AssertionError(f"server {server}: its files come and go")

    def two_values(self) -> list[tuple[Any, ...]]:
        return [key for key, found in self.sent.items() if any(not np.array_equal(found[0], more) for more in found)]
