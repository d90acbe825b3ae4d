"""``ppvfl``: everything a host needs, one sub-command each. ``python -m protocols.deploy`` is the same."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys

from accel.errors import InvalidArgument, PpvflError

__all__ = ["main"]

# each is a module of this package with add_parser(subparsers) and run(arguments) -> exit code
COMMANDS = ("init", "key", "pin", "doctor", "server", "client", "predict", "run", "audit_log")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ppvfl",
        description="Vertical federated learning between organisations: three servers, any number of clients.",
        epilog="Start with `ppvfl init`, then `ppvfl doctor` on each host; docs/deployment.md walks through it.",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        if importlib.util.find_spec(f"protocols.deploy.commands.{name}") is not None:
            importlib.import_module(f"protocols.deploy.commands.{name}").add_parser(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command. Exit codes: 0 done, 1 something is wrong or broke (it may work later), 2 bad input."""
    arguments = make_parser().parse_args(argv)
    module = importlib.import_module(f"protocols.deploy.commands.{arguments.command.replace('-', '_')}")
    try:
        return module.run(arguments)
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
