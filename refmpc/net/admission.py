"""How many callers a listener takes before they are authenticated, and for how long: one policy for every listener.

Anybody can call. Each caller gets ``PATIENCE`` seconds to say who it is, and at most ``STRANGERS`` callers may be in
this state. Beyond that, the oldest caller of the host that has most of them is sent away. A participant says who it is
within a moment, so silent callers keep out neither it nor callers of other hosts.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter

from refmpc.net.tls import hang_up

__all__ = ["PATIENCE", "STRANGERS", "Admission", "Caller"]

PATIENCE = 5.0  # seconds for a caller to prove who it is and to say what it wants
STRANGERS = 64  # callers at the door at the same time


class Caller:
    """One connection at the door, with or without TLS around it."""

    def __init__(self, connection: socket.socket, host: str):
        self.connection = connection
        self.host = host
        self.sent_away = False


class Admission:
    """The callers at one door, the oldest first. Safe to use from several threads."""

    def __init__(self, strangers: int = STRANGERS):
        self._limit = strangers
        self._callers: dict[Caller, None] = {}
        self._closed = False
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        """Whether nobody can be accepted now: those who were sent away need a moment to go."""
        return len(self._callers) >= 2 * self._limit

    def enter(self, connection: socket.socket, host: str) -> Caller:
        """A new caller; makes room for it if the door is crowded."""
        caller = Caller(connection, host)
        with self._lock:
            staying = [other for other in self._callers if not other.sent_away]
            if len(staying) >= self._limit:
                crowded = Counter(other.host for other in staying).most_common(1)[0][0]
                self._send_away(next(other for other in staying if other.host == crowded))
            self._callers[caller] = None
            if self._closed:
                self._send_away(caller)
        return caller

    def replace(self, caller: Caller, connection: socket.socket) -> None:
        """TLS was put around the caller's connection, which may have been sent away meanwhile."""
        with self._lock:
            caller.connection = connection
            if caller.sent_away:
                hang_up(connection)

    def leave(self, caller: Caller) -> None:
        """The caller was let in, or is gone."""
        with self._lock:
            self._callers.pop(caller, None)

    def close(self) -> None:
        """Send away everybody who still is at the door, and whoever comes."""
        with self._lock:
            self._closed = True
            for caller in self._callers:
                self._send_away(caller)

    def _send_away(self, caller: Caller) -> None:
        caller.sent_away = True
        hang_up(caller.connection)
