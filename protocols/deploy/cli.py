"""``ppvfl``: everything a host needs, one sub-command each. ``python -m protocols.deploy`` is the same."""

from __future__ import annotations

import argparse
import sys
from types import ModuleType

from accel.errors import InvalidArgument, PpvflError
from protocols.deploy.commands import audit_log, check, client, doctor, init, key, pin, predict, run, schema, server
from protocols.version import add_version_option

__all__ = ["main"]

# each module has add_parser(subparsers) and run(arguments) -> exit code
COMMANDS: dict[str, ModuleType] = {
    "init": init,
    "key": key,
    "pin": pin,
    "schema": schema,
    "check": check,
    "doctor": doctor,
    "server": server,
    "client": client,
    "predict": predict,
    "run": run,
    "audit-log": audit_log,
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ppvfl",
        description="Vertical federated learning between organisations: three servers, any number of clients.",
        epilog="Start with `ppvfl init`, then `ppvfl doctor` on each host; docs/deployment.md walks through it.",
    )
    add_version_option(parser)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS.values():
        command.add_parser(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command. Exit codes: 0 done, 1 something is wrong or broke (it may work later), 2 bad input."""
    arguments = make_parser().parse_args(argv)
    try:
        return int(COMMANDS[arguments.command].run(arguments))
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
