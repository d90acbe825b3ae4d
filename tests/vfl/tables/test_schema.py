"""Schemas: what they accept, how they are written, and that a table through one is the same whatever its file looks
like."""

from __future__ import annotations

import datetime

import numpy as np
import pandas
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, QuantileTransformer, StandardScaler

from accel.errors import InvalidArgument
from tests.not_none import not_none
from vfl.tables import (
    Boolean,
    Category,
    ColumnsError,
    Date,
    IdRule,
    Label,
    Number,
    Schema,
    apply_schema,
    draft_schema,
    fit_schema,
    read_schema,
    read_table,
    schema_text,
    write_schema,
)

PEOPLE = 300


@pytest.fixture(scope="module")
def frame():
    random = np.random.default_rng(3)
    table = pandas.DataFrame(
        {
            "customer": [f"c{i}" for i in range(PEOPLE)],
            "age": random.normal(45, 12, PEOPLE).round(1),
            "gain": random.pareto(0.8, PEOPLE) * 100,
            "region": random.choice(["north", "south", "east"], PEOPLE),
            "member": random.choice([True, False], PEOPLE),
            "since": pandas.Timestamp("2015-01-01") + pandas.to_timedelta(random.integers(0, 3000, PEOPLE), unit="D"),
            "defaulted": random.choice(["no", "yes"], PEOPLE),
        }
    )
    table.loc[5:9, "age"] = np.nan
    table.loc[7, "region"] = None
    return table


@pytest.fixture(scope="module")
def schema(frame):
    return fit_schema(frame, id_column="customer", label=Label("defaulted", classes=("no", "yes")))


def test_constants_are_those_of_scikit_learn(frame, schema):
    table, _ = apply_schema(schema, frame)
    column = dict(zip(table.columns, table.features.T, strict=True))
    known = frame["age"].notna().to_numpy()
    expected = StandardScaler().fit_transform(frame[["age"]].to_numpy())[known, 0]
    np.testing.assert_allclose(column["age"][known], np.clip(expected, -4, 4), atol=1e-6)
    assert (column["age"][~known] == 0).all() and (~known).sum() == 5  # what is empty is at the centre
    gain = frame[["gain"]].to_numpy()
    uniform = QuantileTransformer(n_quantiles=33, subsample=None).fit_transform(gain)[:, 0]
    np.testing.assert_allclose(column["gain"], 2 * uniform - 1, atol=1e-6)
    known = frame["region"].notna()
    hot = OneHotEncoder(sparse_output=False).fit_transform(frame.loc[known, ["region"]])
    got = np.stack([column[f"region={name}"] for name in ("east", "north", "south")], axis=1)
    np.testing.assert_array_equal(got[known], hot)
    assert column["region=…"].tolist() == (~known).astype(float).tolist()
    ranged, _ = apply_schema(Schema((Number("gain", range=(0, 50)),), IdRule("customer")), frame)
    scaled = MinMaxScaler((-1, 1)).fit([[0.0], [50.0]]).transform(gain)
    np.testing.assert_allclose(ranged.features, np.clip(scaled, -1, 1), atol=1e-6)
    assert (
        set(np.unique(column["member"])) == {-1.0, 1.0} and column["since"].min() == -1 and column["since"].max() == 1
    )


def test_a_schema_is_what_its_file_says(schema, tmp_path):
    write_schema(tmp_path / "columns.toml", schema)
    again = read_schema(tmp_path / "columns.toml")
    assert again == schema and again.fingerprint() == schema.fingerprint()
    assert Schema.from_dict(schema.as_dict()) == schema


@pytest.mark.parametrize("text", ['a "quoted" \\ name', "ümläut — π", "tab\tand\x7f", "# no comment = []"])
def test_any_name_survives_the_file(text, tmp_path):
    kept = Schema((Category(text, (f"v {text}",), False, "drop"), Number("n", range=(-1e-9, 1e300), fill=0.25)))
    write_schema(tmp_path / "c.toml", kept)
    assert read_schema(tmp_path / "c.toml") == kept


def test_report_counts_what_was_done(frame):
    columns = (
        Number("age", range=(40, 50), fill=45.0),
        Category("region", ("north",)),
        Date("since", ("2016-01-01", "2017-01-01")),
        Boolean("member"),
    )
    table, report = apply_schema(Schema(columns, IdRule("customer")), frame)
    age, region, since, member = report.columns
    assert (age.missing, age.clipped) == (5, int(((frame["age"] < 40) | (frame["age"] > 50)).sum()))
    assert (table.features[5:10, 0] == 0).all()
    assert (region.missing, region.rest) == (1, int(frame["region"].isin(["south", "east"]).sum()))
    assert since.clipped == int(((frame["since"] < "2016-01-01") | (frame["since"] > "2017-01-01")).sum())
    assert (member.missing, member.clipped, report.dropped) == (0, 0, 0)
    assert any("not in the schema" in note and "'gain'" in note for note in report.notes)
    dropped, report = apply_schema(Schema((Number("age", range=(0, 100), fill="drop"),), IdRule("customer")), frame)
    assert report.dropped == 5 and len(dropped.ids) == PEOPLE - 5 and "c5" not in dropped.ids


def _written(frame, kind, directory):
    file = directory / f"t.{kind}"
    if kind == "csv":
        frame.to_csv(file, index=False)
    else:
        frame.to_parquet(file, index=False)
    return read_table(file)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_other_files_of_the_same_rows_give_the_same_or_are_refused(frame, schema, tmp_path_factory, data):
    """Columns permuted, another file type, types changed, one missing, one renamed: reordered or refused, never
    wrong."""
    expected, _ = apply_schema(schema, frame)
    order = data.draw(st.permutations(list(frame.columns)))
    other = frame[order]
    changes = data.draw(st.sets(st.sampled_from(["text", "missing", "renamed", "swapped kinds", "codes"]), max_size=2))
    features = [column.name for column in schema.columns]
    wrong = False
    if "text" in changes:  # the same cells written as text
        name = data.draw(st.sampled_from(features))
        missing = other[name].isna()
        shown = other[name].dt.strftime("%Y-%m-%d") if name == "since" else other[name].map(lambda v: f" {v!s}")
        other = other.assign(**{name: shown.astype(object).where(~missing, "")})
    if "codes" in changes:  # numbers become yes and no
        other = other.assign(gain=frame["gain"] > 3)
        wrong = True
    if "swapped kinds" in changes:
        other = other.assign(since=range(len(other)))
        wrong = True
    if "missing" in changes:
        other, wrong = other.drop(columns=data.draw(st.sampled_from(features))), True
    if "renamed" in changes:
        name = data.draw(st.sampled_from(features))
        other, wrong = other.rename(columns={name: name.upper()}), True
    kind = data.draw(st.sampled_from(["memory", "csv", "parquet"]))
    raw = other if kind == "memory" else _written(other, kind, tmp_path_factory.mktemp("files"))
    if wrong:
        with pytest.raises(
            ColumnsError, match="missing|not numbers|not dates|is text, not a number|not a date of the form"
        ):
            apply_schema(schema, raw)
        return
    got, _ = apply_schema(schema, raw)
    assert got.columns == expected.columns and got.ids == expected.ids and got.labels == expected.labels
    np.testing.assert_allclose(got.features, expected.features, atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "cells", "expected"),
    [
        ("integer", ["007", "8", "9.0", "+10", "-0"], ["7", "8", "9", "10", "0"]),
        ("integer", [7, 8], ["7", "8"]),
        ("integer", [7.0, 8.0], ["7", "8"]),
        ("text", [7, 8], ["7", "8"]),
        ("text", [7.0, 8.0], ["7", "8"]),
        ("text", ["A7", "7", "0x7", "1.5"], ["A7", "7", "0x7", "1.5"]),
        ("trimmed", [" A7 ", "7\t"], ["A7", "7"]),
        ("verbatim", ["007", " 7", "7"], ["007", " 7", "7"]),
        ("text", ["007", "8"], r"row 1: is a number with leading zeros.*rule = 'integer' \(007 is 7\)"),
        ("text", ["8", "7.0"], "row 2: is a number with leading zeros, a sign or a decimal point"),
        ("text", ["8", "7 "], "row 2: is an id with space around it.*'trimmed'"),
        ("trimmed", [" 007"], "row 1: is a number with leading zeros"),
        ("integer", ["7", "A7"], "row 2: is an id that is no whole number"),
        ("integer", [7.5], "row 1: is a number with a fraction"),
        ("integer", ["7", "07"], "row 2: has the same id as row 1"),
        ("text", ["7", ""], "row 2: the value is missing"),
        ("text", [True, False], "holds true and false, not ids"),
    ],
)  # fmt: skip
def test_ids_match_or_are_refused(rule, cells, expected):
    schema = Schema((Number("x", range=(0, 1)),), IdRule("who", rule))
    table = pa.table({"who": cells, "x": [0.5] * len(cells)})
    if isinstance(expected, list):
        assert list(apply_schema(schema, table)[0].ids) == expected
        return
    with pytest.raises(ColumnsError, match=expected) as error:
        apply_schema(schema, table)
    assert "A7" not in str(error.value)


def test_refusals_never_show_a_cell(tmp_path):
    """The words of private cells are nowhere in an error, whatever is wrong and whoever finds it."""
    secret = "sëcret-zq7"
    schema = Schema(
        (
            Number("n", range=(0, 1)),
            Category("c", ("a",), False, "refuse"),
            Boolean("b"),
            Date("d", ("2000-01-01", "2001-01-01")),
        ),
        IdRule("id", "integer"),
        Label("y", classes=("0", "1")),
    )
    good = {"id": "1", "n": "0.5", "c": "a", "b": "yes", "d": "2000-05-05", "y": "1"}
    for name in good:
        file = tmp_path / f"{name}.csv"
        bad = {**good, name: secret}
        lines = [",".join(good), ",".join(good.values()), ",".join(bad.values())]
        file.write_text("\n".join(lines), encoding="utf-8")
        with pytest.raises(ColumnsError, match=rf"column '{name}', row 2: ") as error:
            apply_schema(schema, read_table(file))
        assert secret not in str(error.value) and error.value.__cause__ is None
    broken = tmp_path / "broken.csv"
    broken.write_text(f"{','.join(good)}\n1,2,3,4,5,6,{secret}\n", encoding="utf-8")
    with pytest.raises(ColumnsError, match="line 2: 7 values, but the header names 6 columns") as error:
        read_table(broken)
    assert secret not in str(error.value)
    broken.write_bytes(",".join(good).encode() + b"\n1,\xff\xfe" + secret.encode() + b",c,b,d,y\n")
    with pytest.raises(ColumnsError, match="UTF-8") as error:
        read_table(broken)
    assert secret not in str(error.value)


def test_pandas_index_columns_are_no_features(frame, tmp_path):
    """Neither the unnamed one of a CSV file nor the one in a Parquet file's metadata; but an id may be an index."""
    small = frame[["customer", "age"]].iloc[10:20]
    small.to_csv(tmp_path / "a.csv")
    small.to_parquet(tmp_path / "a.parquet")  # rows 10 to 20: a real index column
    small.set_index("customer").to_parquet(tmp_path / "b.parquet")
    small.rename_axis("row").to_parquet(tmp_path / "c.parquet", index=True)
    for name in ("a.csv", "a.parquet", "c.parquet"):
        raw = read_table(tmp_path / name, id_column="customer")
        assert raw.names == ("customer", "age"), name
        assert name != "a.csv" or "is a row index that pandas wrote" in raw.notes[0]
    raw = read_table(tmp_path / "b.parquet", id_column="customer")
    assert sorted(raw.names) == ["age", "customer"] and raw.notes == ()


def test_a_draft_takes_names_and_types_only(frame, tmp_path):
    raw = read_table(_file(frame, tmp_path), id_column="customer", guess_types=True)
    draft = draft_schema(raw, id_column="customer", label=Label("defaulted"), ranges={"age": [0, 120]})
    text = schema_text(draft)
    assert "state it" in text and "state them" in text and "north" not in text
    (tmp_path / "columns.toml").write_text(text)
    with pytest.raises(ColumnsError, match=r"columns.toml: column 'gain': scaling = 'none': must be one of range"):
        read_schema(tmp_path / "columns.toml")
    stated = draft_schema(
        raw,
        id_column="customer",
        label=Label("defaulted"),
        ranges={"age": [0, 120], "gain": [0, 1e4], "since": ["2015-01-01", "2025-01-01"]},
        values={"region": ["north", "south"]},
    )
    (tmp_path / "columns.toml").write_text(schema_text(stated))
    done = read_schema(tmp_path / "columns.toml")
    assert [column.kind for column in done.columns] == ["number", "number", "category", "boolean", "date"]
    assert done.width == 7 and len(apply_schema(done, frame)[0].ids) == PEOPLE


def _file(frame, directory):
    frame.to_csv(directory / "t.csv", index=False)
    return directory / "t.csv"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "nmber"}, "column 'a': kind = 'nmber': must be one of 'number'"),
        ({"centre": 1.0, "spread": 2.0}, "scaling = 'range, centre and spread'"),
        ({"range": [3, 3]}, r"range = 3.0: must be a finite number in \(3"),
        ({"range": [0, 1, 2]}, "two values"),
        ({"rang": [0, 1]}, "column 'a': key = 'rang'"),
        ({"fill": "mean"}, "column 'a': fill = 'mean': must be one of 'centre', 'refuse', 'drop'; or a number"),
        ({"range": ["a", "b"]}, "column 'a': range"),
        ({"kind": "category"}, "column 'a': key = 'range'"),
        ({"name": ""}, "name = ''"),
    ],
)
def test_wrong_schemas_are_refused(changes, message):
    column = {"name": "a", "kind": "number", "range": [0, 1], **changes}
    with pytest.raises(InvalidArgument, match=message):
        Schema.from_dict({"version": 1, "id": {"column": "id"}, "column": [column]})


def test_roles_are_exclusive_and_versions_known():
    with pytest.raises(InvalidArgument, match="columns = 'id'"):
        Schema((Number("id", range=(0, 1)),))
    with pytest.raises(InvalidArgument, match="version = 2"):
        Schema.from_dict({"version": 2})
    with pytest.raises(InvalidArgument, match="did you mean 'ignored'"):
        Schema.from_dict({"version": 1, "ignore": []})


def test_times_count_in_utc_and_forms_of_dates_are_stated():
    zone = datetime.timezone(datetime.timedelta(hours=2))
    stamps = [datetime.datetime(2020, 1, 2, 0, 0, tzinfo=zone), None]
    schema = Schema((Date("d", ("2020-01-01", "2020-01-03")),))
    table, _ = apply_schema(schema, pa.table({"id": [1, 2], "d": pa.array(stamps)}))
    np.testing.assert_allclose(table.features[:, 0], [-2 / 24, 0], atol=1e-6)
    german = Schema((Date("d", ("2020-01-01", "2020-01-03"), "%d.%m.%Y"),))
    table, _ = apply_schema(german, pa.table({"id": [1, 2], "d": ["02.01.2020", "3.1.2020"]}))
    np.testing.assert_allclose(table.features[:, 0], [0, 1])
    with pytest.raises(ColumnsError, match="row 1: is not a date of the form %d.%m.%Y"):
        apply_schema(german, pa.table({"id": [1], "d": ["2020-01-02"]}))


def test_targets_are_numbers_within_their_public_range():
    schema = Schema((Number("x", range=(0, 1)),), label=Label("y", "number", range=(0.0, 10.0)))
    table, _ = apply_schema(schema, pa.table({"id": [1, 2, 3], "x": [0, 1, 0], "y": [5, 99, -1]}))
    assert table.labels is None and not_none(table.targets).tolist() == [5.0, 10.0, 0.0]
    new, _ = apply_schema(schema, pa.table({"id": [1], "x": [0]}), with_label=False)
    assert new.targets is None
