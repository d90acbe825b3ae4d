"""A participant's key and certificate on disk, and the certificates of the others, which are pinned in the file.

A certificate is accepted for one participant only if its fingerprint is the pinned one *and* it says the role of that
participant (``urn:ppvfl:server:0``, ``urn:ppvfl:client:bank``), so a stolen key impersonates its
owner only, and a mix-up in the file is noticed before anything is sent. Who signed the certificate does not matter:
pinned ones are trusted themselves, and no other certificate of the same authority is.
"""

from __future__ import annotations

import contextlib
import datetime
import ssl
import stat
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from accel.files import private_folder, write_bytes
from protocols.federation.read import ClientEntry, ConfigurationError, FederationConfig, ServerEntry
from refmpc.net.certificates import fingerprint_of, write_certificate, write_request
from refmpc.net.tls import Credentials

__all__ = [
    "CERTIFICATE",
    "EARLIER",
    "KEY",
    "NEXT_KEY",
    "REQUEST",
    "WARN_BEFORE",
    "RoleError",
    "hosts_of",
    "install_certificate",
    "load_credentials",
    "make_key",
    "own_directory",
    "pinned_certificates",
    "read_certificate",
    "role_of",
    "two_pins",
    "unpinned",
    "unsafe_key",
    "unusable_key",
    "validity_warning",
    "wrong_role",
    "wrong_usage",
]

KEY, CERTIFICATE, REQUEST = "key.pem", "certificate.pem", "request.csr"
NEXT_KEY, EARLIER = (
    "next-key.pem",
    "earlier",
)  # the key of a request that is not signed yet; the pair before the present one
WARN_BEFORE = datetime.timedelta(days=30)  # a certificate expires
_PREFIX = "urn:ppvfl:"


class RoleError(ConfigurationError):
    """A pinned certificate that says it is somebody else's."""


def own_directory(config: FederationConfig, name: str, directory: str | Path | None = None) -> Path:
    """Where a participant keeps its key: ``directory``, or the one beside the file that has its name."""
    return Path(directory) if directory is not None else Path(config.source).parent / name


def hosts_of(entry: ServerEntry | ClientEntry) -> list[str]:
    """The names and addresses under which others call this participant."""
    if isinstance(entry, ServerEntry):
        return [entry.host]
    address = entry.alignment_address
    return [address[0]] if address is not None else []


def make_key(entry: ServerEntry | ClientEntry, directory: Path, *, request: bool, days: int = 3650) -> Path:
    """A fresh key, and its certificate or (``request``) a signing request; returns the latter's path.

    A request takes days to be signed: if there is a key already it stays, and the new one waits beside it as
    ``NEXT_KEY``.
    """
    private_folder(directory)
    hosts, key = hosts_of(entry) or [entry.name], directory / KEY
    if request:
        path = directory / REQUEST
        write_request(entry.name, hosts, entry.role, path, directory / NEXT_KEY if key.exists() else key)
    else:
        path = directory / CERTIFICATE
        write_certificate(entry.name, hosts, entry.role, path, key, days)
    return path


def install_certificate(entry: ServerEntry | ClientEntry, directory: Path, signed: Path) -> Path:
    """Put a signed certificate in place, together with the key of its request; the pair that was there is kept."""
    certificate = read_certificate(signed)
    wrong = wrong_role(certificate, entry) or wrong_usage(certificate, entry)
    if wrong:
        raise ConfigurationError(wrong)
    key = directory / (NEXT_KEY if (directory / NEXT_KEY).exists() else KEY)
    wrong = unsafe_key(key) or unusable_key(key, signed)
    if wrong:
        raise ConfigurationError(wrong)
    if key.name == NEXT_KEY:
        earlier = directory / EARLIER
        private_folder(earlier)
        for name in (KEY, CERTIFICATE):
            if (directory / name).exists():
                write_bytes(earlier / name, (directory / name).read_bytes(), private=True)
    write_bytes(directory / CERTIFICATE, signed.read_bytes())
    if key.name == NEXT_KEY:
        key.replace(directory / KEY)
    return directory / CERTIFICATE


def read_certificate(path: Path) -> x509.Certificate:
    """The first certificate of a PEM file (those of the authority may follow)."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())[0]
    except FileNotFoundError:
        raise ConfigurationError(f"{path} does not exist: make it with `ppvfl key`, or have it signed") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigurationError(f"{path} holds no certificate in PEM form (-----BEGIN CERTIFICATE-----)") from None


def role_of(certificate: x509.Certificate) -> str:
    """The role that a certificate says, empty if none: a URI among its alternative names."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return ""
    roles = [uri for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if uri.startswith(_PREFIX)]
    return roles[0] if len(roles) == 1 else ""


def wrong_role(certificate: x509.Certificate, entry: ServerEntry | ClientEntry) -> str:
    """A sentence if the certificate is not for this participant."""
    role = role_of(certificate)
    if role == entry.role:
        return ""
    says = f"says {role}" if role else "says no role, or several"
    return (
        f"the certificate of {entry.name} {says}, but must hold the URI {entry.role} among its alternative names: "
        "have the signing request of `ppvfl key --csr` signed with its extensions"
    )


def wrong_usage(certificate: x509.Certificate, entry: ServerEntry | ClientEntry) -> str:
    """A sentence if TLS would refuse the certificate at one of the two ends; each participant may be at either."""
    extensions = certificate.extensions
    with contextlib.suppress(x509.ExtensionNotFound):
        allowed = set(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
        if not allowed >= {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}:
            return (
                f"the certificate of {entry.name} is not for both ends of a connection: its extended key usage must "
                f"hold "
                "server and client authentication, as in the signing request"
            )
    with contextlib.suppress(x509.ExtensionNotFound):
        if not extensions.get_extension_for_class(x509.KeyUsage).value.digital_signature:
            return f"the certificate of {entry.name} is not for signatures: its key usage must hold digital signature"
    return ""


def pinned_certificates(config: FederationConfig, entry: ServerEntry | ClientEntry) -> list[x509.Certificate]:
    """A participant's certificates from the file, after checking that they are the pinned ones and say the right
    role."""
    where = f"{config.source}: [certificates] {entry.name}"
    way_out = f"run `ppvfl pin --participant {entry.name} --certificate FILE`"
    text = config.certificates.get(entry.name)
    if text is None:
        raise ConfigurationError(f"{where} is missing: {way_out}")
    try:
        certificates = x509.load_pem_x509_certificates(text.encode())
    except ValueError:
        raise ConfigurationError(f"{where} is no certificate in PEM form: {way_out}") from None
    got, want = [fingerprint_of(certificate) for certificate in certificates], [*entry.pins]
    if got != want:
        has, pinned = (" and ".join(f"{pin[:16]}…" for pin in pins) for pins in (got, want))
        raise ConfigurationError(
            f"{where} has the fingerprint {has}, but {pinned} is pinned: compare both with its owner, then {way_out}"
        )
    for certificate in certificates:
        if wrong := wrong_role(certificate, entry):
            raise RoleError(f"{config.source}: {wrong}")
        if wrong := wrong_usage(certificate, entry):
            raise ConfigurationError(f"{config.source}: {wrong}")
    return certificates


def load_credentials(config: FederationConfig, name: str, directory: str | Path | None = None) -> Credentials:
    """What one participant needs for mutual TLS with all others; refuses files that could not work or are not safe."""
    entry = config.participant(name)
    anchors = [certificate for other in config.participants for certificate in pinned_certificates(config, other)]
    folder = own_directory(config, name, directory)
    key, certificate = folder / KEY, folder / CERTIFICATE
    wrong = unpinned(certificate, entry, config.source)
    wrong = wrong or unsafe_key(key) or unusable_key(key, certificate)
    if wrong:
        raise ConfigurationError(wrong)
    pem = "".join(anchor.public_bytes(serialization.Encoding.PEM).decode() for anchor in anchors)
    pinned = {other.peer: other.fingerprint for other in config.participants}
    earlier = {other.peer: other.earlier for other in config.participants if other.earlier is not None}
    return Credentials(certificate, key, pem, pinned, earlier)


def unpinned(certificate: Path, entry: ServerEntry | ClientEntry, source: str) -> str:
    """A sentence if others would refuse a participant's own certificate because it is not pinned."""
    own = fingerprint_of(read_certificate(certificate))
    if own not in entry.pins:
        return (
            f"{certificate} has the fingerprint {own[:16]}…, but {source} pins {entry.fingerprint[:16]}… for "
            f"{entry.name}: the others would refuse it; use the certificate that was pinned, or pin this one "
            "at everybody"
        )
    if entry.earlier is not None and entry.earlier.over and own == entry.earlier.fingerprint:
        return (
            f"{certificate} is the earlier certificate of {entry.name}, which {source} pins until "
            f"{entry.earlier.until:%Y-%m-%d %H:%M} UTC: the others refuse it; use the one that is pinned in its place"
        )
    return ""


def two_pins(config: FederationConfig, certificate: Path | None = None) -> list[str]:
    """A sentence for every participant whose key is being replaced: which two certificates are accepted, and until
    when; for the owner of ``certificate``, which of the two it uses."""
    own = "" if certificate is None else fingerprint_of(read_certificate(certificate))
    said = []
    for entry in config.participants:
        if entry.earlier is None:
            continue
        verb = "was accepted" if entry.earlier.over else "is accepted"
        used = "; this host uses the earlier one" if own == entry.earlier.fingerprint else ""
        said.append(f"{entry.name} has the certificate {entry.fingerprint[:16]}…, {entry.earlier.words} {verb}{used}")
    return said


def validity_warning(path: Path, within: datetime.timedelta = WARN_BEFORE) -> str:
    """A sentence if the certificate at ``path`` is not valid now, or not for much longer: the others refuse it then."""
    certificate = read_certificate(path)
    now, until = datetime.datetime.now(datetime.UTC), certificate.not_valid_after_utc
    way_out = "make a new one with `ppvfl key --force`, pin it, and give the file to everybody"
    if now < certificate.not_valid_before_utc:
        return (
            f"{path} is valid only from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on: set this host's clock"
        )
    if now > until:
        return f"{path} expired on {until:%Y-%m-%d %H:%M} UTC, and everybody refuses it: {way_out}"
    return f"{path} expires on {until:%Y-%m-%d}: {way_out}" if until - now < within else ""


def unsafe_key(key: Path) -> str:
    """A sentence if the key is missing or somebody else could read it."""
    try:
        mode = key.stat().st_mode
    except FileNotFoundError:
        return f"the key {key} does not exist: give its directory with --credentials, or make one with `ppvfl key`"
    except OSError as error:
        return f"the key {key} cannot be read: {error.strerror}"
    if stat.S_IMODE(mode) & 0o077:
        return (
            f"the key {key} has mode {stat.S_IMODE(mode):04o}, others on this host could read it: must be 0600; "
            f"chmod 600 {key}, and make a new key if others were logged in"
        )
    return ""


def unusable_key(key: Path, certificate: Path) -> str:
    """A sentence if TLS could not use key and certificate together."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password="")
    except PermissionError:
        return f"the key {key} cannot be read by this user: run as its owner"
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            return (
                f"the key {key} does not belong to {certificate}, they are from different key pairs; copy both from "
                f"where "
                "they were made, or make new ones with `ppvfl key`"
            )
        return f"the key {key} cannot be used ({error.reason or error}): it must be PEM and without a passphrase"
    except OSError as error:
        return f"the key {key} cannot be read: {error.strerror}"
    return ""
