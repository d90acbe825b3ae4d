"""Framed messages between parties: threads in one process, or sockets (plain on loopback, TLS elsewhere).

A frame is a 24-byte header (payload length, round number, checksum of the operation's name, time of sending) and
the payload: all messages of one round on one link. Length, round and operation are known to the receiver beforehand
and compared with the header, so a party out of step raises and never computes garbage. Payloads go out of, and into,
numpy buffers without a copy. Sending and receiving progress together, so two parties that send at once cannot block
each other. Counted are payload bytes and frames; ``FRAME_OVERHEAD`` bytes a frame come on top on the wire.
"""

from __future__ import annotations

import queue
import select
import socket
import ssl
import struct
import time
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from refmpc.errors import OutOfStep, PeerAborted, PeerLost, PeerTimeout
from refmpc.network import PROFILES, NetworkProfile, ReceivingLine

__all__ = ["FRAME_OVERHEAD", "Peer", "SocketTransport", "ThreadTransport", "Transport", "thread_links"]

Peer = Hashable  # 0, 1, 2 for the servers, a name for a client

_HEADER = struct.Struct("<QIIQ")
FRAME_OVERHEAD = _HEADER.size
_ABORT = 2**64 - 1  # a payload length that no real frame has: the payload is then a reason of this many bytes
_ABORT_BYTES = 200
_GRACE = 0.3  # seconds in which a peer that failed first may still say so
_KNOWN_OPERATIONS: dict[int, str] = {}


def _operation_code(operation: str) -> int:
    code = zlib.crc32(operation.encode())
    _KNOWN_OPERATIONS.setdefault(code, operation)
    return code


def _name(peer: Peer) -> str:
    return f"party {peer}" if isinstance(peer, int) else f"client {peer!r}"


class Transport(Protocol):
    """What a party needs of its channels."""

    bytes_sent: int
    frames_sent: int
    seconds_waiting: float

    def exchange(
        self, operation: str, sends: Mapping[Peer, list[np.ndarray]], receives: Mapping[Peer, list[np.ndarray]]
    ) -> None: ...

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...


class _Framing:
    """Round numbers, counters and the check of headers: the part that all transports share."""

    def __init__(self, peers: Iterable[Peer], timeout: float, profile: NetworkProfile):
        self.timeout = timeout
        self.bytes_sent = 0
        self.frames_sent = 0
        self.seconds_waiting = 0.0
        self._sent: dict[Peer, int] = dict.fromkeys(peers, 0)
        self._received: dict[Peer, int] = dict.fromkeys(peers, 0)
        self._lines = {peer: ReceivingLine(profile) for peer in self._sent}

    def _header(self, peer: Peer, operation: str, payload: list[np.ndarray]) -> bytes:
        size = sum(part.nbytes for part in payload)
        self.bytes_sent += size
        self.frames_sent += 1
        self._sent[peer] += 1
        return _HEADER.pack(size, self._sent[peer], _operation_code(operation), time.monotonic_ns())

    def _check(self, peer: Peer, operation: str, header: bytes, size: int) -> float:
        """Compare a header with what is expected; returns the time of sending."""
        got_size, got_round, got_code, sent_ns = _HEADER.unpack(header)
        self._received[peer] += 1
        expected_round = self._received[peer]
        if got_code != _operation_code(operation) or got_round != expected_round:
            theirs = _KNOWN_OPERATIONS.get(got_code, f"unknown operation {got_code:#010x}")
            raise OutOfStep(
                f"{_name(peer)} is out of step: it sent message {got_round} of '{theirs}', "
                f"this party expects message {expected_round} of '{operation}'"
            )
        if got_size != size:
            raise OutOfStep(
                f"{_name(peer)} sent {got_size} bytes in '{operation}' (message {got_round}), this party expects "
                f"{size}: the parties run on different shapes or parameters"
            )
        return sent_ns * 1e-9

    def _timed_out(self, peer: Peer, operation: str, doing: str) -> PeerTimeout:
        return PeerTimeout(
            f"{_name(peer)} {doing} in '{operation}' (message {self._received[peer] + 1}) for {self.timeout:g} s: "
            "it hangs, is stopped or its network is down"
        )

    def _aborted(self, peer: Peer, operation: str, reason: str) -> PeerAborted:
        return PeerAborted(f"{_name(peer)} gave up while this party was in '{operation}': {reason}")

    def _lost(self, peer: Peer, operation: str) -> PeerLost:
        return PeerLost(
            f"{_name(peer)} closed the connection in '{operation}' (message {self._received[peer] + 1}): "
            "it died or was killed"
        )


class ThreadTransport(_Framing):
    """Channels between threads of one process: one queue per directed link."""

    def __init__(
        self,
        outgoing: Mapping[Peer, queue.SimpleQueue],
        incoming: Mapping[Peer, queue.SimpleQueue],
        timeout: float,
        profile: NetworkProfile = PROFILES["loopback"],
    ):
        super().__init__(outgoing, timeout, profile)
        self._outgoing = dict(outgoing)
        self._incoming = dict(incoming)

    def exchange(
        self, operation: str, sends: Mapping[Peer, list[np.ndarray]], receives: Mapping[Peer, list[np.ndarray]]
    ) -> None:
        """Send and receive one frame per named peer."""
        for peer, payload in sends.items():
            self._outgoing[peer].put((self._header(peer, operation, payload), payload))
        for peer, parts in receives.items():
            begun = time.monotonic()
            try:
                header, payload = self._incoming[peer].get(timeout=self.timeout + _GRACE)
            except queue.Empty:
                raise self._timed_out(peer, operation, "sent nothing") from None
            finally:
                self.seconds_waiting += time.monotonic() - begun
            if header is None:
                raise self._aborted(peer, operation, payload)
            size = sum(part.nbytes for part in parts)
            sent_at = self._check(peer, operation, header, size)
            self._lines[peer].wait_for_arrival(sent_at, size)
            for part, message in zip(parts, payload, strict=True):
                _as_bytes(part)[:] = _as_bytes(message)

    def abort(self, reason: str) -> None:
        """Tell every peer that this party ends."""
        for link in self._outgoing.values():
            link.put((None, reason))

    def close(self) -> None:
        """Nothing to close: the queues go with the run."""


def thread_links(peers: Iterable[Peer]) -> Callable[[Peer], tuple[dict[Peer, Any], dict[Peer, Any]]]:
    """Queues between all ``peers``; the result gives one peer's (outgoing, incoming)."""
    names = list(peers)
    links: dict[tuple[Peer, Peer], queue.SimpleQueue] = {
        (a, b): queue.SimpleQueue() for a in names for b in names if a != b
    }

    def ends(me: Peer) -> tuple[dict[Peer, Any], dict[Peer, Any]]:
        return {b: links[me, b] for b in names if b != me}, {b: links[b, me] for b in names if b != me}

    return ends


class _Sending:
    """A frame on its way out of a non-blocking socket."""

    def __init__(self, header: bytes, payload: list[np.ndarray]):
        self.views = [memoryview(header), *(memoryview(_as_bytes(part)) for part in payload if part.nbytes)]

    def progress(self, connection: socket.socket) -> bool:
        """Hand as much as possible to the socket; true when all is gone."""
        while self.views:
            if isinstance(connection, ssl.SSLSocket):
                sent = connection.send(self.views[0])
            else:
                sent = connection.sendmsg(self.views[:64])
            while sent:
                if sent < len(self.views[0]):
                    self.views[0] = self.views[0][sent:]
                    break
                sent -= len(self.views.pop(0))
        return True


class _Receiving:
    """A frame on its way in; the header is examined as soon as it is whole."""

    def __init__(self, parts: list[np.ndarray]):
        self.size = sum(part.nbytes for part in parts)
        self.header = bytearray(FRAME_OVERHEAD)
        self._header_missing = FRAME_OVERHEAD
        self._views = [memoryview(self.header), *(memoryview(_as_bytes(part)) for part in parts if part.nbytes)]
        self.sent_at = 0.0

    def progress(self, connection: socket.socket, check: Callable[[bytes, int], float]) -> bool:
        """Take what the socket has; true when the frame is whole."""
        while self._views:
            # until the header has been checked only the header is read: what follows may be of another length
            wanted = self._views[:1] if self._header_missing else self._views[:64]
            if isinstance(connection, ssl.SSLSocket):
                got = connection.recv_into(wanted[0])
            else:
                got = connection.recvmsg_into(wanted)[0]
            if got == 0:
                raise ConnectionResetError
            if self._header_missing:
                self._header_missing -= got
                if not self._header_missing:
                    self.sent_at = check(bytes(self.header), self.size)
            while got:
                if got < len(self._views[0]):
                    self._views[0] = self._views[0][got:]
                    break
                got -= len(self._views.pop(0))
        return True


_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_GONE = (ConnectionError, ssl.SSLError, OSError)


class SocketTransport(_Framing):
    """Channels over connected sockets (TCP on loopback, or TLS), one per peer."""

    def __init__(
        self,
        connections: Mapping[Peer, socket.socket],
        timeout: float,
        profile: NetworkProfile = PROFILES["loopback"],
    ):
        super().__init__(connections, timeout, profile)
        self._connections = dict(connections)
        for connection in self._connections.values():
            connection.setblocking(False)

    def exchange(
        self, operation: str, sends: Mapping[Peer, list[np.ndarray]], receives: Mapping[Peer, list[np.ndarray]]
    ) -> None:
        """Send and receive one frame per named peer, all at the same time."""
        sending = {peer: _Sending(self._header(peer, operation, parts), parts) for peer, parts in sends.items()}
        receiving = {peer: _Receiving(parts) for peer, parts in receives.items()}
        arriving = list(receiving.items())
        quiet_since = time.monotonic()
        while sending or receiving:
            moved = self._write(sending, operation)
            moved |= self._read(receiving, operation)
            if moved:
                quiet_since = time.monotonic()
            elif sending or receiving:
                remaining = quiet_since + self.timeout + _GRACE - time.monotonic()
                if remaining <= 0:
                    peer = next(iter(receiving or sending))
                    raise self._timed_out(peer, operation, "sent nothing" if receiving else "took no message")
                self._wait(sending, receiving, remaining)
        for peer, frame in arriving:
            self._lines[peer].wait_for_arrival(frame.sent_at, frame.size)

    def _write(self, sending: dict[Peer, _Sending], operation: str) -> bool:
        moved = False
        for peer in list(sending):
            before = len(sending[peer].views), len(sending[peer].views[0])
            try:
                if sending[peer].progress(self._connections[peer]):
                    del sending[peer]
                    moved = True
            except _WOULD_BLOCK:
                moved |= (len(sending[peer].views), len(sending[peer].views[0])) != before
            except _GONE as error:
                reason = self._last_words(peer)
                raise (self._aborted(peer, operation, reason) if reason else self._lost(peer, operation)) from error
        return moved

    def _read(self, receiving: dict[Peer, _Receiving], operation: str) -> bool:
        moved = False
        for peer in list(receiving):
            try:
                if receiving[peer].progress(
                    self._connections[peer],
                    lambda header, size, peer=peer: self._check_or_abort(peer, operation, header, size),  # type: ignore[misc]
                ):
                    del receiving[peer]
                    moved = True
            except _WOULD_BLOCK:
                continue
            except _GONE as error:
                raise self._lost(peer, operation) from error
        return moved

    def _check_or_abort(self, peer: Peer, operation: str, header: bytes, size: int) -> float:
        if _HEADER.unpack(header)[0] == _ABORT:
            raise self._aborted(peer, operation, self._read_reason(peer))
        return self._check(peer, operation, header, size)

    def _read_reason(self, peer: Peer) -> str:
        connection = self._connections[peer]
        try:
            connection.settimeout(1.0)
            words = b""
            while len(words) < _ABORT_BYTES:
                piece = connection.recv(_ABORT_BYTES - len(words))
                if not piece:
                    break
                words += piece
        except OSError:
            return "for a reason it could not send"
        return words.rstrip(b"\0").decode(errors="replace")

    def _last_words(self, peer: Peer) -> str:
        """What a peer that no longer takes messages may have said before it closed."""
        connection = self._connections[peer]
        try:
            connection.settimeout(_GRACE)
            header = connection.recv(FRAME_OVERHEAD)
        except OSError:
            return ""
        if len(header) == FRAME_OVERHEAD and _HEADER.unpack(header)[0] == _ABORT:
            return self._read_reason(peer)
        return ""

    def _wait(self, sending: Mapping[Peer, Any], receiving: Mapping[Peer, Any], seconds: float) -> None:
        begun = time.monotonic()
        poll = select.poll()
        interest: dict[int, int] = {}
        for peers, event in ((receiving, select.POLLIN), (sending, select.POLLOUT)):
            for peer in peers:
                number = self._connections[peer].fileno()
                interest[number] = interest.get(number, 0) | event
        for number, events in interest.items():
            poll.register(number, events)
        poll.poll(seconds * 1000)
        self.seconds_waiting += time.monotonic() - begun

    def abort(self, reason: str) -> None:
        """Tell every peer, as far as it still listens, that this party ends."""
        words = reason.encode()[:_ABORT_BYTES].ljust(_ABORT_BYTES, b"\0")
        frame = _HEADER.pack(_ABORT, 0, 0, time.monotonic_ns()) + words
        for connection in self._connections.values():
            try:
                connection.settimeout(0.2)
                connection.sendall(frame)
            except OSError:
                continue

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()


def _as_bytes(array: np.ndarray) -> Any:
    return array.reshape(-1).view(np.uint8)
