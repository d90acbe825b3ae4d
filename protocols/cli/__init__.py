"""``ppvfl``: everything a host needs, one sub-command each. ``python -m protocols.deploy`` is the same.

A command's module is imported when that command is called: ``ppvfl --help`` loads none of them.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["COMMANDS", "main", "make_parser"]

# each module protocols.cli.NAME has add_parser(subparsers) and run(arguments) -> exit code
COMMANDS: dict[str, str] = {
    "init": "write federation.toml, keys and certificates",
    "key": "make a key and certificate (or signing request) for one participant",
    "pin": "write a participant's certificate and fingerprint into the file",
    "schema": "write columns.toml for a client's file",
    "check": "look at one's own file before connecting",
    "public-rows": "public labelled rows to measure a run on",
    "estimate": "what a training would cost, and how long it would take",
    "doctor": "check files, peers, certificates, versions, clocks and links",
    "status": "what the three servers are doing",
    "warm": "compile the kernels of this machine, once after an installation",
    "server": "run one of the three servers",
    "client": "take part with a file of columns",
    "predict": "predictions for new rows, to one client only",
    "run": "all participants on this machine",
    "forget": "remove what is kept of a session",
    "audit-log": "print and verify what a run released, from the servers' records",
}


def make_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The command line: with the options of ``command`` only, or of all commands (None), whose modules are imported."""
    parser = argparse.ArgumentParser(
        prog="ppvfl",
        description="Vertical federated learning between organisations: three servers, any number of clients.",
        epilog="Start with `ppvfl init`, then `ppvfl doctor` on each host; docs/deployment.md walks through it.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show release, wire protocol and commit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, words in COMMANDS.items():
        if command in (name, None):
            _module(name).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=words)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from protocols.version import version_line

        print(version_line())
        parser.exit()


def _module(name: str) -> Any:
    return importlib.import_module(f"protocols.cli.{name.replace('-', '_')}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command. Exit codes: 0 done, 1 something is wrong or broke (it may work later), 2 bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = make_parser(words[0] if words and words[0] in COMMANDS else "none").parse_args(words)
    from accel.errors import InvalidArgument, PpvflError

    try:
        return int(_module(arguments.command).run(arguments))
    except InvalidArgument as error:
        print(f"ppvfl {arguments.command}: {error.summary}", file=sys.stderr)
        return 2
    except PpvflError as error:
        print(f"ppvfl {arguments.command}: {error.summary}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"ppvfl {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"ppvfl {arguments.command}: interrupted", file=sys.stderr)
        return 130
