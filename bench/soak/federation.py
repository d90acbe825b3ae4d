"""The federation of a soak: made-up columns of two clients, keys, one configuration, its processes and what they
keep."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bench.soak.hosts import Host, Processes
from protocols.cli.init import initialise
from protocols.federation.read import FederationConfig
from protocols.federation.template import federation_text

__all__ = ["CLIENTS", "PARTICIPANTS", "ROWS", "SERVERS", "make_federation", "server_folder", "start", "write_columns"]

SERVERS, CLIENTS = ("server-0", "server-1", "server-2"), ("bank", "card")
PARTICIPANTS = (*SERVERS, *CLIENTS)
WIDTHS = {"bank": 12, "card": 8}
ROWS = 2000


def write_columns(directory: Path) -> None:
    """Both clients' files: the label depends on columns of both."""
    random = np.random.default_rng(20)
    values = random.uniform(size=(ROWS, sum(WIDTHS.values())))
    labels = np.where(values[:, :3].sum(axis=1) + values[:, -3:].sum(axis=1) > 3, "yes", "no")
    start = 0
    for name, width in WIDTHS.items():
        with (directory / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            last = ["label"] if name == CLIENTS[-1] else []
            writer.writerow(["id", *(f"column-{i}" for i in range(width)), *last])
            for row in random.permutation(ROWS):
                own = values[row, start : start + width].round(6)
                writer.writerow([f"person-{row:05d}", *own, *([labels[row]] if last else [])])
        start += width


def make_federation(
    directory: Path, hosts: Mapping[str, Host], port: int, changes: Mapping[str, object]
) -> FederationConfig:
    """``federation.toml``, keys and certificates in ``directory/federation``; ``changes`` to its keys."""
    text = federation_text(
        "soak",
        [(hosts[name].address, port + i) for i, name in enumerate(SERVERS)],
        [(name, WIDTHS[name], f"{hosts[name].address}:{port + 10 + i}") for i, name in enumerate(CLIENTS)],
        ["no", "yes"],
    )
    for name, value in changes.items():
        text, count = re.subn(rf"(?m)^(?:# )?{name} = .*$", f"{name} = {json.dumps(value)}", text)
        assert count == 1, name
    return initialise(text, directory / "federation", keys="certificates")


def start(run: Processes, name: str) -> None:
    """Start a participant, for the first time or again."""
    if name in SERVERS:
        run.participant("server", name, "--until-trained", "--status", "off")
        return
    label = ["--label-column", "label"] if name == CLIENTS[-1] else []
    words = ["--columns", f"{name}.csv", "--id", "id", "--value-range", "0,1", "--model-out", f"model-{name}.npz"]
    run.participant("client", name, *words, *label)


def server_folder(directory: Path, name: str) -> Path | None:
    """Where a server keeps its noise and what it opens, once it has begun."""
    found = list((directory / "federation" / name / "state").glob("*/training-*/server"))
    return found[0] if found else None
