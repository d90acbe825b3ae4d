"""Estimators on disk: a folder with each party's model file, as ``ppvfl client`` writes it, and the estimator's
parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from accel.files import write_text
from accel.validate import require
from protocols.api.inputs import ROW, Columns, labels_of, texts_of
from protocols.state.model_file import ReleasedModel, read_model, write_model

__all__ = ["KeptClaim", "adopt_files", "load", "save"]

ESTIMATOR = "estimator.json"
FORMAT = 1
_LEFT_OUT = ("schemas", "public", "federation", "budget")  # in the model files; public rows are not kept


def save(estimator: Any, directory: Path) -> Path:
    """Write ``directory``; returns it. Of a federation: this party's own file, which is all that it has."""
    columns: Columns = estimator.columns_
    own = getattr(estimator, "model_", None)
    models = {own.client: own} if own is not None else _models_of(estimator, columns)
    files = {name: _file_of(name, columns.names.index(name)) for name in models}
    for name, model in models.items():
        write_model(directory / files[name], model)
    facts = {
        "claim": estimator.claim_.paragraph(),  # first, because that of a simulation is that there is none
        "format": FORMAT,
        "estimator": type(estimator).__name__,
        "parameters": {name: _plain(value) for name, value in estimator.get_params().items() if name not in _LEFT_OUT},
        "files": list(files.values()),
        "classes": _plain(getattr(estimator, "classes_", None)),  # for earlier versions; the model files say their type
        "row_bounds": list(estimator.row_bounds_),
        "columns": {
            "matrix": columns.matrix,
            "strips": [list(strip) for strip in columns.strips],
            "column_names": [list(names) for names in columns.column_names],
            "aligned_by_id": columns.aligned_by_id,
        },
        "features": getattr(estimator, "n_features_in_", None),
        "feature_names": _plain(getattr(estimator, "feature_names_in_", None)),
    }
    write_text(directory / ESTIMATOR, json.dumps(facts, indent=2))
    return directory


def _models_of(estimator: Any, columns: Columns) -> dict[str, ReleasedModel]:
    """What each party's file holds: the model, and of columns only its own."""
    number = getattr(estimator, "target_range", None)
    single = estimator.layers_[-1].shape[1] == 1
    return {
        name: ReleasedModel(
            estimator.layers_,
            texts_of(estimator.classes_) if number is None else (),
            columns.names,
            columns.widths,
            estimator.claim_.paragraph(),
            task="regression" if number is not None else "binary" if single else "classification",
            target_range=None if number is None else (float(number[0]), float(number[1])),
            schema=columns.schemas.get(name),
            row_bound=bound,
            row_rule=estimator.row_rule,
            client=name,
            label_type=_type_of(estimator),
            activation=estimator.activation_,
        )
        for name, bound in zip(columns.names, estimator.row_bounds_, strict=True)
    }


def load(kind: type, path: Path) -> Any:
    """An estimator of class ``kind`` that predicts as the one that was saved, or as the model that ``ppvfl client``
    wrote."""
    if path.is_file():
        return _from_models(kind, {path.name: read_model(path, "path")})
    file = path / ESTIMATOR
    if not file.exists():
        models = {found.name: read_model(found, "path") for found in sorted(path.glob("model-*.npz"))}
        way_out = (
            f"a folder that save() wrote, with {ESTIMATOR}, one with every party's model-NAME.npz, or one such file"
        )
        require(len(models) > 0, "path", str(path), way_out)
        return _from_models(kind, models)
    facts = json.loads(file.read_text())
    require(facts.get("format") == FORMAT, f"{file}: format", facts.get("format"), f"{FORMAT}")
    require(
        facts["estimator"] == kind.__name__, "path", f"a {facts['estimator']}", f"a {kind.__name__}", "load it as such"
    )
    parameters = facts["parameters"]
    for name in ("hidden", "target_range"):
        if parameters.get(name) is not None:
            parameters[name] = tuple(parameters[name])
    estimator = kind(**parameters)
    models = {name: read_model(path / name, "path") for name in facts["files"]}
    first, shown = next(iter(models.values())), facts["columns"]
    if len(models) < len(first.clients):
        return adopt_files(estimator, models)
    estimator.columns_ = Columns(
        first.clients,
        first.widths,
        shown["matrix"],
        tuple(map(tuple, shown["strips"])),
        tuple(map(tuple, shown["column_names"])),
        {name: m.schema for name, m in zip(first.clients, models.values(), strict=True) if m.schema is not None},
        shown["aligned_by_id"],
    )
    estimator.row_bounds_ = tuple(facts["row_bounds"])
    if facts["features"] is not None:
        estimator.n_features_in_ = facts["features"]
    if facts["feature_names"] is not None:
        estimator.feature_names_in_ = np.asarray(facts["feature_names"], dtype=object)
    estimator = _adopt(estimator, first)
    if facts["classes"] is not None and not first.label_type:  # a folder of an earlier version
        estimator.classes_ = np.asarray(facts["classes"])
    return estimator


def _from_models(kind: type, models: Mapping[str, ReleasedModel]) -> Any:
    """From files of ``ppvfl client`` alone: every party's, or one party's own."""
    model = next(iter(models.values()))
    given = {"target_range": model.target_range} if model.task == "regression" else {}
    wanted = "VerticalRegressor" if model.task == "regression" else "VerticalClassifier"
    require(kind.__name__ == wanted, "path", f"a model for {model.task}", f"one for a {kind.__name__}", f"use {wanted}")
    return adopt_files(kind(**given, row_rule=model.row_rule), models)


def adopt_files(estimator: Any, models: Mapping[str, ReleasedModel]) -> Any:
    """Tables of parties whose files these are go through their schemas; those of others are taken as scaled by their
    owners."""
    model = next(iter(models.values()))
    for name, each in models.items():
        require(
            each.client in each.clients and each.row_bound is not None,
            "path",
            f"{name}, which names no party",
            "a file that `ppvfl client` or save() of this version wrote",
            "train again, or load the folder that save() wrote",
        )
        same = len(each.layers) == len(model.layers) and all(map(np.array_equal, each.layers, model.layers))
        require(same and each.clients == model.clients, "path", f"{name}, of another training", "files of one training")
    found = {each.client: each for each in models.values()}
    missing = [name for name in model.clients if name not in found]
    whole = f"those of every party ({', '.join(model.clients)}), or one file"
    require(len(found) == len(models) and (not missing or len(models) == 1), "path", f"{len(models)} files", whole)
    schemas = {name: each.schema for name, each in found.items() if each.schema is not None}
    by_id = len(schemas) == len(model.clients) and all(schema.id.column != ROW for schema in schemas.values())
    estimator.columns_ = Columns(model.clients, model.widths, matrix=False, schemas=schemas, aligned_by_id=by_id)
    own = model.widths[model.clients.index(model.client)]
    shares = [(width / own) ** 0.5 if model.row_rule == "clip" else 1.0 for width in model.widths]
    assert model.row_bound is not None
    estimator.row_bounds_ = tuple(model.row_bound * share for share in shares)
    estimator.own_layers_ = tuple(name for name, each in found.items() if each.local or each.local_model)
    ids = {schema.id.column for schema in schemas.values()} - {ROW}
    if len(ids) == 1:
        estimator.set_params(id_column=ids.pop())
    if missing:
        estimator.model_ = model
    return _adopt(estimator, model)


@dataclass(frozen=True)
class KeptClaim:
    """The claim of a training as its model file tells it: the words, without the numbers behind them."""

    text: str

    def paragraph(self) -> str:
        """All of it."""
        return self.text

    def __str__(self) -> str:
        return self.text


def _adopt(estimator: Any, model: ReleasedModel) -> Any:
    """Make ``estimator`` one that was fitted: with this model."""
    estimator.layers_ = list(model.layers)
    estimator.activation_ = model.activation
    estimator.claim_ = KeptClaim(model.claim)
    estimator.cost_ = {}
    if model.classes and hasattr(estimator, "class_weight"):
        estimator.classes_ = labels_of(model.classes, model.label_type)
    return estimator


def _type_of(estimator: Any) -> str:
    """Numpy's name of the labels' type; texts of any length are one type."""
    kind = getattr(estimator, "classes_", np.empty(0, "U1")).dtype
    return "" if kind.kind == "U" else str(kind)


def _file_of(name: str, index: int) -> str:
    return f"model-{re.sub(r'[^A-Za-z0-9_-]+', '-', name) or index}.npz"


def _plain(value: Any) -> Any:
    """Values of JSON; arrays and numpy numbers as lists and numbers."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else None
