"""Connections between participants: mutual TLS 1.3, or on one machine Unix sockets or TCP on loopback; everybody greets
everybody (``refmpc.net.greeting``).

Party i accepts connections from higher parties and from clients, and calls lower ones, all at once. Both ends send a
greeting (version, who they are, run, public parameters) and compare it field by field. A caller with a wrong
certificate or greeting is refused and told why, and the listener goes on waiting for the right one. A participant that
is connected with all others says "ready", and all go on when all are ready. One that cannot connect says why.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import queue
import select
import socket
import ssl
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from refmpc.core.errors import HandshakeError, PeerAborted, PeerLost, PeerTimeout, RefmpcError
from refmpc.net.admission import PATIENCE, Admission, Caller
from refmpc.net.framing import Peer, listed, printable, title
from refmpc.net.greeting import Greeting
from refmpc.net.tls import (
    LENGTH,
    MAX_MESSAGE,
    Credentials,
    hang_up,
    parse,
    receive,
    secure,
    send,
    send_small,
    set_socket_options,
    shake_hands,
    wrong_pin,
)

__all__ = [
    "Address",
    "Credentials",
    "connect_client",
    "connect_party",
    "is_loopback",
    "listen",
    "listen_everywhere",
    "listen_here",
]

Address = tuple[str, int] | str  # host and port, or the path of a Unix socket

_LONGEST_PATH = 100  # bytes, of a Unix socket
_TOLD = 20  # different refusals that are remembered
_STAY = 1.0  # seconds that one who cannot take part stays, to tell the others why
_GRACE = 0.3  # seconds in which a peer whose time is up as well may still name the one it waited for


def is_loopback(host: str) -> bool:
    """Whether every address of ``host`` is a loopback address."""
    try:
        found = {item[4][0] for item in socket.getaddrinfo(host, None)}
    except socket.gaierror as error:
        raise HandshakeError(f"the host name {host!r} does not resolve: {error.strerror}") from error
    return all(ipaddress.ip_address(address).is_loopback for address in found)


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A listening socket at the first address of ``host``, of either family."""
    first, *others = listen_everywhere(host, port)
    for other in others:
        other.close()
    return first


def listen_everywhere(host: str, port: int = 0) -> list[socket.socket]:
    """A listening socket at each address of ``host``, IPv4 and IPv6; of ``::`` one socket for all addresses of both.

    Raises ``OSError`` with a sentence if the name has no address, or none of this host.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise OSError(f"cannot listen at {host}:{port}: the name does not resolve ({error.strerror})") from error
    listeners: list[socket.socket] = []
    lacking: OSError | None = None
    for family, address in dict.fromkeys((item[0], item[4][0]) for item in found):
        both = family == socket.AF_INET6 and address == "::" and socket.has_dualstack_ipv6()
        try:
            place = str(address), listeners[0].getsockname()[1] if listeners else port
            listeners.append(socket.create_server(place, family=family, backlog=16, dualstack_ipv6=both))
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # a family that this host has not
                for listener in listeners:
                    listener.close()
                why = f"cannot listen at {host}:{port} ({address}): {os.strerror(error.errno or 0)}"
                raise OSError(error.errno, why) from error
            lacking = error
    if not listeners:
        why = os.strerror(lacking.errno or 0) if lacking else "the name has no address"
        raise OSError(f"cannot listen at {host}:{port}: it is no address of this host ({why})") from lacking
    return listeners


def listen_here(directory: Path, name: str) -> tuple[socket.socket, Address]:
    """A listening socket for participants on this machine, and where it is: a Unix socket in ``directory``, which only
    this user can enter, or a port on loopback where there are none or the path is too long for one. A round over Unix
    sockets takes half the time of one over TCP."""
    path = str(directory / name)
    if not hasattr(socket, "AF_UNIX") or len(path.encode()) > _LONGEST_PATH:
        listener = listen()
        return listener, ("127.0.0.1", listener.getsockname()[1])
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    return listener, path


def connect_party(
    party: int,
    listener: socket.socket,
    addresses: Mapping[int, Address],
    greeting: Greeting,
    *,
    credentials: Credentials | None = None,
    clients: Collection[str] = (),
    timeout: float = 30.0,
) -> dict[Peer, socket.socket]:
    """Connect one server with the two others and with all ``clients``; returns a socket per peer."""
    if credentials is None and listener.family != getattr(socket, "AF_UNIX", None):
        _require_loopback(f"this party ({title(party)}) listens", listener.getsockname()[0])
    calls = {peer: addresses[peer] for peer in range(party)}
    return _Meeting(party, greeting, credentials, timeout).hold(calls, {*range(party + 1, 3), *clients}, listener)


def connect_client(
    name: str,
    addresses: Mapping[int, Address],
    greeting: Greeting,
    *,
    credentials: Credentials | None = None,
    timeout: float = 30.0,
) -> dict[Peer, socket.socket]:
    """Connect a client with the three servers."""
    return _Meeting(name, greeting, credentials, timeout).hold(
        {peer: addresses[peer] for peer in range(3)}, set(), None
    )


def _require_loopback(what: str, host: str) -> None:
    if not is_loopback(host):
        raise HandshakeError(
            f"{what} at {host}, which is not a loopback address: plain TCP is for loopback only; "
            "give certificates (credentials=...) to use TLS"
        )


class _Refused(Exception):
    """A caller that is not let in; the text is for it and for the one who waits."""


class _Meeting:
    """One participant on its way to a connection with every other. Each greeting has a thread of its own, so that
    no caller can keep the others waiting. Only the main thread handles what follows the greeting."""

    def __init__(self, me: Peer, greeting: Greeting, credentials: Credentials | None, timeout: float):
        self._me = me
        self._greeting = greeting
        self._credentials = credentials
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._greeted: dict[Peer, socket.socket] = {}
        self._inboxes: dict[Peer, bytearray] = {}
        self._heard: set[Peer] = set()
        self._failure: Exception | None = None
        self._until = float("inf")
        self._outcomes: queue.SimpleQueue[tuple[Peer | None, socket.socket | Exception]] = queue.SimpleQueue()
        self._admission = Admission()
        self._called: set[socket.socket] = set()  # connections that were begun from here
        self._refused: dict[str, int] = {}
        self._over = False
        self._lock = threading.Lock()
        self._woken, self._waker = socket.socketpair()

    def hold(
        self, calls: Mapping[int, Address], callers: set[Peer], listener: socket.socket | None
    ) -> dict[Peer, socket.socket]:
        """Call those in ``calls``, let in those in ``callers``; returns when all are connected with all."""
        try:
            for peer, address in calls.items():
                if self._credentials is None and not isinstance(address, str):
                    _require_loopback(f"{title(peer)} is", address[0])
            for peer, address in calls.items():
                self._start(self._call, peer, address)
            self._greet(set(calls), callers, listener)
            self._agree_on_start()
        except BaseException as error:
            self._end()
            self._leave(str(error) if isinstance(error, RefmpcError) else type(error).__name__)
            raise
        self._end()
        return dict(sorted(self._greeted.items(), key=lambda item: str(item[0])))

    # the main thread -----------------------------------------------------------------------------

    def _greet(self, called: set[Peer], callers: set[Peer], listener: socket.socket | None) -> None:
        missing = called | callers
        while missing:
            # the thread of a call knows better than "it did not connect" and gets the time to say it
            until = min(self._deadline + _GRACE * bool(missing & called), self._until)
            readable = self._wait(listener, until)
            if listener is not None and listener.fileno() in readable:
                self._open_door(listener, callers)
            missing -= self._take_outcomes(missing)
            self._hear()
            if missing and time.monotonic() >= until:
                if self._failure is None:
                    self._note(PeerTimeout(f"{_titles(missing)} did not connect in {self._timeout:g} s"))
                break
        if self._failure is not None:
            self._conclude()

    def _take_outcomes(self, missing: set[Peer]) -> set[Peer]:
        """Take what the greeting threads have found out; returns the peers that need not be waited for any more."""
        done: set[Peer] = set()
        while not self._outcomes.empty():
            peer, outcome = self._outcomes.get()
            if isinstance(outcome, _Refused):
                self._count_refusal(str(outcome))
            elif isinstance(outcome, socket.socket) and (peer is None or peer in self._greeted or peer not in missing):
                outcome.close()  # it called twice
            else:
                assert peer is not None
                done.add(peer)
                if isinstance(outcome, socket.socket):
                    outcome.setblocking(False)
                    self._greeted[peer], self._inboxes[peer] = outcome, bytearray()
                else:
                    self._note(outcome)
        return done

    def _count_refusal(self, why: str) -> None:
        """Strangers may come as often as they like, and say something new every time: memory stays bounded."""
        if why not in self._refused and len(self._refused) >= _TOLD:
            why = "others"
        self._refused[why] = self._refused.get(why, 0) + 1

    def _agree_on_start(self) -> None:
        for connection in self._greeted.values():
            send_small(connection, {"ready": True})
        while True:
            self._hear()
            waiting = self._greeted.keys() - self._heard
            if not waiting and self._failure is None:
                return
            until = min(self._deadline + _GRACE, self._until)
            if time.monotonic() >= until or not waiting:
                if self._failure is None:
                    self._failure = PeerTimeout(
                        f"{_titles(waiting)} did not get ready in {self._timeout:g} s: it still waits for another "
                        "participant, hangs or is stopped"
                    )
                self._conclude()
            self._wait(None, until)

    def _note(self, error: Exception) -> None:
        """Remember why this meeting fails, and go on a little: the others are to be told, or may know more."""
        order = (HandshakeError, PeerAborted, PeerTimeout, PeerLost)  # from what is known best to an echo

        def rank(known: Exception) -> int:
            return next((i for i, kind in enumerate(order) if isinstance(known, kind)), -1)

        if self._failure is None or rank(error) < rank(self._failure):
            self._failure = error
        self._until = min(self._until, time.monotonic() + _STAY)

    def _conclude(self) -> NoReturn:
        assert self._failure is not None
        if self._refused and isinstance(self._failure, PeerTimeout | PeerAborted):
            refused = "; ".join(why if times == 1 else f"{why} ({times} times)" for why, times in self._refused.items())
            raise HandshakeError(f"{self._failure}; refused meanwhile: {refused}") from self._failure
        raise self._failure

    def _hear(self) -> None:
        """Note who is ready, and who cannot go on and says so instead."""
        for peer in self._greeted.keys() - self._heard:
            try:
                if self._is_ready(peer):
                    self._heard.add(peer)
            except RefmpcError as error:
                self._heard.add(peer)
                self._note(error)

    def _is_ready(self, peer: Peer) -> bool:
        """Whether a greeted peer said that it is ready; raises if it gave up. Reads its one message, and no more."""
        inbox, connection = self._inboxes[peer], self._greeted[peer]
        try:
            while len(inbox) < LENGTH.size or len(inbox) < LENGTH.size + LENGTH.unpack_from(inbox)[0]:
                wanted = LENGTH.size if len(inbox) < LENGTH.size else LENGTH.size + LENGTH.unpack_from(inbox)[0]
                piece = connection.recv(min(wanted, MAX_MESSAGE) - len(inbox))
                if not piece:
                    raise ConnectionResetError
                inbox += piece
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            raise PeerLost(f"{title(peer)} closed the connection before the run began: it died") from None
        message = parse(bytes(inbox[LENGTH.size :]), title(peer))
        if "gave up" in message:
            raise PeerAborted(f"{title(peer)} gave up before the run began: {printable(str(message['gave up']))}")
        return True

    def _wait(self, listener: socket.socket | None, until: float) -> set[int]:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        if listener is not None and not self._admission.is_full:
            poll.register(listener, select.POLLIN)
        for peer in self._greeted.keys() - self._heard:
            poll.register(self._greeted[peer], select.POLLIN)
        readable = {number for number, _ in poll.poll(max(0.0, until - time.monotonic()) * 1000)}
        if self._woken.fileno() in readable:
            self._woken.recv(4096)
        return readable

    def _open_door(self, listener: socket.socket, callers: set[Peer]) -> None:
        listener.setblocking(False)
        with contextlib.suppress(OSError):  # a caller that has gone again
            connection, source = listener.accept()
            host = str(source[0]) if source else "this machine"
            self._start(self._answer, self._admission.enter(connection, host), frozenset(callers))

    def _end(self) -> None:
        """Send away who is still at the door; connections that were just made are to be left like the others."""
        with self._lock:
            self._over = True
            self._admission.close()
            for connection in self._called:
                hang_up(connection)
            self._woken.close()
            self._waker.close()
        self._take_outcomes(set(range(3)))

    def _leave(self, reason: str) -> None:
        """Tell those who are connected why this participant will not take part; give them time to read it."""
        for connection in self._greeted.values():
            with contextlib.suppress(OSError):
                send_small(connection, {"gave up": reason[:1000]})
                connection.shutdown(socket.SHUT_WR)
        until = time.monotonic() + _GRACE
        for connection in self._greeted.values():
            with contextlib.suppress(OSError):
                while True:
                    connection.settimeout(max(0.001, until - time.monotonic()))
                    if not connection.recv(MAX_MESSAGE):
                        break
            connection.close()

    # threads -------------------------------------------------------------------------------------

    def _start(self, work: Any, *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, daemon=True, name="refmpc greeting").start()

    def _call(self, peer: int, address: Address) -> None:
        with _Door(self, peer) as door:
            connection = door.enter(self._reach(peer, address))
            try:
                set_socket_options(connection)
                connection.settimeout(max(0.05, self._deadline - time.monotonic()))
                if self._credentials is not None:
                    connection = door.enter(secure(connection, self._credentials, server_side=False))
                    shake_hands(connection, title(peer))
                    wrong = wrong_pin(connection, self._credentials, peer)
                    if wrong:
                        raise HandshakeError(wrong)
                send(connection, self._greeting.words(self._me, peer), self._deadline)
                theirs = parse(receive(connection, title(peer), self._deadline), title(peer))
            except OSError as error:
                raise HandshakeError(
                    f"{title(peer)} closed the connection during the greeting: it refused this party, or died "
                    f"({getattr(error, 'reason', '') or error})"
                ) from error
            if "refused" in theirs:
                raise HandshakeError(f"{title(peer)} refused this participant: {printable(str(theirs['refused']))}")
            _, difference = self._greeting.compare(theirs, peer, self._me)
            if difference:
                raise HandshakeError(difference)
            door.leave_open(connection)

    def _reach(self, peer: int, address: Address) -> socket.socket:
        while True:
            try:
                return _connected(address, max(0.05, self._deadline - time.monotonic()))
            except OSError as error:
                if self._over or time.monotonic() > self._deadline:
                    where = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
                    raise PeerTimeout(
                        f"{title(peer)} at {where} cannot be reached for {self._timeout:g} s: {error}"
                    ) from error
                time.sleep(0.02)

    def _answer(self, stranger: Caller, callers: frozenset[Peer]) -> None:
        caller = f"a caller at {stranger.host}"
        with _Door(self, None, stranger) as door:
            deadline = min(self._deadline, time.monotonic() + PATIENCE)
            connection = stranger.connection
            try:
                set_socket_options(connection)
                connection.settimeout(max(0.05, deadline - time.monotonic()))
                if self._credentials is not None:
                    connection = door.enter(secure(connection, self._credentials, server_side=True))
                    shake_hands(connection, caller)
                theirs = parse(receive(connection, caller, deadline), caller)
                peer = theirs.get("from")
                if not isinstance(peer, int | str) or isinstance(peer, bool) or peer not in callers:
                    shown = printable(repr(peer), 100)
                    self._refuse(connection, f"{caller} calls itself {shown}, who is not expected here")
                door.peer = peer
                wrong = self._credentials and wrong_pin(connection, self._credentials, peer)
                if wrong:
                    self._refuse(connection, wrong)
                known, difference = self._greeting.compare(theirs, peer, self._me)
                if difference and not known:
                    self._refuse(connection, difference)
                send(connection, self._greeting.words(self._me, peer), deadline)
            except _Refused:
                raise
            except Exception as error:  # whatever a stranger sends, the door stays open for the others
                raise _Refused(str(error) or f"{caller}: {type(error).__name__}") from error
            if difference:  # a participant of this run, with which it cannot begin
                raise HandshakeError(difference)
            door.leave_open(connection)

    def _refuse(self, connection: socket.socket, why: str) -> NoReturn:
        with contextlib.suppress(OSError):
            send(connection, {"refused": why}, time.monotonic() + 1.0)
        raise _Refused(why)


class _Door:
    """One greeting under way: reports its outcome, and closes its socket unless it is left open."""

    def __init__(self, meeting: _Meeting, peer: Peer | None, stranger: Caller | None = None):
        self._meeting = meeting
        self._stranger = stranger
        self._connection: socket.socket | None = None if stranger is None else stranger.connection
        self._open: socket.socket | None = None
        self.peer = peer

    def __enter__(self) -> _Door:
        return self

    def enter(self, connection: socket.socket) -> socket.socket:
        """Put a socket (or the TLS layer around it) at the door."""
        with self._meeting._lock:
            if self._stranger is not None:
                self._meeting._admission.replace(self._stranger, connection)
            else:
                self._meeting._called = {*self._meeting._called - {self._connection}, connection}
                if self._meeting._over:
                    hang_up(connection)
            self._connection = connection
        return connection

    def leave_open(self, connection: socket.socket) -> None:
        """The greeting succeeded: hand the connection over."""
        self._open = connection

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        meeting = self._meeting
        with meeting._lock:
            if self._connection is not None:
                meeting._called.discard(self._connection)
                if self._stranger is not None:
                    meeting._admission.leave(self._stranger)
                if self._open is None or meeting._over:
                    self._connection.close()
            if not meeting._over:
                outcome = self._open if error is None else error
                if isinstance(outcome, socket.socket | Exception):
                    meeting._outcomes.put((self.peer, outcome))
                with contextlib.suppress(OSError):
                    meeting._waker.send(b".")
        return isinstance(error, Exception)


def _connected(address: Address, timeout: float) -> socket.socket:
    if not isinstance(address, str):
        return socket.create_connection(address, timeout=timeout)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout)
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _titles(peers: Collection[Peer]) -> str:
    return listed(sorted(map(title, peers)))
