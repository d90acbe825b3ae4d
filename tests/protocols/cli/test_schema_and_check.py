"""`ppvfl schema` and `ppvfl check`: from a private file to a schema without looking at its values, and what it does to
it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas
import pytest

from protocols.cli import main
from protocols.federation.template import federation_text
from vfl.tables import read_schema

SECRET = "zq-secret"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    random = np.random.default_rng(0)
    count = 200
    table = pandas.DataFrame(
        {
            "who": [f"{i:04d}" for i in range(count)],
            "age": random.normal(40, 10, count),
            "region": random.choice(["n", "s"], count),
            "since": "2020-05-01",
            "default": random.choice(["no", "yes"], count),
        }
    )
    table.drop(columns=["who", "default"]).to_csv(tmp_path / "public.csv", index=False)
    table.loc[3, "region"] = SECRET
    table.loc[:50, "age"] = 1000.0
    table.loc[60:62, "age"] = np.nan
    table.to_csv(tmp_path / "card.csv")  # with the index of pandas
    servers = [("127.0.0.1", 7000 + i) for i in range(3)]
    clients = [("bank", 2, ""), ("card", 5, "127.0.0.1:7101")]
    (tmp_path / "federation.toml").write_text(federation_text("pilot", servers, clients, ["no", "yes"]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(capsys: pytest.CaptureFixture[str], line: str, code: int = 0) -> str:
    assert main(line.split()) == code
    shown = capsys.readouterr()
    return " ".join((shown.out + shown.err).split())


def test_from_a_file_to_a_checked_schema(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "schema card.csv --id who --id-rule integer --label default --classes no,yes"
    said = command(capsys, line)
    assert "State range or values in columns.toml of: age, region, since" in said and SECRET not in said
    assert "is a row index that pandas wrote" in said
    assert SECRET not in (folder / "columns.toml").read_text()
    said = command(capsys, "check card.csv --schema columns.toml", 2)
    assert "columns.toml: column 'age': scaling = 'none': must be one of range = [LOW, HIGH]" in said
    stated = "--range age=0:100 --values region=n,s --range since=2000-01-01:2030-01-01 --force"
    said = command(capsys, f"{line} {stated}")
    assert "open" not in said and "Next: ppvfl check" in said
    assert read_schema("columns.toml").width == 5
    said = command(capsys, "check card.csv --schema columns.toml --config federation.toml --as card")
    assert "26% of the rows are beyond the stated range, and clipped" in said and SECRET not in said
    assert "the same in every row, and so of no use: 'since'" in said and "200 ids (whole numbers" in said
    facts = json.loads(command(capsys, "check card.csv --schema columns.toml --json"))
    age = facts["columns"][0]
    assert (age["missing"], age["clipped"], facts["width"], facts["columns"][1]["rest"]) == (3, 51, 5, 1)


def test_constants_from_public_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = command(capsys, "schema card.csv --id who --label default --public public.csv --out c.toml --ignore since")
    assert "width = 4" in said and "mean and deviation" in said
    schema = read_schema("c.toml")
    assert [column.name for column in schema.columns] == ["age", "region"] and schema.ignored == ("since",)
    said = command(capsys, "check card.csv --schema c.toml --config federation.toml --as card", 2)
    assert "a number with leading zeros" in said and "rule = 'integer'" in said  # the ids are 0000, 0001, …
    text = Path("c.toml").read_text().replace('rule = "text"', 'rule = "verbatim"')
    Path("c.toml").write_text(text)
    said = command(capsys, "check card.csv --schema c.toml --config federation.toml --as card", 1)
    assert "refused: 4 columns of numbers, but card has width 5 in federation.toml" in said


def test_what_is_not_used_is_said_with_its_reason(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = 30
    frame = pandas.DataFrame({"id": range(rows), "weight [kg]": np.arange(rows), "region": ["n", "s", "n"] * 10})
    frame["hole"], frame["text"] = np.nan, "word " * 200
    frame.to_csv("plain.csv", index=False)
    said = command(capsys, "schema plain.csv --public plain.csv --out p.toml")
    assert "column 'hole': is not used: it is empty" in said and "column 'text': is not used: it holds text" in said
    assert "weight [kg]" in said  # not taken for a colour
    said = command(capsys, "check plain.csv --schema p.toml")
    assert "weight [kg]" in said and "of no use" not in said  # an empty rest category is as it should be
    said = command(capsys, "check plain.csv --public plain.csv")
    assert "warning: plain.csv, column 'hole': is not used" in said
    text = Path("p.toml").read_text().replace('values = ["n", "s"]', f'values = ["n", "s", "{"long " * 50}end"]')
    Path("p.toml").write_text(text)
    said = command(capsys, "check plain.csv --schema p.toml")
    assert "of no use: 'region=long long" in said and "end" not in said.split("of no use")[1].split("This is about")[0]


def test_ids_have_a_rule_without_a_schema_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("plain.csv").write_text("id,a\n007,1\n8.0,2\n")
    assert "a number with leading zeros" in command(capsys, "check plain.csv --scaled", 2)
    assert "2 ids (whole numbers, 1 characters)" in command(capsys, "check plain.csv --scaled --id-rule integer")
    command(capsys, "schema plain.csv --range a=0:9 --out p.toml")
    said = command(capsys, "check plain.csv --schema p.toml --id-rule integer", 2)
    assert "--id-rule = 'integer': must be 'text', the schema's own, or absent" in said


def test_a_rule_that_destroys_a_narrow_table_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "federation.toml"
    file.write_text(file.read_text().replace('row_rule = "clip"', 'row_rule = "normalise"'))
    (folder / "bank.csv").write_text("id,a,b\n" + "".join(f"p{i},{i},{i % 3}\n" for i in range(9)))
    said = command(capsys, "check bank.csv --value-range 0,9 --config federation.toml --as bank")
    assert "'normalise' gives every row of these 2 columns the same norm, and leaves little but signs" in said
    file.write_text(file.read_text().replace('"normalise"', '"clip"').replace('row_bound = "auto"', "row_bound = 0.1"))
    said = command(capsys, "check bank.csv --value-range 0,9 --config federation.toml --as bank")
    assert "of the rows are longer than this client's part 0.0535 of row_bound" in said


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("schema card.csv", "the id column = 'id': must be one of who, age"),
        ("schema card.csv --id who --range age=0", "range of age = '0': must be LOW:HIGH"),
        ("schema card.csv --id who --range ages=0:1", "columns = 'ages': must be columns of card.csv"),
        ("schema card.csv --id who --classes a,b", "--label = None: must be given"),
        ("schema card.csv --id who --label nothing", "--label = 'nothing'"),
        ("schema card.csv --id who --public card.csv --ignore age,region,since,default", "none that is a feature"),
        ("check card.csv --config federation.toml", "--config and --as"),
        ("check card.csv --value-range 1,0 --id who", "LOW below HIGH"),
        ("check nothing.csv --scaled", "an existing CSV"),
    ],
)
def test_what_does_not_fit_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, sentence: str
) -> None:
    assert sentence in command(capsys, line, 2)
