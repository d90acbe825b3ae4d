"""What ``ppvfl doctor`` checks, one finding each: own files first, then every peer, from its name to its bandwidth.

A check that fails says what to do; those that depend on it are skipped, not failed. Nothing is told to a peer before
its certificate is the pinned one.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import math
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509

from protocols.federation.read import (
    ClientEntry,
    ConfigurationError,
    FederationConfig,
    ServerEntry,
    agreed_values,
    configuration_hash,
    other_pins,
)
from protocols.net.answerer import MAX_TRANSFER, PURPOSE, receive_payload
from protocols.net.credentials import (
    CERTIFICATE,
    KEY,
    WARN_BEFORE,
    RoleError,
    own_directory,
    pinned_certificates,
    read_certificate,
    two_pins,
    unpinned,
    unsafe_key,
    unusable_key,
    wrong_role,
)
from protocols.state.budget import Spent
from protocols.state.disk import RESERVE, free_bytes
from protocols.version import software_version
from refmpc.core.errors import HandshakeError
from refmpc.net.certificates import fingerprint_of
from refmpc.net.framing import printable
from refmpc.net.tls import parse, receive, send, set_socket_options
from vfl.alignment import has_the_group, matching_costs
from vfl.dp.baselines import AS_IF_POISSON
from vfl.methods import facts

__all__ = ["PEER_CHECKS", "Finding", "check_own_files", "check_peer"]

CLOCK_WARNING, CLOCK_FAILURE = 2.0, 60.0  # seconds
SLOW_ROUND_TRIP = 0.2  # seconds
SLOW_LINK = 10e6  # bits a second
_ECHOES = 8

PEER_CHECKS = (
    "name resolves",
    "port open",
    "TLS handshake",
    "certificate pinned",
    "certificate valid",
    "role",
    "accepts us",
    "disk",
    "budget",
    "version",
    "configuration",
    "clock",
    "round trip",
    "bandwidth",
)


@dataclass(frozen=True)
class Finding:
    """One row: ``status`` is ok, warning, failed or skipped."""

    subject: str
    check: str
    status: str
    found: str
    way_out: str = ""


# own files ---------------------------------------------------------------------------------------


def check_own_files(
    config: FederationConfig, name: str, directory: str | Path | None = None, state: str | Path | None = None
) -> Iterator[Finding]:
    """The participant's own key and certificate, the others' certificates in the file, and what it says of privacy."""
    entry = config.participant(name, "--as")
    yield check_privacy(config, name)
    folder = own_directory(config, name, directory)
    yield check_disk(name, free_bytes(folder if state is None else Path(state)))
    if isinstance(entry, ClientEntry) and len(config.clients) > 1:
        yield check_matching(config, name)
    certificate = None
    try:
        certificate = read_certificate(folder / CERTIFICATE)
    except ConfigurationError as error:
        yield Finding(name, "own certificate", "failed", str(error), "give its directory with --credentials")
    if certificate is not None:
        yield _own_pin(name, entry, folder / CERTIFICATE, config.source)
        yield _validity(name, "own certificate valid", certificate)
    unsafe = unsafe_key(folder / KEY)
    if unsafe:
        yield Finding(name, "own key safe", "failed", *_split(unsafe))
    else:
        yield Finding(name, "own key safe", "ok", f"{folder / KEY}, only its owner may read it")
    if certificate is not None and (folder / KEY).exists():
        unusable = unusable_key(folder / KEY, folder / CERTIFICATE)
        if unusable:
            yield Finding(name, "own key matches", "failed", *_split(unusable))
        else:
            yield Finding(name, "own key matches", "ok", "key and certificate belong together")
    for other in config.participants:
        try:
            pinned_certificates(config, other)
        except ConfigurationError as error:
            check = "role in the file" if isinstance(error, RoleError) else "certificate in the file"
            yield Finding(other.name, check, "failed", *_split(str(error)))
    for window in two_pins(config):
        way_out = "when its owner uses the new one everywhere: `ppvfl pin` without --until, and the file to everybody"
        yield Finding(window.split()[0], "two certificates", "ok", window, way_out)


def check_disk(name: str, free: Any) -> Finding:
    """Room where a participant keeps its state; how much a run needs depends on its rows, 16 bytes a value at most."""
    if not isinstance(free, int) or isinstance(free, bool):
        return Finding(name, "disk", "warning", "it does not say how much is free", "install the same version there")
    found = f"{free / 1e9:,.1f} GB free for its state"
    if free < RESERVE:
        return Finding(name, "disk", "failed", found, f"make room: below {RESERVE / 1e6:.0f} MB nothing is kept")
    if free < 20 * RESERVE:
        return Finding(name, "disk", "warning", found, "shares take 16 bytes a value: make room for large uploads")
    return Finding(name, "disk", "ok", found)


def check_matching(config: FederationConfig, name: str) -> Finding:
    """How rows will be matched, what that costs, and whether this installation can."""
    matching, clients = config.run.matching, len(config.clients)
    if matching == "ot" and not has_the_group():
        found = "the libsodium of pynacl is built without ed25519's group"
        return Finding(
            name, "matching", "failed", found, "reinstall pynacl, or matching = 'ecdh' in [run], at all clients"
        )
    work, moved = matching_costs(matching, clients)
    seconds = work * (3 if matching == "ot" else 180)
    found = (
        f"{matching}, clients only; with 1,000,000 rows each about {moved:,.0f} MB and {seconds:,.0f} CPU seconds in "
        f"all"
    )
    return Finding(name, "matching", "ok", found)


def check_budget(name: str, spent: Any, epsilon: float) -> Finding:
    """What a server has recorded as spent on each client's people; a warning if another run like this may not fit."""
    entries = spent if isinstance(spent, list) else []
    words, tight = [], False
    for entry in entries:
        try:
            limit, used = entry["limit"], entry["epsilon"]
            found = Spent(
                printable(str(entry["client"]), 40),
                printable(str(entry["people"]), 40),
                math.inf if used is None else float(used),
                float(entry["delta"]),
                math.inf if limit is None else float(limit),
                int(entry["runs"]),
            )
        except (KeyError, TypeError, ValueError):
            return Finding(name, "budget", "warning", "it tells nothing that can be read", "install the same version")
        words.append(found.words)
        tight = tight or (math.isfinite(found.limit) and found.epsilon + epsilon > found.limit)
    if tight:
        way_out = "runs compose to less than their sum, but it may be refused: ask for a smaller epsilon"
        return Finding(name, "budget", "warning", "; ".join(words), way_out)
    return Finding(name, "budget", "ok", "; ".join(words) or "nothing was spent yet")


def check_privacy(config: FederationConfig, name: str) -> Finding:
    """What (ε, δ) in the file will mean; the number of common rows is known only when they are aligned."""
    training = config.run.training
    rows = math.ceil(1 / training.delta)
    found = (
        f"ε = {training.epsilon:g}, δ = {training.delta:g}, for fewer than {rows:,} common rows: δ must be below 1/n"
    )
    if facts(config.run.protocol).takes("a new order in every epoch") and training.accounting == "paper":
        way_out = 'take accounting = "proven" (its default), whose ε is that of the secret order'
        return Finding(name, "privacy", "warning", f"{found}; this ε is {AS_IF_POISSON}", way_out)
    return Finding(name, "privacy", "ok", found)


def _own_pin(name: str, entry: ServerEntry | ClientEntry, certificate: Path, source: str) -> Finding:
    if wrong := unpinned(certificate, entry, source):
        found, way_out = _split(wrong)
        return Finding(name, "own certificate", "failed", found, f"{way_out}: `ppvfl pin`, and the file to everybody")
    got = fingerprint_of(read_certificate(certificate))
    return Finding(name, "own certificate", "ok", f"{got[:16]}…, pinned in {source}")


def _validity(subject: str, check: str, certificate: x509.Certificate) -> Finding:
    now, until = datetime.datetime.now(datetime.UTC), certificate.not_valid_after_utc
    rotate = f"make a new one (`ppvfl key --as {subject} --force`), pin it, and give the file to everybody"
    if now < certificate.not_valid_before_utc:
        since = f"valid only from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on"
        return Finding(subject, check, "failed", since, "compare this host's clock with the certificate's owner")
    if now > until:
        return Finding(subject, check, "failed", f"expired on {until:%Y-%m-%d %H:%M} UTC", rotate)
    days = (until - now).days
    if until - now < WARN_BEFORE:
        return Finding(subject, check, "warning", f"expires in {days} days, on {until:%Y-%m-%d}", rotate)
    return Finding(subject, check, "ok", f"until {until:%Y-%m-%d} ({days} days)")


# peers -------------------------------------------------------------------------------------------


class _Failed(Exception):
    """The checks that follow depend on this one."""


def check_peer(
    config: FederationConfig,
    name: str,
    entry: ServerEntry | ClientEntry,
    address: tuple[str, int],
    directory: str | Path | None = None,
    *,
    timeout: float = 5.0,
    transfer: int = 1 << 20,
) -> Iterator[Finding]:
    """All checks of one peer, in order; after a failure that the rest depends on, the rest is skipped."""
    visit = _Visit(config, name, entry, address, own_directory(config, name, directory), timeout, transfer)
    done: list[str] = []
    with contextlib.closing(visit):
        try:
            for finding in visit.findings():
                done.append(finding.check)
                yield finding
                if finding.status == "failed" and finding.check in _NEEDED:
                    raise _Failed
        except _Failed:
            for check in PEER_CHECKS:
                if check not in done:
                    yield Finding(entry.name, check, "skipped", f"after {done[-1]!r} failed")


_NEEDED = (*PEER_CHECKS[:4], "role", "accepts us")


class _Visit:
    """One connection to one peer."""

    def __init__(
        self,
        config: FederationConfig,
        name: str,
        entry: ServerEntry | ClientEntry,
        address: tuple[str, int],
        directory: Path,
        timeout: float,
        transfer: int,
    ):
        self._config = config
        self._name = name
        self._entry = entry
        self._address = address
        self._directory = directory
        self._timeout = timeout
        self._transfer = min(transfer, MAX_TRANSFER)
        self._connection: socket.socket | None = None
        self._certificate = b""

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def findings(self) -> Iterator[Finding]:
        yield self._resolve()
        yield self._open()
        yield self._shake_hands()
        der = self._certificate
        yield self._pin(hashlib.sha256(der).hexdigest())
        certificate = x509.load_der_x509_certificate(der)  # the pinned one: safe to look into
        yield _validity(self._entry.name, "certificate valid", certificate)
        wrong = wrong_role(certificate, self._entry)
        yield self._failed("role", *_split(wrong)) if wrong else self._ok("role", self._entry.role)
        facts = self._greet()
        if isinstance(facts, Finding):
            yield facts
            return
        yield self._ok("accepts us", f"knows {self._name}; {printable(str(facts.get('state', '')), 80)}")
        yield check_disk(self._entry.name, facts.get("free_bytes"))
        yield check_budget(self._entry.name, facts.get("budget"), self._config.run.training.epsilon)
        yield self._version(facts)
        yield self._configuration(facts)
        yield from self._measure()

    def _resolve(self) -> Finding:
        host, port = self._address
        try:
            found = sorted({str(item[4][0]) for item in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
        except (socket.gaierror, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            return self._failed(
                "name resolves",
                f"{host!r} does not: {reason}",
                "correct host in the file, or add the name to DNS or /etc/hosts",
            )
        return self._ok("name resolves", f"{host} is {', '.join(found)}")

    def _open(self) -> Finding:
        host, port = self._address
        try:
            self._connection = socket.create_connection(self._address, timeout=self._timeout)
        except ConnectionRefusedError:
            way_out = f"start `ppvfl server` or `ppvfl doctor --answer` there, or correct port {port} in the file"
            return self._failed("port open", f"{host}:{port} refuses connections: nothing listens there", way_out)
        except TimeoutError:
            way_out = f"let TCP port {port} through the firewalls between the two hosts"
            return self._failed("port open", f"{host}:{port} does not answer in {self._timeout:g} s", way_out)
        except OSError as error:
            return self._failed("port open", f"{host}:{port}: {error.strerror or error}", "check route and address")
        with contextlib.suppress(OSError):  # it has hung up already: the handshake says so
            set_socket_options(self._connection)
        return self._ok("port open", f"{host}:{port}")

    def _shake_hands(self) -> Finding:
        """Without verification, so that a wrong certificate can be looked at; it is compared before anything is
        said."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        with contextlib.suppress(OSError):  # own files have their own rows; without them the peer will refuse us
            context.load_cert_chain(self._directory / CERTIFICATE, self._directory / KEY, password="")
        assert self._connection is not None
        try:
            self._connection = context.wrap_socket(self._connection)
            self._certificate = self._connection.getpeercert(binary_form=True) or b""
        except (OSError, ValueError) as error:  # ValueError: Python's word for a peer that hung up in the middle
            reason = getattr(error, "reason", None) or error
            way_out = "something else listens on this port, or a proxy between the hosts does not pass TLS 1.3 on"
            return self._failed("TLS handshake", f"failed: {reason}", way_out)
        cipher = self._connection.cipher()
        return self._ok("TLS handshake", f"{self._connection.version()}, {cipher[0] if cipher else ''}")

    def _pin(self, got: str) -> Finding:
        want, earlier = self._entry.fingerprint, self._entry.earlier
        if got == want:
            return self._ok("certificate pinned", f"{got[:16]}…")
        if earlier is not None and got == earlier.fingerprint:
            use = f"it must use the new one, {want[:16]}…"
            if earlier.over:
                return self._failed("certificate pinned", f"the earlier one, {earlier.words}, which is over", use)
            return Finding(self._entry.name, "certificate pinned", "warning", f"the earlier one, {earlier.words}", use)
        owner = next((e.name for e in self._config.participants if got in e.pins), None)
        if owner is not None:
            return self._failed(
                "certificate pinned",
                f"this is {owner}'s certificate, not {self._entry.name}'s",
                "correct host and port of the two in the file: they are mixed up",
            )
        return self._failed(
            "certificate pinned",
            f"presents {got[:16]}…, pinned is {want[:16]}…",
            f"ask its owner for the fingerprint by telephone; if it is right, `ppvfl pin --participant "
            f"{self._entry.name}`; if not, somebody is between you",
        )

    def _greet(self) -> dict[str, Any] | Finding:
        connection, who = self._connection, self._entry.name
        assert connection is not None
        deadline = time.monotonic() + self._timeout
        pin_us = f"its file must pin this host's certificate for {self._name}, which must not be expired"
        try:
            send(connection, {"purpose": PURPOSE, "from": self._name, "to": who}, deadline)
            facts = parse(receive(connection, who, deadline), who)
        except ssl.SSLError as error:
            return self._failed("accepts us", f"refuses our certificate: {error.reason or error}", pin_us)
        except (OSError, HandshakeError) as error:
            return self._failed("accepts us", printable(str(error), 200), f"look into its log; {pin_us}")
        if "refused" in facts:
            reason = printable(str(facts["refused"]), 300)
            return self._failed("accepts us", f"refuses: {reason}", f"give both hosts the same file; {pin_us}")
        return facts

    def _version(self, facts: dict[str, Any]) -> Finding:
        mine, theirs = software_version(), printable(str(facts.get("version")), 80)
        if mine == theirs:
            return self._ok("version", mine)
        return self._failed("version", f"here {mine}, there {theirs}", "install the same version at every participant")

    def _configuration(self, facts: dict[str, Any]) -> Finding:
        mine = configuration_hash(self._config)
        others = other_pins(self._config, str(facts.get("pins")))
        if mine == facts.get("hash") and others:
            found = f"no certificate in common for {', '.join(others)}"
            return self._failed("configuration", found, "give the same file to every participant")
        if mine == facts.get("hash"):
            return self._ok("configuration", f"{mine[:16]}…")
        there = facts.get("agreed")
        theirs, ours = there if isinstance(there, dict) else {}, agreed_values(self._config)
        differing = [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
        shown = "; ".join(f"{key}: here {ours.get(key)!r:.60}, there {theirs.get(key)!r:.60}" for key in differing[:3])
        more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
        found = f"differs: {shown}{more}" if theirs else "differs"
        return self._failed("configuration", printable(found, 500), "give the same file to every participant")

    def _measure(self) -> Iterator[Finding]:
        try:
            yield from self._clock_and_round_trip()
            yield self._bandwidth()
        except (OSError, HandshakeError, ValueError, TypeError) as error:
            way_out = "try again; if it stays, look into the log there"
            yield self._failed("bandwidth", f"measurement broke off: {printable(str(error), 200)}", way_out)

    def _clock_and_round_trip(self) -> Iterator[Finding]:
        assert self._connection is not None
        who, best, skew = self._entry.name, float("inf"), 0.0
        for _ in range(_ECHOES):
            deadline = time.monotonic() + self._timeout
            begun = time.perf_counter()
            send(self._connection, {"echo": True}, deadline)
            theirs = float(parse(receive(self._connection, who, deadline), who)["time"])
            trip = time.perf_counter() - begun
            if trip < best:  # their clock was read half a round trip ago, best known for the quickest echo
                best, skew = trip, theirs + trip / 2 - time.time()
        found = f"{abs(skew):.3f} s {'ahead' if skew > 0 else 'behind'}, ± {best / 2:.3f} s"
        way_out = "set both clocks by NTP: certificates and logs depend on them"
        if abs(skew) > CLOCK_FAILURE:
            yield self._failed("clock", found, way_out)
        elif abs(skew) > CLOCK_WARNING:
            yield Finding(who, "clock", "warning", found, way_out)
        else:
            yield self._ok("clock", found)
        if best > SLOW_ROUND_TRIP:
            slow = "a training step takes about 60 round trips: choose servers that are nearer to each other"
            yield Finding(who, "round trip", "warning", f"{best * 1e3:.1f} ms", slow)
        else:
            yield self._ok("round trip", f"{best * 1e3:.2f} ms")

    def _bandwidth(self) -> Finding:
        assert self._connection is not None
        who, size, deadline = self._entry.name, self._transfer, time.monotonic() + 3 * self._timeout
        begun = time.perf_counter()
        send(self._connection, {"upload": size}, deadline)
        self._connection.sendall(bytes(size))
        receive(self._connection, who, deadline)
        up = time.perf_counter() - begun
        begun = time.perf_counter()
        send(self._connection, {"download": size}, deadline)
        receive_payload(self._connection, size, deadline)
        down = time.perf_counter() - begun
        send(self._connection, {"bye": True}, deadline)
        rates = 8 * size / up, 8 * size / down
        found = f"{rates[0] / 1e6:,.0f} Mbit/s there, {rates[1] / 1e6:,.0f} back ({size / 1e6:.1f} MB)"
        if min(rates) < SLOW_LINK:
            slow = "a training step sends about 0.4 MB per server: it will be slow, but works"
            return Finding(who, "bandwidth", "warning", found, slow)
        return self._ok("bandwidth", found)

    def _ok(self, check: str, found: str) -> Finding:
        return Finding(self._entry.name, check, "ok", found)

    def _failed(self, check: str, found: str, way_out: str) -> Finding:
        return Finding(self._entry.name, check, "failed", found, way_out)


def _split(sentence: str) -> tuple[str, str]:
    """What was found, and the way out, of an error that says both."""
    found, mark, way_out = sentence.rpartition("; " if "; " in sentence else ": ")
    return (found, way_out) if mark else (sentence, "")
