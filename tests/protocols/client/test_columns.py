"""From a client's file to what it shares: by schema, by options, and for new rows as the model's file says."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel.errors import InvalidArgument
from protocols.client.columns import OwnColumns, add_column_options, client_row_bound, read_columns
from protocols.client.take_part import released
from protocols.federation.public_plan import plan_for
from protocols.federation.read import ClientEntry, FederationConfig, parse
from protocols.federation.template import federation_text
from protocols.state.model_file import ReleasedModel, read_model, write_model
from vfl.data.scaling import split_row_bound
from vfl.tables import fit_schema, write_schema

ROWS = 60
CLIENTS = [("bank", 3, ""), ("card", 6, "127.0.0.1:7101")]


def frame() -> pandas.DataFrame:
    random = np.random.default_rng(0)
    return pandas.DataFrame(
        {
            "person": [f"p{i}" for i in range(ROWS)],
            "age": random.normal(40, 9, ROWS),
            "gain": random.normal(0, 3, ROWS),
            "region": random.choice(["n", "s"], ROWS),
            "member": random.choice([True, False], ROWS),
            "defaulted": random.choice(["no", "yes"], ROWS),
        }
    )


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_column_options(parser)
    return parser.parse_args(words)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[FederationConfig, OwnColumns, ReleasedModel, Path]:
    """The label client's columns as they were trained on, and its model file."""
    folder = tmp_path_factory.mktemp("trained")
    servers = [("127.0.0.1", 7000 + i) for i in range(3)]
    config = parse(federation_text("pilot", servers, CLIENTS, ["no", "yes"]), pinned=False)
    public = frame().sample(frac=0.5, random_state=1)
    public.to_csv(folder / "public.csv", index=False)
    write_schema(folder / "columns.toml", fit_schema(public.drop(columns="defaulted"), id_column="person"))
    frame().to_csv(folder / "card.csv", index=False)
    given_options = options("--schema", str(folder / "columns.toml"))
    own = read_columns(config, card(config), folder / "card.csv", given_options, label_column="defaulted")
    layer = np.random.default_rng(2).normal(size=(10, 1))
    write_model(folder / "model.npz", released(config, plan_for(config, ROWS), [layer], columns=own))
    return config, own, read_model(folder / "model.npz"), folder


def card(config: FederationConfig) -> ClientEntry:
    return config.label_client


def test_the_models_file_holds_what_new_rows_need(trained: Any) -> None:
    config, own, model, _ = trained
    assert model.schema == own.schema and model.task == "binary" and model.version == 1
    assert (model.row_bound, model.row_rule) == (client_row_bound(config, card(config)), "clip")
    assert own.outputs.shape == (ROWS, 6) and own.table.columns[2:5] == ("region=n", "region=s", "region=…")


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_new_rows_are_found_by_name_or_refused(
    trained: Any, tmp_path_factory: pytest.TempPathFactory, data: Any
) -> None:
    """Columns in another order, other file types, further columns: the same embeddings. One missing, renamed or of
    another kind, other public rows, another range: refused. Never other numbers."""
    config, own, model, _ = trained
    directory = tmp_path_factory.mktemp("new")
    table = frame().drop(columns="defaulted").iloc[data.draw(st.permutations(range(ROWS)))[:20]]
    names = data.draw(st.permutations(list(table.columns)))
    table = table[names]
    change = data.draw(
        st.sampled_from(["nothing", "further", "label too", "missing", "renamed", "text", "dates", "public", "range"])
    )
    words: list[str] = []
    if change == "further":
        table = table.assign(further=1.0)
    elif change == "label too":
        table = table.assign(defaulted="no")
    elif change == "missing":
        table = table.drop(columns=data.draw(st.sampled_from(["age", "gain", "region", "member", "person"])))
    elif change == "renamed":
        table = table.rename(columns=dict(zip(["age", "gain"], ["gain_", "age_"], strict=True)))
    elif change == "text":
        table = table.assign(age="forty")
    elif change == "dates":
        table = table.assign(gain=pandas.Timestamp("2020-01-01"))
    elif change == "public":
        other = directory / "public.csv"
        frame().iloc[: ROWS // 2].assign(age=lambda t: t["age"] + 1).to_csv(other, index=False)
        words = ["--public", str(other)]
    elif change == "range":
        words = ["--value-range", "0,1"]
    kind = data.draw(st.sampled_from(["csv", "parquet"]))
    file = directory / f"new.{kind}"
    table.to_csv(file, index=False) if kind == "csv" else table.to_parquet(file, index=False)
    arguments = options(*words)
    if change in ("nothing", "further", "label too"):
        new = read_columns(config, card(config), file, arguments, with_label=False, model=model)
        expected = own.embeddings(np.array([own.ids.index(name) for name in new.ids]))
        np.testing.assert_allclose(new.embeddings(np.arange(20)), expected, atol=1e-6)
        assert bool(new.notes) == (change == "further")
        return
    with pytest.raises(InvalidArgument):
        read_columns(config, card(config), file, arguments, with_label=False, model=model)


def test_the_same_constants_may_be_stated_again(trained: Any) -> None:
    config, own, model, folder = trained
    assert own.schema is not None
    turned = folder / "turned.toml"  # the same columns in another order: that of the model holds
    write_schema(turned, replace(own.schema, columns=own.schema.columns[::-1]))
    for words in (
        ["--schema", str(folder / "columns.toml")],
        ["--schema", str(turned)],
        ["--public", str(folder / "public.csv")],
    ):
        new = read_columns(config, card(config), folder / "card.csv", options(*words), with_label=False, model=model)
        np.testing.assert_allclose(new.outputs, own.outputs, atol=1e-6)
    with pytest.raises(
        InvalidArgument, match="scaling of these columns = 'age': must be as when the model was trained"
    ):
        schema = fit_schema(frame().drop(columns="defaulted").assign(age=1.0), id_column="person")
        age = {column.name: column for column in schema.columns}["age"]
        mine = replace(own.schema, columns=tuple(age if c.name == "age" else c for c in own.schema.columns))
        write_schema(folder / "other.toml", mine)
        words = ["--schema", str(folder / "other.toml")]
        read_columns(config, card(config), folder / "card.csv", options(*words), with_label=False, model=model)


def test_another_row_bound_or_local_model_is_refused(trained: Any) -> None:
    config, _, model, folder = trained
    other = replace(config, run=replace(config.run, row_bound=1.0))
    with pytest.raises(InvalidArgument, match="row bound and rule of this client"):
        read_columns(other, card(config), folder / "card.csv", options(), with_label=False, model=model)
    with pytest.raises(InvalidArgument, match="--local-model = 'another one"):
        strange = replace(model, local_model="0" * 64)
        read_columns(config, card(config), folder / "card.csv", options(), with_label=False, model=strange)


def test_parts_of_the_row_bound_by_width(trained: Any) -> None:
    config = trained[0]
    parts = [client_row_bound(config, client) for client in config.clients]
    np.testing.assert_allclose(np.sum(np.square(parts)), config.run.row_bound**2)
    assert parts[1] / parts[0] == pytest.approx(2**0.5) and config.run.row_bound == 12.0
    even = replace(config, run=replace(config.run, row_rule="normalise"))
    assert client_row_bound(even, config.clients[0]) == split_row_bound(12.0, 2)[0]
    with pytest.raises(InvalidArgument, match="widths"):
        split_row_bound(1.0, 2, [1])
