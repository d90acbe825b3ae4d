"""``ppvfl forget``: remove what a stopped server or client keeps of a session: shares of rows, noise key, results,
layers.

A training that may have opened something leaves a record that it was there: its ε is spent, so the same configuration
is never trained again. Budget, audit log, model and claim stay. What is removed cannot be brought back, and the session
cannot go on.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
from pathlib import Path
from typing import Any

from accel.files import Damaged, read_arrays
from accel.validate import require
from protocols.federation.read import ServerEntry, load
from protocols.net.credentials import load_credentials, own_directory
from protocols.net.wire import Identity
from protocols.run.hosts.sessions import forget_session
from protocols.state.audit_log import AuditLog

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """The command line."""
    parser = subparsers.add_parser("forget", help="remove what is kept of a session", description=__doc__)
    parser.add_argument(
        "session", nargs="?", metavar="SESSION", help="its name or the beginning of it (default: list all)"
    )
    parser.add_argument(
        "--as", dest="name", required=True, metavar="NAME", help="which participant, which must be stopped"
    )
    parser.add_argument("--config", default="federation.toml", metavar="FILE")
    parser.add_argument("--credentials", metavar="DIR", help="where key.pem and certificate.pem lie (default: ./NAME)")
    parser.add_argument("--state", metavar="DIR", help="what survives a restart is kept here (default: ./NAME/state)")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0 if something was removed or listed."""
    config = load(arguments.config)
    entry = config.participant(arguments.name, "--as")
    identity = Identity(config, entry.peer, load_credentials(config, entry.name, arguments.credentials))
    state = Path(arguments.state or own_directory(config, entry.name, arguments.credentials) / "state")
    directory = identity.kept_in(state)
    sessions = _of_server(directory) if isinstance(entry, ServerEntry) else _of_client(directory)
    wanted = arguments.session
    if wanted is None:
        for name, places in sessions.items():
            print(name, *(place.name for place in places))
        return 0
    found = [name for name in sessions if name.startswith(wanted)]
    require(
        len(wanted) >= 8 and len(found) == 1,
        "SESSION",
        wanted,
        f"8 or more digits of one of {', '.join(sessions) or 'none'}",
    )
    if isinstance(entry, ServerEntry):
        with AuditLog(directory / "audit.jsonl") as audit:  # refuses while the server runs
            audit.append("session forgotten", session=found[0])
            when = datetime.datetime.now(datetime.UTC)
            for place in sessions[found[0]]:
                forget_session(place, f"{entry.name} was told to forget this session on {when:%Y-%m-%d}")
    else:
        for place in sessions[found[0]]:
            shutil.rmtree(place) if place.is_dir() else place.unlink()
    print(f"{entry.name} has forgotten {found[0]}")
    return 0


def _of_server(directory: Path) -> dict[str, list[Path]]:
    return {file.parent.name.partition("-")[2]: [file.parent] for file in sorted(directory.glob("*/session.json"))}


def _of_client(directory: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for place in sorted(directory.glob("training-*")):
        found.setdefault(place.name.partition("-")[2], []).append(place)
    for file in sorted(directory.glob("alignment-*.npz")):
        try:
            name = str(read_arrays(file)["session"])
        except Damaged:
            name = "damaged-alignment"
        found.setdefault(name, []).append(file)
    return found
