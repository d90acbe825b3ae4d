"""The answering side of ``ppvfl doctor``: version, configuration, clock, echoes and a measured transfer.

A server's listener hands every connection whose first message has ``"purpose": "doctor"`` to ``Answerer.answer``. Only
a participant with its pinned certificate is answered, with facts that are public among participants; time, transfers
and the number of visitors at a time are bounded, so that asking costs a running server next to nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from protocols.federation.read import FederationConfig, agreed_values, configuration_hash, pins_in_words
from protocols.net.credentials import own_directory
from protocols.state.disk import free_bytes
from protocols.version import software_version
from refmpc.core.errors import HandshakeError
from refmpc.net.admission import PATIENCE, Admission, Caller
from refmpc.net.framing import printable
from refmpc.net.tls import (
    MAX_MESSAGE,
    Credentials,
    parse,
    receive,
    secure,
    send,
    set_socket_options,
    shake_hands,
    wrong_pin,
)

__all__ = ["MAX_TRANSFER", "PURPOSE", "Answerer", "receive_payload", "serve"]

PURPOSE = "doctor"
MAX_TRANSFER = 4 << 20  # bytes of one transfer
_MAX_REQUESTS = 32  # of one visit
_MAX_TRANSFERS = 2
_VISITORS = 4  # at a time
_VISIT = 20.0  # seconds
_log = logging.getLogger("ppvfl.doctor")


class Answerer:
    """Answers doctors on behalf of participant ``name``. ``state`` says in a word what it is doing; it keeps its state
    on the disk of ``directory``, and ``budget`` is what it has recorded as spent."""

    def __init__(
        self,
        config: FederationConfig,
        credentials: Credentials,
        name: str,
        *,
        state: Callable[[], str] = lambda: "answering doctors only",
        clock: Callable[[], float] = time.time,
        version: str | None = None,
        directory: Path | None = None,
        budget: Callable[[], list[dict[str, Any]]] = list,
    ):
        self._config = config
        self._credentials = credentials
        self._name = name
        self._state = state
        self._clock = clock
        self._version = version or software_version()
        self._directory = directory or own_directory(config, name)
        self._budget = budget
        self._places = threading.BoundedSemaphore(_VISITORS)

    def answer(self, connection: ssl.SSLSocket, first: Mapping[str, Any], source: str = "a caller") -> None:
        """Answer one visit whose first message is ``first``; returns when it is over, and never raises for what the
        other end does. The caller closes the connection."""
        deadline = time.monotonic() + _VISIT
        if not self._places.acquire(blocking=False):
            self._refuse(connection, f"{_VISITORS} doctors are here already: try again in {_VISIT:.0f} s", source)
            return
        try:
            refusal = self._refusal(connection, first)
            if refusal:
                self._refuse(connection, refusal, source)
                return
            send(connection, self._facts(), deadline)
            self._attend(connection, source, deadline)
        except (OSError, HandshakeError, ValueError) as error:
            _log.info("doctor from %s ended: %s", source, printable(str(error), 200))
        finally:
            self._places.release()

    def _refusal(self, connection: ssl.SSLSocket, first: Mapping[str, Any]) -> str:
        caller, wanted = first.get("from"), first.get("to")
        entries = {entry.name: entry for entry in self._config.participants}
        if not isinstance(caller, str) or caller not in entries:
            return f"{printable(repr(caller), 100)} is no participant in the file of {self._name}"
        wrong = wrong_pin(connection, self._credentials, entries[caller].peer)
        if wrong:
            return wrong
        if wanted != self._name:
            return f"this is {self._name}, not {printable(repr(wanted), 100)}: the addresses in one file are mixed up"
        return ""

    def _facts(self) -> dict[str, Any]:
        agreed = agreed_values(self._config)
        return {
            "from": self._name,
            "version": self._version,
            "hash": configuration_hash(self._config),
            "pins": pins_in_words(self._config),
            "agreed": agreed if len(json.dumps(agreed)) < MAX_MESSAGE // 2 else {},  # thousands of class names
            "time": self._clock(),
            "state": self._state(),
            "free_bytes": free_bytes(self._directory),
            "budget": _plain(self._budget()),
        }

    def _attend(self, connection: ssl.SSLSocket, source: str, deadline: float) -> None:
        transfers = 0
        for _ in range(_MAX_REQUESTS):
            request = parse(receive(connection, source, deadline), source)
            if "echo" in request:
                send(connection, {"time": self._clock()}, deadline)
                continue
            size = request.get("download", request.get("upload"))
            if not isinstance(size, int) or isinstance(size, bool):
                return  # "bye", or something unknown
            transfers += 1
            if not 0 < size <= MAX_TRANSFER or transfers > _MAX_TRANSFERS:
                self._refuse(connection, f"{_MAX_TRANSFERS} transfers of at most {MAX_TRANSFER} bytes a visit", source)
                return
            if "download" in request:
                connection.settimeout(max(0.05, deadline - time.monotonic()))
                connection.sendall(bytes(size))
            else:
                receive_payload(connection, size, deadline)
                send(connection, {"received": size}, deadline)

    def _refuse(self, connection: ssl.SSLSocket, why: str, source: str) -> None:
        _log.warning("doctor from %s refused: %s", source, why)
        with contextlib.suppress(OSError):
            send(connection, {"refused": why}, time.monotonic() + 1.0)


def _plain(spent: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without infinite numbers, which JSON does not have."""
    return [
        {name: None if isinstance(value, float) and math.isinf(value) else value for name, value in entry.items()}
        for entry in spent
    ]


def receive_payload(connection: socket.socket, size: int, deadline: float) -> None:
    """Read and forget ``size`` bytes, in little memory."""
    buffer = bytearray(1 << 16)
    while size > 0:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        count = connection.recv_into(buffer, min(size, len(buffer)))
        if not count:
            raise HandshakeError("the connection was closed during a transfer")
        size -= count


def serve(
    listeners: Sequence[socket.socket], answerer: Answerer, credentials: Credentials, stop: threading.Event
) -> None:
    """Answer doctors, and nobody else, until ``stop``: for use before the servers run."""
    admission = Admission()

    def attend(caller: Caller) -> None:
        connection, source = caller.connection, caller.host
        try:
            deadline = time.monotonic() + PATIENCE
            set_socket_options(connection)
            connection.settimeout(PATIENCE)
            connection = secure(connection, credentials, server_side=True)
            admission.replace(caller, connection)
            shake_hands(connection, source)
            first = parse(receive(connection, source, deadline), source)
            admission.leave(caller)  # it said what it wants; visits are bounded by the answerer
            if first.get("purpose") == PURPOSE:
                assert isinstance(connection, ssl.SSLSocket)
                answerer.answer(connection, first, source)
            else:
                send(connection, {"refused": "only doctors are answered here: the server does not run yet"}, deadline)
        except (OSError, HandshakeError) as error:
            _log.info("%s: %s", source, printable(str(error), 200))
        finally:
            connection.close()
            admission.leave(caller)

    for listener in listeners:
        listener.setblocking(False)
    while not stop.is_set():
        if admission.is_full:
            stop.wait(0.01)
            continue
        for listener in select.select(listeners, [], [], 0.2)[0]:
            with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # a caller that has gone again
                connection, address = listener.accept()
                caller = admission.enter(connection, str(address[0]))
                threading.Thread(target=attend, args=(caller,), daemon=True, name="doctor answer").start()
