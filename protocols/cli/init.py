"""``ppvfl init``: write a commented federation.toml, and keys and certificates for all participants."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from accel.errors import InvalidArgument
from accel.files import write_text
from accel.validate import require, require_integer, require_real
from protocols.cli.key import refuse_overwriting
from protocols.cli.pin import with_pin
from protocols.federation.read import FederationConfig, configuration_hash, load, parse, split_address
from protocols.federation.template import federation_text
from protocols.net.credentials import CERTIFICATE, KEY, REQUEST, make_key, read_certificate

__all__ = ["add_parser", "initialise", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("init", help="write federation.toml, keys and certificates")
    parser.add_argument(
        "--servers",
        default="127.0.0.1:7000,127.0.0.1:7001,127.0.0.1:7002",
        metavar="HOST:PORT,HOST:PORT,HOST:PORT",
        help="the three servers (default: ports 7000 to 7002 of this machine)",
    )
    parser.add_argument("--clients", default="bank,card", metavar="NAME,…", help="the last one holds the labels")
    parser.add_argument(
        "--alignment",
        default="127.0.0.1:7100",
        metavar="HOST:PORT",
        help="where the label client listens for the others while ids are matched (default: port 7100 of this "
        "machine); "
        "or an address for each client",
    )
    parser.add_argument("--widths", default="", metavar="N,…", help="columns of each client (default 32 each)")
    parser.add_argument("--classes", metavar="N or NAME,…", help="number of classes, or their label texts (default 2)")
    parser.add_argument(
        "--target-range", metavar="LOW:HIGH", help="instead of classes: the label is a number within this public range"
    )
    parser.add_argument(
        "--held-out",
        type=float,
        default=0.2,
        metavar="SHARE",
        help="of the common rows, which takes no part and is kept for an evaluation (default 0.2)",
    )
    parser.add_argument("--name", default="example", help="of the federation")
    parser.add_argument(
        "--dir", default="federation", metavar="DIR", help="where everything goes (default federation/)"
    )
    parser.add_argument("--csr", action="store_true", help="signing requests for your own authority, no certificates")
    parser.add_argument("--no-keys", action="store_true", help="the file only: each host runs `ppvfl key` for itself")
    parser.add_argument("--force", action="store_true", help="replace what is there")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    names = _items(arguments.clients)
    alignment = _items(arguments.alignment)
    if len(alignment) == 1:
        alignment = [""] * (len(names) - 1) + alignment
    given = _items(arguments.widths) or ["32"] * len(names)
    require(len(alignment) == len(names), "--alignment", arguments.alignment, f"one address or {len(names)}")
    require(len(given) == len(names), "--widths", arguments.widths, f"{len(names)} numbers")
    require(all(w.isascii() and w.isdigit() for w in given), "--widths", arguments.widths, "positive numbers")
    servers = [split_address(text, "--servers") for text in _items(arguments.servers)]
    require(len(servers) == 3, "--servers", arguments.servers, "three addresses host:port, separated by commas")
    target = None if arguments.target_range is None else _range(arguments.target_range)
    require(target is None or arguments.classes is None, "--classes", arguments.classes, "absent with --target-range")
    classes = _items(arguments.classes or "2")
    number = len(classes) == 1 and classes[0].isascii() and classes[0].isdigit()
    text = federation_text(
        arguments.name,
        servers,
        [(name, require_integer("--widths", int(w), 1), a) for name, w, a in zip(names, given, alignment, strict=True)],
        int(classes[0]) if number else classes,
        require_real("--held-out", arguments.held_out, 0.0, 0.5),
        target,
    )
    directory = Path(arguments.dir)
    keys = "none" if arguments.no_keys else "requests" if arguments.csr else "certificates"
    config = initialise(text, directory, keys=keys, force=arguments.force)
    _print(config, directory, keys, as_json=arguments.json)
    return 0


def initialise(text: str, directory: Path, *, keys: str = "certificates", force: bool = False) -> FederationConfig:
    """Write the file and, for each participant, a directory with its key; all is checked before anything is written."""
    path = directory / "federation.toml"
    config = parse(text, str(path), pinned=False)
    if not force:
        files = (KEY, CERTIFICATE, REQUEST)
        there = [directory / entry.name / file for entry in config.participants for file in files]
        refuse_overwriting([path, *(there if keys != "none" else [])])
    directory.mkdir(parents=True, exist_ok=True)
    if keys != "none":
        for entry in config.participants:
            (directory / entry.name / CERTIFICATE).unlink(missing_ok=True)
            made = make_key(entry, directory / entry.name, request=keys == "requests")
            if keys == "certificates":
                text = with_pin(text, config, entry, read_certificate(made))
                config = parse(text, str(path), pinned=False)
    write_text(path, text)
    return load(path, pinned=False)


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _range(text: str) -> tuple[float, float]:
    """LOW:HIGH as two numbers."""
    try:
        low, high = (float(end) for end in text.split(":"))
    except ValueError:
        raise InvalidArgument(f"--target-range {text!r} must be two numbers, LOW:HIGH, such as 0:100") from None
    require_real("--target-range", low)
    require_real("--target-range", high, low, open_low=True)
    return low, high


def _print(config: FederationConfig, directory: Path, keys: str, *, as_json: bool) -> None:
    if as_json:
        facts = {
            "config": config.source,
            "configuration_hash": configuration_hash(config),
            "participants": {entry.name: entry.fingerprint for entry in config.participants},
        }
        print(json.dumps(facts, indent=2))
        return
    made = {"certificates": f"{KEY}, {CERTIFICATE}", "requests": f"{KEY}, {REQUEST}", "none": "nothing yet"}[keys]
    table = Table(title=f"{config.source}: federation {config.name!r}")
    for column in ("participant", "its directory", "holds", "certificate SHA-256"):
        table.add_column(column)
    for entry in config.participants:
        shown = f"{entry.fingerprint[:16]}…" if entry.fingerprint else "not pinned yet"
        table.add_row(entry.name, "-" if keys == "none" else str(directory / entry.name), made, shown)
    console = Console()
    console.print(table)
    console.print(f"Everybody gets {config.source}; its directory goes to its participant only, over a safe way.")
    if keys == "requests":
        console.print(f"Have each {REQUEST} signed, keep the result as {CERTIFICATE} beside it, then pin each:")
        console.print(f"  ppvfl pin --config {config.source} --participant NAME --certificate NAME/{CERTIFICATE}")
    elif keys == "none":
        console.print("Each participant runs `ppvfl key --as NAME` on its host and sends its certificate; pin each:")
        console.print(f"  ppvfl pin --config {config.source} --participant NAME --certificate FILE")
    else:
        console.print(f"Next, on each host: ppvfl doctor --config {config.source} --as NAME")
