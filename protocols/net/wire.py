"""One TLS connection between two participants of a federation: who calls, a first message, then framed messages.

Whoever listens recognises the caller by its certificate (the fingerprint is pinned in ``federation.toml``), never by
what it calls itself. The first message says what the call is for and carries version and configuration hash; a caller
that is refused is told why in a sentence. After that a frame is a small JSON message and a payload of bytes, whose
length the receiver bounds before it reads: nobody can make a peer hold more than it expects.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import re
import socket
import ssl
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cryptography import x509

from accel.errors import InvalidArgument
from accel.validate import require
from protocols.federation.read import (
    FederationConfig,
    configuration_hash,
    hash_with_certificates,
    other_pins,
    pins_in_words,
)
from refmpc.core.errors import HandshakeError, PeerLost, PeerTimeout, RefmpcError
from refmpc.net.framing import Peer, name_of, printable
from refmpc.net.greeting import first_difference, must_agree
from refmpc.net.tls import (
    MAX_MESSAGE,
    Credentials,
    hang_up,
    parse,
    receive,
    secure,
    send,
    set_socket_options,
    shake_hands,
    wrong_pin,
)

__all__ = [
    "ALIGNED",
    "ALIGNMENT_CALLS",
    "CALLS",
    "LEADS",
    "PREDICTION",
    "SIGNS",
    "SUMS",
    "TRAINING",
    "UPLOADS",
    "VERSION",
    "Channel",
    "Field",
    "Identity",
    "Refused",
    "call",
    "caller_of",
    "check_fields",
    "check_message",
    "earlier_in_use",
    "notice_silence",
    "wrong_date",
]

TRAINING, PREDICTION = "training", "prediction"  # what a session computes
VERSION = 3  # of the messages between participants; since 3: pins are compared apart from the configuration
_FRAME = struct.Struct("<IQ")
_CALL = 10.0  # seconds for a connection, its TLS handshake and the first two messages

_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 35_000))


@dataclass(frozen=True)
class Field:
    """What a field of a message may be. ``pattern``: a text; else a whole number from ``low`` to ``high``, or
    (``truth``) true."""

    pattern: str = ""
    low: int = 0
    high: int = 0
    truth: bool = False
    optional: bool = False  # it may be absent, or null

    @property
    def allowed(self) -> str:
        if self.truth:
            return "true"
        return f"text of the form {self.pattern}" if self.pattern else f"a whole number from {self.low} to {self.high}"

    def takes(self, value: Any) -> bool:
        """Whether ``value`` may stand here."""
        if value is None or self.truth:
            return value is True or (self.optional and value is None)
        if self.pattern:
            return isinstance(value, str) and re.fullmatch(self.pattern, value) is not None
        return type(value) is int and self.low <= value <= self.high


_WORD, _COUNT = r"[a-z][a-z0-9_-]{0,31}", Field(low=0, high=10**9)
_GREETING = {
    "version": Field(low=1, high=1 << 16),
    "from": Field(_WORD),
    "to": Field(_WORD),
    "purpose": Field(_WORD),
    "configuration": Field("[0-9a-f]{64}"),
    "pins": Field(r"[0-9a-f]{32}(\+[0-9a-f]{32})?(,[0-9a-f]{32}(\+[0-9a-f]{32})?)*"),
}
_SESSION = _GREETING | {
    "kind": Field(_WORD),
    "session": Field("[0-9a-f]{32}"),
    "rows": Field(low=1, high=10**9),
    "output": Field(_WORD, optional=True),
    "people": Field("[0-9a-f]{64}", optional=True),
}

# the first message of each call of a client to a server, by its purpose, and what it may say afterwards, by the first
# field
CALLS: Mapping[str, Mapping[str, Field]] = {
    "upload": _SESSION,
    "live": _SESSION,
    "result": _SESSION,
    "taken": _SESSION,
    "status": _GREETING,
}
UPLOADS: Mapping[str, Mapping[str, Field]] = {
    "from": {"from": _COUNT},
    "message": {"message": _COUNT, "operation": Field("input_from_client"), "token": Field("[0-9a-f]{32}")},
    "complete": {"complete": _COUNT, "digest": Field("[0-9a-f]{64}")},
}
SIGNS: Mapping[str, Mapping[str, Field]] = {
    "waiting": {"waiting": Field(truth=True)},
    "takes": {"takes": Field("[0-9a-f]{32}")},
}

# the calls of the other clients to the label client, what they may say afterwards, and what it says to them
ALIGNMENT_CALLS: Mapping[str, Mapping[str, Field]] = {
    "align": _GREETING
    | {
        "kind": Field(_WORD),
        "id_form": Field(_WORD),
        "pad_to": Field(low=1, high=10**9, optional=True),
        "output": Field(_WORD, optional=True),
    },
    "sums": _GREETING,
}
ALIGNED: Mapping[str, Mapping[str, Field]] = {"ok": {"ok": Field(truth=True)}}
SUMS: Mapping[str, Mapping[str, Field]] = {"session": {"session": Field("[0-9a-f]{32}")}}
LEADS: Mapping[str, Mapping[str, Field]] = {
    "missing": {"missing": Field(f"{_WORD}(,{_WORD})*")},
    "begin": {"begin": Field(truth=True)},
    "session": {"session": Field("[0-9a-f]{32}"), "rows": _COUNT},
}


def check_fields(message: Mapping[str, Any], fields: Mapping[str, Field]) -> None:
    """Refuse a message with a sentence that names the first field which is missing, unknown or not what it may be."""
    for name, allowed in fields.items():
        found = printable(str(message[name]), 80) if name in message else "missing"
        require(allowed.takes(message.get(name)), name, found, allowed.allowed)
    for name in message:
        require(name in fields, printable(str(name), 40), printable(str(message[name]), 80), "absent from this message")


def check_message(message: Mapping[str, Any], forms: Mapping[str, Mapping[str, Field]]) -> str:
    """``check_fields`` of the one of ``forms`` that the message has the first field of; which one it is."""
    form = next((name for name in forms if name in message), None)
    require(
        form is not None, "message", printable(", ".join(map(str, message)), 80), f"with a field {' or '.join(forms)}"
    )
    assert form is not None
    check_fields(message, forms[form])
    return form


Payload = Iterable[np.ndarray | bytes | bytearray]


class Refused(HandshakeError):
    """The peer answered, and does not go on. ``later``: it may do so when asked again."""

    def __init__(self, text: str, later: bool = False):
        super().__init__(text)
        self.later = later


@dataclass(frozen=True)
class Identity:
    """Who this process is, and how it recognises the others. Only ``credentials`` points to a secret (a file)."""

    config: FederationConfig
    me: Peer
    credentials: Credentials

    @property
    def name(self) -> str:
        return name_of(self.me)

    @property
    def configuration(self) -> str:
        return configuration_hash(self.config)

    def kept_in(self, state: Path) -> Path:
        """Where in ``state`` this participant keeps what belongs to this configuration: the same place under new
        certificates."""
        kept, earlier = state / self.configuration[:16], state / hash_with_certificates(self.config)[:16]
        if earlier.is_dir() and not kept.exists():  # of a version that named it by the certificates, too
            earlier.rename(kept)
        return kept

    def hello(self, peer: Peer, purpose: str, **more: Any) -> dict[str, Any]:
        """The first message of a call."""
        return {
            "version": VERSION,
            "from": self.name,
            "to": name_of(peer),
            "purpose": purpose,
            "configuration": self.configuration,
            "pins": pins_in_words(self.config),
            **more,
        }

    def objection(self, theirs: Mapping[str, Any], peer: Peer) -> str:
        """Why a first message cannot be accepted from ``peer`` (whose certificate was checked), or nothing."""
        for field, got, want in (
            ("version", theirs.get("version"), VERSION),
            ("name", theirs.get("from"), name_of(peer)),
            ("peer", theirs.get("to"), self.name),
            ("configuration hash", theirs.get("configuration"), self.configuration),
        ):
            if got != want:
                hint = {
                    "version": "install the same version at both",
                    "name": "it uses another participant's certificate, or another name",
                    "peer": "its addresses point to the wrong host",
                    "configuration hash": "both must use the same federation.toml",
                }[field]
                return (
                    f"{name_of(peer)} has {field} {printable(str(got), 80)}, {self.name} has "
                    f"{printable(str(want), 80)}: "
                    f"{hint}"
                )
        if others := other_pins(self.config, str(theirs.get("pins"))):
            return (
                f"{name_of(peer)} has other pins than {self.name} for {', '.join(others)}: both must use the same "
                "federation.toml, or one with the earlier certificate, too (`ppvfl pin --until`)"
            )
        return ""

    def difference(self, peer: Peer, theirs: Any, mine: Mapping[str, Any]) -> str:
        """A sentence on the first public parameter in which ``peer`` differs, or nothing."""
        different = first_difference(theirs if isinstance(theirs, dict) else {}, mine)
        if different is None:
            return ""
        name, got, want = different[0], printable(different[1], 200), printable(different[2], 200)
        return f"{name_of(peer)} has {name} = {got}, {self.name} has {want}: {must_agree(*different[1:])}"


def caller_of(connection: ssl.SSLSocket, credentials: Credentials) -> Peer | None:
    """The participant whose certificate the other end proved to have: the pinned one, or an earlier one, which may be
    over."""
    got = hashlib.sha256(connection.getpeercert(binary_form=True) or b"").hexdigest()
    earlier = {peer: pin.fingerprint for peer, pin in credentials.earlier.items()}
    every = (*credentials.pinned.items(), *earlier.items())
    return next((peer for peer, pin in every if pin.lower() == got), None)


def earlier_in_use(connection: socket.socket, credentials: Credentials, peer: Peer) -> str:
    """Which certificate the other end uses and until when it is accepted, if it is not the pinned one."""
    assert isinstance(connection, ssl.SSLSocket)
    got = hashlib.sha256(connection.getpeercert(binary_form=True) or b"").hexdigest()
    earlier = credentials.earlier.get(peer)
    return earlier.words if earlier is not None and got == earlier.fingerprint else ""


def wrong_date(connection: socket.socket, peer: Peer, me: str) -> str:
    """A sentence if the peer's certificate is not valid by this host's clock: one that is wrong is named with what it
    says."""
    assert isinstance(connection, ssl.SSLSocket)
    certificate = x509.load_der_x509_certificate(connection.getpeercert(binary_form=True) or b"")
    now = datetime.datetime.now(datetime.UTC)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if begins <= now <= ends:
        return ""
    found = (
        f"is not valid before {begins:%Y-%m-%d %H:%M} UTC" if now < begins else f"expired on {ends:%Y-%m-%d %H:%M} UTC"
    )
    return (
        f"the certificate of {name_of(peer)} {found}, and the clock of {me} says {now:%Y-%m-%d %H:%M} UTC: "
        f"set that clock if it is wrong, else {name_of(peer)} needs a new certificate"
    )


def notice_silence(connection: socket.socket) -> None:
    """Let the kernel ask whether the other host is still there: one that crashed or lost its link is noticed after 35
    s, also by somebody who only listens or whose words are never acknowledged."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class Channel:
    """Framed messages over one connection; used by one thread at a time."""

    def __init__(self, connection: socket.socket, peer: Peer, timeout: float):
        self.peer = peer
        self.timeout = timeout
        self.connection = connection

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def answer(self, **message: Any) -> None:
        """The answer to a caller's first message."""
        try:
            send(self.connection, message, time.monotonic() + min(_CALL, self.timeout))
        except OSError as error:
            raise PeerLost(f"the connection to {name_of(self.peer)} broke: {error}") from error

    def send(self, message: Mapping[str, Any], payload: Payload = ()) -> None:
        """One frame; raises when the peer takes nothing for the whole time-out."""
        words = json.dumps(message).encode()
        parts = [
            np.ascontiguousarray(p).reshape(-1).view(np.uint8).data if isinstance(p, np.ndarray) else p for p in payload
        ]
        try:
            self.connection.settimeout(self.timeout)
            self.connection.sendall(_FRAME.pack(len(words), sum(map(len, parts))) + words)
            for part in parts:
                if len(part):
                    self.connection.sendall(part)
        except TimeoutError as error:
            raise PeerTimeout(f"{name_of(self.peer)} took no message for {self.timeout:g} s") from error
        except OSError as error:
            raise PeerLost(f"the connection to {name_of(self.peer)} broke: {error}") from error

    def receive(self, limit: int = 0, timeout: float | None = None) -> tuple[dict[str, Any], bytearray]:
        """The next message and its payload of at most ``limit`` bytes; raises when nothing arrives for the time-out."""
        patience = self.timeout if timeout is None else timeout
        words, size = _FRAME.unpack(self._read(_FRAME.size, patience))
        if words > MAX_MESSAGE or size > limit:
            raise HandshakeError(
                f"{name_of(self.peer)} announced a message of {words} and {size} bytes, at most {MAX_MESSAGE} and "
                f"{limit} "
                "are expected here"
            )
        message = parse(bytes(self._read(words, patience)), name_of(self.peer))
        payload = self._read(size, patience)
        if "refused" in message:
            raise Refused(
                f"{name_of(self.peer)} refused: {printable(str(message['refused']))}", later=bool(message.get("later"))
            )
        return message, payload

    def receive_one_of(
        self, forms: Mapping[str, Mapping[str, Field]], limit: int = 0, timeout: float | None = None
    ) -> tuple[dict[str, Any], bytearray]:
        """``receive`` a message of one of these forms; another one is the peer's mistake."""
        message, payload = self.receive(limit, timeout)
        try:
            check_message(message, forms)
        except InvalidArgument as error:
            words = f"{name_of(self.peer)} sent something that does not fit: {error}"
            with contextlib.suppress(RefmpcError):
                self.refuse(words)
            raise HandshakeError(words) from None
        return message, payload

    def refuse(self, why: str, *, later: bool = False) -> None:
        """Tell the peer why this goes no further; ``later``: it may go on when it calls again."""
        self.send({"refused": why, "later": later})

    def _read(self, count: int, patience: float) -> bytearray:
        data = bytearray(count)
        view, got = memoryview(data), 0
        try:
            self.connection.settimeout(patience)
            while got < count:
                piece = self.connection.recv_into(view[got:])
                if not piece:
                    raise ConnectionResetError("closed by the peer")
                got += piece
        except TimeoutError as error:
            raise PeerTimeout(f"{name_of(self.peer)} sent nothing for {patience:g} s") from error
        except OSError as error:
            raise PeerLost(f"the connection to {name_of(self.peer)} broke: {error}") from error
        return data

    def cut(self) -> None:
        """End the connection from another thread: the one that uses it notices at once."""
        hang_up(self.connection)

    def close(self) -> None:
        """Close without ceremony: what matters was acknowledged."""
        self.connection.close()


def _refusal(error: BaseException | None, name: str, me: str) -> str:
    """A sentence if TLS failed because one of the two does not know the other's certificate; not if the connection
    broke."""
    way_out = "both must use the same federation.toml, with the certificates that are in use"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{name} presents a certificate that {me} has not pinned ({error.verify_message}): {way_out}"
    reason = str(getattr(error, "reason", ""))
    if isinstance(error, ssl.SSLError) and "ALERT" in reason:
        return f"{name} refused the TLS connection, as it has not pinned the certificate of {me} ({reason}): {way_out}"
    return ""


def call(
    identity: Identity, peer: Peer, address: tuple[str, int], purpose: str, *, timeout: float, **more: Any
) -> tuple[Channel, dict[str, Any]]:
    """Call a participant; returns the channel and its answer. ``Refused`` if it answers with a refusal: ``later`` if it
    may be answered otherwise when a clock has been set, or when a new federation.toml or version has reached both
    ends."""
    deadline = time.monotonic() + min(_CALL, timeout)
    name, host, port = name_of(peer), *address
    try:
        raw = socket.create_connection((host, port), timeout=max(0.05, deadline - time.monotonic()))
    except OSError as error:
        raise PeerLost(f"{name} at {host}:{port} cannot be reached: {error}") from error
    connection: socket.socket = raw
    try:
        set_socket_options(raw)
        notice_silence(raw)
        raw.settimeout(max(0.05, deadline - time.monotonic()))
        connection = secure(raw, identity.credentials, server_side=False, check_dates=False)
        shake_hands(connection, name)
        wrong = wrong_pin(connection, identity.credentials, peer) or wrong_date(connection, peer, identity.name)
        if wrong:
            raise Refused(wrong, later=True)
        try:
            send(connection, identity.hello(peer, purpose, **more), deadline)
            answer = parse(receive(connection, name, deadline), name)
        except OSError as error:  # TLS 1.3: a refused certificate is noticed only now
            reason = getattr(error, "reason", "") or error
            if why := _refusal(error, name, identity.name):
                raise Refused(why, later=True) from error
            raise PeerLost(f"{name} closed the connection during the greeting: {reason}") from error
        if "refused" in answer:
            why = printable(str(answer["refused"]))
            raise Refused(f"{name} refused: {why}", later=bool(answer.get("later")))
    except Refused:
        connection.close()
        raise
    except HandshakeError as error:
        connection.close()
        if why := _refusal(error.__cause__, name, identity.name):
            raise Refused(why, later=True) from error
        raise PeerLost(str(error)) from error  # it died, or is too busy: worth another call
    except OSError as error:
        connection.close()
        raise PeerLost(f"the connection to {name} broke: {error}") from error
    except BaseException:
        connection.close()
        raise
    return Channel(connection, peer, timeout), answer
