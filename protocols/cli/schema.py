"""``ppvfl schema FILE``: write columns.toml, which says how each column of a client's file becomes numbers.

Of FILE only names and types of columns are used, so it may be private. Constants come from ``--public``, rows that are
public, or are stated with ``--range`` and ``--values``; what is left open is marked in the file, for an editor. `ppvfl
check` comes next.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from accel.files import write_text
from accel.validate import require
from protocols.cli.key import refuse_overwriting
from vfl.tables import (
    Column,
    Label,
    RawTable,
    Schema,
    UnusedColumnWarning,
    draft_schema,
    fit_schema,
    read_table,
    schema_text,
)
from vfl.tables.ids import ID_RULES
from vfl.tables.kinds import Category, Date, Number

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """The command line."""
    parser = subparsers.add_parser("schema", help="write columns.toml for a client's file", description=__doc__)
    parser.add_argument("file", metavar="FILE", help="CSV or Parquet; its values are not looked at")
    parser.add_argument("--public", metavar="FILE", help="public rows with the same columns, to take constants from")
    parser.add_argument("--id", default="id", metavar="COLUMN", help="column that names the person (default id)")
    parser.add_argument("--id-rule", choices=ID_RULES, default="text", help="how ids are compared (default text)")
    parser.add_argument("--label", metavar="COLUMN", help="the label, at the label client")
    parser.add_argument("--classes", metavar="NAME,…", help="the label's values")
    parser.add_argument("--target-range", metavar="LOW:HIGH", help="the label is a number within this public range")
    parser.add_argument(
        "--range", action="append", default=[], metavar="COLUMN=LOW:HIGH", help="stated range of a number or date"
    )
    parser.add_argument(
        "--values", action="append", default=[], metavar="COLUMN=A,B,…", help="stated values of a category"
    )
    parser.add_argument("--ignore", default="", metavar="COLUMN,…", help="columns that are not used")
    parser.add_argument("--out", default="columns.toml", metavar="FILE", help="default columns.toml")
    parser.add_argument("--force", action="store_true", help="replace what is there")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Write the file, and say what is in it and what is open."""
    out = Path(arguments.out)
    if not arguments.force:
        refuse_overwriting([out])
    raw = read_table(arguments.file, id_column=arguments.id, label_column=arguments.label, guess_types=True)
    label = _label(arguments, raw)
    ranges = {name: [_end(end) for end in _two(name, text)] for name, text in _pairs("--range", arguments.range)}
    values = {name: _items(text) for name, text in _pairs("--values", arguments.values)}
    ignored = _items(arguments.ignore)
    options: dict[str, Any] = {"id_column": arguments.id, "id_rule": arguments.id_rule, "label": label}
    draft = draft_schema(raw, ranges=ranges, values=values, ignored=ignored, **options)
    made: Schema | dict[str, Any] = draft
    if arguments.public is not None:
        public = read_table(arguments.public, id_column=arguments.id)
        names = [name for name in raw.names if name not in (arguments.id, arguments.label, *draft["ignored"])]
        missing = [name for name in names if name not in public.names]
        require(not missing, f"{public.source}: columns", f"without {', '.join(missing[:5])}", f"those of {raw.source}")
        chosen = RawTable(public.source, public.table.select(names), public.notes)
        stated = _stated(draft, ranges, values)
        with warnings.catch_warnings(record=True, category=UnusedColumnWarning) as unused:
            warnings.simplefilter("always")
            made = fit_schema(chosen, stated=stated, ignored=draft["ignored"], **options)
        raw = replace(raw, notes=(*raw.notes, *(str(each.message) for each in unused)))
    write_text(out, schema_text(made))
    _print(arguments, out, made, raw)
    return 0


def _stated(draft: dict[str, Any], ranges: dict[str, Any], values: dict[str, Any]) -> dict[str, Column]:
    """What the options fix, as columns."""
    found: dict[str, Column] = {}
    for column in draft["column"]:
        name = column["name"]
        if name in values:
            found[name] = Category(name, tuple(values[name]))
        elif name in ranges:
            low, high = ranges[name]
            found[name] = Date(name, (low, high)) if column["kind"] == "date" else Number(name, range=(low, high))
    return found


def _label(arguments: argparse.Namespace, raw: RawTable) -> Label | None:
    given = arguments.classes is not None or arguments.target_range is not None
    require(arguments.label is not None or not given, "--label", None, "given with --classes or --target-range")
    if arguments.label is None:
        return None
    require(arguments.label in raw.names, "--label", arguments.label, f"one of {', '.join(raw.names[:20])}")
    if arguments.target_range is None:
        return Label(arguments.label, classes=tuple(_items(arguments.classes or "")))
    require(arguments.classes is None, "--classes", arguments.classes, "absent with --target-range")
    low, high = (_end(end) for end in _two("--target-range", arguments.target_range))
    return Label(arguments.label, "number", range=(low, high))


def _pairs(option: str, given: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [text.partition("=") for text in given]
    for (name, equals, value), text in zip(pairs, given, strict=True):
        require(bool(name and equals and value), option, text, "COLUMN=…")
    return [(name.strip(), value) for name, _, value in pairs]


def _two(name: str, text: str) -> list[str]:
    ends = text.split(":")
    require(len(ends) == 2, f"range of {name}", text, "LOW:HIGH, such as 0:100 or 1990-01-01:2030-01-01")
    return [end.strip() for end in ends]


def _end(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _print(arguments: argparse.Namespace, out: Path, made: Schema | dict[str, Any], raw: RawTable) -> None:
    values = made.as_dict() if isinstance(made, Schema) else made
    columns = values["column"]
    constants = ("range", "values", "centre", "quantiles")
    still = [c["name"] for c in columns if c["kind"] != "boolean" and not set(constants) & set(c)]
    width = made.width if isinstance(made, Schema) else None
    if arguments.json:
        print(
            json.dumps(
                {"schema": str(out), "width": width, "open": still, "ignored": values["ignored"], "notes": raw.notes},
                indent=2,
            )
        )
        return
    view = Table(title=f"{out}: {len(columns)} columns of {raw.source}")
    for name in ("column", "kind", "by"):
        view.add_column(name)
    for column in columns:
        by = next(
            (name for name in constants if name in column), "" if column["kind"] == "boolean" else "[red]open[/red]"
        )
        view.add_row(Text(column["name"]), column["kind"], {"centre": "mean and deviation"}.get(by, by))
    console = Console()
    console.print(view)
    for note in raw.notes:
        console.print(note, style="yellow", markup=False, highlight=False)
    if values["ignored"]:
        console.print(f"Not used: {', '.join(values['ignored'])}", markup=False)
    if still:
        console.print(f"State range or values in {out} of: {', '.join(still)}", style="bold", markup=False)
    elif width is not None:
        console.print(f"width = {width} in federation.toml: the columns of numbers that these become")
    console.print(f"Next: ppvfl check {arguments.file} --schema {out}", markup=False)
