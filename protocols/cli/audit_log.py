"""``ppvfl audit-log``: what was opened, under which claim, and whether the servers' records agree and are untouched."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from accel.files import read_json
from accel.validate import require
from protocols.run.hosts.sessions import require_kept
from protocols.state.audit_log import AuditError, Record, compare, read_log
from protocols.state.budget import BUDGET, ledger_files, read_spent
from refmpc.net.framing import printable

__all__ = ["Run", "add_parser", "budgets", "check", "collect", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("audit-log", help="print and verify what a run released, from the servers' records")
    parser.add_argument(
        "directories",
        nargs="+",
        metavar="DIR",
        help="a run's directory, or one directory per server: then they are compared with each other",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


@dataclass(frozen=True)
class Run:
    """One ledger of one server. ``name`` (and ``session``, if it has one) is the same at all servers."""

    server: str
    name: str
    session: str
    ledger: Mapping[str, Any]
    claim: str
    path: str


@dataclass(frozen=True)
class Log:
    """One audit log of one server. ``place``, below the server's directory, is the same at all servers: a server has a
    log for each configuration."""

    server: str
    place: str
    path: str
    records: list[Record]


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0 if everything agrees, 1 if something does not."""
    runs, logs, wrong = collect([Path(directory) for directory in arguments.directories])
    require(
        bool(runs or logs or wrong),
        "DIR",
        ", ".join(arguments.directories),
        "directories with a ledger.json or an audit.jsonl somewhere below",
        "give a server's --state, or the directory of a run in runs/",
    )
    wrong += check(runs) + check_against_logs(runs, logs)
    for place in dict.fromkeys(log.place for log in logs):
        wrong += compare({log.server: log.records for log in logs if log.place == place})
    spent, unlike = budgets([Path(directory) for directory in arguments.directories])
    wrong += unlike
    if arguments.json:
        facts = {
            "spent": spent,
            "runs": [asdict(one) for one in runs],
            "logs": [asdict(log) for log in logs],
            "wrong": wrong,
        }
        print(json.dumps(facts, indent=2))
    else:
        _print(runs, logs, wrong)
        for server, ledgers in spent.items():
            for ledger in ledgers:
                limit = "no limit" if ledger["limit"] is None else f"limit {ledger['limit']:g}"
                words = f"ε = {ledger['epsilon']:.4g} at δ = {ledger['delta']:g} in {len(ledger['runs'])} runs, {limit}"
                Console().print(f"{server}: spent on {ledger['ledger']}: {words}", markup=False)
    return 1 if wrong else 0


def collect(directories: Iterable[Path]) -> tuple[list[Run], list[Log], list[str]]:
    """All ledgers and audit logs below the directories, and sentences on those that cannot be read."""
    runs: list[Run] = []
    logs: list[Log] = []
    wrong: list[str] = []
    for server, directory in _servers(list(directories)).items():
        for file in sorted(directory.rglob("ledger.json")):
            try:
                runs.append(_read_run(server, directory, file))
            except (ValueError, KeyError, TypeError, OSError) as error:
                wrong.append(f"{file} is not a ledger: {type(error).__name__}: {error}")
        for file in sorted(directory.rglob("audit.jsonl")):
            place = str(file.parent.relative_to(directory))
            try:
                logs.append(Log(server, "" if place == "." else place, str(file), read_log(file)))
            except AuditError as error:
                wrong.append(str(error))
    return runs, logs, wrong


def budgets(directories: Iterable[Path]) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """What each server has recorded as spent, and sentences on ledgers that cannot be read or differ."""
    found: dict[str, list[dict[str, Any]]] = {}
    wrong: list[str] = []
    for server, directory in _servers(list(directories)).items():
        for file in itertools.chain.from_iterable(map(ledger_files, sorted(directory.rglob(BUDGET)))):
            try:
                found.setdefault(server, []).append(read_spent(file))
            except (ValueError, KeyError, TypeError, OSError) as error:
                wrong.append(f"{file} is not a privacy ledger: {type(error).__name__}")
    for (first, ledgers), (second, others) in itertools.pairwise(found.items()):
        theirs = {ledger["ledger"]: sorted(ledger["runs"]) for ledger in others}
        for ledger in ledgers:
            if sorted(ledger["runs"]) != theirs.get(ledger["ledger"]):
                wrong.append(f"{first} and {second} differ in the runs charged to {ledger['ledger']}")
    return found, wrong


def check(runs: list[Run]) -> list[str]:
    """Sentences on releases without a claim, and on servers that recorded different things of the same run."""
    wrong = []
    for one in runs:
        for release in one.ledger["releases"]:
            name, claim = release["name"], release["claim"]
            if not claim or one.ledger["declared"].get(name) != claim:
                wrong.append(f"{one.server}: release {name!r} was not declared with the claim that it carries")
    for name in dict.fromkeys(one.name for one in runs):
        first, *others = [one for one in runs if one.name == name]
        for other in others:
            for what, left, right in _differences(first, other):
                wrong.append(
                    f"{name or 'the run'}: {first.server} and {other.server} differ in {what}: {left}, {right}"
                )
    return wrong


def check_against_logs(runs: list[Run], logs: list[Log]) -> list[str]:
    """Sentences on ledgers that say something else than the server's own audit log, whose records are chained."""
    wrong = []
    for one in runs:
        above = [log for log in logs if Path(log.path).parent in Path(one.path).parents]
        if not one.session or not above:
            continue
        records = max(above, key=lambda log: len(log.path)).records
        noted = [r.facts for r in records if r.event == "release" and r.facts.get("session") == one.session]
        last = [facts for facts in noted if facts.get("attempt") == noted[-1].get("attempt")]
        found = [
            (f.get("name"), f.get("elements"), f.get("receiver"), f.get("claim"))
            for f in last
            for _ in range(int(f.get("times", 1)))
        ]
        want = [
            (r["name"], r["elements"], r["receiver"], hashlib.sha256(r["claim"].encode()).hexdigest())
            for r in one.ledger["releases"]
        ]
        if Counter(found) != Counter(want):
            wrong.append(
                f"{one.name}: the ledger of {one.server} lists {len(want)} releases, its audit log has {len(found)} "
                f"that "
                "match in part: the ledger was changed, or the server died between writing the two"
            )
    return wrong


def _differences(first: Run, other: Run) -> Iterable[tuple[str, str, str]]:
    """Bytes and seconds are each server's own; everything else is the same at all three."""
    for what in ("declared", "releases"):
        left, right = first.ledger[what], other.ledger[what]
        if left != right:
            yield what, _brief(left), _brief(right)
    mine, theirs = ({name: c["rounds"] for name, c in one.ledger["phases"].items()} for one in (first, other))
    for phase in dict.fromkeys((*mine, *theirs)):
        if mine.get(phase) != theirs.get(phase):
            yield f"rounds of the phase {phase!r}", str(mine.get(phase)), str(theirs.get(phase))


def _brief(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(f"{r['name']!r} ({r['elements']} to {r['receiver']})" for r in value) or "none"
    return ", ".join(map(repr, value)) or "none"


def _servers(directories: list[Path]) -> dict[str, Path]:
    """Participant → directory: the sub-directories server-0, … if there are, else each directory as it is."""
    found: dict[str, Path] = {}
    for directory in directories:
        require(directory.is_dir(), "DIR", str(directory), "an existing directory")
        below = [path for path in sorted(directory.glob("server-*")) if path.is_dir()]
        below = [path for path in below if any(path.rglob("ledger.json")) or any(path.rglob("audit.jsonl"))]
        for path in below or [directory]:
            name = next((part for part in reversed(path.resolve().parts) if part.startswith("server-")), path.name)
            found[name if name not in found else str(path)] = path
    return found


def _read_run(server: str, directory: Path, file: Path) -> Run:
    ledger = read_json(require_kept(file.parent, file.name))
    for release in ledger["releases"]:
        require(set(release) == {"name", "elements", "receiver", "claim"}, "release", sorted(release), "a release")
    require(isinstance(ledger["declared"], dict) and isinstance(ledger["phases"], dict), "ledger", "", "complete")
    session, claim = file.parent / "session.json", require_kept(file.parent, "claim.txt")
    name, number = str(file.parent.relative_to(directory)), ""
    if session.exists():
        facts = read_json(session)
        number = str(facts["name"])
        name = f"{facts['kind']} {number[:8]}"
    text = claim.read_text().strip() if claim.exists() else ""
    return Run(server, "" if name == "." else name, number, ledger, text, str(file))


def _print(runs: list[Run], logs: list[Log], wrong: list[str]) -> None:
    console = Console()
    for name in dict.fromkeys(one.name for one in runs):
        same = [one for one in runs if one.name == name]
        _print_releases(console, name, same)
        for claim in dict.fromkeys(one.claim for one in same if one.claim):
            console.print(Text(claim))
    for place in dict.fromkeys(log.place for log in logs):
        _print_logs(console, [log for log in logs if log.place == place])
    for sentence in wrong:
        console.print(Text(f"wrong: {sentence}", style="bold red"))
    if not wrong:
        servers = sorted({one.server for one in runs} | {log.server for log in logs})
        agree = f"{', '.join(servers)} agree" if len(servers) > 1 else "one server's records only, nothing to compare"
        console.print(
            f"[green]nothing wrong[/green]: {agree}; every release was declared with its claim, chains are whole"
        )


def _print_releases(console: Console, name: str, same: list[Run]) -> None:
    ledgers = [one.ledger for one in same]
    table = Table(title=f"{name or 'run'}: releases, as recorded by {', '.join(one.server for one in same)}")
    for column in ("what", "numbers", "times", "to whom", "recorded by"):
        table.add_column(column, justify="right" if column in ("numbers", "times") else "left")
    everything = [release for ledger in ledgers for release in ledger["releases"]]
    for release in {json.dumps(release, sort_keys=True): release for release in everything}.values():
        counts = {
            one.server: one.ledger["releases"].count(release) for one in same if release in one.ledger["releases"]
        }
        times = " ".join(f"{count:,}" for count in dict.fromkeys(counts.values()))  # one number, unless servers differ
        table.add_row(release["name"], f"{release['elements']:,}", times, release["receiver"], ", ".join(counts))
    console.print(table)
    costs = Table(title=f"cost by phase, {len(same)} of 3 servers")
    for column in ("phase", "rounds", "bytes sent", "seconds"):
        costs.add_column(column, justify="left" if column == "phase" else "right")
    for phase in dict.fromkeys(phase for ledger in ledgers for phase in ledger["phases"]):
        counters = [ledger["phases"][phase] for ledger in ledgers if phase in ledger["phases"]]
        sent, seconds = sum(c["bytes_sent"] for c in counters), max(c["seconds"] for c in counters)
        costs.add_row(phase, f"{counters[0]['rounds']:,}", f"{sent:,}", f"{seconds:.2f}")
    console.print(costs)


def _print_logs(console: Console, logs: list[Log]) -> None:
    """The servers' logs of one configuration as one: what several servers noted alike is one row."""
    rows: dict[tuple[str, str, int], tuple[str, list[str]]] = {}
    for log in logs:
        seen: Counter[tuple[str, str]] = Counter()
        for record in log.records:
            same = record.event, _facts(record.facts)
            seen[same] += 1
            time, by = rows.setdefault((*same, seen[same]), (record.time, []))
            rows[(*same, seen[same])] = min(time, record.time), [*by, log.server]
    counts = ", ".join(f"{log.server} {len(log.records)} records" for log in logs)
    table = Table(title=f"audit logs{f' of {logs[0].place}' if logs[0].place else ''}: {counts}")
    table.add_column("time (UTC)", no_wrap=True)
    for column in ("event", "facts", "noted by"):
        table.add_column(column, overflow="fold")
    for (event, facts, _), (time, by) in sorted(rows.items(), key=lambda row: row[1][0]):
        whom = "all" if len(by) == len(logs) > 1 else ", ".join(by)
        table.add_row(time[:19].replace("T", " "), printable(event), Text(printable(facts)), whom)
    console.print(table)


def _facts(value: Any) -> str:
    """Names and values; long hashes are cut for people, JSON has all of them."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_facts(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " ".join(map(_facts, value))
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{24,}\b", r"\1…", str(value))
