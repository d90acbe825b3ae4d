"""backend="federation": this party's side of an existing federation, as ``ppvfl client`` and ``ppvfl predict`` do it.

Every organisation runs its own estimator on its own table, at the same time. Nothing is written but what these commands
keep; a table that is not a file goes through a private temporary one.
"""

from __future__ import annotations

import csv
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from accel.validate import require
from protocols.api.files import adopt_files
from protocols.api.inputs import as_arrow
from protocols.cli import client, make_parser, predict
from protocols.federation.public_plan import plan_for
from protocols.federation.read import load
from protocols.plan.run_plan import Plan
from protocols.state.model_file import read_model, write_model
from vfl.tables import Schema, read_table, write_schema

__all__ = ["fit_in_federation", "join_in_federation", "planned_in_federation", "predict_in_federation"]

LABEL = "label"


def fit_in_federation(estimator: Any, table: Any, y: Any) -> None:
    """Align, share, wait for the model."""
    _who(estimator)
    with tempfile.TemporaryDirectory(prefix="ppvfl-") as folder:
        words = _words(estimator, table, y, Path(folder))
        label = y if isinstance(y, str) else LABEL
        if y is not None:
            words += ["--label-column", label]
        file = Path(folder) / "model.npz"
        arguments = make_parser().parse_args(["client", *words, "--model-out", str(file)])
        client.run(arguments)
        model = read_model(file)
        if y is not None and model.task != "regression":
            model = replace(model, label_type=_label_type(table, y))
    adopt_files(estimator, {file.name: model})
    estimator.model_ = model  # also of a federation of one


def planned_in_federation(estimator: Any, table: Any) -> Plan:
    """The plan if all rows of this party's table were common: what it can know before rows are matched."""
    party, config = _who(estimator), load(str(estimator.federation))
    config.participant(party, "party")
    rows = read_table(table) if isinstance(table, str | Path) else as_arrow("X", table)
    return plan_for(config, len(rows))


def predict_in_federation(estimator: Any, table: Any, output: str) -> tuple[np.ndarray, np.ndarray]:
    """Predictions for the common rows and their ids, in the order of this party's table. Refused at a party that would
    not receive them."""
    party, receiver = _who(estimator), load(str(estimator.federation)).predict.receiver
    require(
        party == receiver,
        "party",
        party,
        f"{receiver!r}, which receives predictions ([predict] receiver)",
        f"call join_prediction(X, output={output!r}) here while {receiver} predicts",
    )
    found = _predict(estimator, table, output)
    assert found is not None  # the receiver's file is there, or the command has raised
    return found


def join_in_federation(estimator: Any, table: Any, output: str) -> None:
    """This party's part in a prediction that another one receives."""
    party, receiver = _who(estimator), load(str(estimator.federation)).predict.receiver
    require(party != receiver, "party", party, "another party than the receiver", "call predict or predict_proba here")
    _predict(estimator, table, output)


def _predict(estimator: Any, table: Any, output: str) -> tuple[np.ndarray, np.ndarray] | None:
    with tempfile.TemporaryDirectory(prefix="ppvfl-") as folder:
        words = _words(estimator, table, None, Path(folder), new=True)
        file, out = Path(folder) / "model.npz", Path(folder) / "predictions.csv"
        model = getattr(estimator, "model_", None)
        require(
            model is not None and model.client == estimator.party,
            "party",
            estimator.party,
            "the party of the model file, but none is loaded"
            if model is None
            else f"{model.client!r}, the party of the model file",
            "load its model-NAME.npz, or fit in the federation",
        )
        assert model is not None
        write_model(file, model)
        wanted = ["--model", str(file), "--output", output, "--out", str(out)]
        predict.run(make_parser().parse_args(["predict", *words, *wanted]))
        if not out.exists():
            return None
        with out.open(newline="", encoding="utf-8") as stream:
            _, *rows = list(csv.reader(stream))
    return np.array([row[1:] for row in rows]), np.array([row[0] for row in rows])


def _label_type(table: Any, y: Any) -> str:
    """The type of this party's own labels; the federation knows their texts."""
    if isinstance(table, str | Path):
        column = read_table(table, label_column=y, keep=(y,)).table.column(y)
    else:
        column = as_arrow("X", table).column(y) if isinstance(y, str) else pa.chunked_array([pa.array(np.asarray(y))])
    kind = column.type
    numbers = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return str(np.dtype(kind.to_pandas_dtype())) if numbers else ""


def _who(estimator: Any) -> str:
    both, way_out = (estimator.federation, estimator.party), "`ppvfl init` writes one"
    allowed = "a federation.toml, with party= the client of it that this is"
    require(None not in both and isinstance(both[0], str | Path), "federation", both, allowed, way_out)
    require(isinstance(both[1], str), "party", both[1], "the name of a client in the file")
    return str(estimator.party)


def _words(estimator: Any, table: Any, y: Any, folder: Path, *, new: bool = False) -> list[str]:
    """The command line that this party would type."""
    party = _who(estimator)
    words = ["--as", party, "--config", str(estimator.federation), "--columns", _file(table, y, folder / "own.parquet")]
    if new:  # the model's file says the rest
        return words if estimator.id_column is None else [*words, "--id", str(estimator.id_column)]
    require(
        estimator.id_column is not None, "id_column", None, "the column that names the person, to match rows by", ""
    )
    words += ["--id", str(estimator.id_column)]
    if estimator.id_rule != "text":
        words += ["--id-rule", str(estimator.id_rule)]
    schema = (estimator.schemas or {}).get(party) if not isinstance(estimator.schemas, Schema) else estimator.schemas
    if schema is not None:
        write_schema(folder / "columns.toml", schema)
        return [*words, "--schema", str(folder / "columns.toml")]
    if estimator.public is not None:
        return [*words, "--public", _file(estimator.public, None, folder / "public.parquet")]
    return [*words, "--scaled"]


def _file(table: Any, y: Any, file: Path) -> str:
    if isinstance(table, str | Path):
        require(y is None or isinstance(y, str), "y", "labels", "the name of a column, where X is a file")
        return str(table)
    import pyarrow.parquet as pq

    found = as_arrow("X", table)
    if y is not None and not isinstance(y, str):
        require(LABEL not in found.column_names, "X: columns", LABEL, "without a column of that name where y is given")
        found = found.append_column(LABEL, pa.array(np.asarray(y)))
    pq.write_table(found, file)
    return str(file)
