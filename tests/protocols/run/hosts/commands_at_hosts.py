"""A federation's files and commands for end-to-end tests."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.protocols.run.hosts.hosts import Host

__all__ = ["CLIENTS", "NEW", "ROWS", "SERVERS", "WIDTHS", "columns", "free_block", "init", "write_data"]

SERVERS, CLIENTS = ("server-0", "server-1", "server-2"), ("bank", "card")


WIDTHS = {"bank": 5, "card": 4}


ROWS, NEW = 300, 40


def write_data(directory: Path, rows: int = ROWS) -> dict[str, np.ndarray]:
    """Files of both clients (CSV and Parquet, other orders, some people in one only), and of new people."""
    import pandas

    random = np.random.default_rng(7)
    everybody = rows + 20 + NEW
    ids = np.array([f"person-{i:06d}" for i in range(everybody)])
    values = random.uniform(size=(everybody, sum(WIDTHS.values())))
    labels = np.where(values[:, 0] + values[:, 5] > 1, "yes", "no")
    people = {"bank": np.arange(rows + 10), "card": np.r_[0:rows, rows + 10 : rows + 20]}
    fresh = np.arange(rows + 20, everybody)
    start = 0
    for name, width in WIDTHS.items():
        word = "salary_zq" if name == "bank" else "purchases_zq"
        table = pandas.DataFrame(values[:, start : start + width], columns=[f"{word}_{i}" for i in range(width)])
        table.insert(0, "customer_id", ids)
        start += width
        old = table.iloc[random.permutation(people[name])].copy()
        if name == "card":
            old["defaulted"] = labels[old.index]
            old.to_parquet(directory / "card.parquet", index=False)
        else:
            old.to_csv(directory / "bank.csv", index=False)
        table.iloc[random.permutation(fresh)].to_csv(directory / f"{name}-new.csv", index=False)
    return {"ids": ids[fresh], "values": values[fresh]}


def init(hosts: dict[str, Host], directory: Path, port: int, **run: object) -> None:
    """``ppvfl init``, and parameters for a short run."""
    words = [sys.executable, "-m", "protocols.deploy", "init", "--dir", "federation", "--classes", "no,yes"]
    words += ["--servers", ",".join(f"{hosts[name].address}:{port + i}" for i, name in enumerate(SERVERS))]
    words += ["--alignment", ",".join(f"{hosts[name].address}:{port + 10 + i}" for i, name in enumerate(CLIENTS))]
    words += ["--clients", ",".join(CLIENTS), "--widths", ",".join(str(WIDTHS[name]) for name in CLIENTS)]
    subprocess.run(words, cwd=directory, check=True, capture_output=True, env={"PYTHONPATH": str(_root())})
    short = {"epochs": 2, "batch_size": 50, "timeout": 30.0, "held_out": 0.0}
    change(directory / "federation" / "federation.toml", **short | run)


def change(file: Path, **run: object) -> None:
    text = file.read_text()
    for name, value in run.items():
        text, count = re.subn(rf"(?m)^(?:# )?{name} = .*$", f"{name} = {json.dumps(value)}", text)
        assert count == 1, name
    file.write_text(text)


def _root() -> Path:
    return Path(__file__).resolve().parents[4]


def free_block() -> int:
    """The first of twenty ports, of which this process alone makes use (tests run side by side)."""
    import os

    return 20000 + os.getpid() * 20 % 12000


def columns(name: str, *, new: bool = False) -> list[object]:
    file = f"{name}-new.csv" if new else {"bank": "bank.csv", "card": "card.parquet"}[name]
    return ["--columns", file, "--id", "customer_id", "--value-range", "0,1"]
