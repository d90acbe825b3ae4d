"""What strangers and broken peers do to a listener: hypothesis draws it, ``perform`` does it to a live port."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import time
from dataclasses import dataclass

from hypothesis import strategies as st

from refmpc.net.tls import Credentials, secure

PATIENCE = 0.3  # seconds that one attack may take


@dataclass(frozen=True)
class Attack:
    """``layer``: plain TCP, TLS without a certificate, or TLS with that of a participant (stolen, or it is broken)."""

    layer: str
    pieces: tuple[bytes, ...]
    pause: float  # between pieces
    leave: str  # "close", "reset", "half" (stops sending, stays) or "answer" (waits for the reply)
    copies: int = 1  # connections at the same time


def _framed(words: bytes, announced: int | None = None) -> bytes:
    return struct.pack("<I", len(words) if announced is None else announced) + words


def _greetings() -> st.SearchStrategy[bytes]:
    """Greetings that are almost right: fields left out, of another type, wrong, enormous."""
    scalars = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=20),
        st.sampled_from([0, 1, 2, 3, -1, "bank", "0", "\ud800", "x" * 3000, 10**400, "\x1b[2J"]),
    )
    values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner))
    fields = {
        name: st.one_of(usual, values)
        for name, usual in {
            "version": st.just(1),
            "from": st.sampled_from([1, 2, "bank"]),
            "to": st.just(0),
            "run": st.text("0123456789abcdef", min_size=64, max_size=64),
            "parameters": st.just({"rows": 10}),
        }.items()
    }
    return st.fixed_dictionaries({}, optional=fields).map(lambda message: _framed(json.dumps(message).encode()))


def _frames() -> st.SearchStrategy[bytes]:
    return st.one_of(
        st.binary(max_size=300),
        _greetings(),
        _greetings().flatmap(lambda frame: st.integers(0, len(frame)).map(lambda end: frame[:end])),
        st.tuples(st.binary(max_size=50), st.integers(0, 2**32 - 1)).map(lambda drawn: _framed(*drawn)),
        st.sampled_from(
            [
                b"",
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                b"SSH-2.0-scan\r\n",
                _framed(b""),
                _framed(b"[" * 60_000),
                _framed(b"9" * 60_000),
                _framed(b'{"from": ' + b"9" * 4000 + b"}"),
                _framed(b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
                _framed(b"\xff\xfe" * 100),
                _framed(b"null"),
                _framed(b"x" * (1 << 16)),
                b"\x16\x03\x01\x02\x00" + b"\x01\x00\x01\xfc\x03\x03" + bytes(200),  # a broken ClientHello
                bytes(5000),
            ]
        ),
    )


def attacks() -> st.SearchStrategy[Attack]:
    """Anything that may arrive at a port."""
    return st.builds(
        Attack,
        layer=st.sampled_from(["plain", "plain", "anonymous", "participant", "participant"]),
        pieces=st.lists(_frames(), max_size=4).map(tuple),
        pause=st.sampled_from([0.0, 0.0, 0.0, 0.05]),
        leave=st.sampled_from(["close", "close", "reset", "half", "answer"]),
        copies=st.sampled_from([1, 1, 1, 1, 2, 20]),
    )


def perform(attack: Attack, address: tuple[str, int], stolen: Credentials | None) -> list[socket.socket]:
    """Do it. Returns connections that were left open: the caller closes them when it likes."""
    left = []
    with contextlib.suppress(OSError):
        for _ in range(attack.copies):
            left.append(socket.create_connection(address, timeout=PATIENCE))
    staying = []
    for connection in left:
        with contextlib.suppress(OSError):
            connection = _dress(connection, attack.layer, stolen)
            for piece in attack.pieces:
                connection.sendall(piece)
                time.sleep(attack.pause)
            if attack.leave == "half":
                staying.append(connection)
                continue
            if attack.leave == "answer":
                connection.recv(1 << 16)
            if attack.leave == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    return staying


def _dress(connection: socket.socket, layer: str, stolen: Credentials | None) -> socket.socket:
    if layer == "plain" or stolen is None:
        return connection
    if layer == "participant":
        dressed = secure(connection, stolen, server_side=False)
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        dressed = context.wrap_socket(connection, do_handshake_on_connect=False)
    dressed.do_handshake()
    return dressed
