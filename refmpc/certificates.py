"""Certificates for mutual TLS: self-signed, ECDSA P-256, pinned by fingerprint."""

from __future__ import annotations

import datetime
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from refmpc.handshake import Credentials
from refmpc.transport import Peer

__all__ = ["fingerprint", "make_certificate", "make_credentials"]


def make_certificate(name: str, directory: Path, days: int = 3650) -> tuple[Path, Path]:
    """Write ``name``.crt and ``name``.key (mode 0600) under ``directory``; returns both paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_path, key_path = directory / f"{name}.crt", directory / f"{name}.key"
    certificate_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    descriptor = os.open(key_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), 0o600)  # also when the file was there before
        file.write(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
    return certificate_path, key_path


def fingerprint(certificate: Path) -> str:
    """SHA-256 of a PEM certificate's DER form, in hex."""
    parsed = x509.load_pem_x509_certificate(certificate.read_bytes())
    return hashlib.sha256(parsed.public_bytes(serialization.Encoding.DER)).hexdigest()


def make_credentials(peers: Iterable[Peer], directory: Path) -> dict[Peer, Credentials]:
    """Fresh certificates for all ``peers`` of a run on one machine, each pinning the others."""
    names = list(peers)
    files = {  # a client's name may be no file name, or that of a party
        peer: make_certificate(f"party-{peer}" if isinstance(peer, int) else f"client-{number}", directory)
        for number, peer in enumerate(names)
    }
    trusted = directory / "trusted.crt"
    trusted.write_bytes(b"".join(certificate.read_bytes() for certificate, _ in files.values()))
    pinned = {peer: fingerprint(certificate) for peer, (certificate, _) in files.items()}
    return {peer: Credentials(certificate, key, trusted, pinned) for peer, (certificate, key) in files.items()}
