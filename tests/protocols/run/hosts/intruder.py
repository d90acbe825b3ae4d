"""Somebody on the network who does not belong: every way to knock, and what came of it, as JSON.

python -m tests.protocols.run.hosts.intruder federation.toml STOLEN WORK     # STOLEN: directory with a client's key
"""

from __future__ import annotations

import json
import secrets
import socket
import ssl
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from protocols.federation.read import FederationConfig, load
from protocols.net.credentials import CERTIFICATE, KEY, load_credentials
from protocols.net.wire import Identity, Refused, call
from refmpc.core.errors import RefmpcError
from refmpc.net.certificates import self_signed
from refmpc.net.tls import Credentials
from tests.protocols.run.hosts.federations import write_pair

TIMEOUT = 8.0


def bytes_to(address: tuple[str, int], data: bytes) -> str:
    """Send bytes that are no TLS; what comes back, or that nothing does."""
    with socket.create_connection(address, timeout=TIMEOUT) as connection:
        connection.sendall(data)
        connection.settimeout(TIMEOUT)
        try:
            answer = connection.recv(1000)
        except ConnectionResetError:
            answer = b""
    return f"closed after {len(answer)} bytes" if len(answer) < 100 else f"answered with {len(answer)} bytes"


def without_certificate(address: tuple[str, int]) -> str:
    """TLS as a browser speaks it. In TLS 1.3 the refusal comes with the first read."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(address, timeout=TIMEOUT) as raw, context.wrap_socket(raw) as connection:
            connection.sendall(b"\x10\0\0\0" + b"{" * 16)
            return f"answered with {connection.recv(100)!r}"
    except (ssl.SSLError, ConnectionResetError) as error:
        return f"refused: {getattr(error, 'reason', None) or error}"


def made_up(config: FederationConfig, directory: Path, *, age: int = 0) -> Credentials:
    """A certificate that names a participant, made by somebody else; ``age`` days old, valid for 30."""
    import datetime

    key = ec.generate_private_key(ec.SECP256R1())
    begins = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=age)
    write_pair(directory, key, self_signed(key, "bank", [], "urn:ppvfl:client:bank", 30, begins))
    pinned = {entry.peer: entry.fingerprint for entry in config.participants}
    trusted = "".join(config.certificates.values())
    return Credentials(directory / CERTIFICATE, directory / KEY, trusted, pinned)


def knocking(address: tuple[str, int]) -> str:
    socket.create_connection(address, timeout=TIMEOUT).close()
    return "hung up"


def calling(identity: Identity, server: int, purpose: str) -> str:
    address = identity.config.addresses[server]
    facts = {"kind": "training", "session": secrets.token_hex(16), "rows": 300, "output": None, "people": "0" * 64}
    try:
        channel, answer = call(identity, server, address, purpose, timeout=TIMEOUT, **facts)
    except Refused as error:
        return f"refused: {error}"
    except RefmpcError as error:
        return f"failed: {error}"
    channel.close()
    return f"answered: {sorted(answer)}"


def attempts(config: FederationConfig, stolen: Path, work: Path) -> dict[str, str]:
    """All of them, against server 0 (which the two others and all clients call)."""
    address = config.addresses[0]
    bank = load_credentials(config, "bank", stolen)
    everybody: dict[str, Callable[[], str]] = {
        "port scan": lambda: knocking(address),
        "garbage": lambda: bytes_to(address, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(range(256)) * 40),
        "no certificate": lambda: without_certificate(address),
        "another authority": lambda: calling(Identity(config, "bank", made_up(config, work / "other")), 0, "upload"),
        "expired": lambda: calling(Identity(config, "bank", made_up(config, work / "old", age=90)), 0, "upload"),
        "stolen, as a server": lambda: calling(Identity(config, 2, bank), 0, "party"),
        "stolen, wrong purpose": lambda: calling(Identity(config, "bank", bank), 0, "party"),
        "stolen, as another client": lambda: calling(Identity(config, "card", bank), 0, "upload"),
        "another configuration": lambda: calling(Identity(replace(config, name="other"), "bank", bank), 0, "upload"),
    }
    return {name: attempt() for name, attempt in everybody.items()}


if __name__ == "__main__":
    file, thief, folder = map(Path, sys.argv[1:])
    print(json.dumps(attempts(load(file), thief, folder), indent=1))
