"""Framed messages between parties: threads in one process, or sockets (plain on loopback, TLS elsewhere).

A frame is a 64-byte header (payload length, round number, the operation's name and its checksum, time of sending) and
the payload: all messages of one round on one link. Length, round and operation are known to the receiver beforehand
and compared with the header, so a party out of step raises and never computes garbage. Payloads go out of, and into,
numpy buffers without a copy. Sending and receiving progress together, so two parties that send at once cannot block
each other. Counted are payload bytes and frames; ``FRAME_OVERHEAD`` bytes a frame come on top on the wire.

A party that fails says why (abort), one that is done says so (goodbye), and both leave the connection so that nothing
they sent before is lost: closing a socket that holds unread data would destroy what is still on its way.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import ssl
import struct
import time
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NoReturn, Protocol

import numpy as np

from refmpc.errors import OutOfStep, PeerAborted, PeerLost, PeerTimeout, RefmpcError
from refmpc.network import PROFILES, NetworkProfile, ReceivingLine

__all__ = ["FRAME_OVERHEAD", "Peer", "SocketTransport", "ThreadTransport", "Transport", "thread_links", "title"]

Peer = Hashable  # 0, 1, 2 for the servers, a name for a client

_NAME_BYTES = 40
_HEADER = struct.Struct(f"<QIIQ{_NAME_BYTES}s")
FRAME_OVERHEAD = _HEADER.size
# payload lengths that no real frame has; the round number of an abort is the length of the reason that follows
_ABORT, _GOODBYE = 2**64 - 1, 2**64 - 2
_ABORT_BYTES = 600
_GRACE = 0.3  # seconds in which a peer that gave up at the same moment may still say why
_LINGER = 1.0  # seconds in which the last words of a party that failed are brought to its peers
_VIEWS = 64  # buffers handed to one system call
_SMALL = 1 << 14  # TLS: parts below a record's size are joined, each call makes at least one record


def title(peer: Peer) -> str:
    """How messages to people call a participant."""
    return f"party {peer}" if isinstance(peer, int) else f"client {peer!r}"


def printable(text: str, limit: int = _ABORT_BYTES) -> str:
    """Text that came from a peer, fit to be shown: no control characters, not too long."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:limit])


class Transport(Protocol):
    """What a party needs of its channels."""

    timeout: float
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
        self._said_why = False  # whether the peers were told that this party gives up

    def _require_participants(self, peers: Iterable[Peer]) -> None:
        for peer in peers:
            if peer not in self._sent:
                known = ", ".join(map(title, self._sent))
                raise ValueError(f"{title(peer)} takes no part in this run; this party is connected with: {known}")

    def _header(self, peer: Peer, operation: str, payload: list[np.ndarray]) -> bytes:
        size = sum(part.nbytes for part in payload)
        self.bytes_sent += size
        self.frames_sent += 1
        self._sent[peer] += 1
        name = operation.encode()
        return _HEADER.pack(size, self._sent[peer], zlib.crc32(name), time.monotonic_ns(), name[:_NAME_BYTES])

    def _check(self, peer: Peer, operation: str, header: bytes, size: int) -> float:
        """Compare a header with what is expected; returns the time of sending."""
        got_size, got_round, got_code, sent_ns, got_name = _HEADER.unpack(header)
        expected_round = self._received[peer] + 1
        if got_size == _GOODBYE:
            raise OutOfStep(
                f"{title(peer)} has ended its program after {got_round} messages, "
                f"this party expects message {expected_round} of '{operation}'"
            )
        if got_code != zlib.crc32(operation.encode()) or got_round != expected_round:
            theirs = printable(got_name.rstrip(b"\0").decode(errors="replace"))
            raise OutOfStep(
                f"{title(peer)} is out of step: it sent message {got_round} of '{theirs}', "
                f"this party expects message {expected_round} of '{operation}'"
            )
        if got_size != size:
            raise OutOfStep(
                f"{title(peer)} sent {got_size} bytes in '{operation}' (message {got_round}), this party expects "
                f"{size}: the parties run on different shapes or parameters"
            )
        return sent_ns * 1e-9

    def _wait_for_arrival(self, peer: Peer, sent_at: float, size: int) -> None:
        self.seconds_waiting += self._lines[peer].wait_for_arrival(sent_at, size)

    def _timed_out(self, peers: Iterable[Peer], operation: str, doing: str) -> PeerTimeout:
        names = " and ".join(f"{title(peer)} (message {self._received[peer] + 1})" for peer in peers)
        return PeerTimeout(
            f"{names} {doing} in '{operation}' for {self.timeout:g} s: it hangs, is stopped or its network is down"
        )

    def _aborted(self, peer: Peer, operation: str, reason: str) -> PeerAborted:
        return PeerAborted(f"{title(peer)} gave up while this party was in '{operation}': {printable(reason)}")

    def _lost(self, peer: Peer, operation: str) -> PeerLost:
        return PeerLost(
            f"{title(peer)} closed the connection in '{operation}' (message {self._received[peer] + 1}): "
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
        self._require_participants((*sends, *receives))
        for peer, payload in sends.items():
            self._outgoing[peer].put((self._header(peer, operation, payload), payload))
        for peer, parts in receives.items():
            begun = time.monotonic()
            try:
                header, payload = self._take(peer, operation)
            finally:
                self.seconds_waiting += time.monotonic() - begun
            size = sum(part.nbytes for part in parts)
            sent_at = self._check(peer, operation, header, size)
            self._received[peer] += 1
            self._wait_for_arrival(peer, sent_at, size)
            _copy(payload, parts)

    def _take(self, peer: Peer, operation: str) -> tuple[bytes, Any]:
        link = self._incoming[peer]
        try:
            header, payload = link.get(timeout=self.timeout)
        except queue.Empty:
            late = self._timed_out([peer], operation, "sent nothing")
            self.abort(str(late))
            try:  # the peer may have waited just as long for another one, and name it
                header, payload = link.get(timeout=_GRACE)
            except queue.Empty:
                raise late from None
            if header is not None:
                raise late from None
        if header is None:
            raise self._aborted(peer, operation, payload)
        return header, payload

    def abort(self, reason: str) -> None:
        """Tell every peer that this party ends."""
        if not self._said_why:
            self._said_why = True
            for link in self._outgoing.values():
                link.put((None, reason))

    def close(self) -> None:
        """Say goodbye; the queues go with the run."""
        if not self._said_why:
            for peer, link in self._outgoing.items():
                link.put((_HEADER.pack(_GOODBYE, self._sent[peer], 0, 0, b""), []))


def _copy(payload: list[np.ndarray], parts: list[np.ndarray]) -> None:
    """Copy a message of the right size into the expected arrays, however it is divided."""
    if [part.nbytes for part in parts] != [part.nbytes for part in payload]:
        payload = np.split(
            np.concatenate([_as_bytes(part) for part in payload]), np.cumsum([part.nbytes for part in parts])[:-1]
        )
    for part, message in zip(parts, payload, strict=True):
        _as_bytes(part, writable=True)[:] = _as_bytes(message)


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
    """A frame on its way out of a socket."""

    def __init__(self, header: bytes, payload: list[np.ndarray], joined: bool):
        views = [memoryview(header), *(memoryview(_as_bytes(part)) for part in payload if part.nbytes)]
        self._views = _join_small(views) if joined else views
        self.moved = 0

    def progress(self, connection: socket.socket) -> bool:
        """Hand as much as possible to the socket; true when all is gone."""
        while self._views:
            if isinstance(connection, ssl.SSLSocket):
                sent = connection.send(self._views[0])
            else:
                sent = connection.sendmsg(self._views[:_VIEWS])
            self.moved += sent
            _advance(self._views, sent)
        return True


def _join_small(views: list[memoryview]) -> list[memoryview]:
    joined: list[memoryview] = []
    small: list[memoryview] = []
    for view in [*views, None]:
        if view is not None and len(view) < _SMALL:
            small.append(view)
            continue
        if small:
            joined.append(memoryview(b"".join(small)))
            small = []
        if view is not None:
            joined.append(view)
    return joined


def _advance(views: list[memoryview], count: int) -> None:
    """Drop the first ``count`` bytes of a list of views."""
    whole = 0
    while count and count >= len(views[whole]):
        count -= len(views[whole])
        whole += 1
    del views[:whole]
    if count:
        views[0] = views[0][count:]


class _Receiving:
    """A frame on its way in; the header is examined as soon as it is whole."""

    def __init__(self, parts: list[np.ndarray]):
        self.size = sum(part.nbytes for part in parts)
        self.header = bytearray(FRAME_OVERHEAD)
        self._views = [
            memoryview(self.header),
            *(memoryview(_as_bytes(part, writable=True)) for part in parts if part.nbytes),
        ]
        self.sent_at = 0.0
        self.moved = 0

    def progress(self, connection: socket.socket, check: Callable[[bytes, int], float]) -> bool:
        """Take what the socket has; true when the frame is whole."""
        while self._views:
            # until the header has been checked only the header is read: what follows may be of another length
            in_header = self.moved < FRAME_OVERHEAD
            if isinstance(connection, ssl.SSLSocket):
                got = connection.recv_into(self._views[0])
            else:
                got = connection.recvmsg_into(self._views[:1] if in_header else self._views[:_VIEWS])[0]
            if got == 0:
                raise ConnectionResetError
            self.moved += got
            if in_header and self.moved == FRAME_OVERHEAD:
                self.sent_at = check(bytes(self.header), self.size)
            _advance(self._views, got)
        return True


_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


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
        self._sending: dict[Peer, _Sending] = {}
        for connection in self._connections.values():
            connection.setblocking(False)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a party, and a secret tensor of it, stays in its process: return what was revealed")

    def exchange(
        self, operation: str, sends: Mapping[Peer, list[np.ndarray]], receives: Mapping[Peer, list[np.ndarray]]
    ) -> None:
        """Send and receive one frame per named peer, all at the same time."""
        self._require_participants((*sends, *receives))
        self._sending = sending = {
            peer: _Sending(
                self._header(peer, operation, parts), parts, isinstance(self._connections[peer], ssl.SSLSocket)
            )
            for peer, parts in sends.items()
        }
        receiving = {peer: _Receiving(parts) for peer, parts in receives.items()}
        arriving = list(receiving.items())
        quiet_since = time.monotonic()
        while sending or receiving:
            moved = self._write(sending, receiving, operation)
            moved |= self._read(receiving, operation)
            if moved:
                quiet_since = time.monotonic()
            elif sending or receiving:
                remaining = quiet_since + self.timeout - time.monotonic()
                if remaining <= 0:
                    self._give_up(sending, receiving, operation)
                self._wait(sending, receiving, remaining)
        for peer, frame in arriving:
            self._wait_for_arrival(peer, frame.sent_at, frame.size)

    def _write(self, sending: dict[Peer, _Sending], receiving: Mapping[Peer, _Receiving], operation: str) -> bool:
        moved = False
        for peer, frame in list(sending.items()):
            before = frame.moved
            try:
                if frame.progress(self._connections[peer]):
                    del sending[peer]
            except _WOULD_BLOCK:
                pass
            except OSError as error:
                raise self._last_words(peer, operation, receiving.get(peer)) from error
            moved |= frame.moved != before
        return moved

    def _read(self, receiving: dict[Peer, _Receiving], operation: str) -> bool:
        moved = False
        for peer, frame in list(receiving.items()):
            before = frame.moved
            try:
                if frame.progress(self._connections[peer], self._examiner(peer, operation)):
                    self._received[peer] += 1
                    del receiving[peer]
            except _WOULD_BLOCK:
                pass
            except OSError as error:
                raise self._lost(peer, operation) from error
            moved |= frame.moved != before
        return moved

    def _examiner(self, peer: Peer, operation: str) -> Callable[[bytes, int], float]:
        def examine(header: bytes, size: int) -> float:
            if _HEADER.unpack(header)[0] == _ABORT:
                raise self._aborted(peer, operation, self._read_reason(peer, header))
            return self._check(peer, operation, header, size)

        return examine

    def _read_reason(self, peer: Peer, header: bytes) -> str:
        connection = self._connections[peer]
        with contextlib.suppress(OSError):
            connection.settimeout(_LINGER)
            return _read_exactly(connection, min(_HEADER.unpack(header)[1], _ABORT_BYTES)).decode(errors="replace")
        return "for a reason it could not send"

    def _last_words(self, peer: Peer, operation: str, frame: _Receiving | None) -> RefmpcError:
        """Why a peer takes no more messages: what it said before it closed, behind what it sent before that."""
        connection = self._connections[peer]
        try:
            connection.settimeout(_GRACE)
            if frame is not None:
                frame.progress(connection, self._examiner(peer, operation))
            while True:
                header = _read_exactly(connection, FRAME_OVERHEAD)
                size = _HEADER.unpack(header)[0]
                if size in (_ABORT, _GOODBYE):
                    self._examiner(peer, operation)(header, 0)
                while size:
                    size -= len(_read_exactly(connection, min(size, 1 << 16)))
        except RefmpcError as error:
            return error
        except OSError:
            return self._lost(peer, operation)

    def _give_up(self, sending: Mapping[Peer, _Sending], receiving: dict[Peer, _Receiving], operation: str) -> NoReturn:
        """Nothing moved for the whole time-out. Say so, and see whether the peer that is late names another one."""
        late = self._timed_out(receiving or sending, operation, "sent nothing" if receiving else "took no message")
        self.abort(str(late))
        for connection in self._connections.values():
            connection.setblocking(False)
        until = time.monotonic() + _GRACE
        while receiving and time.monotonic() < until:
            if not self._read(receiving, operation):
                self._wait({}, receiving, until - time.monotonic())
        raise late

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
        poll.poll(min(max(0.0, seconds), 1e6) * 1000)  # the kernel counts milliseconds in an int
        self.seconds_waiting += time.monotonic() - begun

    def abort(self, reason: str) -> None:
        """Tell every peer, as far as it still listens, that this party ends."""
        if self._said_why:
            return
        self._said_why = True
        words = reason.encode()[:_ABORT_BYTES]
        message = _HEADER.pack(_ABORT, len(words), 0, time.monotonic_ns(), b"") + words
        unfinished = {peer: frame for peer, frame in self._sending.items() if frame.moved}
        for peer in sorted(self._connections, key=lambda peer: peer in unfinished):
            with contextlib.suppress(OSError):
                self._connections[peer].settimeout(_LINGER if peer in unfinished else _GRACE)
                if peer in unfinished:  # inside a frame the peer would take the words for payload
                    unfinished[peer].progress(self._connections[peer])
                self._connections[peer].sendall(message)

    def close(self) -> None:
        """Say goodbye and close all connections, without losing what is still on its way to a peer."""
        open_ = {c.fileno(): c for c in self._connections.values() if c.fileno() >= 0}
        for peer, connection in self._connections.items():
            with contextlib.suppress(OSError):
                connection.setblocking(False)
                if not self._said_why:
                    connection.send(_HEADER.pack(_GOODBYE, self._sent[peer], 0, time.monotonic_ns(), b""))
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        if not self._said_why:  # a peer to which this party owes an answer still sends: wait for it, not for the others
            open_ = {number: connection for number, connection in open_.items() if _unread(connection)}
        until = time.monotonic() + _LINGER
        while open_ and time.monotonic() < until:
            poll = select.poll()
            for number in open_:
                poll.register(number, select.POLLIN)
            for number, _ in poll.poll(max(0.0, until - time.monotonic()) * 1000):
                if not _unread(open_[number]):
                    del open_[number]
        for connection in self._connections.values():
            connection.close()


def _unread(connection: socket.socket) -> bool:
    """Throw away what has arrived; false if there was nothing, or the peer has closed."""
    try:
        return bool(connection.recv(1 << 20))
    except OSError:
        return False


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionResetError
        data += piece
    return data


def _as_bytes(array: np.ndarray, writable: bool = False) -> Any:
    if writable and not array.flags.c_contiguous:  # reshape would make a copy, and what arrives would be lost
        raise ValueError(f"an array of shape {array.shape} and strides {array.strides} cannot receive: not contiguous")
    return array.reshape(-1).view(np.uint8)
