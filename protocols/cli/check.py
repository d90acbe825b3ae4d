"""``ppvfl check FILE``: look at one's own file before any connection: what will be dropped, filled and clipped, and how
often.

Everything it prints is about private rows: it is for the owner of the file, and is sent to nobody.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from accel.validate import require
from protocols.client.columns import add_column_options, client_row_bound, resolve_schema, rule_warning
from protocols.federation.read import ClientEntry, FederationConfig, load
from vfl.data.scaling import RowBound
from vfl.tables import (
    ClientTable,
    Schema,
    TableReport,
    UnusedColumnWarning,
    apply_schema,
    describe_ids,
    read_schema,
    read_table,
)
from vfl.tables.kinds import REST

__all__ = ["add_parser", "run", "warnings_about"]

OFTEN = 0.1  # share of rows from which on something is worth a warning
SHOWN, LONGEST = 20, 40  # names in a warning, characters of one


def add_parser(subparsers: Any) -> None:
    """The command line."""
    parser = subparsers.add_parser("check", help="look at one's own file before connecting", description=__doc__)
    parser.add_argument("file", metavar="FILE", help="CSV, Parquet, .npz or .npy")
    parser.add_argument("--label-column", metavar="COLUMN", help="the labels, at the label client (default: schema's)")
    parser.add_argument(
        "--config", metavar="FILE", help="federation.toml, to compare width, classes and row bound with"
    )
    parser.add_argument("--as", dest="name", metavar="NAME", help="which client of that file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_column_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Read the file as `ppvfl client` would. Exit code 1 if the federation would refuse it."""
    require((arguments.config is None) == (arguments.name is None), "--config and --as", None, "given both or neither")
    entry, config = None, None
    if arguments.config is not None:
        config = load(arguments.config, pinned=False)
        found = config.participant(arguments.name, "--as")
        require(isinstance(found, ClientEntry), "--as", arguments.name, "a client", "servers have no columns")
        assert isinstance(found, ClientEntry)
        entry = found
    stated = read_schema(arguments.schema) if arguments.schema is not None else None
    id_column = arguments.id or ("id" if stated is None else stated.id.column)
    label = arguments.label_column
    if label is None and entry is not None and entry.label and (stated is None or stated.label is None):
        label = "label"
    raw = read_table(arguments.file, id_column=id_column, label_column=label)
    with catch_warnings(record=True, category=UnusedColumnWarning) as unused:
        simplefilter("always")
        schema = resolve_schema(arguments, raw, label)
    table, report = apply_schema(schema, raw)
    warnings = [*(str(each.message) for each in unused), *warnings_about(table, report, schema, config, entry)]
    problems = [] if config is None or entry is None else _problems(table, schema, config, entry, arguments)
    if arguments.json:
        facts = {**asdict(report), "width": schema.width, "outputs": list(schema.outputs)}
        print(json.dumps({**facts, "warnings": warnings, "problems": problems}, indent=2))
    else:
        _print(table, report, schema, warnings, problems)
    return 1 if problems else 0


def warnings_about(
    table: ClientTable,
    report: TableReport,
    schema: Schema,
    config: FederationConfig | None = None,
    entry: ClientEntry | None = None,
) -> list[str]:
    """What will work and probably is not meant."""
    found = list(report.notes)
    rows = max(1, report.rows)
    for column in report.columns:
        for count, what, way_out in (
            (column.clipped, "beyond the stated range, and clipped", "is the range right?"),
            (column.rest, "in the rest category", "are the values right?"),
            (column.missing, f"empty, and filled ({column.fill})", "is the column worth sharing?"),
        ):
            if count > OFTEN * rows and not (what.startswith("empty") and column.fill in ("drop", "refuse")):
                found.append(f"column {column.name!r}: {count / rows:.0%} of the rows are {what}; {way_out}")
    if report.dropped:
        found.append(f"{report.dropped:,} of {rows:,} rows are dropped before ids are matched")
    same = np.ptp(table.features, axis=0) == 0 if len(table.ids) > 1 else np.zeros(schema.width, bool)
    flat = [
        name for name, is_flat in zip(schema.outputs, same, strict=True) if is_flat and not name.endswith(f"={REST}")
    ]
    if flat:  # a rest category that nobody is in is what is hoped for
        found.append(f"the same in every row, and so of no use: {', '.join(map(_short, flat[:SHOWN]))}{_more(flat)}")
    if config is not None and entry is not None:
        found += _about_the_bound(table, config, entry)
    return found


def _short(name: str) -> str:
    return repr(name if len(name) <= LONGEST else f"{name[:LONGEST]}…")


def _more(names: list[str]) -> str:
    return f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""


def _about_the_bound(table: ClientTable, config: FederationConfig, entry: ClientEntry) -> list[str]:
    destroyed = rule_warning(config, entry)
    if destroyed or config.run.row_rule == "normalise":
        return [destroyed] if destroyed else []
    factors = RowBound(client_row_bound(config, entry)).factors(table.features)
    shrunk = float((factors < 1).mean())
    if shrunk <= OFTEN:
        return []
    bound = client_row_bound(config, entry)
    return [
        f"{shrunk:.0%} of the rows are longer than this client's part {bound:.3g} of row_bound, and shrunk to it; a "
        f"larger row_bound "
        "costs no privacy"
    ]


def _problems(
    table: ClientTable,
    schema: Schema,
    config: FederationConfig,
    entry: ClientEntry,
    arguments: argparse.Namespace,
) -> list[str]:
    found = []
    if arguments.local_model == "identity" and schema.width != entry.width:
        found.append(f"{schema.width} columns of numbers, but {entry.name} has width {entry.width} in {config.source}")
    if entry.label and table.labels is not None:
        others = sum(label not in config.run.classes for label in table.labels)
        if others:
            found.append(
                f"{others:,} labels are none of the classes {', '.join(config.run.classes)} in {config.source}"
            )
    if not entry.label and schema.label is not None:
        found.append(f"the schema has a label, but {config.label_client.name} holds the labels in {config.source}")
    return found


def _print(table: ClientTable, report: TableReport, schema: Schema, warnings: list[str], problems: list[str]) -> None:
    view = Table(title=f"{Path(report.source).name}: {report.rows:,} rows")
    for name in ("column", "kind", "becomes", "empty", "filled by", "clipped", "rest"):
        view.add_column(name, justify="left" if name in ("column", "kind", "filled by") else "right")
    for column in report.columns:
        counts = [f"{n:,}" if n else "" for n in (column.missing, column.clipped, column.rest)]
        fill = column.fill if column.missing else ""
        view.add_row(Text(column.name), column.kind, str(column.outputs), counts[0], fill, counts[1], counts[2])
    console = Console()
    console.print(view)
    words = f"id {schema.id.column!r} (rule {schema.id.rule}): {describe_ids(table.ids)}, all different"
    console.print(words, markup=False, highlight=False)
    if schema.label is not None:
        console.print(f"label {schema.label.column!r}: {_labels(table)}", markup=False, highlight=False)
    words = f"rows dropped: {report.dropped:,}; width = {schema.width}; {schema.source}"
    console.print(words, markup=False, highlight=False)
    for text in warnings:
        console.print(f"warning: {text}", style="yellow", markup=False, highlight=False)
    for text in problems:
        console.print(f"refused: {text}", style="red", markup=False, highlight=False)
    console.print("This is about private rows: it is for you, and was sent to nobody.")


def _labels(table: ClientTable) -> str:
    if table.targets is not None:
        return f"numbers from {table.targets.min():g} to {table.targets.max():g}"
    names, counts = np.unique(np.array(table.labels), return_counts=True)
    shown = ", ".join(f"{name} {count:,}" for name, count in list(zip(names, counts, strict=True))[:10])
    return f"{len(names)} classes ({shown})"
