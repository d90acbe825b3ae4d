"""Files as people really have them: what is read, what is refused with its reason, and what is left out with a word."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pandas
import pytest

from vfl.tables import ColumnsError, Label, Number, Schema, UnusedColumnWarning, apply_schema, fit_schema, read_table

REFUSED = {
    "columns are separated by semicolons, not by commas": b"id;a\n1;2,5\n2;3,5\n",
    "columns are separated by tabs": b"id\ta\n1\t2\n",
    "columns are separated by vertical bars": b"id|a\n1|2\n",
    r"row 1: a quotation mark is not closed, so all lines after it are one cell": b'id,a\n1,"x\n2,y\n3,z\n',
    r"row 2: a quotation mark is not closed": b'id,a\n1,x\n2,"y\n3,z',
    "is not in UTF-8": "id,a\n1,Zürich\n".encode("latin-1"),
    "is empty; the first line must name the columns": b"",
    "has a header but no rows": b"id,a\n",
    "column 'a': occurs more than once": b"id,a,a\n1,2,3\n",
    "line 3: 3 values, but the header names 2 columns": b"id,a\n1,2\n2,3,4\n",
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_files_that_would_be_misread_are_refused(tmp_path: Path, sentence: str) -> None:
    file = tmp_path / "t.csv"
    file.write_bytes(REFUSED[sentence])
    for guess in (False, True):
        with pytest.raises(ColumnsError, match=sentence):
            read_table(file, guess_types=guess)


@pytest.mark.parametrize(
    "content",
    [
        b'id,a\n1,x\n2,"y\nz"\n',
        b'id,a\r\n1,x\r\n2,"y\r\nz"\r\n',
        b'id,a\n1,x\n2,"y\nz"',
        b'id,a\n1,"x\nz"\n2,y',
        b"\xef\xbb\xbfid,a\n1,x\n\n2,y\n\n",
    ],
)
def test_closed_quotes_blank_lines_and_marks_of_order_are_read(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "t.csv"
    file.write_bytes(content)
    assert read_table(file).table.column("id").to_pylist() == ["1", "2"]


def test_columns_that_become_no_feature_are_named_with_the_reason() -> None:
    rows = 60
    public = pandas.DataFrame(
        {
            "id": range(rows),
            "x": np.arange(rows) * 1.0,
            "hole": np.nan,
            "note": "word " * 500,
            "code": [f"c{i}" for i in range(rows)],
        }
    )
    with pytest.warns(UnusedColumnWarning) as caught:
        schema = fit_schema(public)
    said = {str(each.message) for each in caught}
    assert schema.outputs == ("x",) and schema.ignored == ("hole", "note", "code")
    for words in (
        "column 'hole': is not used: it is empty in all public rows",
        "column 'note': is not used: it holds text of up to 2,499 characters",
        "column 'code': is not used: it has 60 different texts in 60 public rows",
    ):
        assert any(words in text for text in said), words
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stated = {"hole": Number("hole", range=(0.0, 1.0))}
        assert fit_schema(public[["id", "x", "hole"]], stated=stated).outputs == ("x", "hole")


def test_targets_beyond_the_range_are_counted() -> None:
    schema = Schema((Number("x", range=(0, 1)),), label=Label("y", "number", range=(0.0, 10.0)))
    frame = pandas.DataFrame({"id": [1, 2, 3], "x": [0, 1, 0], "y": [5, 99, -1]})
    _, report = apply_schema(schema, frame)
    (note,) = report.notes
    assert note == "the table, column 'y': 2 targets are beyond the range 0 to 10, and count as its ends"
    assert apply_schema(schema, frame.head(1))[1].notes == ()
