"""Certificates for mutual TLS: ECDSA P-256, self-signed or requested from an authority, pinned by fingerprint."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from refmpc.net.framing import Peer, name_of
from refmpc.net.tls import Credentials

__all__ = [
    "alternative_names",
    "fingerprint",
    "fingerprint_of",
    "make_certificate",
    "make_credentials",
    "private_file",
    "self_signed",
    "write_certificate",
    "write_request",
]

_BOTH_ENDS = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
_LATE_CLOCKS = datetime.timedelta(hours=1)  # a peer whose clock is behind accepts a fresh certificate as well


def make_certificate(name: str, directory: Path, days: int = 3650) -> tuple[Path, Path]:
    """Write ``name``.crt and ``name``.key (mode 0600) under ``directory``; returns both paths."""
    certificate_path, key_path = directory / f"{name}.crt", directory / f"{name}.key"
    write_certificate(name, [name], "", certificate_path, key_path, days)
    return certificate_path, key_path


def write_certificate(
    name: str, hosts: Iterable[str], uri: str, certificate_path: Path, key_path: Path, days: int = 3650
) -> None:
    """Write a fresh key (mode 0600) and its self-signed certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    private_file(key_path, _key_bytes(key))
    certificate = self_signed(key, name, hosts, uri, days)
    certificate_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def self_signed(
    key: ec.EllipticCurvePrivateKey,
    name: str,
    hosts: Iterable[str] = (),
    uri: str = "",
    days: int = 3650,
    begins: datetime.datetime | None = None,
) -> x509.Certificate:
    """A certificate that ``key`` signs for itself; good for both ends of a connection, and for signing nothing."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    start = begins or datetime.datetime.now(datetime.UTC) - _LATE_CLOCKS
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=days))
        .add_extension(alternative_names(hosts, uri), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_BOTH_ENDS, critical=False)
        .sign(key, hashes.SHA256())
    )


def write_request(name: str, hosts: Iterable[str], uri: str, request_path: Path, key_path: Path) -> None:
    """Write a fresh key (mode 0600) and a signing request for it, for the organisation's own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .add_extension(alternative_names(hosts, uri), critical=False)
        .add_extension(_BOTH_ENDS, critical=False)
        .sign(key, hashes.SHA256())
    )
    private_file(key_path, _key_bytes(key))
    request_path.write_bytes(request.public_bytes(serialization.Encoding.PEM))


def alternative_names(hosts: Iterable[str], uri: str = "") -> x509.SubjectAlternativeName:
    """Host names and addresses, each of its own kind, and the role as a URI."""
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(hosts):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    if uri:
        names.append(x509.UniformResourceIdentifier(uri))
    return x509.SubjectAlternativeName(names)


def private_file(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, from its first byte on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), 0o600)  # also when the file was there before
        file.write(content)


def fingerprint(certificate: Path) -> str:
    """SHA-256 of a PEM certificate's DER form, in hex."""
    return fingerprint_of(x509.load_pem_x509_certificate(certificate.read_bytes()))


def fingerprint_of(certificate: x509.Certificate) -> str:
    """SHA-256 of a certificate's DER form, in hex."""
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()


def make_credentials(peers: Iterable[Peer], directory: Path) -> dict[Peer, Credentials]:
    """Fresh certificates for all ``peers`` of a run on one machine, each pinning the others."""
    names = list(peers)
    files = {  # a client's name may be no file name, or that of a server
        peer: make_certificate(name_of(peer) if isinstance(peer, int) else f"client-{number}", directory)
        for number, peer in enumerate(names)
    }
    trusted = directory / "trusted.crt"
    trusted.write_bytes(b"".join(certificate.read_bytes() for certificate, _ in files.values()))
    pinned = {peer: fingerprint(certificate) for peer, (certificate, _) in files.items()}
    return {peer: Credentials(certificate, key, trusted, pinned) for peer, (certificate, key) in files.items()}


def _key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
