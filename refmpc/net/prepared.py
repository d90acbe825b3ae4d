"""Rounds of a recorded step over sockets: buffers, headers and poll objects are made once.

The usual case is ``sendmsg`` to each neighbour, ``poll``, ``recvmsg_into`` from each, and sixteen bytes compared. Over
TLS a frame is joined, so that it goes with one ``send`` and comes with one ``recv_into`` a record. Over plain sockets a
round can also be a call of a compiled kernel (``accel.compiled.frames``) between two others. Whatever else happens (a
short write or read, another header, an error, a time-out) is left to ``SocketTransport`` with what has moved so far,
and so are all sentences for people.
"""

from __future__ import annotations

import ssl
import struct
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import kernels
from refmpc.net.framing import FRAME_OVERHEAD, HEADER, Peer, as_bytes, named, require_contiguous

if TYPE_CHECKING:
    from refmpc.net.sockets import SocketTransport

__all__ = ["Link", "PreparedRound"]

_EXPECTED = struct.Struct("<QII")  # the beginning of a header: size, number of the message, code
_VIEWS = 64  # buffers handed to one system call
_MILLISECONDS = (
    50  # that a compiled round waits for one frame before Python takes over, which hears signals and every peer
)
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
        self.frame = np.zeros(self.total if joined else FRAME_OVERHEAD, dtype=np.uint8).data
        self.header = self.frame[:FRAME_OVERHEAD]
        self.buffers = [self.frame] if joined else [self.header, *views]
        self.places: list[tuple[memoryview, memoryview]] = []  # of the joined frame, and the parts they belong to
        start = FRAME_OVERHEAD
        for view in views if joined else ():
            self.places.append((self.frame[start : start + len(view)], view))
            start += len(view)

    def use_header(self, memory: memoryview) -> None:
        """Let the header lie there. Only of a frame that is not joined."""
        self.frame = self.header = self.buffers[0] = memory

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
        self._moved: np.ndarray | None = None  # by a compiled call: bytes of every link, and whether it is under way

    def compiled(self, code: int, weight: int, base: np.ndarray) -> tuple[Any, list[Any]] | None:
        """A kernel and its arguments that carry out this round under the code ``code + weight·base[0]``;
        ``kernels.round_is_done`` is what it returns if it could. If not, a call of this object goes on from there. None
        where there is no such kernel."""
        links = [*self._out, *self._in]
        if not kernels.has_compiled_rounds or any(link.with_tls or link.places for link in links):
            return None
        name, places = self._name.ljust(FRAME_OVERHEAD - 24, b"\0"), self._transport.places
        headers = np.zeros((len(links), FRAME_OVERHEAD // 8), dtype=np.uint64)
        table = np.empty((len(links), 5), dtype=np.int64)
        vectors: list[tuple[int, int]] = []
        for link, own, row in zip(links, headers, table, strict=True):
            own[3:] = np.frombuffer(name, dtype=np.uint64)
            link.use_header(own.view(np.uint8).data)
            row[:] = link.connection.fileno(), places[link.peer], link.size, len(vectors), len(link.buffers)
            vectors += [(view.__array_interface__["data"][0], view.nbytes) for view in map(np.asarray, link.buffers)]
        self._moved = np.zeros(len(links) + 1, dtype=np.int64)
        arguments = [
            table,
            len(self._out),
            np.array(vectors, dtype=np.uint64).reshape(-1, 2),
            headers,
            self._transport.counts,
            self._transport.totals,
            self._moved,
            np.zeros(kernels.ROUND_SCRATCH, dtype=np.uint64),
            (self._base + code) & 0xFFFFFFFF,
            weight,
            base,
            _MILLISECONDS,
        ]
        return kernels.carry_round, arguments

    def _go_on(self) -> None:
        """Finish what a compiled call began."""
        assert self._moved is not None
        *moved, _ = self._moved.tolist()
        self._moved[-1] = 0
        left = {link: count for link, count in zip([*self._out, *self._in], moved, strict=True) if count >= 0}
        unsent = {link: count for link, count in left.items() if link in self._out}
        waiting = {link: count for link, count in left.items() if link not in unsent}
        self._transport.go_on(self._operation, unsent, waiting)

    def __call__(self, code: int) -> None:
        """Send and receive all frames under this code, or what a compiled call has left of them."""
        transport = self._transport
        transport.begin(code)
        if self._moved is not None and self._moved[-1]:
            self._go_on()
            return
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
                transport.count_waiting(time.monotonic() - begun)
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
