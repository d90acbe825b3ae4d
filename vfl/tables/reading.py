"""One reader for every file of a client, training, public and new rows alike: CSV, Parquet, .npz and .npy as an Arrow
table.

Nothing is guessed about CSV: all its columns are text, and the schema says what they are, so that an id 007 stays 007.
Index columns that pandas writes are no features: they are left out, and named in ``RawTable.notes``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

from accel.validate import require
from vfl.tables.errors import ColumnsError

__all__ = ["RawTable", "as_raw_table", "read_table"]

ENDINGS = (".csv", ".parquet", ".pq", ".npz", ".npy")
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}


@dataclass(frozen=True)
class RawTable:
    """A file's columns as they are. ``notes`` are for its owner: what was left out."""

    source: str
    table: pa.Table = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.table.column_names)

    def __len__(self) -> int:
        return int(self.table.num_rows)


def read_table(
    path: str | Path,
    *,
    id_column: str = "id",
    label_column: str | None = None,
    keep: Sequence[str] = (),
    guess_types: bool = False,
) -> RawTable:
    """The file's columns. ``id_column`` and ``label_column`` name those of an .npy or .npz file, and are kept with
    ``keep`` even if they are an index of pandas. ``guess_types``: let Arrow guess the types of a CSV file (for a first
    schema)."""
    file = Path(path)
    require(file.exists(), "file", str(path), "an existing CSV, Parquet, .npz or .npy file")
    ending = file.suffix.lower()
    require(ending in ENDINGS, f"{file.name}: ending", ending, f"one of {', '.join(ENDINGS)}")
    if ending == ".csv":
        table = _read_csv(file, guess_types)
    elif ending in (".parquet", ".pq"):
        try:
            table = parquet.read_table(file, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            raise ColumnsError(f"{file.name}: cannot be read as Parquet ({type(error).__name__})") from None
    else:
        table = _read_numpy(file, id_column, label_column)
    return as_raw_table(table, source=file.name, keep=(id_column, *([label_column] if label_column else []), *keep))


def as_raw_table(table: Any, *, source: str = "the table", keep: Sequence[str] = ()) -> RawTable:
    """A pyarrow.Table, a pandas.DataFrame (its index is left out) or a RawTable, checked: names all different, some
    rows."""
    if isinstance(table, RawTable):
        return table
    if not isinstance(table, pa.Table):
        require(
            hasattr(table, "columns") and hasattr(table, "iloc"),
            "table",
            type(table).__name__,
            "a pandas.DataFrame, a pyarrow.Table or a file",
        )
        table = pa.Table.from_pandas(table, preserve_index=False)
    index = [name.strip() for name in _index_columns(table)]  # before renaming, which loses what pandas wrote
    names = [name.strip() for name in table.column_names]
    table = table.rename_columns(names)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ColumnsError(f"{source}, column {twice!r}: occurs more than once; rename one of them")
    index = [name for name in index if name not in keep]
    notes = tuple(
        f"{source}, column {name!r}: is a row index that pandas wrote, so it is left out; write the file "
        "with index=False, or rename the column if it is a feature"
        for name in index
    )
    table = table.drop_columns(index)
    if table.num_rows == 0:
        raise ColumnsError(f"{source}: has a header but no rows")
    return RawTable(source, table, notes)


def _index_columns(table: pa.Table) -> list[str]:
    """Names of columns that are an index: by the metadata that pandas writes, or the name it gives one in CSV."""
    named: list[str] = []
    metadata = (table.schema.metadata or {}).get(b"pandas")
    if metadata is not None:
        entries = json.loads(metadata).get("index_columns", [])
        named = [entry for entry in entries if isinstance(entry, str)]
    return [name for name in table.column_names if name in named or name == "" or name.startswith("Unnamed: ")]


def _read_csv(file: Path, guess_types: bool) -> pa.Table:
    """All columns as text, or as Arrow guesses. Lines with another number of values than the header are named."""
    header = _header(file)
    wrong: list[tuple[int, int]] = []

    def note(row: Any) -> str:
        wrong.append((row.number or 0, row.actual_columns))
        return "skip"

    types = None if guess_types else dict.fromkeys(header, pa.string())
    try:
        table = csv.read_csv(
            file,
            # one thread, so that Arrow knows the numbers of bad lines; wide files are read in blocks of 16 MB
            read_options=csv.ReadOptions(use_threads=False, block_size=1 << 24),
            parse_options=csv.ParseOptions(newlines_in_values=True, invalid_row_handler=note),
            convert_options=csv.ConvertOptions(
                column_types=types,
                strings_can_be_null=guess_types,
                check_utf8=True,
                null_values=["", "NA", "N/A", "NaN", "nan", "null", "None"],
            ),
        )
    except pa.ArrowInvalid as error:  # its text may quote a cell
        raise ColumnsError(
            f"{file.name}: cannot be read as CSV in UTF-8 ({type(error).__name__}); check quotes and encoding"
        ) from None
    if wrong:
        line, values = min(wrong)
        where = f"line {line}" if line else "a line"
        raise ColumnsError(f"{file.name}, {where}: {values} values, but the header names {len(header)} columns")
    _refuse_open_quote(file, table)
    return table


def _refuse_open_quote(file: Path, table: pa.Table) -> None:
    """A quotation mark that nobody closes takes all lines below it into one cell, the last one of the file, without an
    error."""
    if table.num_rows == 0 or not pa.types.is_string(table.schema.types[-1]):
        return
    cell = table.column(table.num_columns - 1)[-1].as_py()
    if cell is None or not ("\n" in cell or "\r" in cell):
        return
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - 4))
        closed = stream.read().rstrip(b"\r\n").endswith(b'"')
    if not closed:
        raise ColumnsError(
            f"{file.name}, row {table.num_rows}: a quotation mark is not closed, so all lines after it are one "
            "cell; close it, or double it if it is meant as a character"
        )


def _header(file: Path) -> list[str]:
    import csv as plain_csv

    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            header = next(plain_csv.reader(stream), [])
    except UnicodeDecodeError:
        raise ColumnsError(f"{file.name}: is not in UTF-8; save it in that encoding") from None
    if not header:
        raise ColumnsError(f"{file.name}: is empty; the first line must name the columns")
    separator = next((mark for mark in _OTHER_SEPARATORS if mark in header[0]), None) if len(header) == 1 else None
    if separator is not None:
        raise ColumnsError(
            f"{file.name}: columns are separated by {_OTHER_SEPARATORS[separator]}, not by commas; save it with "
            f"commas, and with a point "
            "in decimal numbers"
        )
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise ColumnsError(f"{file.name}, column {twice!r}: occurs more than once; rename one of them")
    return header


def _read_numpy(file: Path, id_column: str, label_column: str | None) -> pa.Table:
    try:
        loaded = np.load(file, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ColumnsError(f"{file.name}: cannot be read as {file.suffix} ({type(error).__name__})") from None
    if isinstance(loaded, np.ndarray):
        if loaded.ndim != 2 or loaded.shape[1] < 2 or not np.issubdtype(loaded.dtype, np.number):
            raise ColumnsError(
                f"{file.name}: must be a numeric matrix with the id in its first column, got shape {loaded.shape}, "
                f"type {loaded.dtype}"
            )
        last = loaded.shape[1] - (label_column is not None)
        names = [id_column, *(f"x{i}" for i in range(last - 1)), *([label_column] if label_column else [])]
        return pa.table({name: np.ascontiguousarray(loaded[:, i]) for i, name in enumerate(names)})
    with loaded as stored:
        arrays = {key: stored[key] for key in stored}
    for key in ("ids", "features", *(("labels",) if label_column else ())):
        if key not in arrays:
            raise ColumnsError(f"{file.name}: array {key!r} is missing; it holds {', '.join(sorted(arrays))}")
    features = arrays["features"]
    if features.ndim != 2 or len(features) != len(arrays["ids"]):
        raise ColumnsError(f"{file.name}, array 'features': shape {features.shape} must be (number of ids, columns)")
    names = [str(name) for name in arrays.get("columns", [f"x{i}" for i in range(features.shape[1])])]
    columns: dict[str, Any] = {id_column: _one_dimension(file, "ids", arrays["ids"])}
    for place, name in enumerate(names):
        columns[name] = np.ascontiguousarray(features[:, place])
    if label_column:
        columns[label_column] = _one_dimension(file, "labels", arrays["labels"])
    require(
        len(columns) == len(names) + 1 + bool(label_column), f"{file.name}: columns", "two of one name", "all different"
    )
    return pa.table(columns)


def _one_dimension(file: Path, key: str, array: np.ndarray) -> Any:
    if array.ndim != 1:
        raise ColumnsError(f"{file.name}, array {key!r}: shape {array.shape} must be (rows,)")
    return array.tolist() if array.dtype.kind in "US" else array
