"""What two participants say before they trust each other: TLS with pinned certificates, and small JSON messages."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import json
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refmpc.core.errors import HandshakeError
from refmpc.net.framing import Peer, title

__all__ = [
    "LENGTH",
    "MAX_MESSAGE",
    "Credentials",
    "EarlierPin",
    "hang_up",
    "parse",
    "receive",
    "secure",
    "send",
    "send_small",
    "set_socket_options",
    "shake_hands",
    "tls_context",
    "wrap_in_tls",
    "wrong_pin",
]

LENGTH = struct.Struct("<I")
MAX_MESSAGE = 1 << 16
_BUFFER = 4 << 20
_NO_CHECK_TIME = ssl.VerifyFlags(0x200000)  # X509_V_FLAG_NO_CHECK_TIME of OpenSSL


@dataclass(frozen=True)
class EarlierPin:
    """A certificate that is being replaced: it is accepted beside the pinned one ``until`` then, by this host's
    clock."""

    fingerprint: str
    until: datetime.datetime

    @property
    def over(self) -> bool:
        return datetime.datetime.now(datetime.UTC) > self.until

    @property
    def words(self) -> str:
        """Which, and until when."""
        return f"{self.fingerprint[:16]}… until {self.until:%Y-%m-%d %H:%M} UTC"


@dataclass(frozen=True)
class Credentials:
    """One participant's certificate and key (PEM files), and the pinned certificates of the others.

    ``pinned`` maps each peer to the SHA-256 of its certificate (DER), in hex; ``trusted`` is a PEM file, or PEM text,
    with those certificates (self-signed or not) or with the authority that signed them. ``earlier`` holds the second
    pin of peers whose key is being replaced.
    """

    certificate: Path
    key: Path = field(repr=False)
    trusted: Path | str = field(repr=False)
    pinned: Mapping[Peer, str]
    earlier: Mapping[Peer, EarlierPin] = field(default_factory=dict)


def set_socket_options(connection: socket.socket) -> None:
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER)


def secure(
    connection: socket.socket, credentials: Credentials, *, server_side: bool, check_dates: bool = True
) -> ssl.SSLSocket:
    context = tls_context(credentials, server_side=server_side, check_dates=check_dates)
    return wrap_in_tls(connection, context, server_side=server_side)


def wrap_in_tls(connection: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> ssl.SSLSocket:
    """TLS around a connection, before its handshake. Python looks at the socket here: a peer that has hung up since it
    took the connection (a server that stops, with callers in its queue) is noticed now."""
    try:
        return context.wrap_socket(connection, server_side=server_side, do_handshake_on_connect=False)
    except OSError as error:
        raise HandshakeError(f"the connection broke before the TLS handshake: {error}") from error


def tls_context(credentials: Credentials, *, server_side: bool, check_dates: bool = True) -> ssl.SSLContext:
    """TLS 1.3 with this participant's certificate, for peers that have one of those pinned. Reads the files.

    ``check_dates`` false: the caller compares the peer's certificate with the clock itself, after the handshake, so
    that it can say whose clock says what. TLS only has an alert for it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself is pinned, which is stronger than a name in it
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a pinned certificate is trusted without its authority
    if not check_dates:
        context.verify_flags |= _NO_CHECK_TIME
    if server_side:
        context.num_tickets = 0  # nothing is resumed
    try:
        context.load_cert_chain(credentials.certificate, credentials.key, password="")  # never asks at a terminal
        if isinstance(credentials.trusted, str):
            context.load_verify_locations(cadata=credentials.trusted)
        else:
            context.load_verify_locations(credentials.trusted)
    except (OSError, ssl.SSLError) as error:
        raise HandshakeError(f"the certificate {credentials.certificate} cannot be used: {error}") from error
    return context


def shake_hands(connection: socket.socket, who: str) -> None:
    assert isinstance(connection, ssl.SSLSocket)
    try:
        connection.do_handshake()
    except TimeoutError as error:
        raise HandshakeError(f"{who} did not complete the TLS handshake in time") from error
    except OSError as error:
        why = getattr(error, "verify_message", "") or getattr(error, "reason", "") or error
        raise HandshakeError(f"the TLS handshake with {who} failed: {why}") from error


def wrong_pin(connection: socket.socket, credentials: Credentials, peer: Peer) -> str:
    """A sentence if the peer's certificate is not the one pinned for it, nor an earlier one before its end."""
    assert isinstance(connection, ssl.SSLSocket)
    got = hashlib.sha256(connection.getpeercert(binary_form=True) or b"").hexdigest()
    want, earlier = credentials.pinned.get(peer, ""), credentials.earlier.get(peer)
    if hmac.compare_digest(got, want.lower()):
        return ""
    if earlier is not None and got == earlier.fingerprint:
        way_out = f"it must use the certificate {want[:16]}…, which is pinned in its place"
        return (
            f"{title(peer)} presented its earlier certificate, {earlier.words}, which is over: {way_out}"
            if earlier.over
            else ""
        )
    pinned = f"{want[:16]}… is" if want else "none is"
    return (
        f"{title(peer)} presented the certificate {got[:16]}…, but {pinned} pinned for it: "
        "compare the fingerprints with its owner"
    )


def packed(message: Mapping[str, Any]) -> bytes:
    words = json.dumps(message).encode()
    return LENGTH.pack(len(words)) + words


def send(connection: socket.socket, message: Mapping[str, Any], deadline: float) -> None:
    connection.settimeout(max(0.05, deadline - time.monotonic()))
    connection.sendall(packed(message))


def send_small(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message on a non-blocking socket whose buffers are as good as empty."""
    with contextlib.suppress(OSError):  # a peer that has gone is noticed when it is read from
        connection.send(packed(message))


def receive(connection: socket.socket, who: str, deadline: float) -> bytes:
    (length,) = LENGTH.unpack(_receive_exactly(connection, LENGTH.size, who, deadline))
    if length > MAX_MESSAGE:
        raise HandshakeError(f"{who} sent a greeting of {length} bytes: not a participant of this run")
    return _receive_exactly(connection, length, who, deadline)


def _receive_exactly(connection: socket.socket, count: int, who: str, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        remaining = deadline - time.monotonic()  # of the whole greeting: a caller that trickles is not waited for
        try:
            connection.settimeout(max(0.001, remaining))
            piece = connection.recv(count - len(data))
        except TimeoutError as error:
            raise HandshakeError(f"{who} is connected but sent no greeting in time") from error
        if not piece:
            raise HandshakeError(f"{who} closed the connection during the greeting: it refused this party, or died")
        data += piece
    return data


def parse(words: bytes, who: str) -> dict[str, Any]:
    try:
        message = json.loads(words)
    except (ValueError, RecursionError) as error:
        raise HandshakeError(f"{who} sent something that is not a greeting") from error
    if not isinstance(message, dict):
        raise HandshakeError(f"{who} sent something that is not a greeting")
    return message


def hang_up(connection: socket.socket) -> None:
    """End a connection that another thread is using. (``SSLSocket.shutdown`` would let that thread go on in the
    clear.)"""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
