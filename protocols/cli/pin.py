"""``ppvfl pin``: write a participant's certificate and its fingerprint into the file; everything else stays as it
is."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from accel.files import write_text
from protocols.federation.read import ClientEntry, ConfigurationError, FederationConfig, ServerEntry, load, parse
from protocols.net.credentials import read_certificate, wrong_role, wrong_usage
from refmpc.net.certificates import fingerprint_of

__all__ = ["add_parser", "pin", "run", "with_pin"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("pin", help="write a participant's certificate and fingerprint into the file")
    parser.add_argument("--participant", required=True, help="server-0, server-1, server-2 or a client's name")
    parser.add_argument("--certificate", required=True, metavar="FILE", help="its certificate (PEM)")
    parser.add_argument("--config", default="federation.toml", metavar="FILE")


def run(arguments: argparse.Namespace) -> int:
    certificate = read_certificate(Path(arguments.certificate))
    pin(Path(arguments.config), arguments.participant, certificate)
    print(f"{arguments.participant}: {fingerprint_of(certificate)} is pinned in {arguments.config}")
    print("Compare the fingerprint with its owner by telephone, and give the file to every participant.")
    return 0


def pin(path: Path, name: str, certificate: x509.Certificate) -> None:
    """Pin a certificate that says the right role."""
    config = load(path, pinned=False)
    entry = config.participant(name, "--participant")
    wrong = wrong_role(certificate, entry) or wrong_usage(certificate, entry)
    if wrong:
        raise ConfigurationError(wrong)
    write_text(path, with_pin(path.read_text(encoding="utf-8"), config, entry, certificate))


def with_pin(
    text: str, config: FederationConfig, entry: ServerEntry | ClientEntry, certificate: x509.Certificate
) -> str:
    """The file's text with one fingerprint and certificate replaced. What it says otherwise is compared afterwards."""
    new = fingerprint_of(certificate)
    pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
    edited = _with_certificate(_with_fingerprint(text, entry, new), entry.name, pem)
    want = replace(
        config,
        servers=tuple(replace(s, fingerprint=new) if s.name == entry.name else s for s in config.servers),
        clients=tuple(replace(c, fingerprint=new) if c.name == entry.name else c for c in config.clients),
        certificates={**config.certificates, entry.name: pem},
    )
    if parse(edited, config.source, pinned=False) != want:
        raise ConfigurationError(
            f"{config.source} is written in a way that cannot be edited safely: put fingerprint = {new!r} into the "
            f"section of {entry.name} by hand, and its certificate into [certificates]"
        )
    return edited


def _with_fingerprint(text: str, entry: ServerEntry | ClientEntry, new: str) -> str:
    """Each [[server]] or [[client]] section reaches to the next line that begins with a bracket."""
    kind, key, value = (
        ("server", "id", str(entry.id)) if isinstance(entry, ServerEntry) else ("client", "name", f'"{entry.name}"')
    )
    sections = re.split(r"(?m)^(?=\s*\[)", text)
    own = re.compile(rf"(?m)^([ \t]*){key}[ \t]*=[ \t]*{re.escape(value)}[ \t]*(#.*)?$")
    for i, section in enumerate(sections):
        if not re.match(rf"\s*\[\[\s*{kind}\s*\]\]", section) or not own.search(section):
            continue
        line = re.compile(r'(?m)^([ \t]*fingerprint[ \t]*=[ \t]*)(?:"[^"\n]*"|\'[^\'\n]*\')')
        changed, count = line.subn(rf'\g<1>"{new}"', section)
        if not count:
            changed = own.sub(lambda found: f'{found[0]}\n{found[1]}fingerprint = "{new}"', section, count=1)
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
