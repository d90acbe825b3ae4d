"""Tables of clients: schema, reader, and from cells to numbers. ``vfl.tables.schema`` shows the whole interface."""

from vfl.tables.applying import ClientTable, ColumnReport, TableReport, apply_schema
from vfl.tables.errors import ColumnsError
from vfl.tables.fitting import UnusedColumnWarning, draft_schema, fit_schema, refuse_private_ids, refuse_private_rows
from vfl.tables.ids import IdRule, Ids, describe_ids
from vfl.tables.kinds import Boolean, Category, Column, Date, Number
from vfl.tables.reading import RawTable, as_raw_table, read_table
from vfl.tables.schema import Label, Schema
from vfl.tables.toml import read_schema, schema_text, write_schema

__all__ = [
    "Boolean",
    "Category",
    "ClientTable",
    "Column",
    "ColumnReport",
    "ColumnsError",
    "Date",
    "IdRule",
    "Ids",
    "Label",
    "Number",
    "RawTable",
    "Schema",
    "TableReport",
    "UnusedColumnWarning",
    "apply_schema",
    "as_raw_table",
    "describe_ids",
    "draft_schema",
    "fit_schema",
    "read_schema",
    "read_table",
    "refuse_private_ids",
    "refuse_private_rows",
    "schema_text",
    "write_schema",
]
