"""``ppvfl pin``: write a participant's certificate and its fingerprint into the file; everything else stays as it
is."""

from __future__ import annotations

import argparse
import datetime
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from accel.errors import InvalidArgument
from accel.files import write_text
from accel.validate import require
from protocols.federation.read import ClientEntry, ConfigurationError, FederationConfig, ServerEntry, load, parse
from protocols.net.credentials import pinned_certificates, read_certificate, wrong_role, wrong_usage
from refmpc.net.certificates import fingerprint_of

__all__ = ["add_parser", "pin", "run", "with_pin"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("pin", help="write a participant's certificate and fingerprint into the file")
    parser.add_argument("--participant", required=True, help="server-0, server-1, server-2 or a client's name")
    parser.add_argument("--certificate", required=True, metavar="FILE", help="its certificate (PEM)")
    parser.add_argument("--config", default="federation.toml", metavar="FILE")
    parser.add_argument(
        "--until",
        metavar="TIME",
        help="accept the certificate that was pinned before, too, until this time (UTC), such as 2030-01-31T12:00",
    )


def run(arguments: argparse.Namespace) -> int:
    certificate = read_certificate(Path(arguments.certificate))
    until = None if arguments.until is None else _time(arguments.until)
    pin(Path(arguments.config), arguments.participant, certificate, until)
    print(f"{arguments.participant}: {fingerprint_of(certificate)} is pinned in {arguments.config}")
    if until is not None:
        print(f"The certificate that was pinned before is accepted, too, until {until:%Y-%m-%d %H:%M} UTC.")
    print("Compare the fingerprint with its owner by telephone, and give the file to every participant.")
    return 0


def _time(text: str) -> datetime.datetime:
    """A time in the future; UTC, if it says no zone."""
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(f"--until {text!r} must be a time such as 2030-01-31T12:00") from None
    time = (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).astimezone(datetime.UTC)
    require(time > datetime.datetime.now(datetime.UTC), "--until", text, "in the future")
    return time


def pin(path: Path, name: str, certificate: x509.Certificate, until: datetime.datetime | None = None) -> None:
    """Pin a certificate that says the right role; the one that was pinned is accepted ``until`` then, too."""
    config = load(path, pinned=False)
    entry = config.participant(name, "--participant")
    wrong = wrong_role(certificate, entry) or wrong_usage(certificate, entry)
    if wrong:
        raise ConfigurationError(wrong)
    write_text(path, with_pin(path.read_text(encoding="utf-8"), config, entry, certificate, until))


def with_pin(
    text: str,
    config: FederationConfig,
    entry: ServerEntry | ClientEntry,
    certificate: x509.Certificate,
    until: datetime.datetime | None = None,
) -> str:
    """The file's text with one fingerprint and certificate replaced; with ``until`` those before stay beside them.
    What it says otherwise is compared afterwards."""
    new = fingerprint_of(certificate)
    certificates, earlier = [certificate], ""
    if until is not None:
        require(new != entry.fingerprint, "--certificate", f"{new[:16]}…", "another than the one that is pinned")
        require(bool(entry.fingerprint), "--until", until, f"absent: no certificate of {entry.name} was pinned before")
        certificates, earlier = [certificate, pinned_certificates(config, entry)[0]], entry.fingerprint
    pem = "".join(each.public_bytes(serialization.Encoding.PEM).decode() for each in certificates)
    pins: dict[str, Any] = {"fingerprint": new, "earlier_fingerprint": earlier, "earlier_until": until}
    edited = _with_certificate(_with_pins(text, entry, pins), entry.name, pem)
    want = replace(
        config,
        servers=tuple(replace(s, **pins) if s.name == entry.name else s for s in config.servers),
        clients=tuple(replace(c, **pins) if c.name == entry.name else c for c in config.clients),
        certificates={**config.certificates, entry.name: pem},
    )
    if parse(edited, config.source, pinned=False) != want:
        raise ConfigurationError(
            f"{config.source} is written in a way that cannot be edited safely: put fingerprint = {new!r} into the "
            f"section of {entry.name} by hand, and its certificate into [certificates]"
        )
    return edited


def _with_pins(text: str, entry: ServerEntry | ClientEntry, pins: Mapping[str, Any]) -> str:
    """Each [[server]] or [[client]] section reaches to the next line that begins with a bracket."""
    kind, key, value = (
        ("server", "id", str(entry.id)) if isinstance(entry, ServerEntry) else ("client", "name", f'"{entry.name}"')
    )
    lines = f'fingerprint = "{pins["fingerprint"]}"'
    if pins["earlier_until"] is not None:
        until = pins["earlier_until"].isoformat()
        lines += f'\nearlier_fingerprint = "{pins["earlier_fingerprint"]}"\nearlier_until = {until}'
    sections = re.split(r"(?m)^(?=\s*\[)", text)
    own = re.compile(rf"(?m)^([ \t]*){key}[ \t]*=[ \t]*{re.escape(value)}[ \t]*(#.*)?$")
    for i, section in enumerate(sections):
        if not re.match(rf"\s*\[\[\s*{kind}\s*\]\]", section) or not own.search(section):
            continue
        section = re.sub(r"(?m)^[ \t]*earlier_(fingerprint|until)[ \t]*=.*\n?", "", section)
        line = re.compile(r'(?m)^([ \t]*)fingerprint[ \t]*=[ \t]*(?:"[^"\n]*"|\'[^\'\n]*\')')
        changed, count = line.subn(lambda found: found[1] + lines.replace("\n", f"\n{found[1]}"), section)
        if not count:
            changed = own.sub(lambda found: f"{found[0]}\n{lines}", section, count=1)
        sections[i] = changed
        break
    return "".join(sections)


def _with_certificate(text: str, name: str, pem: str) -> str:
    block = f'{name} = """\n{pem}"""\n'
    old = re.compile(rf'(?m)^[ \t]*{re.escape(name)}[ \t]*=[ \t]*"""[^"]*"""[ \t]*\n?')
    if old.search(text):
        return old.sub(lambda _: block, text)
    header = re.search(r"(?m)^[ \t]*\[certificates\][^\n]*\n", text)
    if header is None:
        return f"{text.rstrip()}\n\n[certificates]\n{block}"
    following = re.search(r"(?m)^\s*\[", text[header.end() :])
    end = header.end() + following.start() if following else len(text)
    return f"{text[:end].rstrip()}\n{block}{text[end:]}"
