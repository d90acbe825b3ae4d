"""Estimators on disk: a folder with each party's model file, as ``ppvfl client`` writes it, and the estimator's parameters."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from accel.files import write_text
from accel.validate import require
from protocols.api.inputs import Columns
from protocols.inference.model_file import ReleasedModel, read_model, write_model

__all__ = ["KeptClaim", "adopt", "load", "save"]

ESTIMATOR = "estimator.json"
FORMAT = 1
_LEFT_OUT = ("schemas", "public", "federation")  # in the model files; public rows are not kept


def save(estimator: Any, directory: Path) -> Path:
    """Write ``directory``; returns it."""
    columns: Columns = estimator.columns_
    classes = tuple(map(str, getattr(estimator, "classes_", ())))
    number = getattr(estimator, "target_range", None)
    single = estimator.layers_[-1].shape[1] == 1
    task = "regression" if number is not None else "binary" if single else "classification"
    for index, name in enumerate(columns.names):
        model = ReleasedModel(
            estimator.layers_,
            classes,
            columns.names,
            columns.widths,
            estimator.claim_.paragraph(),
            task=task,
            target_range=None if number is None else (float(number[0]), float(number[1])),
            schema=columns.schemas.get(name),
            row_bound=estimator.row_bounds_[index],
            row_rule=estimator.row_rule,
        )
        write_model(directory / _file_of(name, index), model)
    facts = {
        "format": FORMAT,
        "estimator": type(estimator).__name__,
        "parameters": {name: _plain(value) for name, value in estimator.get_params().items() if name not in _LEFT_OUT},
        "files": [_file_of(name, index) for index, name in enumerate(columns.names)],
        "classes": _plain(getattr(estimator, "classes_", None)),
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


def load(kind: type, path: Path) -> Any:
    """An estimator of class ``kind`` that predicts as the one that was saved."""
    if path.is_file():
        return _from_model(kind, read_model(path, "path"))
    file = path / ESTIMATOR
    require(file.exists(), "path", str(path), f"a folder that save() wrote, with {ESTIMATOR}, or a model file (.npz)")
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
    models = [read_model(path / name, "path") for name in facts["files"]]
    shown = facts["columns"]
    estimator.columns_ = Columns(
        models[0].clients,
        models[0].widths,
        shown["matrix"],
        tuple(map(tuple, shown["strips"])),
        tuple(map(tuple, shown["column_names"])),
        {name: model.schema for name, model in zip(models[0].clients, models, strict=True) if model.schema is not None},
        shown["aligned_by_id"],
    )
    estimator.row_bounds_ = tuple(facts["row_bounds"])
    if facts["features"] is not None:
        estimator.n_features_in_ = facts["features"]
    if facts["feature_names"] is not None:
        estimator.feature_names_in_ = np.asarray(facts["feature_names"], dtype=object)
    return adopt(estimator, models[0], facts["classes"])


def _from_model(kind: type, model: ReleasedModel) -> Any:
    """From one party's file: columns of all parties are taken as scaled already, and are brought within their bounds."""
    given = {"target_range": model.target_range} if model.task == "regression" else {}
    wanted = "VerticalRegressor" if model.task == "regression" else "VerticalClassifier"
    require(kind.__name__ == wanted, "path", f"a model for {model.task}", f"one for a {kind.__name__}", f"use {wanted}")
    widths = {model.schema.width} if model.schema is not None else set(model.widths)
    require(
        model.row_bound is not None and (len(widths) == 1 or model.row_rule == "normalise"),
        "path",
        "a model file that does not tell the row bounds of all parties",
        "a client's own, of this version",
        "load the folder that save() wrote",
    )
    assert model.row_bound is not None
    estimator = kind(**given, row_rule=model.row_rule)
    estimator.columns_ = Columns(model.clients, model.widths, matrix=False)
    own = widths.pop()
    shares = [(width / own) ** 0.5 if model.row_rule == "clip" else 1.0 for width in model.widths]
    estimator.row_bounds_ = tuple(model.row_bound * share for share in shares)
    return adopt(estimator, model, list(model.classes))


@dataclass(frozen=True)
class KeptClaim:
    """The claim of a training as its model file tells it: the words, without the numbers behind them."""

    text: str

    def paragraph(self) -> str:
        """All of it."""
        return self.text

    def __str__(self) -> str:
        return self.text


def adopt(estimator: Any, model: ReleasedModel, classes: Any) -> Any:
    """Make ``estimator`` one that was fitted: with this model."""
    estimator.layers_ = list(model.layers)
    estimator.claim_ = KeptClaim(model.claim)
    estimator.cost_ = {}
    if classes is not None and hasattr(estimator, "class_weight"):
        estimator.classes_ = np.asarray(classes)
    return estimator


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
