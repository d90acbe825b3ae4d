"""``ppvfl status``: what the three servers are doing: who is waited for, which step, how fast, what was opened and
spent."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

from accel.validate import require_real
from protocols.federation.read import load
from protocols.net.credentials import load_credentials
from protocols.net.wire import Identity, call
from refmpc.core.errors import RefmpcError
from refmpc.net.framing import printable

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """The command line."""
    parser = subparsers.add_parser("status", help="what the three servers are doing", description=__doc__)
    parser.add_argument("--as", dest="name", required=True, metavar="NAME", help="which participant asks")
    parser.add_argument("--config", default="federation.toml", metavar="FILE")
    parser.add_argument("--credentials", metavar="DIR", help="own key and certificate (default: beside the file)")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds for each server to answer")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0 if every server answered, 1 otherwise."""
    timeout = require_real("--timeout", arguments.timeout, 0.1, 600.0)
    config = load(arguments.config)
    entry = config.participant(arguments.name, "--as")
    identity = Identity(config, entry.peer, load_credentials(config, entry.name, arguments.credentials))
    found: dict[str, dict[str, Any]] = {}
    for server in config.servers:
        try:
            channel, _ = call(identity, server.id, (server.host, server.port), "status", timeout=timeout)
            with channel:
                found[server.name] = channel.receive(timeout=timeout)[0]
        except RefmpcError as error:
            found[server.name] = {"unreachable": str(error)}
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)
    return 1 if any("unreachable" in facts for facts in found.values()) else 0


def _print(found: dict[str, dict[str, Any]]) -> None:
    table = Table(show_lines=True)
    for name in ("server", "what", "found"):
        table.add_column(name, overflow="fold")
    for server, facts in found.items():
        for place, (what, words) in enumerate(_lines(facts)):
            table.add_row("" if place else server, what, printable(words, 400))
    Console().print(table)


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    if "unreachable" in facts:
        return [("not reached", facts["unreachable"])]
    lines = [("waits for", f"{w['whom']} since {w['since']} ({w['why']})") for w in facts.get("waits", [])]
    for session in facts.get("sessions", []):
        words = f"{session['state']}, {session['rows']:,} rows"
        if session.get("total"):
            words += f", {session['phase']} {session['done']:,} of {session['total']:,}"
        if session.get("rate"):
            words += f", {session['rate']:.3g} a second"
        if session.get("seconds_left") is not None:
            words += f", {session['seconds_left']:,} s left"
        if session.get("rounds") is not None:
            words += f", {session['rounds']:,} rounds, {session['bytes_sent'] / 1e6:,.2f} MB sent"
        lines.append((f"{session['kind']} {session['name']}", words))
        if session.get("failed"):
            lines.append(("failed", session["failed"]))
    for spent in facts.get("budget", []):
        epsilon = "unbounded" if spent["epsilon"] is None else f"{spent['epsilon']:.4g}"
        limit = "no limit" if spent["limit"] is None else f"limit {spent['limit']:g}"
        lines.append((f"spent on {spent['client']}", f"ε = {epsilon} at δ = {spent['delta']:g}, {limit}"))
    return lines or [("", "nothing yet")]
