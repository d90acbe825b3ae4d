"""``ppvfl doctor``: from one host, check everything a run needs, before it starts; say what to do about each
failure."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from accel.validate import require, require_real
from protocols.federation.read import (
    ClientEntry,
    ConfigurationError,
    FederationConfig,
    ServerEntry,
    configuration_hash,
    load,
    split_address,
)
from protocols.net.answerer import Answerer, serve
from protocols.net.checks import Finding, check_own_files, check_peer
from protocols.net.credentials import load_credentials
from refmpc.net.rendezvous import listen_everywhere

__all__ = ["add_parser", "examine", "run"]

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("doctor", help="check files, peers, certificates, versions, clocks and links")
    parser.add_argument("--as", dest="participant", required=True, help="server-0 … server-2 or a client's name")
    parser.add_argument("--config", default="federation.toml", metavar="FILE")
    parser.add_argument("--credentials", metavar="DIR", help="own key and certificate (default: beside the file)")
    parser.add_argument(
        "--state", metavar="DIR", help="own state, on whose disk there must be room (default: NAME/state)"
    )
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds for each peer to connect and to answer")
    parser.add_argument("--alignment", action="store_true", help="also the client whom this one matches ids with")
    parser.add_argument("--answer", action="store_true", help="answer the doctors of others until interrupted")
    parser.add_argument("--listen", metavar="HOST:PORT", help="for --answer, if not the address in the file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0 if nothing failed, 1 otherwise."""
    timeout = require_real("--timeout", arguments.timeout, 0.1, 600.0)
    name = arguments.participant
    if arguments.answer:
        return _answer(load(arguments.config), name, arguments.credentials, arguments.listen)
    digest = ""
    try:
        config = load(arguments.config)
        config.participant(name, "--as")
    except ConfigurationError as error:
        findings = [Finding(name, "file", "failed", str(error), "correct the file; every participant needs the same")]
    else:
        digest = configuration_hash(config)
        findings = [Finding(name, "file", "ok", f"{arguments.config}, hash {digest[:16]}…")]
        findings += examine(
            config, name, arguments.credentials, arguments.state, timeout=timeout, alignment=arguments.alignment
        )
    if arguments.json:
        print(json.dumps({"hash": digest, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _print(findings, name)
    return 1 if any(finding.status == "failed" for finding in findings) else 0


def examine(
    config: FederationConfig,
    name: str,
    directory: str | Path | None = None,
    state: str | Path | None = None,
    *,
    timeout: float = 5.0,
    alignment: bool = False,
) -> list[Finding]:
    """Own files, then all peers at once; findings come back in the order of the file."""
    findings = list(check_own_files(config, name, directory, state))
    peers = list(_peers(config, name, alignment))

    def look(peer: tuple[ServerEntry | ClientEntry, tuple[str, int]]) -> list[Finding]:
        return list(check_peer(config, name, *peer, directory, timeout=timeout))

    with ThreadPoolExecutor(max(1, len(peers))) as pool:
        for found in pool.map(look, peers):
            findings += found
    return findings


def _peers(
    config: FederationConfig, name: str, alignment: bool
) -> Iterator[tuple[ServerEntry | ClientEntry, tuple[str, int]]]:
    """Everybody needs the servers; the label client listens for the other clients only while ids are matched."""
    for server in config.servers:
        if server.name != name:
            yield server, (server.host, server.port)
    leader = config.label_client
    if alignment and leader.name != name and leader.alignment_address is not None:
        yield leader, leader.alignment_address


def _answer(config: FederationConfig, name: str, directory: str | None, listening: str | None) -> int:
    entry = config.participant(name, "--as")
    if listening is not None:
        address = split_address(listening, "--listen")
    elif isinstance(entry, ServerEntry):
        address = entry.host, entry.port
    else:
        require(
            entry.alignment_address is not None,
            "--as",
            name,
            "a participant with an address in the file",
            "give one with --listen",
        )
        assert entry.alignment_address is not None
        address = entry.alignment_address
    credentials = load_credentials(config, name, directory)
    try:
        listeners = listen_everywhere(*address)
    except OSError as error:
        raise ConfigurationError(
            f"{error.strerror or error}; give an address of this host with "
            "--listen HOST:PORT (0.0.0.0 for all), or stop what uses the port"
        ) from None
    stop = threading.Event()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with contextlib.ExitStack() as stack:
        shown = " and ".join(_shown(stack.enter_context(listener)) for listener in listeners)
        print(f"{name} answers doctors at {shown}; interrupt to stop", flush=True)
        serve(listeners, Answerer(config, credentials, name), credentials, stop)
    return 0


def _shown(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _print(findings: list[Finding], name: str) -> None:
    table = Table(title=f"doctor: as seen from {name}", show_lines=False)
    table.add_column("whom", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found, and what to do", overflow="fold")
    for subject, group in itertools.groupby(findings, lambda finding: finding.subject):
        rows = list(group)
        shown = [finding for finding in rows if finding.status != "skipped"]
        for number, finding in enumerate(shown):
            text = Text(finding.found)
            if finding.way_out:
                text.append(f"\n→ {finding.way_out}", style="bold")
            status = Text(finding.status, style=_COLOURS[finding.status])
            table.add_row("" if number else subject, finding.check, status, text)
        skipped = len(rows) - len(shown)
        if skipped:
            table.add_row("", f"{skipped} more checks", Text("skipped", style=_COLOURS["skipped"]), rows[-1].found)
        table.add_section()
    console = Console()
    console.print(table)
    failed = sum(finding.status == "failed" for finding in findings)
    warned = sum(finding.status == "warning" for finding in findings)
    verdict = (
        "everything a run needs is in place" if not failed else f"{failed} checks failed; fix them before starting"
    )
    console.print(f"{verdict}{f', {warned} warnings' if warned else ''}")
