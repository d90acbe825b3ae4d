"""``ppvfl public-rows``: labelled rows of all clients that are public, to measure a run on after every epoch, which
costs no privacy.

Whoever has the public rows of all clients runs it once, after `ppvfl init`. It scales them as the clients scale theirs,
writes public-rows.npz beside federation.toml, and its digest into federation.toml; everybody gets both files. The rows
must be public in every column and in the label, and no part of what is trained on. ``--schema``, ``--public``, ``--id``
and ``--value-range`` take one value for all clients, or NAME=VALUE,… .
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from accel.files import write_text
from accel.validate import require, require_integer
from protocols.cli.run import files_of, option_of
from protocols.client.columns import OwnColumns, add_column_options, read_columns
from protocols.federation.public_rows import FILE, write_public_rows
from protocols.federation.read import FederationConfig, load, parse

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """The command line."""
    parser = subparsers.add_parser("public-rows", help="public labelled rows to measure a run on", description=__doc__)
    parser.add_argument("--config", default="federation.toml", metavar="FILE", help="as `ppvfl init` writes it")
    parser.add_argument("--columns", required=True, metavar="NAME=FILE,…", help="public rows of each client")
    parser.add_argument(
        "--label-column", metavar="COLUMN", help="in the label client's file (default: schema's, or label)"
    )
    parser.add_argument(
        "--patience",
        type=int,
        default=0,
        metavar="EPOCHS",
        help="stop when so many epochs have not raised the accuracy on these rows, and give the best model (default "
        "0: never)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of words")
    add_column_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Match the rows by their ids, in the clear: they are public."""
    config = load(arguments.config, pinned=False)
    patience = require_integer("--patience", arguments.patience, 0)
    require(
        config.run.target_range is None and config.run.training.weights == "open" and config.run.layers is None,
        "[run]",
        f"protocol {config.run.protocol!r}, task {config.run.training.task!r}, weights {config.run.training.weights!r}",
        "a classification with g_bmf or g_shuff and open weights",
        "no other model can be measured during training",
    )
    tables = {name: _read(config, arguments, name, file) for name, file in files_of(config, arguments.columns).items()}
    label = tables[config.label_client.name]
    common = set(label.ids).intersection(*(table.ids for table in tables.values()))
    order = [name for name in label.ids if name in common]
    require(
        len(order) > 0,
        "public rows that all clients have",
        0,
        "at least one",
        "check that all files write ids in the same way",
    )
    blocks = []
    for table in tables.values():
        place = {name: row for row, name in enumerate(table.ids)}
        rows = np.array([place[name] for name in order])
        blocks.append(table.embeddings(rows))
        labels = table.labels_of(rows, config.run) if table is label else None
    assert labels is not None  # the label client is the last one
    digest = write_public_rows(config, np.concatenate(blocks, axis=1), labels)
    path = Path(arguments.config)
    write_text(path, _with_rows(path.read_text(encoding="utf-8"), config, digest, patience))
    if arguments.json:
        print(json.dumps({"file": FILE, "rows": len(order), "digest": digest, "patience": patience}, indent=2))
        return 0
    console = Console()
    console.print(
        f"{FILE}: {len(order):,} public rows with labels; [run] public_rows in {path} has its digest", markup=False
    )
    console.print("Everybody gets both files, before anything is started.")
    return 0


def _read(config: FederationConfig, arguments: argparse.Namespace, name: str, file: Path) -> OwnColumns:
    entry = next(client for client in config.clients if client.name == name)
    own = {
        option: option_of(config, option, getattr(arguments, option), name)
        for option in ("id", "schema", "public", "value_range")
    }
    label = arguments.label_column if entry.label else None
    return read_columns(config, entry, file, argparse.Namespace(**{**vars(arguments), **own}), label_column=label)


def _with_rows(text: str, config: FederationConfig, digest: str, patience: int) -> str:
    """The file's text with both keys in its section [run]; what it says otherwise is compared afterwards."""
    lines = re.sub(r"(?m)^(public_rows|patience)[ \t]*=.*\n", "", text)
    more = f'public_rows = "{digest}" # of {FILE}, which `ppvfl public-rows` writes\n'
    more += (
        f"patience = {patience} # epochs without a better accuracy on them, after which the run stops\n"
        if patience
        else ""
    )
    edited = re.sub(r"(?m)^\[run\][^\n]*\n", lambda head: head[0] + more, lines, count=1)
    wanted = replace(config, run=replace(config.run, public_rows=digest, patience=patience))
    require(
        parse(edited, config.source, pinned=False) == wanted,
        config.source,
        "written in a way that cannot be edited safely",
        "as `ppvfl init` writes it",
        f"put public_rows = {digest!r} and patience = {patience} into [run] by hand",
    )
    return edited
