"""A client's schema, ``columns.toml``: which column names the person, which is the label, and how each other column
becomes numbers. Constants in it are public (stated, or from public rows); it stays with its client, and only its width
is told.

The whole interface::

    from vfl.tables import Schema, Number, Category, Boolean, Date, IdRule, Label      # made by hand, or
    schema = fit_schema(public_rows, id_column="customer_id", label=Label("defaulted"))  # from public rows
    table, report = apply_schema(schema, read_table("bank.parquet"))   # or a pandas.DataFrame, or a pyarrow.Table
    table.features, table.columns, table.ids, table.labels, table.targets
    schema.width, schema.outputs                                       # what the columns become
    write_schema(path, schema); read_schema(path)                      # columns.toml
    schema.as_dict(); Schema.from_dict(values)                         # plain values, for a model file
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from accel.validate import require, require_choice, require_real
from vfl.tables.ids import IdRule
from vfl.tables.kinds import Column, column_from_dict

__all__ = ["Label", "Schema", "refuse_unknown"]

FORMAT = 1  # of columns.toml


@dataclass(frozen=True)
class Label:
    """The label client's own column. ``class``: texts, of which ``classes`` lists those that are meant (empty: whatever
    the federation says). ``number``: the target of a regression, within the public ``range``. Rows without one are
    refused or dropped (``missing``)."""

    column: str = "label"
    kind: str = "class"
    classes: tuple[str, ...] = ()
    range: tuple[float, float] | None = None
    missing: str = "refuse"

    def __post_init__(self) -> None:
        require(isinstance(self.column, str) and self.column != "", "[label] column", self.column, "a column's name")
        require_choice("[label] kind", self.kind, ("class", "number"))
        require_choice("[label] missing", self.missing, ("refuse", "drop"))
        require(self.kind == "class" or not self.classes, "[label] classes", list(self.classes), "absent with a number")
        require(len(set(self.classes)) == len(self.classes), "[label] classes", list(self.classes), "all different")
        require(self.kind == "number" or self.range is None, "[label] range", self.range, "absent with classes")
        if self.range is not None:
            require_real("[label] range", self.range[0])
            require_real("[label] range", self.range[1], self.range[0], open_low=True)


@dataclass(frozen=True)
class Schema:
    """All of it. ``ignored`` columns may be in the file and are not used; others that the schema does not know are left
    out too, with a note. ``source`` says in words where the constants come from; it goes into the claim."""

    columns: tuple[Column, ...]
    id: IdRule = field(default_factory=IdRule)
    label: Label | None = None
    ignored: tuple[str, ...] = ()
    source: str = "stated in columns.toml"

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        roles = [*names, *self.ignored, self.id.column, *([self.label.column] if self.label else [])]
        twice = sorted({name for name in roles if roles.count(name) > 1})
        require(not twice, "columns", ", ".join(twice), "one of: a feature, the id, the label or ignored", "once each")
        outputs = self.outputs
        require(len(set(outputs)) == len(outputs), "columns", "two that become the same name", "all different")

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the columns of numbers, in the order in which they are shared."""
        return tuple(name for column in self.columns for name in column.outputs)

    @property
    def width(self) -> int:
        """How many columns of numbers: what others are told."""
        return len(self.outputs)

    def as_dict(self) -> dict[str, Any]:
        """Plain values; ``from_dict`` is the inverse."""
        found: dict[str, Any] = {"version": FORMAT, "source": self.source, "id": asdict(self.id)}
        if self.label is not None:
            found["label"] = {k: v for k, v in asdict(self.label).items() if v is not None and v != ()}
        found["ignored"] = list(self.ignored)
        found["column"] = [column.as_dict() for column in self.columns]
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Schema:
        """From ``as_dict``, or from a columns.toml that was read."""
        refuse_unknown("columns.toml", values, ("version", "source", "id", "label", "ignored", "column"))
        require(
            values.get("version") == FORMAT, "version", values.get("version"), f"{FORMAT}, of columns.toml's format"
        )
        columns, ignored = values.get("column", []), values.get("ignored", [])
        require(_is_list_of(columns, dict), "[[column]]", columns, "sections in double brackets, one for each column")
        require(_is_list_of(ignored, str), "ignored", ignored, "a list of columns' names")
        id_values, label = dict(_section(values, "id")), None
        refuse_unknown("[id]", id_values, ("column", "rule", "missing"))
        if "label" in values:
            section = dict(_section(values, "label"))
            refuse_unknown("[label]", section, ("column", "kind", "classes", "range", "missing"))
            for name in ("classes", "range"):
                if name in section:
                    require(isinstance(section[name], list | tuple), f"[label] {name}", section[name], "a list")
                    section[name] = tuple(section[name])
            label = Label(**section)
        return cls(
            tuple(column_from_dict(column) for column in columns),
            IdRule(**id_values),
            label,
            tuple(ignored),
            str(values.get("source", "stated in columns.toml")),
        )

    def fingerprint(self) -> str:
        """SHA-256 of what turns cells into numbers: two schemas with the same one give the same columns."""
        facts = [column.as_dict() for column in self.columns]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def refuse_unknown(where: str, values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Name a key that does not exist, and the one that was probably meant."""
    for key in values:
        close = difflib.get_close_matches(str(key), known, 1)
        hint = f"did you mean {close[0]!r}?" if close else ""
        require(key in known, f"{where}: key", key, f"one of {', '.join(known)}", hint)


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = values.get(name, {})
    require(isinstance(section, dict), f"[{name}]", section, f"a section [{name}]")
    assert isinstance(section, dict)
    return section


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, kind) for item in value)
