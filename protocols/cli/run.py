"""``ppvfl run``: a whole federation on this machine, for trying out: the same commands as on many hosts, as processes.

Every participant is its own process with its own key and its own state, over mutual TLS. All keys lie on one machine,
so nothing is hidden from whoever owns it. ``--schema``, ``--public``, ``--id`` and ``--id-rule`` take one value for all
clients, the first three also NAME=VALUE,… .
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from accel.validate import require
from protocols.client.columns import add_column_options
from protocols.federation.read import FederationConfig, load
from protocols.run.timing_run import processes

__all__ = ["Watch", "add_parser", "files_of", "option_of", "run"]

# of the logs, what people want to see
_SHOWN = {"rows aligned", "upload complete, all servers have it", "all servers agree", "computed and released"}
_FACTS = ("common", "rows", "rounds", "bytes_sent", "seconds", "peer", "since", "reason", "claim")
EVALUATION, PREDICTION = "evaluation", "prediction"  # folders of the outputs of what comes after the training


def add_parser(subparsers: Any) -> None:
    """The command line."""
    parser = subparsers.add_parser("run", help="all participants on this machine", description=__doc__)
    parser.add_argument("--config", default="federation.toml", metavar="FILE", help="as `ppvfl init` writes it")
    parser.add_argument("--columns", required=True, metavar="NAME=FILE,…", help="one file for each client")
    parser.add_argument(
        "--label-column", metavar="COLUMN", help="in the label client's file (default: schema's, or label)"
    )
    parser.add_argument(
        "--out", default="runs/federation", metavar="DIR", help="models and logs (default runs/federation)"
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after this time")
    parser.add_argument(
        "--evaluate", action="store_true", help="then predict the held-out rows on shares, and write a report"
    )
    parser.add_argument("--predict", metavar="NAME=FILE,…", help="then predict new rows, one file for each client")
    add_column_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Start everybody, wait for the clients; then ask for predictions, if these are wanted."""
    config = load(arguments.config)
    files = files_of(config, arguments.columns)
    new = None if arguments.predict is None else files_of(config, arguments.predict, "--predict")
    require(
        not arguments.evaluate or config.run.held_out > 0,
        "[run] held_out",
        config.run.held_out,
        "above 0 with --evaluate",
    )
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    commands = {
        **{server.name: _server_command(arguments, server.name, out) for server in config.servers},
        **{name: _client_command(config, arguments, name, file, out) for name, file in files.items()},
    }
    console.print(f"{len(commands)} processes; logs and models in {out}")
    last = config.ordered_clients[-1].name
    shown = [last]
    with processes(commands, out) as running:
        deadline = None if arguments.timeout is None else time.monotonic() + arguments.timeout
        waited = {name: running[name] for name in files} if _serve(arguments) else running
        with Watch(out, list(commands), console) as watch:
            failed = _wait(waited, deadline, running, watch.look)
        servers = {server.name: running[server.name] for server in config.servers}
        for folder, rows in ((EVALUATION, files if arguments.evaluate else None), (PREDICTION, new)):
            if rows is None or failed:
                continue
            (out / folder).mkdir(exist_ok=True)
            asking = {
                f"{folder}/{name}": _predict_command(config, arguments, folder, name, file, out)
                for name, file in rows.items()
            }
            with processes(asking, out) as predicting, Watch(out, list(asking), console) as watch:
                failed = _wait(predicting, deadline, {**servers, **predicting}, watch.look)
            shown.append(f"{folder}/{last}")
    if failed:
        name = failed[0]
        console.print((out / f"{name}.err").read_text()[-4000:], markup=False)
        console.print(f"[red]{name} failed[/red]; its output is above, and the logs of all are in {out}")
        return 1
    for name in shown:
        console.print((out / f"{name}.out").read_text().strip(), markup=False)
    return 0


def _serve(arguments: argparse.Namespace) -> bool:
    """Whether servers stay for predictions."""
    return bool(arguments.evaluate or arguments.predict is not None)


def files_of(config: FederationConfig, text: str, option: str = "--columns") -> dict[str, Path]:
    """NAME=FILE,… as a file for each client, in the order of their columns."""
    names = [client.name for client in config.ordered_clients]
    pairs = [item.partition("=") for item in text.split(",") if item]
    files = {name.strip(): Path(file.strip()) for name, _, file in pairs}
    shown = ",".join(f"{name}=FILE" for name in names)
    require(sorted(files) == sorted(names) and len(pairs) == len(files), option, text, f"a file each: {shown}")
    return {name: files[name] for name in names}


def _server_command(arguments: argparse.Namespace, name: str, out: Path) -> list[str]:
    own = ["--as", name, "--config", arguments.config, "--log", str(out / f"{name}.log")]
    own += [] if _serve(arguments) else ["--until-trained"]
    return [sys.executable, "-m", "protocols.deploy", "server", *own]


def _client_command(
    config: FederationConfig, arguments: argparse.Namespace, name: str, file: Path, out: Path
) -> list[str]:
    own = ["--as", name, "--config", arguments.config, "--log", str(out / f"{name}.log")]
    own += ["--columns", str(file), "--model-out", str(out / f"model-{name}.npz")]
    if name == config.label_client.name and arguments.label_column is not None:
        own += ["--label-column", arguments.label_column]
    for option in ("id", "id_rule", "schema", "public", "value_range"):
        own += _words(config, option, getattr(arguments, option), name)
    return [sys.executable, "-m", "protocols.deploy", "client", *own, *_model_options(arguments)]


def _predict_command(
    config: FederationConfig, arguments: argparse.Namespace, folder: str, name: str, file: Path, out: Path
) -> list[str]:
    own = ["--as", name, "--config", arguments.config, "--log", str(out / f"{name}.log")]
    own += ["--columns", str(file), "--model", str(out / f"model-{name}.npz")]
    own += ["--held-out"] if folder == EVALUATION else []
    if folder == EVALUATION and name == config.label_client.name:
        own += ["--report", str(out / "evaluation.html")]
    if folder == PREDICTION and name == config.predict.receiver:
        own += ["--out", str(out / "predictions.csv")]
    own += _words(config, "id", arguments.id, name)
    return [sys.executable, "-m", "protocols.deploy", "predict", *own, *_model_options(arguments, scaled=False)]


def _model_options(arguments: argparse.Namespace, *, scaled: bool = True) -> list[str]:
    words = ["--scaled"] if scaled and arguments.scaled else []
    for option in ("local_model", "local_weights", "local_width"):
        value = getattr(arguments, option)
        if value is not None:
            words += [f"--{option.replace('_', '-')}", str(value)]
    return words


def _words(config: FederationConfig, option: str, given: str | None, name: str) -> list[str]:
    value = option_of(config, option, given, name)
    return [] if value is None else [f"--{option.replace('_', '-')}", value]


def option_of(config: FederationConfig, option: str, given: str | None, name: str) -> str | None:
    """One value for all clients, or NAME=VALUE,… ; None for a client that is not named."""
    if given is None:
        return None
    values = {client.name: given for client in config.clients}
    word = f"--{option.replace('_', '-')}"
    if "=" in given:
        values = {key.strip(): value.strip() for key, _, value in (item.partition("=") for item in given.split(","))}
        known = [client.name for client in config.clients]
        require(set(values) <= set(known), word, given, f"NAME=VALUE,… of {', '.join(known)}")
    return values.get(name) or None


class Watch:
    """What the participants are doing, for people: a bar where there is a terminal, and what happens, from their
    logs."""

    def __init__(self, out: Path, names: Sequence[str], console: Console):
        self._files = {name: out / f"{name}.log" for name in names}
        self._read = {name: file.stat().st_size if file.exists() else 0 for name, file in self._files.items()}
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Watch:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.look()
        self._bar.stop()

    def look(self) -> None:
        """Show what has been logged since the last look."""
        for name, file in self._files.items():
            if not file.exists():
                continue
            with file.open("rb") as handle:
                handle.seek(self._read[name])
                lines = handle.read().splitlines(keepends=True)
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # it is being written
                self._read[name] += len(line)
                self._show(name, json.loads(line))

    def _show(self, name: str, record: Mapping[str, Any]) -> None:
        event = record["event"]
        if event == "progress":
            if name == "server-0":  # the three are in step
                shown = f"{record['phase']} {record['done']} of {record['total']}"
                self._bar.update(
                    self._task, description=record["phase"], completed=record["done"], total=record["total"]
                )
                if not self._console.is_terminal:
                    self._console.print(f"server-0: {shown}", markup=False)
        elif event in _SHOWN or record["level"] != "info":
            facts = {key: value for key, value in record.items() if key in _FACTS}
            rest = ", ".join(f"{key} {value}" for key, value in facts.items())
            self._console.print(f"{name}: {event}{': ' if rest else ''}{rest}", markup=False)


def _wait(
    waited: dict[str, Any], deadline: float | None, watched: dict[str, Any], look: Callable[[], None]
) -> list[str]:
    """Until all of ``waited`` have ended; who of ``watched`` failed, or who was not done in time."""
    while any(process.poll() is None for process in waited.values()):
        failed = [name for name, process in watched.items() if process.poll() not in (None, 0)]
        if failed:
            return failed
        if deadline is not None and time.monotonic() > deadline:
            return [name for name, process in waited.items() if process.poll() is None]
        look()
        time.sleep(0.2)
    return [name for name, process in waited.items() if process.poll() != 0]
