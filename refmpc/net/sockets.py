"""Channels over connected sockets: plain TCP on loopback, TLS elsewhere. ``refmpc.net.framing`` describes the frames.

A usual round is two ``sendmsg``, one ``poll`` and two ``recvmsg``: a frame goes out and comes in with one system call,
header and payload together, straight from and into numpy's memory. Only what does not fit takes the longer way.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from refmpc.core.errors import RefmpcError
from refmpc.net.emulation import PROFILES, NetworkProfile
from refmpc.net.framing import (
    ABORT,
    ABORT_BYTES,
    FRAME_OVERHEAD,
    GOODBYE,
    GRACE,
    HEADER,
    Framing,
    Peer,
    as_bytes,
    require_contiguous,
)
from refmpc.net.prepared import Link, PreparedRound

__all__ = ["SocketTransport"]

_LINGER = 1.0  # seconds in which the last words of a party that failed are brought to its peers
_VIEWS = 64  # buffers handed to one system call
_SMALL = 1 << 14  # TLS: parts below a record's size are joined, each call makes at least one record
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class _Moving:
    """A frame on its way: the buffers that are left, and how many bytes have gone."""

    __slots__ = ("_buffers", "_total", "moved")

    def __init__(self, buffers: list[Any], total: int):
        self._buffers = buffers
        self._total = total
        self.moved = 0

    def _advance(self, count: int) -> None:
        """Drop the next ``count`` bytes."""
        self.moved += count
        if self.moved == self._total:
            self._buffers = []
            return
        views = [
            memoryview(as_bytes(buffer) if isinstance(buffer, np.ndarray) else buffer)
            for buffer in self._buffers
            if not isinstance(buffer, np.ndarray) or buffer.nbytes
        ]
        whole = 0
        while count and count >= len(views[whole]):
            count -= len(views[whole])
            whole += 1
        self._buffers = views[whole:]
        if count:
            self._buffers[0] = self._buffers[0][count:]


class _Sending(_Moving):
    """A frame on its way out of a socket. ``begun``: part of it may have gone; TLS does not say how much of what it was
    offered, only when all of that is gone."""

    __slots__ = ("begun",)

    def __init__(self, buffers: list[Any], total: int, moved: int = 0, begun: bool = False):
        super().__init__(buffers, total)
        self.begun = begun or moved > 0
        if moved:
            self._advance(moved)

    @classmethod
    def frame(cls, header: bytes, payload: list[np.ndarray], joined: bool) -> _Sending:
        """A whole frame."""
        total = FRAME_OVERHEAD + sum(part.nbytes for part in payload)
        return cls(_join_small([header, *payload]) if joined else [header, *payload], total)

    def progress(self, connection: socket.socket) -> bool:
        """Hand as much as possible to the socket; true when all is gone."""
        while self._buffers:
            if isinstance(connection, ssl.SSLSocket):
                self.begun = True
                self._advance(connection.send(self._buffers[0]))
            else:
                self._advance(connection.sendmsg(self._buffers[:_VIEWS]))
                self.begun = True
        return True


def _join_small(buffers: list[Any]) -> list[memoryview]:
    joined: list[memoryview] = []
    small: list[memoryview] = []
    for buffer in [*buffers, None]:
        view = None if buffer is None else memoryview(as_bytes(buffer) if isinstance(buffer, np.ndarray) else buffer)
        if view is not None and len(view) < _SMALL:
            small.append(view)
            continue
        if small:
            joined.append(memoryview(b"".join(small)))
            small = []
        if view is not None:
            joined.append(view)
    return joined


class _Receiving(_Moving):
    """A frame on its way in. Header and payload are read together: at most as many bytes as the expected frame has, so
    that nothing of a later frame is taken. The header is examined as soon as it is whole."""

    __slots__ = ("_header", "_parts", "sent_at", "size")

    def __init__(self, parts: list[np.ndarray]):
        for part in parts:
            require_contiguous(part)
        self.size = sum(part.nbytes for part in parts)
        self._header = bytearray(FRAME_OVERHEAD)
        self._parts = parts
        self.sent_at = 0.0
        super().__init__([self._header, *parts], FRAME_OVERHEAD + self.size)

    def take(self, header: bytes, count: int, check: Callable[[bytes, int, bytes], float]) -> None:
        """``count`` bytes of the frame have been read already, those of the payload into its place."""
        self._header[:] = header
        self._advance(count)
        if count >= FRAME_OVERHEAD:
            self._examine(check)

    def progress(self, connection: socket.socket, check: Callable[[bytes, int, bytes], float]) -> bool:
        """Take what the socket has; true when the frame is whole."""
        while self._buffers:
            before = self.moved
            if isinstance(connection, ssl.SSLSocket):
                got = connection.recv_into(self._buffers[0])
            else:
                got = connection.recvmsg_into(self._buffers[:_VIEWS])[0]
            if got == 0:
                raise ConnectionResetError
            self._advance(got)
            if before < FRAME_OVERHEAD <= self.moved:
                self._examine(check)
        return True

    def _examine(self, check: Callable[[bytes, int, bytes], float]) -> None:
        header = bytes(self._header)
        # a peer that gives up sends a frame of another length: part of its words lies in the payload's place
        words = self._behind_header() if HEADER.unpack(header)[0] == ABORT else b""
        self.sent_at = check(header, self.size, words)

    def _behind_header(self) -> bytes:
        taken = b"".join(as_bytes(part).tobytes() for part in self._parts)
        return taken[: self.moved - FRAME_OVERHEAD]


class SocketTransport(Framing):
    """Channels over connected sockets (TCP on loopback, or TLS), one per peer."""

    def __init__(
        self,
        connections: Mapping[Peer, socket.socket],
        timeout: float,
        profile: NetworkProfile = PROFILES["loopback"],
    ):
        super().__init__(connections, timeout, profile)
        self._connections = dict(connections)
        self._with_tls = {peer for peer, c in self._connections.items() if isinstance(c, ssl.SSLSocket)}
        self._sending: dict[Peer, _Sending] = {}
        self._polls: dict[tuple[tuple[Peer, ...], tuple[Peer, ...]], Any] = {}
        for connection in self._connections.values():
            connection.setblocking(False)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a party, and a secret tensor of it, stays in its process: return what was revealed")

    def exchange(
        self,
        operation: str,
        sends: Mapping[Peer, list[np.ndarray]],
        receives: Mapping[Peer, list[np.ndarray]],
        code: int = 0,
    ) -> None:
        """Send and receive one frame per named peer, all at the same time. All ends of a frame pass the same
        ``code``."""
        self._code = code
        self._require_participants((*sends, *receives))
        self._sending = sending = {
            peer: _Sending.frame(self._header(peer, operation, parts), parts, peer in self._with_tls)
            for peer, parts in sends.items()
        }
        receiving = {peer: _Receiving(parts) for peer, parts in receives.items()}
        arriving = list(receiving.items()) if self._lines else ()
        self._write(sending, receiving, operation)
        self._move(sending, receiving, operation)
        for peer, frame in arriving:
            self._wait_for_arrival(peer, frame.sent_at, frame.size)

    def prepare(
        self, operation: str, sends: Mapping[Peer, list[np.ndarray]], receives: Mapping[Peer, list[np.ndarray]]
    ) -> Callable[[int], None]:
        """An exchange to be carried out many times with the same arrays, each under its own code."""
        self._require_participants((*sends, *receives))
        if self._lines:
            return lambda code: self.exchange(operation, sends, receives, code)
        out, into = (
            {peer: (self._connections[peer], parts) for peer, parts in each.items()} for each in (sends, receives)
        )
        return PreparedRound(self, operation, out, into, self._poll((), tuple(receives)))

    def _move(self, sending: dict[Peer, _Sending], receiving: dict[Peer, _Receiving], operation: str) -> None:
        """Bring frames that have begun to their end."""
        until = time.monotonic() + self.timeout
        while sending or receiving:
            self._wait(sending, receiving, until)
            moved = self._write(sending, receiving, operation) if sending else False
            moved |= self._read(receiving, operation)
            if moved:
                until = time.monotonic() + self.timeout
            elif time.monotonic() > until:
                self._give_up(sending, receiving, operation)

    def go_on(self, operation: str, unsent: Mapping[Link, int], waiting: Mapping[Link, int]) -> None:
        """Finish a prepared round in which something did not go at once: of these frames so many bytes have moved."""
        # over TLS what was refused once has to be offered again from the same place on
        self._sending = sending = {
            link.peer: _Sending(list(link.buffers), link.total, went, begun=link.with_tls)
            for link, went in unsent.items()
        }
        receiving = {link.peer: _Receiving(link.parts) for link in waiting}
        for link, count in waiting.items():
            if count:
                link.scatter()
                receiving[link.peer].take(bytes(link.header), count, self._examiner(link.peer, operation))
        for peer in [link.peer for link, count in waiting.items() if count == link.total]:
            del receiving[peer]
            self.count_received(peer)
        self._move(sending, receiving, operation)

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
                    self.count_received(peer)
                    del receiving[peer]
            except _WOULD_BLOCK:
                pass
            except OSError as error:
                raise self._lost(peer, operation) from error
            moved |= frame.moved != before
        return moved

    def _examiner(self, peer: Peer, operation: str) -> Callable[[bytes, int, bytes], float]:
        def examine(header: bytes, size: int, words: bytes) -> float:
            if HEADER.unpack(header)[0] == ABORT:
                raise self._aborted(peer, operation, self._read_reason(peer, header, words))
            return self._check(peer, operation, header, size)

        return examine

    def _read_reason(self, peer: Peer, header: bytes, words: bytes) -> str:
        connection = self._connections[peer]
        length = min(HEADER.unpack(header)[1], ABORT_BYTES)
        with contextlib.suppress(OSError):
            connection.settimeout(_LINGER)
            words += _read_exactly(connection, length - len(words))
            return words.decode(errors="replace")
        return "for a reason it could not send"

    def _last_words(self, peer: Peer, operation: str, frame: _Receiving | None) -> RefmpcError:
        """Why a peer takes no more messages: what it said before it closed, behind what it sent before that."""
        connection = self._connections[peer]
        try:
            connection.settimeout(GRACE)
            if frame is not None:
                frame.progress(connection, self._examiner(peer, operation))
            while True:
                header = _read_exactly(connection, FRAME_OVERHEAD)
                size = HEADER.unpack(header)[0]
                if size in (ABORT, GOODBYE):
                    self._examiner(peer, operation)(header, 0, b"")
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
        until = time.monotonic() + GRACE
        while receiving and time.monotonic() < until:
            self._wait({}, receiving, until)
            self._read(receiving, operation)
        raise late

    def _wait(self, sending: Mapping[Peer, Any], receiving: Mapping[Peer, Any], until: float) -> None:
        """Sleep until a socket is ready; the kernel does not know of what TLS has read ahead."""
        for peer in self._with_tls.intersection(receiving):
            if self._connections[peer].pending():  # type: ignore[attr-defined]
                return
        begun = time.monotonic()
        milliseconds = min(max(0.0, until - begun), 1e6) * 1000 + 1  # the kernel counts milliseconds in an int
        self._poll(tuple(sending), tuple(receiving)).poll(milliseconds)
        self.count_waiting(time.monotonic() - begun)

    def _poll(self, sending: tuple[Peer, ...], receiving: tuple[Peer, ...]) -> Any:
        poll = self._polls.get((sending, receiving))
        if poll is None:
            poll = self._polls[sending, receiving] = select.poll()
            for peer in {*sending, *receiving}:
                events = select.POLLOUT * (peer in sending) | select.POLLIN * (peer in receiving)
                poll.register(self._connections[peer].fileno(), events)
        return poll

    def abort(self, reason: str) -> None:
        """Tell every peer, as far as it still listens, that this party ends."""
        if self._said_why:
            return
        self._said_why = True
        words = reason.encode()[:ABORT_BYTES]
        message = HEADER.pack(ABORT, len(words), 0, time.monotonic_ns(), b"") + words
        unfinished = {peer: frame for peer, frame in self._sending.items() if frame.begun}
        for peer in sorted(self._connections, key=lambda peer: peer in unfinished):
            with contextlib.suppress(OSError):
                self._connections[peer].settimeout(_LINGER if peer in unfinished else GRACE)
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
                    connection.send(HEADER.pack(GOODBYE, self.sent_to(peer), 0, time.monotonic_ns(), b""))
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
