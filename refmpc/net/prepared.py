"""Rounds of a recorded step over sockets: buffers, headers and poll objects are made once.

The usual case is ``sendmsg`` to each neighbour, ``poll``, ``recvmsg_into`` from each, and sixteen bytes compared. Over TLS
a frame is joined, so that it goes with one ``send`` and comes with one ``recv_into`` a record. Whatever else happens (a short
write or read, another header, an error, a time-out) is left to ``SocketTransport`` with what has moved so far, and so are
all sentences for people.
"""

from __future__ import annotations

import ssl
import struct
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from refmpc.net.framing import FRAME_OVERHEAD, HEADER, Peer, as_bytes, named, require_contiguous

if TYPE_CHECKING:
    from refmpc.net.sockets import SocketTransport

__all__ = ["Link", "PreparedRound"]

_EXPECTED = struct.Struct("<QII")  # the beginning of a header: size, number of the message, code
_VIEWS = 64  # buffers handed to one system call
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Link:
    """One frame of a prepared round, to or from a peer."""

    __slots__ = ("buffers", "connection", "frame", "header", "parts", "peer", "places", "size", "total", "with_tls")

    def __init__(self, peer: Peer, connection: Any, parts: list[np.ndarray]):
        self.peer, self.connection, self.parts = peer, connection, parts
        self.with_tls = isinstance(self.connection, ssl.SSLSocket)
        self.size = sum(part.nbytes for part in parts)
        self.total = FRAME_OVERHEAD + self.size
        views = [memoryview(as_bytes(part)) for part in parts if part.nbytes]
        # over TLS the frame is joined; one of very many parts is joined too, a system call takes only so many
        joined = self.with_tls or len(views) >= _VIEWS
        self.frame = memoryview(bytearray(self.total if joined else FRAME_OVERHEAD))
        self.header = self.frame[:FRAME_OVERHEAD]
        self.buffers = [self.frame] if joined else [self.header, *views]
        self.places: list[tuple[memoryview, memoryview]] = []  # of the joined frame, and the parts they belong to
        start = FRAME_OVERHEAD
        for view in views if joined else ():
            self.places.append((self.frame[start : start + len(view)], view))
            start += len(view)

    def gather(self) -> None:
        """Copy the parts into the joined frame."""
        for place, part in self.places:
            place[:] = part

    def scatter(self) -> None:
        """Copy the joined frame into the parts."""
        for place, part in self.places:
            part[:] = place

    def send(self) -> int:
        """How many bytes of the frame went at once."""
        try:
            return self.connection.send(self.frame) if self.with_tls else self.connection.sendmsg(self.buffers)
        except OSError:  # the socket is full, or broken, which the next attempt will say again
            return 0

    def receive(self, count: int) -> int:
        """How many bytes of the frame are there, if ``count`` were before."""
        try:
            if not self.with_tls:
                return count + self.connection.recvmsg_into(self.buffers)[0] if count == 0 else count
            while count < self.total:
                got = self.connection.recv_into(self.frame[count:])
                if got == 0:
                    break
                count += got
        except OSError:
            pass
        return count


class PreparedRound:
    """The frames of one round with the neighbours; a call carries it out."""

    def __init__(
        self,
        transport: SocketTransport,
        operation: str,
        sends: Mapping[Peer, tuple[Any, list[np.ndarray]]],
        receives: Mapping[Peer, tuple[Any, list[np.ndarray]]],
        poll: Any,
    ):
        for part in (part for _, parts in receives.values() for part in parts):
            require_contiguous(part)
        self._transport = transport
        self._operation = operation
        self._base, self._name = named(operation)
        self._out = [Link(peer, *link) for peer, link in sends.items()]
        self._in = [Link(peer, *link) for peer, link in receives.items()]
        self._by_number = {link.connection.fileno(): link for link in self._in}
        self._with_tls = any(link.with_tls for link in self._in)
        self._poll = poll

    def __call__(self, code: int) -> None:
        """Send and receive all frames under this code."""
        transport = self._transport
        transport.begin(code)
        full = (self._base + code) & 0xFFFFFFFF
        unsent: dict[Link, int] = {}
        for link in self._out:
            number = transport.count_sent(link.peer, link.size)
            HEADER.pack_into(link.header, 0, link.size, number, full, time.monotonic_ns(), self._name)
            link.gather()
            went = link.send()
            if went < link.total:
                unsent[link] = went
        waiting = dict.fromkeys(self._in, 0)
        if not unsent:
            self._receive(waiting, full)
        if unsent or waiting:
            transport.go_on(self._operation, unsent, waiting)

    def _receive(self, waiting: dict[Any, int], code: int) -> None:
        """Take what arrives as expected; what is left in ``waiting`` did not, with the bytes of it that are there."""
        transport = self._transport
        milliseconds = min(transport.timeout, 1e6) * 1000
        while waiting:
            ready = [link for link in waiting if link.connection.pending()] if self._with_tls else []
            if not ready:
                begun = time.monotonic()
                numbers = self._poll.poll(milliseconds)
                transport.seconds_waiting += time.monotonic() - begun
                ready = [self._by_number[number] for number, _ in numbers if self._by_number[number] in waiting]
                if not ready:  # time-out, or a peer whose frame is here has closed: the long way knows
                    return
            for link in ready:
                before = waiting[link]
                waiting[link] = count = link.receive(before)
                if count >= FRAME_OVERHEAD > before:
                    expected = _EXPECTED.pack(link.size, transport.expected_message(link.peer), code)
                    if link.header[: _EXPECTED.size] != expected:
                        return
                if count == link.total:
                    link.scatter()
                    transport.count_received(link.peer)
                    del waiting[link]
                elif not link.with_tls or count == before:
                    return
