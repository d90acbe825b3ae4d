"""Figures and a report of an estimator on rows that took no part in its training: outside the claim, as
``vfl.evaluation`` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import LogisticRegression, Ridge

from accel.validate import require
from protocols.api.inputs import path_of
from vfl.evaluation import Evaluation, evaluate_classes, evaluate_numbers, write_report

__all__ = ["evaluate"]

_MOST_ITERATIONS = 1000


def evaluate(
    estimator: Any, x: Any, y: Any, *, report: str | Path | None, non_private: tuple[Any, Any] | None
) -> Evaluation:
    """As ``VerticalEstimator.evaluate``."""
    require(
        estimator.backend != "federation",
        "backend",
        estimator.backend,
        "'twin', 'local' or 'threads'",
        "in a federation the label client calls `ppvfl predict --evaluate` or `--held-out`",
    )
    pair = isinstance(non_private, tuple | list) and len(non_private) == 2
    require(pair or non_private is None, "non_private", non_private, "(X, y) to train on without privacy, or None")
    file = None if report is None else path_of("report", report)
    truth, rows = estimator._own_labels(x, y), estimator._scaled(x)
    found = _compare(estimator, truth, estimator._of_rows(rows))
    beside = None
    if non_private is not None:
        beside = _compare(estimator, truth, _without_privacy(estimator, rows, *non_private)).metrics
    if file is not None:
        write_report(file, found, claim=estimator.claim_.paragraph(), non_private=beside)
    return found


def _compare(estimator: Any, truth: Any, found: npt.NDArray[np.float64]) -> Evaluation:
    if not hasattr(estimator, "classes_"):
        return evaluate_numbers(truth, found)
    names = estimator.classes_
    known = {name: place for place, name in enumerate(names.tolist())}
    places = np.array([known.get(label, -1) for label in np.asarray(truth).tolist()], dtype=np.int64)
    others = int((places < 0).sum())
    require(others == 0, "y", f"{others} labels that are no class", f"one of {names.tolist()}")
    return evaluate_classes(places, found, tuple(map(str, names)))


def _without_privacy(estimator: Any, rows: npt.NDArray[np.float64], x: Any, y: Any) -> npt.NDArray[np.float64]:
    """What scikit-learn's linear model of the same scaled columns says, trained on ``x`` without a clip or noise."""
    labels, training = np.asarray(estimator._own_labels(x, y)), estimator._scaled(x)
    if not hasattr(estimator, "classes_"):
        return np.asarray(Ridge().fit(training, labels).predict(rows), dtype=np.float64)
    model = LogisticRegression(max_iter=_MOST_ITERATIONS).fit(training, labels)
    shares = np.zeros((len(rows), len(estimator.classes_)))
    places = [estimator.classes_.tolist().index(label) for label in model.classes_.tolist()]
    shares[:, places] = model.predict_proba(rows)
    return shares
