"""``ppvfl key``: a key for one participant, made on its own host, so that the key never travels."""

from __future__ import annotations

import argparse
from pathlib import Path

from accel.validate import require
from protocols.federation.read import ConfigurationError, load
from protocols.net.credentials import (
    CERTIFICATE,
    EARLIER,
    KEY,
    NEXT_KEY,
    REQUEST,
    install_certificate,
    make_key,
    own_directory,
    read_certificate,
)
from refmpc.net.certificates import fingerprint_of

__all__ = ["add_parser", "refuse_overwriting", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("key", help="make a key and certificate (or signing request) for one participant")
    parser.add_argument("--as", dest="participant", required=True, help="server-0 … server-2 or a client's name")
    parser.add_argument("--config", default="federation.toml", metavar="FILE")
    parser.add_argument("--credentials", metavar="DIR", help="where key and certificate go (default: beside the file)")
    parser.add_argument("--csr", action="store_true", help="a signing request for your own authority instead")
    parser.add_argument("--force", action="store_true", help="replace a key that is there")
    parser.add_argument(
        "--install", metavar="FILE", help="the certificate that your authority signed: put it in place, with its key"
    )


def run(arguments: argparse.Namespace) -> int:
    config = load(arguments.config, pinned=False)
    entry = config.participant(arguments.participant, "--as")
    directory = own_directory(config, entry.name, arguments.credentials)
    if arguments.install is not None:
        require(not arguments.csr, "--install", arguments.install, "given without --csr: one command after the other")
        path = install_certificate(entry, directory, Path(arguments.install))
        print(f"{path}: in place, with its key; SHA-256 {fingerprint_of(read_certificate(path))}")
        print(f"the earlier pair, if there was one, is kept in {directory / EARLIER}")
    elif arguments.csr:
        if not arguments.force:
            refuse_overwriting([directory / KEY, directory / CERTIFICATE, directory / REQUEST])
        key = directory / (NEXT_KEY if (directory / KEY).exists() else KEY)
        path = make_key(entry, directory, request=True)
        print(f"{key}: the key, mode 0600; it never leaves this host")
        print(f"{path}: have it signed, with its extensions (role {entry.role}), by your authority")
        if key.name == NEXT_KEY:
            print("the key that is there stays in use until the signed certificate is put in its place:")
        print(f"  ppvfl key --as {entry.name} --config {arguments.config} --credentials {directory} --install FILE")
    else:
        if not arguments.force:
            refuse_overwriting([directory / KEY, directory / CERTIFICATE, directory / REQUEST])
        path = make_key(entry, directory, request=False)
        print(f"{directory / KEY}: the key, mode 0600; it never leaves this host")
        print(f"{path}: valid for ten years, SHA-256 {fingerprint_of(read_certificate(path))}")
    print("then, where the file is kept:")
    print(f"  ppvfl pin --participant {entry.name} --certificate {directory / CERTIFICATE}")
    return 0


def refuse_overwriting(paths: list[Path]) -> None:
    """Nothing that is there is overwritten by accident."""
    there = [str(path) for path in paths if path.exists()]
    if there:
        raise ConfigurationError(f"{', '.join(there)} exists already: --force replaces it, which cannot be undone")
