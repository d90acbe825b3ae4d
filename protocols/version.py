"""Which software this is: what ``--version`` prints, and what participants compare."""

from __future__ import annotations

import argparse
import importlib.metadata

from refmpc.net.greeting import PROTOCOL_VERSION

__all__ = ["add_version_option", "software_version"]


def software_version() -> str:
    """Version of this software and of its wire protocol; participants must run the same."""
    try:
        version = importlib.metadata.version("ppvfl")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    return f"{version}/{PROTOCOL_VERSION}"


def add_version_option(parser: argparse.ArgumentParser) -> None:
    """``--version``: the release and, after the slash, the version of the wire protocol."""
    parser.add_argument("--version", action="version", version=f"ppvfl {software_version()}")
