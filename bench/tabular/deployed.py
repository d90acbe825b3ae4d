"""One training and one evaluation by ``ppvfl`` on loopback: three servers and two clients as processes, from files,
over TLS."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from accel.errors import PpvflError
from bench.comparison.relay import free_ports
from bench.tabular.tables import TARGET, Task
from protocols.cli.init import initialise
from protocols.federation.template import federation_text
from protocols.run.timing_run import processes
from vfl.tables import apply_schema, write_schema

__all__ = ["deployed_score"]

PATIENCE = 600.0  # seconds for all clients of one command


def deployed_score(task: Task, epsilon: float) -> float:
    """AUC or R² as ``ppvfl predict --evaluate`` reports it at the label client, on the test tables."""
    with tempfile.TemporaryDirectory(prefix="ppvfl-") as name:
        folder = Path(name)
        config = _federation(task, epsilon, folder)
        servers = {f"server-{i}": _command("server", f"server-{i}", config) for i in range(3)}
        with processes(servers, folder):
            _together("client", task, task.train, config, folder)
            found = _together("predict", task, task.test, config, folder)
    return float(json.loads(found)["metrics"][task.metric])


def _federation(task: Task, epsilon: float, folder: Path) -> Path:
    """federation.toml with keys, and each party's schema."""
    ports = free_ports(4)
    clients = [(name, schema.width, "") for name, schema in task.schemas.items()]
    clients[-1] = (*clients[-1][:2], f"127.0.0.1:{ports[3]}")
    label = apply_schema(list(task.schemas.values())[-1], list(task.train.values())[-1])[0].labels
    text = federation_text(
        "bench",
        [("127.0.0.1", port) for port in ports[:3]],
        clients,
        sorted(set(label or ()), key=lambda name: name == task.positive),
        target_range=TARGET if task.regression else None,
    )
    initialise(text.replace("epsilon = 3.0", f"epsilon = {epsilon!r}", 1), folder / "federation")
    for name, schema in task.schemas.items():
        write_schema(folder / f"{name}.toml", schema)
    return folder / "federation" / "federation.toml"


def _together(command: str, task: Task, tables: dict[str, Any], config: Path, folder: Path) -> str:
    """All clients run ``command`` on their files; what the label client printed."""
    *_, last = task.schemas
    commands = {}
    for name in task.schemas:
        file = folder / f"{command}-{name}.parquet"
        tables[name].to_parquet(file, index=False)
        words = ["--columns", str(file)]
        if command == "client":
            words += ["--schema", str(folder / f"{name}.toml"), "--model-out", str(folder / f"{name}.npz")]
        else:
            words += ["--model", str(folder / f"{name}.npz")]
            shared = ["--output", "value" if task.regression else "probabilities"]
            words += ["--evaluate", "--report", str(folder / "report.html"), "--json"] if name == last else shared
        commands[f"{command}-{name}"] = _command(command, name, config, *words)
    with processes(commands, folder) as running:
        end = time.monotonic() + PATIENCE
        for name, process in running.items():
            try:
                code = process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise PpvflError(f"{name}: not done after {PATIENCE:g} s") from None
            if code != 0:
                raise PpvflError(f"{name} failed: {(folder / f'{name}.err').read_text()[-2000:]}")
    return (folder / f"{command}-{last}.out").read_text()


def _command(command: str, name: str, config: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "protocols.deploy", command, "--as", name, "--config", str(config), *words]
