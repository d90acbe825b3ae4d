"""Which software this is: what ``--version`` prints, and what participants compare."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from refmpc.net.greeting import PROTOCOL_VERSION

__all__ = ["add_version_option", "software_commit", "software_version", "version_line"]

CHECKOUT = Path(__file__).resolve().parents[1]


def software_version() -> str:
    """Version of this software and of its wire protocol; participants must run the same."""
    try:
        version = importlib.metadata.version("ppvfl")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    return f"{version}/{PROTOCOL_VERSION}"


def software_commit() -> str:
    """The commit of this software: as pip noted it (``pip install git+…``), or that of the checkout it runs from."""
    commit = ""
    with suppress(importlib.metadata.PackageNotFoundError):
        noted = importlib.metadata.distribution("ppvfl").read_text("direct_url.json")
        commit = json.loads(noted or "{}").get("vcs_info", {}).get("commit_id", "")
    if not commit and (CHECKOUT / ".git").exists():
        command = ["git", "-C", str(CHECKOUT), "rev-parse", "HEAD"]
        with suppress(OSError, subprocess.CalledProcessError):
            commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return commit[:12] or "unknown"


def version_line() -> str:
    """What ``--version`` prints: the release, after the slash the version of the wire protocol, and the commit."""
    return f"ppvfl {software_version()} (commit {software_commit()})"


class _Version(argparse.Action):
    """Asks for the version only when it is wanted, because that may ask git."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(version_line())
        parser.exit()


def add_version_option(parser: argparse.ArgumentParser) -> None:
    """``--version``: the release, the version of the wire protocol and the commit."""
    nothing = argparse.SUPPRESS  # it is no value among the arguments
    words = "show release, wire protocol and commit"
    parser.add_argument("--version", action=_Version, nargs=0, dest=nothing, default=nothing, help=words)
