"""Federations on loopback for tests: real files, keys and listeners."""

from __future__ import annotations

import contextlib
import datetime
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from protocols.cli.init import initialise
from protocols.cli.pin import pin, with_pin
from protocols.federation.read import FederationConfig, load
from protocols.federation.template import federation_text
from protocols.net.answerer import Answerer, serve
from protocols.net.credentials import CERTIFICATE, KEY, REQUEST, load_credentials
from refmpc.net.certificates import private_file, self_signed
from refmpc.net.rendezvous import listen

CLIENTS = [("bank", 4, ""), ("card", 3, "127.0.0.1:7101")]


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago; nobody listens there."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [s.getsockname()[1] for s in sockets]


def make_federation(directory: Path, ports: list[int] | None = None, keys: str = "certificates") -> FederationConfig:
    """Three servers on loopback and two clients, as ``ppvfl init`` makes them."""
    servers = [("127.0.0.1", port) for port in (ports or free_ports(3))]
    return initialise(federation_text("test", servers, CLIENTS, 2), directory, keys=keys)


def rekey(
    directory: Path,
    name: str,
    *,
    role: str | None = None,
    days: int = 3650,
    age: int = 0,
    until: datetime.datetime | None = None,
    folder: str = "",
) -> FederationConfig:
    """Give a participant a new certificate (in ``folder``, if not its own), pinned without the checks of ``ppvfl
    pin``."""
    path = directory / "federation.toml"
    config = load(path)
    entry = config.participant(name)
    key = ec.generate_private_key(ec.SECP256R1())
    begins = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=age)
    certificate = self_signed(key, name, ["127.0.0.1"], entry.role if role is None else role, days, begins)
    write_pair(directory / (folder or name), key, certificate)
    path.write_text(with_pin(path.read_text(), config, entry, certificate, until))
    return load(path)


def write_pair(directory: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    pem = serialization.Encoding.PEM
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    private_file(directory / KEY, plain)
    (directory / CERTIFICATE).write_bytes(certificate.public_bytes(pem))


class Authority:
    """An organisation's own certificate authority."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Bank Internal CA")])

    def sign(self, request: x509.CertificateSigningRequest, *left_out: type, **more: x509.ExtensionType):
        """Sign with the extensions of the request, but those ``left_out``, and with ``more``."""
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(request.subject)
            .issuer_name(self.name)
            .public_key(request.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=365))
        )
        kept = [e.value for e in request.extensions if not isinstance(e.value, left_out)]
        for extension in (*kept, *more.values()):
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self.key, hashes.SHA256())

    def sign_and_pin(self, directory: Path, name: str) -> None:
        request = x509.load_pem_x509_csr((directory / name / REQUEST).read_bytes())
        certificate = self.sign(request)
        (directory / name / CERTIFICATE).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        pin(directory / "federation.toml", name, certificate)


@contextlib.contextmanager
def answering(config: FederationConfig, *names: str, as_file: Path | None = None, **options: Any) -> Iterator[None]:
    """The answering side of doctor for these servers, at the addresses of ``config``; ``as_file``: with another
    file."""
    stop = threading.Event()
    threads = []
    own = config if as_file is None else load(as_file)
    for name in names or [server.name for server in config.servers]:
        entry = next(server for server in config.servers if server.name == name)
        credentials = load_credentials(own, name, Path(config.source).parent / name)
        answerer = Answerer(own, credentials, name, **options)
        listener = listen(entry.host, entry.port)
        threads.append(threading.Thread(target=serve, args=([listener], answerer, credentials, stop), daemon=True))
        threads[-1].listener = listener  # type: ignore[attr-defined]
        threads[-1].start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
            thread.listener.close()  # type: ignore[attr-defined]


def moved(config: FederationConfig, server: int, **changes: Any) -> FederationConfig:
    """The configuration with one server's address changed, as another participant's file may have it."""
    servers = tuple(replace(s, **changes) if s.id == server else s for s in config.servers)
    return replace(config, servers=servers)
