"""Connections between participants: TCP on loopback or mutual TLS 1.3, and the greeting that compares parameters.

Party i accepts connections from higher parties and from clients, and calls lower ones. Before anything else both ends
send a greeting (version, who they are, run, public parameters) and compare it field by field. A caller with a wrong
certificate or greeting is refused and named; the listener goes on waiting for the right one.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import socket
import ssl
import struct
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refmpc.errors import HandshakeError, PeerTimeout
from refmpc.transport import Peer

__all__ = ["Credentials", "Greeting", "connect_client", "connect_party", "is_loopback", "listen"]

PROTOCOL_VERSION = 1
_LENGTH = struct.Struct("<I")
_MAX_GREETING = 1 << 16
_BUFFER = 4 << 20


@dataclass(frozen=True)
class Credentials:
    """One participant's certificate and key (PEM files), and the pinned certificates of the others.

    ``pinned`` maps each peer to the SHA-256 of its certificate (DER), in hex; ``trusted`` is a PEM file with those
    certificates or with the authority that signed them.
    """

    certificate: Path
    key: Path = field(repr=False)
    trusted: Path
    pinned: Mapping[Peer, str]


@dataclass(frozen=True)
class Greeting:
    """What must be equal at both ends before anything is computed. ``run`` is also the shared secret of a run whose
    channels are plain loopback sockets: only its participants know it."""

    run: str = field(repr=False)
    parameters: Mapping[str, Any]


def is_loopback(host: str) -> bool:
    """Whether every address of ``host`` is a loopback address."""
    try:
        found = {item[4][0] for item in socket.getaddrinfo(host, None)}
    except socket.gaierror as error:
        raise HandshakeError(f"the host name {host!r} does not resolve: {error.strerror}") from error
    return all(ipaddress.ip_address(address).is_loopback for address in found)


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A listening socket."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=16)


def connect_party(
    party: int,
    listener: socket.socket,
    addresses: Mapping[int, tuple[str, int]],
    greeting: Greeting,
    *,
    credentials: Credentials | None = None,
    clients: Collection[str] = (),
    timeout: float = 30.0,
) -> dict[Peer, socket.socket]:
    """Connect one server with the two others and with all ``clients``; returns a socket per peer."""
    deadline = time.monotonic() + timeout
    connections: dict[Peer, socket.socket] = {}
    try:
        for peer in range(party):
            connections[peer] = _call(party, peer, addresses[peer], greeting, credentials, deadline)
        waiting: set[Peer] = {*range(party + 1, 3), *clients}
        _accept(party, listener, waiting, connections, greeting, credentials, deadline)
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise
    return connections


def connect_client(
    name: str,
    addresses: Mapping[int, tuple[str, int]],
    greeting: Greeting,
    *,
    credentials: Credentials | None = None,
    timeout: float = 30.0,
) -> dict[Peer, socket.socket]:
    """Connect a client with the three servers."""
    deadline = time.monotonic() + timeout
    return {peer: _call(name, peer, addresses[peer], greeting, credentials, deadline) for peer in range(3)}


def _title(peer: Peer) -> str:
    return f"party {peer}" if isinstance(peer, int) else f"client {peer!r}"


def _call(
    me: Peer, peer: int, address: tuple[str, int], greeting: Greeting, credentials: Credentials | None, deadline: float
) -> socket.socket:
    host, port = address
    if credentials is None and not is_loopback(host):
        raise HandshakeError(
            f"{_title(peer)} is at {host}, which is not a loopback address: plain TCP is for loopback only; "
            "give certificates (credentials=...) to use TLS"
        )
    while True:
        try:
            connection = socket.create_connection(address, timeout=max(0.05, deadline - time.monotonic()))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise PeerTimeout(f"{_title(peer)} at {host}:{port} cannot be reached: {error}") from error
            time.sleep(0.02)
    try:
        _tune(connection, deadline)
        if credentials is not None:
            connection = _secure(connection, credentials, server_side=False, peer=peer)
            _check_pin(connection, credentials, peer)
        _send_greeting(connection, me, peer, greeting)
        _compare(_read_greeting(connection, _title(peer)), peer, me, greeting)
    except BaseException:
        connection.close()
        raise
    return connection


def _accept(
    me: int,
    listener: socket.socket,
    waiting: set[Peer],
    connections: dict[Peer, socket.socket],
    greeting: Greeting,
    credentials: Credentials | None,
    deadline: float,
) -> None:
    refused: list[str] = []
    while waiting:
        listener.settimeout(max(0.05, deadline - time.monotonic()))
        try:
            connection, source = listener.accept()
        except TimeoutError:
            names = " and ".join(sorted(_title(peer) for peer in waiting))
            also = f"; refused meanwhile: {'; '.join(refused)}" if refused else ""
            kind = HandshakeError if refused else PeerTimeout
            raise kind(f"{names} did not connect in time{also}") from None
        caller = f"caller at {source[0]}"
        try:
            # a caller that is silent must not keep the others waiting
            _tune(connection, min(deadline, time.monotonic() + 5.0))
            if credentials is not None:
                connection = _secure(connection, credentials, server_side=True, peer=None)
            theirs = _read_greeting(connection, caller)
            peer = theirs.get("from")
            if peer not in waiting:
                raise HandshakeError(f"{caller} calls itself {peer!r}, who is not expected here (or no longer)")
            if credentials is not None:
                _check_pin(connection, credentials, peer)
            _send_greeting(connection, me, peer, greeting)
            try:
                _compare(theirs, peer, me, greeting)
            except HandshakeError:
                connection.close()
                raise
        except (HandshakeError, OSError) as error:
            connection.close()
            if isinstance(error, HandshakeError) and getattr(error, "fatal", False):
                raise
            refused.append(str(error) or f"{caller}: {type(error).__name__}")
            continue
        waiting.discard(peer)
        connections[peer] = connection


def _tune(connection: socket.socket, deadline: float) -> None:
    connection.settimeout(max(0.05, deadline - time.monotonic()))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER)


def _secure(
    connection: socket.socket, credentials: Credentials, *, server_side: bool, peer: Peer | None
) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself is pinned, which is stronger than a name in it
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(credentials.certificate, credentials.key)
    context.load_verify_locations(credentials.trusted)
    try:
        return context.wrap_socket(connection, server_side=server_side, do_handshake_on_connect=True)
    except ssl.SSLError as error:
        who = "a caller" if peer is None else _title(peer)
        raise HandshakeError(f"the TLS handshake with {who} failed: {error.reason or error}") from error


def _check_pin(connection: socket.socket, credentials: Credentials, peer: Peer) -> None:
    assert isinstance(connection, ssl.SSLSocket)
    got = hashlib.sha256(connection.getpeercert(binary_form=True) or b"").hexdigest()
    want = credentials.pinned.get(peer, "")
    if not hmac.compare_digest(got, want):
        raise HandshakeError(
            f"{_title(peer)} presented the certificate {got[:16]}…, but {want[:16] or 'none'}… is pinned for it: "
            "compare the fingerprints with its owner"
        )


def _send_greeting(connection: socket.socket, me: Peer, peer: Peer, greeting: Greeting) -> None:
    words = json.dumps(
        {
            "version": PROTOCOL_VERSION,
            "from": me,
            "to": peer,
            "run": greeting.run,
            "parameters": dict(greeting.parameters),
        }
    ).encode()
    connection.sendall(_LENGTH.pack(len(words)) + words)


def _read_exactly(connection: socket.socket, count: int, who: str) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise HandshakeError(f"{who} closed the connection during the greeting: it refused this party, or died")
        data += piece
    return data


def _read_greeting(connection: socket.socket, who: str) -> dict[str, Any]:
    try:
        (length,) = _LENGTH.unpack(_read_exactly(connection, _LENGTH.size, who))
        if length > _MAX_GREETING:
            raise HandshakeError(f"{who} sent a greeting of {length} bytes: not a participant of this run")
        greeting = json.loads(_read_exactly(connection, length, who))
    except TimeoutError as error:
        raise HandshakeError(f"{who} connected but sent no greeting in time") from error
    except ssl.SSLError as error:
        raise HandshakeError(f"{who} refused this party's certificate: {error.reason or error}") from error
    except ValueError as error:
        raise HandshakeError(f"{who} sent something that is not a greeting") from error
    if not isinstance(greeting, dict):
        raise HandshakeError(f"{who} sent something that is not a greeting")
    return greeting


def _compare(theirs: Mapping[str, Any], peer: Peer, me: Peer, greeting: Greeting) -> None:
    """Raise naming the first field that differs. A mismatch with a known peer is final (``fatal``)."""
    if not hmac.compare_digest(str(theirs.get("run", "")).encode(), greeting.run.encode()):
        raise HandshakeError(f"{_title(peer)} belongs to another run: start all parties of one run together")
    checks: list[tuple[str, Any, Any, Callable[[Any], str]]] = [
        ("version", theirs.get("version"), PROTOCOL_VERSION, str),
        ("name", theirs.get("from"), peer, repr),
        ("addressee", theirs.get("to"), me, repr),
    ]
    parameters = theirs.get("parameters")
    parameters = parameters if isinstance(parameters, dict) else {}
    ours = json.loads(json.dumps(dict(greeting.parameters)))
    for name in sorted({*ours, *parameters}):
        checks.append((f"parameter {name!r}", parameters.get(name, "missing"), ours.get(name, "missing"), repr))
    for name, got, want, show in checks:
        if got != want:
            error = HandshakeError(
                f"{_title(peer)} has {name} = {show(got)}, this party has {show(want)}: they must agree"
            )
            error.fatal = True  # type: ignore[attr-defined]
            raise error
