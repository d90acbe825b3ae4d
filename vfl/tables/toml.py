"""``columns.toml``: a schema as a file that people read and edit."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel.errors import InvalidArgument
from accel.files import write_text
from vfl.tables.errors import ColumnsError
from vfl.tables.schema import Schema

__all__ = ["read_schema", "schema_text", "write_schema"]

_HEAD = """\
# How the columns of this client's file become numbers. It stays with this client: others are told only how many columns
# of numbers there are (the width in federation.toml). All constants must be public: stated, or from public rows, never
# looked up in the private ones, or the privacy claim is void.
"""
_ID = """
# The column that names the person. rule: "text" (as written; 007 or 7.0 refused), "trimmed", "integer" (007 = 7 = 7.0)
# or "verbatim" (unchecked; at all clients or none). missing: "refuse" or "drop" rows without an id.
"""
_LABEL = """
# The label, at the label client only. kind: "class", or "number" with its public range. missing: "refuse" or "drop".
"""
_IGNORED = """
# Columns of the file that are not used.
"""
_COLUMNS = """
# Features, in the order in which they are shared. kind:
#   "number"    range = [LOW, HIGH], onto -1..1; or centre and spread (and limit, 4); or quantiles of public rows
#   "category"  values = [...], and rest = true for one more column for all others (false: others are refused)
#   "boolean"   true/false, yes/no, 1/0
#   "date"      range = ["YYYY-MM-DD", "YYYY-MM-DD"], form = "%d.%m.%Y" for text that is written otherwise
# fill, for empty cells: "centre" (becomes 0; a number's fill may be a number), "rest" (categories), "refuse", or
# "drop" the row.
"""
_OPEN = {
    "number": "# range = [LOW, HIGH]   # state it: what is known without looking at the rows",
    "category": '# values = ["a", "b"]   # state them: what is known without looking at the rows',
    "date": '# range = ["1990-01-01", "2030-01-01"]   # state it: what is known without looking at the rows',
}


def schema_text(schema: Schema | Mapping[str, Any]) -> str:
    """The file's text, with comments; of a draft (``draft_schema``) too, whose gaps are shown."""
    values = schema.as_dict() if isinstance(schema, Schema) else schema
    label = values.get("label")
    parts = [
        _HEAD,
        f"version = {values['version']}\n",
        f"source = {_quoted(values['source'])}   # goes into the claim\n",
    ]
    parts += [_IGNORED, f"ignored = {_value(values.get('ignored', []))}\n"]
    parts += [_ID, _section("[id]", values["id"])]
    if label is not None:
        parts += [_LABEL, _section("[label]", label)]
    parts.append(_COLUMNS)
    for column in values["column"]:
        parts.append("\n" + _section("[[column]]", column))
        if not {"range", "values", "centre", "quantiles"} & set(column) and column["kind"] in _OPEN:
            parts.append(_OPEN[column["kind"]] + "\n")
    return "".join(parts)


def write_schema(path: str | Path, schema: Schema | Mapping[str, Any]) -> None:
    """Write the file, all at once."""
    write_text(Path(path), schema_text(schema))


def read_schema(path: str | Path) -> Schema:
    """Read and check the file; errors name file, column and key."""
    file = Path(path)
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ColumnsError(f"{file} does not exist: write one with `ppvfl schema FILE --out {file}`") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ColumnsError(f"{file} is not valid TOML: {error}; text goes into quotes") from None
    try:
        return Schema.from_dict(values)
    except InvalidArgument as error:
        raise ColumnsError(f"{file}: {error}") from None


def _section(head: str, values: Mapping[str, Any]) -> str:
    first = [key for key in ("name", "kind", "column") if key in values]
    keys = [*first, *(key for key in values if key not in first)]
    return "\n".join([head, *(f"{key} = {_value(values[key])}" for key in keys)]) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, float):
        return ("-" if value < 0 else "") + "inf" if math.isinf(value) else repr(value)
    return str(value) if isinstance(value, int) else _quoted(value)


def _quoted(text: Any) -> str:
    return json.dumps(str(text), ensure_ascii=False).replace("\x7f", "\\u007f")
