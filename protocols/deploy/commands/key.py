"""``ppvfl key``: a key for one participant, made on its own host, so that the key never travels."""

from __future__ import annotations

import argparse
from pathlib import Path

from protocols.deploy.config.read import ConfigurationError, load
from protocols.deploy.net.credentials import CERTIFICATE, KEY, REQUEST, make_key, own_directory, read_certificate
from refmpc.net.certificates import fingerprint_of

__all__ = ["add_parser", "refuse_overwriting", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("key", help="make a key and certificate (or signing request) for one participant")
    parser.add_argument("--as", dest="participant", required=True, help="server-0 … server-2 or a client's name")
    parser.add_argument("--config", default="federation.toml", metavar="FILE")
    parser.add_argument("--credentials", metavar="DIR", help="where key and certificate go (default: beside the file)")
    parser.add_argument("--csr", action="store_true", help="a signing request for your own authority instead")
    parser.add_argument("--force", action="store_true", help="replace a key that is there")


def run(arguments: argparse.Namespace) -> int:
    config = load(arguments.config, pinned=False)
    entry = config.participant(arguments.participant, "--as")
    directory = own_directory(config, entry.name, arguments.credentials)
    if not arguments.force:
        refuse_overwriting([directory / KEY, directory / CERTIFICATE, directory / REQUEST])
    path = make_key(entry, directory, request=arguments.csr)
    print(f"{directory / KEY}: the key, mode 0600; it never leaves this host")
    if arguments.csr:
        print(f"{path}: have it signed, with its extensions (role {entry.role}), by your authority")
        print(f"put the signed certificate at {directory / CERTIFICATE}")
    else:
        print(f"{path}: valid for ten years, SHA-256 {fingerprint_of(read_certificate(path))}")
    print("then, where the file is kept:")
    print(f"  ppvfl pin --participant {entry.name} --certificate {directory / CERTIFICATE}")
    return 0


def refuse_overwriting(paths: list[Path]) -> None:
    """Nothing that is there is overwritten by accident."""
    there = [str(path) for path in paths if path.exists()]
    if there:
        raise ConfigurationError(f"{', '.join(there)} exists already: --force replaces it, which cannot be undone")
