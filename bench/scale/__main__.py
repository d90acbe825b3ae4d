"""A federation of many rows through ``ppvfl``: three servers and two clients as processes, over mutual TLS on loopback.

    python -m bench.scale --rows 100000 --columns 100

Makes the tables, then reads, aligns, uploads, tests, trains and releases as ``ppvfl run`` does. Prints one line a
phase: seconds, bytes and the most memory of each participant (own memory; pages of files, which the kernel takes back,
are not counted), and what ``--estimate`` and its calibration, made right before, say beside what happened.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from accel.errors import PpvflError
from bench.scale.memory import MemoryRecorder
from bench.scale.tables import CLIENTS, ID, LABEL, make_tables
from protocols.cli.init import initialise
from protocols.federation.public_plan import plan_for
from protocols.federation.read import FederationConfig, load
from protocols.federation.template import federation_text
from protocols.run.calibration import PHASES, calibrate, elapsed, forecast
from protocols.run.report import estimate, size_in_words
from protocols.run.timing_run import measure_trials, processes

__all__ = ["SERVERS", "Phase", "Scale", "beside_estimate", "beside_forecast", "main", "measure"]

SERVERS = ("server-0", "server-1", "server-2")
_SERVER_PHASES = {  # of the ledger, in their order
    "take in": ("upload",),
    "input checks": ("verification",),
    "norms for the clip": ("norms",),
    "shuffle": ("shuffle",),
    "training": ("training", "checkpoint", "joint noise"),
    "release": ("release",),
}


@dataclass(frozen=True)
class Phase:
    """One line: bytes are of all participants together, memory is the most of each, in bytes."""

    name: str
    seconds: float
    rounds: int
    bytes: int
    memory: dict[str, int]
    memory_of_all: int
    cpu: dict[str, float]


@dataclass(frozen=True)
class Scale:
    """What one run took."""

    rows: int
    columns: int
    steps: int
    phases: tuple[Phase, ...]
    highest: dict[str, int]
    memory_of_all: int
    estimated: dict[str, float]
    forecast: dict[str, float]  # seconds by phase, from a calibration right before
    ranges: dict[str, tuple[float, float]]  # of those phases that vary
    load: tuple[float, float, float]


def measure(directory: Path, rows: int, columns: int, batch: int, epochs: int, protocol: str, timeout: float) -> Scale:
    """One federation in ``directory``; raises if a participant fails."""
    begun = time.time()
    files = make_tables(directory, rows, columns)
    tables = time.time()
    config = _federation(directory, columns, batch, epochs, protocol)
    plan = plan_for(config, rows)
    expected = forecast(plan, calibrate(plan, partial(measure_trials, config, rows), config.run.matching))
    made = time.time()
    out = directory / "out"
    out.mkdir()
    with (
        processes(_commands(config, files, out), out) as running,
        MemoryRecorder({name: process.pid for name, process in running.items()}) as recorder,
    ):
        _wait(running, time.monotonic() + timeout, out)
    events = {name: _events(out / f"{name}.log") for name in (*SERVERS, *CLIENTS)}
    phases = [
        Phase("make tables (bench)", tables - begun, 0, 0, {}, 0, {}),
        *_phases(recorder, events, directory, made),
    ]
    return Scale(
        rows,
        columns,
        plan.schedule.num_steps,
        tuple(phases),
        recorder.highest,
        recorder.peak_of_all(0.0, time.time()),
        estimate(plan, keeps_steps=True),
        expected.seconds,
        expected.ranges,
        os.getloadavg(),
    )


def _federation(directory: Path, columns: int, batch: int, epochs: int, protocol: str) -> FederationConfig:
    with contextlib.ExitStack() as stack:
        listening = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        *ports, meeting = (listener.getsockname()[1] for listener in listening)
    widths = (columns // 2, columns - columns // 2)
    text = federation_text(
        "scale",
        [("127.0.0.1", port) for port in ports],
        [(CLIENTS[0], widths[0], ""), (CLIENTS[1], widths[1], f"127.0.0.1:{meeting}")],
        ["no", "yes"],
    )
    for word, value in (("epochs", epochs), ("batch_size", batch)):
        text = text.replace(f'{word} = "auto"', f"{word} = {value}")
    text = text.replace('protocol = "g_bmf" ', f'protocol = "{protocol}" ').replace("delta = 1e-5", "delta = 1e-7")
    initialise(text, directory)
    return load(directory / "federation.toml")


def _commands(config: FederationConfig, files: Mapping[str, Path], out: Path) -> dict[str, list[str]]:
    def command(name: str, *words: str) -> list[str]:
        common = ["--as", name, "--config", config.source, "--log", str(out / f"{name}.log")]
        return [sys.executable, "-m", "protocols.deploy", *words[:1], *common, *words[1:]]

    commands = {name: command(name, "server", "--until-trained", "--status", "off") for name in SERVERS}
    for name, file in files.items():
        own = ["--columns", str(file), "--id", ID, "--value-range=-1,1", "--model-out", str(out / f"model-{name}.npz")]
        own += ["--label-column", LABEL] if name == CLIENTS[-1] else []
        commands[name] = command(name, "client", *own)
    return commands


def _wait(running: Mapping[str, Any], deadline: float, out: Path) -> None:
    while any(process.poll() is None for process in running.values()):
        failed = [name for name, process in running.items() if process.poll() not in (None, 0)]
        if failed or time.monotonic() > deadline:
            late = failed or [name for name, process in running.items() if process.poll() is None]
            said = (out / f"{late[0]}.err").read_text()[-2000:] + "".join(_tail(out / f"{late[0]}.log"))
            raise RuntimeError(f"{', '.join(late)} {'failed' if failed else 'did not end in time'}:\n{said}")
        time.sleep(0.1)


def _tail(file: Path) -> list[str]:
    return file.read_text().splitlines(keepends=True)[-5:] if file.exists() else []


def _events(file: Path) -> dict[str, tuple[float, dict[str, Any]]]:
    """When each kind of line was logged last, and what it said."""
    found = {}
    for line in file.read_text().splitlines():
        record = json.loads(line)
        found[record["event"]] = datetime.datetime.fromisoformat(record["time"]).timestamp(), record
    return found


def _phases(
    recorder: MemoryRecorder,
    events: Mapping[str, Mapping[str, tuple[float, dict[str, Any]]]],
    directory: Path,
    made: float,
) -> list[Phase]:
    def last(event: str, names: tuple[str, ...] = CLIENTS) -> float:
        return max(events[name][event][0] for name in names)

    def phase(name: str, begin: float, end: float, rounds: int = 0, size: int = 0) -> Phase:
        memory = {who: recorder.peak(who, begin, end) for who in recorder.held}
        cpu = {who: round(recorder.cpu(who, begin, end), 2) for who in recorder.held}
        return Phase(name, end - begin, rounds, size, memory, recorder.peak_of_all(begin, end), cpu)

    read, aligned = last("columns read"), last("rows aligned")
    uploaded = last("upload complete, all servers have it")
    sent = sum(events[name]["upload complete, all servers have it"][1]["bytes_sent"] for name in CLIENTS)
    crossed = int(events[CLIENTS[-1]]["rows aligned"][1].get("bytes_moved", 0))
    found = [
        phase("start and read", made, read),
        phase("align", read, aligned, 0, crossed),
        phase("upload", aligned, uploaded, 0, sent),
    ]
    ledgers = [json.loads(_ledger(directory, name).read_text())["phases"] for name in SERVERS]
    at = last("all servers agree", SERVERS)
    found.append(phase("meet", uploaded, at))
    taken = elapsed([{part: counters["seconds"] for part, counters in ledger.items()} for ledger in ledgers])
    for name, parts in _SERVER_PHASES.items():
        counters = [[ledger[part] for part in parts if part in ledger] for ledger in ledgers]
        if not counters[0]:
            continue
        seconds = sum(taken.get(part, 0.0) for part in parts)
        rounds = sum(part["rounds"] for part in counters[0])
        size = sum(part["bytes_sent"] for own in counters for part in own)
        found.append(phase(name, at, at + seconds, rounds, size))
        at += seconds
    found.append(phase("hand over", at, last("model received")))
    return found


def _ledger(directory: Path, server: str) -> Path:
    return next((directory / server / "state").glob("*/training-*/ledger.json"))


def beside_estimate(found: Scale) -> dict[str, tuple[float, float]]:
    """What was estimated, and what happened: rounds and bytes of the servers, bytes of the clients, memory of the
    largest server."""
    by_name = {phase.name: phase for phase in found.phases}
    servers = [by_name[name] for name in _SERVER_PHASES if name in by_name]
    memory = max(phase.memory.get(server, 0) for phase in servers for server in SERVERS)
    happened = {
        "rounds": sum(phase.rounds for phase in servers),
        "bytes": sum(phase.bytes for phase in servers),
        "upload_bytes": by_name["upload"].bytes,
        "memory_per_server": memory,
    }
    return {name: (found.estimated[name], value) for name, value in happened.items()}


# phases of this module that a phase of the forecast is about
_TIMED = {
    "align": ("align",),
    "upload": ("upload", "take in"),
    "tests of the rows": ("input checks",),
    "norms for the clip": ("norms for the clip",),
    "shuffle": ("shuffle",),
    "training": ("training",),
}
assert set(_TIMED) == {"align", *PHASES}


def beside_forecast(found: Scale) -> dict[str, tuple[float, float]]:
    """Seconds that were forecast, and those that happened, by phase and of all of these."""
    happened = {phase.name: phase.seconds for phase in found.phases}
    by_phase = {
        name: (seconds, sum(happened.get(part, 0.0) for part in _TIMED[name]))
        for name, seconds in found.forecast.items()
    }
    totals = [sum(pair[place] for pair in by_phase.values()) for place in range(2)]
    return {**by_phase, "all of these": (totals[0], totals[1])}


def _print(found: Scale, console: Console) -> None:
    title = f"{found.rows:,} rows × {found.columns} columns, {found.steps:,} steps, load {found.load[0]:.1f}"
    view = Table(title=title)
    for column in ("phase", "seconds", "rounds", "bytes", *SERVERS, *CLIENTS, "memory of all"):
        view.add_column(column, justify="left" if column == "phase" else "right")
    for phase in found.phases:
        memory = [size_in_words(phase.memory[who]) if phase.memory.get(who) else "" for who in (*SERVERS, *CLIENTS)]
        view.add_row(
            phase.name,
            f"{phase.seconds:.1f}",
            f"{phase.rounds:,}" if phase.rounds else "",
            size_in_words(phase.bytes) if phase.bytes else "",
            *memory,
            size_in_words(phase.memory_of_all) if phase.memory_of_all else "",
        )
    console.print(view)
    console.print(f"most at a time, all together: {size_in_words(found.memory_of_all)}")
    compared = Table(title="--estimate, and what happened")
    for column in ("", "estimated", "happened", "ratio"):
        compared.add_column(column, justify="right" if column else "left")
    for name, (estimated, happened) in beside_estimate(found).items():
        words = [f"{value:,.0f}" if name == "rounds" else size_in_words(value) for value in (estimated, happened)]
        compared.add_row(name.replace("_", " "), *words, f"{estimated / happened:.3f}")
    for name, (estimated, happened) in beside_forecast(found).items():
        low = f"{found.ranges[name][0]:.1f} to " if name in found.ranges else ""
        compared.add_row(
            f"time: {name}",
            f"{low}{estimated:.1f} s",
            f"{happened:.1f} s",
            f"{estimated / happened:.3f}" if happened else "",
        )
    console.print(compared)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--protocol", default="g_bmf", choices=("g_bmf", "g_shuff"))
    parser.add_argument("--timeout", type=float, default=1100.0, help="seconds for the whole (default: %(default)s)")
    parser.add_argument("--keep", metavar="DIR", help="make everything here and keep it (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="facts for machines instead of tables")
    arguments = parser.parse_args()
    directory = Path(arguments.keep or tempfile.mkdtemp(prefix="ppvfl-scale-"))
    try:
        found = measure(
            directory,
            arguments.rows,
            arguments.columns,
            arguments.batch,
            arguments.epochs,
            arguments.protocol,
            arguments.timeout,
        )
    except (PpvflError, RuntimeError) as error:
        raise SystemExit(f"bench.scale: {error}") from None
    finally:
        if arguments.keep is None:
            shutil.rmtree(directory, ignore_errors=True)
    if arguments.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        _print(found, Console(width=200))


if __name__ == "__main__":
    main()
