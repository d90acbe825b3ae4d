"""The users' own files: aligned by id, and errors that name file, column and row."""

import csv

import numpy as np
import pytest

from tests.not_none import not_none
from vfl.data.columns import align, alignment_order, load_columns, read_client_file


def write_csv(path, header, rows):
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(header)
        writer.writerows(rows)
    return path


@pytest.fixture
def two_files(tmp_path):
    ids = [f"p{i}" for i in range(30)]
    one = write_csv(tmp_path / "bank.csv", ["id", "income", "age"], [[n, i, i % 7] for i, n in enumerate(ids)])
    shuffled = [*list(reversed(ids))[:-3], "only-here"]
    two = write_csv(
        tmp_path / "shop.csv",
        ["visits", "id", "label"],
        [[int(n[1:]) * 10 if n[0] == "p" else 1, n, "yes" if n[-1] in "02468" else "no"] for n in shuffled],
    )
    return one, two


def test_rows_of_one_person_meet(two_files):
    data, report = load_columns(two_files, public_fraction=0.2)
    assert report.matched == 27 and "3 without a partner" in str(report)
    assert "only-here" not in str(report)  # ids are private
    parts: list[tuple[np.ndarray, ...]] = [data.train, not_none(data.public), data.test]
    for part in parts:
        np.testing.assert_allclose(part[0][:, 0] * 10, part[1][:, 0])
    assert len(data.train_labels) + len(data.test_labels) + len(not_none(data.public_labels)) == 27
    assert data.notes[0].startswith("classes: no, yes")
    even = data.train[0][:, 0].astype(int) % 2 == 0
    np.testing.assert_array_equal(data.train_labels == 1, even)


def test_order_is_fixed_and_independent_of_the_files(two_files):
    tables = [read_client_file(two_files[0]), read_client_file(two_files[1], label_column="label")]
    one, _ = align(tables)
    two, _ = align(tables[::-1])
    assert one[0].ids == two[0].ids == tuple(alignment_order(one[0].ids))
    assert list(one[0].ids) != sorted(one[0].ids)


def test_csv_parquet_and_numpy_files_agree(tmp_path):
    header, rows = ["id", "x0", "x1"], [[3, 0.5, 2.0], [1, -1.0, 4.0]]
    write_csv(tmp_path / "a.csv", header, rows)
    np.save(tmp_path / "a.npy", np.array(rows))
    np.savez(tmp_path / "a.npz", ids=np.array([3, 1]), features=np.array(rows)[:, 1:])
    files = ["a.csv", "a.npy", "a.npz"]
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"id": [3, 1], "x0": [0.5, -1.0], "x1": [2.0, 4.0]}), tmp_path / "a.parquet")
    files.append("a.parquet")
    for name in files:
        table = read_client_file(tmp_path / name)
        assert table.ids == ("3", "1") and table.columns == ("x0", "x1")
        np.testing.assert_allclose(table.features, [[0.5, 2.0], [-1.0, 4.0]])


def test_numpy_files_carry_labels(tmp_path):
    np.save(tmp_path / "a.npy", np.array([[3, 0.5, 1], [1, -1.0, 0]]))
    table = read_client_file(tmp_path / "a.npy", label_column="label")
    assert table.labels == ("1", "0") and table.columns == ("x0",)
    np.savez(tmp_path / "b.npz", ids=["u", "v"], features=np.ones((2, 1)), labels=["cat", "dog"], columns=["w"])
    table = read_client_file(tmp_path / "b.npz", label_column="label")
    assert table.labels == ("cat", "dog") and table.columns == ("w",)
    np.savez(tmp_path / "c.npz", features=np.ones((2, 1)))
    with pytest.raises(ValueError, match=r"c\.npz: array 'ids' is missing"):
        read_client_file(tmp_path / "c.npz")


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        (["id", "a"], [["x", 1], ["x", 2]], r"f\.csv, column 'id', row 2: has the same id as row 1"),
        (["id", "a"], [["x", 1], ["y", ""]], r"f\.csv, column 'a', row 2: the value is missing"),
        (["id", "a"], [["x", 1], ["", 2]], r"f\.csv, column 'id', row 2: the value is missing"),
        (["id", "a"], [["x", 1], ["y", "blue"]], r"f\.csv, column 'a', row 2: is text, not a number"),
        (["id", "a"], [["x", 1], ["y", "inf"]], r"f\.csv, column 'a', row 2: is infinite, not a finite number"),
        (["id", "a"], [["x", 1], ["y", "1e999"]], r"f\.csv, column 'a', row 2: is infinite, not a finite number"),
        (["person", "a"], [["x", 1]], r"f\.csv: the id column 'id' is missing; columns are 'person', 'a'"),
        (["id", "a"], [["x"]], r"f\.csv, line 2: 1 values, but the header names 2 columns"),
        (["id", "a", "a"], [["x", 1, 2]], r"f\.csv, column 'a': occurs more than once"),
        (["id", "a"], [], r"f\.csv: has a header but no rows"),
        (["id"], [["x"]], r"f\.csv: has no feature column"),
        ([], [], r"f\.csv: is empty"),
    ],
)
def test_bad_files_name_file_column_and_row(tmp_path, header, rows, message):
    path = write_csv(tmp_path / "f.csv", header, rows)
    if not header:
        path.write_text("")
    with pytest.raises(ValueError, match=message):
        read_client_file(path)


def test_empty_overlap_says_what_ids_look_like(tmp_path):
    one = write_csv(tmp_path / "a.csv", ["id", "v"], [["A1", 1]])
    two = write_csv(tmp_path / "b.csv", ["id", "w", "label"], [["1", 1, 0]])
    with pytest.raises(ValueError, match=r"no id occurs in every file: a\.csv has 1 ids \(text") as error:
        load_columns([one, two])
    assert "A1" not in str(error.value)


def test_label_trouble(tmp_path, two_files):
    with pytest.raises(ValueError, match=r"bank\.csv: the label column 'label' is missing"):
        load_columns(two_files[::-1])
    with pytest.raises(ValueError, match=r"shop\.csv, column 'label'.*must be one of no, maybe"):
        load_columns(two_files, classes=["no", "maybe"])
    both = write_csv(tmp_path / "c.csv", ["id", "a", "label"], [["p1", 1, "yes"]])
    with pytest.raises(ValueError, match=r"c\.csv, column 'label': the labels belong in the last file"):
        load_columns([both, two_files[1]])
    flat = write_csv(tmp_path / "d.csv", ["id", "a", "label"], [[f"p{i}", 1, "yes"] for i in range(9)])
    with pytest.raises(ValueError, match="only one class"):
        load_columns([flat])
    with pytest.raises(ValueError, match=r"ending = '\.txt'"):
        read_client_file(write_csv(tmp_path / "e.txt", ["id"], []))
    with pytest.raises(ValueError, match="an existing"):
        read_client_file(tmp_path / "nowhere.csv")
