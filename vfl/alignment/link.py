"""Runs the alignment over connected sockets: frames of bounded length, deadlines, and a reason when somebody gives up.

The sockets come from the caller, who has authenticated them (mutual TLS between organisations). What crosses them holds
no id even in the clear, but without authentication anybody could take part.

One thread moves bytes in both directions while the others compute. Members have a socket to the leader only: what they
say to each other is mutual TLS inside frames that the leader passes on, so that it sees ciphertext (``PeerTls``).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from accel import kernels
from accel.reference.oprf import DENSE
from accel.validate import require, require_integer, require_real
from vfl.alignment import ecdh, ot
from vfl.alignment.ids import arrow_ids
from vfl.alignment.steps import Advance, AlignmentError, AlignmentRefused, Receive, Send, Steps, Terms, show
from vfl.tables.ids import Ids

__all__ = ["Alignment", "Hub", "PeerTls", "align_as_leader", "align_as_member", "rehearse"]

_HEADER = struct.Struct("<cI")  # kind, length
_GAVE_UP, _REFUSED, _DONE, _PASSED = b"X", b"Z", b"D", b"r"
_MAX_REASON = 1000
_AHEAD = 16 << 20  # bytes of a frame that nobody waits for yet
_UNREAD = 16  # such frames
_PIECE = 1 << 18  # bytes moved at a time
_NUMBER = struct.Struct("<H")  # of a client, in front of what is passed on
_BUSY = 64  # reads in a row from one socket
_FAREWELL = 1.0  # seconds to say why


@dataclass(frozen=True)
class Alignment:
    """``rows[i]`` is this client's row of the i-th common id; the order is public, random and the same at all
    clients."""

    rows: np.ndarray
    bytes_sent: int
    bytes_received: int

    @property
    def bytes_moved(self) -> int:
        """Both ways."""
        return self.bytes_sent + self.bytes_received


@dataclass(frozen=True)
class PeerTls:
    """How members recognise each other: ``context(server_side)`` makes a TLS context with this client's certificate,
    ``pins`` are the SHA-256 of every client's certificates, in hex: two while its key is replaced."""

    context: Callable[[bool], ssl.SSLContext]
    pins: Mapping[str, tuple[str, ...]]


def align_as_leader(
    ids: Sequence[object],
    links: Mapping[str, socket.socket],
    *,
    name: str,
    matching: str = "ot",
    pad_to: int | None = None,
    minimum: int = 0,
    context: str = "",
    folder: Path | None = None,
    timeout: float = 600.0,
    advance: Advance | None = None,
) -> Alignment:
    """Align with the members in ``links`` (in this order, which all clients must know), as the client whom they call.

    ``matching``: "ot" or "ecdh", as at all clients. ``pad_to`` is a public bound on everybody's number of ids and hides
    the true ones. ``minimum``: stop if fewer ids are common, before anybody is told which. ``context``: what all
    clients have agreed on. ``folder``: where lists that would take much memory are kept meanwhile. ``timeout`` bounds
    the wait for any one message. ``advance(n)`` is told of every n ids that were worked on.
    """
    terms = Terms((*links, name), pad_to, matching, context)
    places = {place: links[peer] for place, peer in enumerate(links)}
    return _align(terms, len(links), ids, places, None, minimum, folder, timeout, advance)


def align_as_member(
    ids: Sequence[object],
    link: socket.socket,
    *,
    name: str,
    clients: Sequence[str],
    matching: str = "ot",
    pad_to: int | None = None,
    minimum: int = 0,
    context: str = "",
    folder: Path | None = None,
    timeout: float = 600.0,
    advance: Advance | None = None,
    tls: PeerTls | None = None,
) -> Alignment:
    """Align over a link to the leading client, the last of ``clients``; the other arguments as for the leader. ``tls``:
    with more than one member and "ot", how they recognise each other."""
    terms = Terms(tuple(clients), pad_to, matching, context)
    *members, leading = terms.clients
    require(name in members, "name", name, f"one of {members}", f"client {leading!r} leads")
    require(
        tls is not None or matching == "ecdh" or len(members) == 1,
        "tls",
        tls,
        "certificates, with more than one member",
        'give PeerTls, or matching = "ecdh" at all clients',
    )
    return _align(terms, members.index(name), ids, {len(members): link}, tls, minimum, folder, timeout, advance)


def rehearse(matching: str, count: int) -> float:
    """Seconds in which two clients match ``count`` made-up ids here. Afterwards its kernels are loaded."""
    ids, ends = Ids(f"rehearsal-{i:09d}" for i in range(count)), socket.socketpair()
    words, store = np.zeros((1, 5), np.uint64), np.zeros((3 + DENSE, 2), np.uint64)
    kernels.decode_values(words, store, 3, np.zeros((1, 2), np.uint64))  # which only more clients need
    begun = time.perf_counter()
    how = {"name": "one", "clients": ("one", "two"), "matching": matching}
    other = threading.Thread(target=align_as_member, args=(ids, ends[0]), kwargs=how)
    other.start()
    with ends[0], ends[1]:
        align_as_leader(ids, {"one": ends[1]}, name="two", matching=matching)
        other.join()
    return time.perf_counter() - begun


def _silent(count: int) -> None:
    return


def _align(
    terms: Terms,
    me: int,
    ids: Sequence[object],
    links: Mapping[int, socket.socket],
    tls: PeerTls | None,
    minimum: int,
    folder: Path | None,
    timeout: float,
    advance: Advance | None,
) -> Alignment:
    require_integer("minimum", minimum, 0)
    hub, told = Hub(terms.clients, me, links, tls, timeout), advance or _silent
    try:
        if terms.matching == "ot":
            steps = ot.align(terms, me, arrow_ids(ids), secrets.token_bytes, told, minimum, folder)
        elif me == len(terms.clients) - 1:
            steps = ecdh.leader(terms, ids, secrets.token_bytes, told, minimum)
        else:
            steps = ecdh.member(terms, me, ids, secrets.token_bytes, told, minimum)
        rows = _run(steps, hub)
        hub.finish()
    except BaseException as error:
        # other errors (of the own ids, say) may name numbers that are nobody else's business
        known = isinstance(error, AlignmentError)
        reason = str(error) if known else "it has a problem of its own, see there"
        hub.give_up(_REFUSED if isinstance(error, AlignmentRefused) else _GAVE_UP, reason)
        raise
    finally:
        hub.close()
    return Alignment(rows, hub.sent, hub.received)


def _run(steps: Steps, hub: Hub) -> np.ndarray:
    """Do what the protocol asks for."""
    try:
        answer: bytearray | None = None
        while True:
            step = next(steps) if answer is None else steps.send(answer)
            if isinstance(step, Send):
                hub.send(step.to, step.kind, step.payload)
                answer = None
            else:
                answer = hub.receive(step)
    except StopIteration as end:
        rows: np.ndarray = end.value
        return rows
    finally:
        steps.close()


class _Inbox:
    """What one client sends, cut into frames. A frame that is not due yet is kept if it is short and they are few."""

    def __init__(self, peer: str):
        self.peer = peer
        self.messages: deque[tuple[bytes, bytearray]] = deque()
        self.wanted: Receive | None = None
        self.error: AlignmentError | None = None  # the end of this client
        self.gave_up: AlignmentError | None = None  # the end of all
        self._header = bytearray(_HEADER.size)
        self._frame: bytearray | None = None
        self._kind = b""
        self._length: int | None = None
        self._got = 0

    def room(self) -> memoryview | None:
        """Where the next bytes go; nowhere while too much lies here unread."""
        if self._length is None:
            return memoryview(self._header)[self._got :] if self.wanted or len(self.messages) < _UNREAD else None
        if self._frame is None:
            if self._length > _AHEAD and self.wanted is None and self._kind != _PASSED:
                return None
            if not self._is_due(self._kind, self._length):
                return None
            self._frame = bytearray(self._length)
        return memoryview(self._frame)[self._got :]

    def took(self, count: int) -> tuple[bytes, bytearray] | None:
        """So many bytes have come; a frame to pass on, if it is one."""
        self._got += count
        if self._length is None and self._got == _HEADER.size:
            self._kind, self._length = _HEADER.unpack(self._header)
            self._got = 0
            if self.room() is None or self._frame is None:
                return None
        if self._frame is None or self._got < len(self._frame):
            return None
        frame = self._kind, self._frame
        self._frame, self._length, self._got = None, None, 0
        if frame[0] == _PASSED:
            return frame
        if frame[0] in (_GAVE_UP, _REFUSED):
            kind = AlignmentRefused if frame[0] == _REFUSED else AlignmentError
            text = show(bytes(frame[1]).decode(errors="replace"))
            self.gave_up = self.error = kind(f"client {self.peer!r} gave up: {text}")
        else:
            self.messages.append(frame)
        return None

    def _is_due(self, kind: bytes, length: int) -> bool:
        """Lengths are checked before anything is kept."""
        wanted = self.wanted
        if kind in (_GAVE_UP, _REFUSED) and length <= _MAX_REASON:
            return True
        if kind == _PASSED:
            good = _NUMBER.size <= length <= _NUMBER.size + _PIECE
        elif wanted is None or self.messages:
            good = length <= _AHEAD
        else:
            good = kind == wanted.kind and wanted.low <= length <= wanted.high
        if not good:
            self.error = _not_due(self.peer, kind, length, wanted)
        return good

    def take(self, wanted: Receive) -> bytearray | None:
        """The message that is due, if it is here."""
        if not self.messages:
            return None
        kind, data = self.messages.popleft()
        if kind != wanted.kind or not wanted.low <= len(data) <= wanted.high:
            raise _not_due(self.peer, kind, len(data), wanted)
        return data


def _not_due(peer: str, kind: bytes, length: int, wanted: Receive | None) -> AlignmentError:
    due = "nothing" if wanted is None else f"{wanted.kind!r} with {wanted.low} to {wanted.high}"
    return AlignmentError(
        f"client {peer!r} sent a message of kind {kind!r} with {length} bytes, due is {due}: it runs another version "
        f"or other terms"
    )


_LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class _Link:
    """One connected socket."""

    def __init__(self, connection: socket.socket, peer: str):
        require(connection.fileno() >= 0, f"link to {peer!r}", "closed", "a connected socket")
        self.socket, self.inbox = connection, _Inbox(peer)
        self.leaving: deque[memoryview] = deque()
        self.is_over = False
        connection.setblocking(False)

    def put(self, kind: bytes, *parts: bytes | memoryview) -> int:
        header = _HEADER.pack(kind, sum(map(len, parts)))
        self.leaving.extend(memoryview(part).cast("B") for part in (header, *parts) if len(part))
        return len(header) + sum(map(len, parts))

    def write(self) -> None:
        try:
            while self.leaving:
                first = self.leaving[0]
                went = self.socket.send(first[:_PIECE])
                if went == len(first):
                    self.leaving.popleft()
                else:
                    self.leaving[0] = first[went:]
        except _LATER:
            pass
        except OSError:
            self.leaving.clear()  # it is gone: what it may have said before is still to be read, and then the end

    def has_more(self) -> bool:
        """Whether TLS holds bytes that the system does not know of."""
        return isinstance(self.socket, ssl.SSLSocket) and self.socket.pending() > 0


class _Tunnel:
    """Mutual TLS to another member, in pieces that the leader passes on."""

    def __init__(self, peer: str, context: ssl.SSLContext, server_side: bool, pins: tuple[str, ...]):
        self.inbox, self._pins, self._secure = _Inbox(peer), pins, False
        self.arriving, self.departing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self.arriving, self.departing, server_side)
        self.leaving: deque[memoryview] = deque()

    def put(self, kind: bytes, *parts: bytes | memoryview) -> None:
        header = _HEADER.pack(kind, sum(map(len, parts)))
        self.leaving.extend(memoryview(part).cast("B") for part in (header, *parts) if len(part))

    def pump(self) -> None:
        """Go as far as what has arrived allows."""
        try:
            if not self._secure:
                self._tls.do_handshake()
                self._recognise()
            while self.leaving:
                first = self.leaving[0]
                went = self._tls.write(first[:_PIECE])
                if went == len(first):
                    self.leaving.popleft()
                else:
                    self.leaving[0] = first[went:]
            while (room := self.inbox.room()) is not None:
                count: int = self._tls.read(len(room), room)  # type: ignore[assignment]
                if not count:
                    raise ssl.SSLEOFError(8, "it has ended what it says")
                self.inbox.took(count)
        except _LATER:
            pass
        except ssl.SSLError as error:
            reason = (
                f"the TLS handshake with client {self.inbox.peer!r} failed: {getattr(error, 'reason', None) or error}"
            )
            self.inbox.error = self.inbox.gave_up = AlignmentRefused(reason)

    def _recognise(self) -> None:
        got = hashlib.sha256(self._tls.getpeercert(binary_form=True) or b"").hexdigest()
        if not any(hmac.compare_digest(got, pin.lower()) for pin in self._pins):
            raise ssl.SSLError(1, f"its certificate {got[:16]}… is not the one pinned for it")
        self._secure = True


class Hub:
    """All that one client sends and receives, moved by a thread of its own."""

    def __init__(
        self,
        clients: Sequence[str],
        me: int,
        links: Mapping[int, socket.socket],
        tls: PeerTls | None,
        timeout: float,
    ):
        require_real("timeout", timeout, 0.0, open_low=True)
        self._timeout, self._me, self._clients = timeout, me, clients
        self._links = {place: _Link(link, clients[place]) for place, link in links.items()}
        self._tunnels: dict[int, _Tunnel] = {}
        leader = len(clients) - 1
        if tls is not None and me != leader:
            for place, name in enumerate(clients[:-1]):
                if place != me:
                    server = me < place
                    self._tunnels[place] = _Tunnel(name, tls.context(server), server, tls.pins[name])
        self._inboxes = [each.inbox for each in self._links.values()] + [each.inbox for each in self._tunnels.values()]
        self._changed = threading.Condition()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._reads = True
        self._over = False
        self._failure: BaseException | None = None
        self.sent = self.received = 0
        self._thread = threading.Thread(target=self._move, daemon=True, name="alignment")
        self._thread.start()

    # the protocol's side -------------------------------------------------------------------------

    def send(self, to: int, kind: bytes, payload: bytes | memoryview) -> None:
        """Soon; the memory must not change any more."""
        with self._changed:
            if to in self._links:
                self.sent += self._links[to].put(kind, payload)
            else:
                self._tunnels[to].put(kind, payload)
                self._pump(to)
        self._nudge()

    def receive(self, wanted: Receive) -> bytearray:
        """The message that is due."""
        inbox = self._inbox(wanted.source)
        until = time.monotonic() + self._timeout
        with self._changed:
            inbox.wanted = wanted
            if wanted.source in self._tunnels:
                self._pump(wanted.source)
            self._nudge()
            try:
                while True:
                    for other in self._inboxes:
                        if other.gave_up is not None:
                            raise other.gave_up
                    found = inbox.take(wanted)
                    if found is not None:
                        return found
                    if inbox.error is not None:
                        raise inbox.error
                    if self._failure is not None:
                        raise AlignmentError(f"the links cannot be used: {self._failure}") from self._failure
                    if not self._changed.wait(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                        raise AlignmentError(f"client {inbox.peer!r} sent nothing for {self._timeout:g} s")
            finally:
                inbox.wanted = None

    def finish(self) -> None:
        """Members say that they need nothing more, and read nothing more; the leader waits for that."""
        leader = len(self._clients) - 1
        if self._me == leader:
            for place in self._links:
                self.receive(Receive(place, _DONE, 0, 0))
        else:
            with self._changed:
                self._reads = False
            self.send(leader, _DONE, b"")
        self._flush(self._timeout)

    @property
    def name(self) -> str:
        """Whose it is."""
        return self._clients[self._me]

    def cut(self) -> None:
        """End all links at once, as if this process were gone."""
        for link in self._links.values():
            with contextlib.suppress(OSError):
                socket.socket.shutdown(link.socket, socket.SHUT_RDWR)

    def give_up(self, kind: bytes, reason: str) -> None:
        """Tell all others why."""
        words = reason.encode()[:_MAX_REASON]
        with self._changed:
            for link in self._links.values():
                link.put(kind, words)
        self._nudge()
        self._flush(_FAREWELL)

    def close(self) -> None:
        """The sockets are the caller's again."""
        with self._changed:
            self._over = True
        self._nudge()
        self._thread.join()
        for end in (self._wake, self._woken):
            end.close()

    def _flush(self, patience: float) -> None:
        until = time.monotonic() + patience
        with self._changed:
            while any(link.leaving for link in self._links.values()) and self._failure is None:
                if not self._changed.wait(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                    return

    def _inbox(self, place: int) -> _Inbox:
        return (self._links.get(place) or self._tunnels[place]).inbox

    def _nudge(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake.send(b"\0")

    # the thread's side ---------------------------------------------------------------------------

    def _move(self) -> None:
        try:
            while not self._over:
                self._wait()
                with self._changed:
                    for link in self._links.values():
                        if link.leaving:
                            link.write()
                        if self._reads and not link.is_over:
                            self._read(link)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        more = False
        with self._changed:
            for link in self._links.values():
                reads = self._reads and not link.is_over and link.inbox.room() is not None
                flags = (select.POLLIN if reads else 0) | (select.POLLOUT if link.leaving else 0)
                more |= reads and link.has_more()
                if flags:
                    poll.register(link.socket, flags)
            self._changed.notify_all()
        for file, _ in poll.poll(0 if more else 1000):
            if file == self._woken.fileno():
                self._woken.recv(4096)

    def _read(self, link: _Link) -> None:
        """What is there, without waiting."""
        inbox = link.inbox
        try:
            for _ in range(_BUSY):
                room = inbox.room()
                if room is None:
                    return
                count = link.socket.recv_into(room) if len(room) else 0
                if not count and len(room):
                    raise ConnectionError("closed")
                self.received += count
                passed = inbox.took(count)
                if passed is not None:
                    self._pass_on(inbox, passed[1])
        except _LATER:
            return
        except OSError as error:
            link.is_over = True
            closed = isinstance(error, ssl.SSLEOFError) or str(error) == "closed"
            inbox.error = inbox.error or AlignmentError(
                f"client {inbox.peer!r} closed the link before the alignment was complete"
                if closed
                else f"the link to client {inbox.peer!r} broke: {error}"
            )

    def _pass_on(self, source: _Inbox, frame: bytearray) -> None:
        """A piece of what two members say to each other: of no concern to the leader, for a tunnel at a member."""
        (other,) = _NUMBER.unpack_from(frame)
        piece = memoryview(frame)[_NUMBER.size :]
        if other in self._tunnels:
            self._tunnels[other].arriving.write(piece)
            self._pump(other)
        elif other in self._links and self._me == len(self._clients) - 1:
            number = self._clients.index(source.peer)
            self.sent += self._links[other].put(_PASSED, _NUMBER.pack(number), piece)
            self._links[other].write()
        else:
            source.error = AlignmentError(f"client {source.peer!r} sent something for a client that is not there")

    def _pump(self, place: int) -> None:
        tunnel, leader = self._tunnels[place], self._links[len(self._clients) - 1]
        tunnel.pump()
        while piece := tunnel.departing.read(_PIECE):
            self.sent += leader.put(_PASSED, _NUMBER.pack(place), piece)
