"""Figures of a model's predictions against the truth, by scikit-learn's metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn import metrics

from accel.validate import require

__all__ = ["Evaluation", "evaluate_classes", "evaluate_numbers"]

BINS = 10  # of the calibration curve
_CURVE = 201  # points of a ROC curve that are kept

Floats = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Evaluation:
    """Figures on ``rows`` rows. ``chance``: what the best constant answer would get, where that is known.

    Classes: ``confusion[i][j]`` rows of class i were taken for class j; ``roc`` holds (class, false positives, true
    positives); ``calibration`` (class, predicted, observed, rows) by bins of the prediction. Both are of the second
    class where there are two. Numbers: ``pairs`` are (truth, prediction), for a picture.
    """

    task: str
    rows: int
    metrics: dict[str, float]
    chance: dict[str, float]
    classes: tuple[str, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()
    roc: tuple[tuple[str, tuple[float, ...], tuple[float, ...]], ...] = field(default=(), repr=False)
    calibration: tuple[tuple[str, tuple[float, ...], tuple[float, ...], tuple[int, ...]], ...] = field(
        default=(), repr=False
    )
    pairs: tuple[tuple[float, ...], tuple[float, ...]] = field(default=((), ()), repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for --json, without the curves; a figure that is not defined is None."""
        plain = {k: v for k, v in asdict(self).items() if k in ("task", "rows", "classes", "confusion")}
        for name in ("metrics", "chance"):
            plain[name] = {k: None if math.isnan(v) else v for k, v in getattr(self, name).items()}
        return plain


def evaluate_classes(truth: npt.ArrayLike, probabilities: Floats, classes: Sequence[str]) -> Evaluation:
    """``truth``: places in ``classes``; ``probabilities``: (rows, classes), or of the second class alone.

    With two classes, AUC, average precision and F1 are those of the second one; with more, means over classes, each
    against the rest (AUC, average precision) or by its own label (F1). ``calibration error``: mean distance between
    predicted and observed shares over ten bins, weighted by rows. What needs two classes is NaN if these rows have only
    one.
    """
    labels = np.asarray(truth, dtype=np.int64)
    shares = np.asarray(probabilities, dtype=np.float64)
    if shares.ndim == 1:
        shares = np.column_stack([1.0 - shares, shares])
    count = len(classes)
    require(count >= 2, "classes", list(classes), "two or more names")
    require(shares.shape == (len(labels), count), "probabilities", shares.shape, f"({len(labels)}, {count})")
    require(len(labels) >= 1, "rows", 0, "at least one to compare with")
    require(bool(((labels >= 0) & (labels < count)).all()), "truth", "other numbers", f"0 to {count - 1}")
    require(bool(np.isfinite(shares).all()), "probabilities", "some are not finite", "numbers from 0 to 1")
    shares = np.clip(shares, 0.0, 1.0)
    guess = shares.argmax(axis=1)
    share_of = np.bincount(labels, minlength=count) / len(labels)
    looked_at = [1] if count == 2 else list(range(count))
    hot = np.eye(count, dtype=np.int64)[labels]
    average = "binary" if count == 2 else "macro"
    both = [c for c in looked_at if 0 < share_of[c] < 1]
    found = {
        "accuracy": float(metrics.accuracy_score(labels, guess)),
        "AUC": _mean([metrics.roc_auc_score(hot[:, c], shares[:, c]) for c in both]),
        "average precision": _mean([metrics.average_precision_score(hot[:, c], shares[:, c]) for c in both]),
        "F1": float(metrics.f1_score(labels, guess, average=average, zero_division=0.0)),
        "log loss": float(metrics.log_loss(labels, _normalised(shares), labels=list(range(count)))),
        "Brier score": float(((shares - hot) ** 2).sum(axis=1).mean()) / (2 if count == 2 else 1),
    }
    calibration = tuple((str(classes[c]), *_calibration(hot[:, c], shares[:, c])) for c in looked_at)
    found["calibration error"] = _mean([_distance(*bins[1:]) for bins in calibration])
    chance = {
        "accuracy": float(share_of.max()),
        "AUC": 0.5,
        "average precision": _mean([share_of[c] for c in both]),
        "F1": 2 * float(share_of[1]) / (1 + float(share_of[1]))
        if count == 2
        else float((2 * share_of / (1 + share_of)).max()) / count,
        "log loss": float(-(share_of[share_of > 0] * np.log(share_of[share_of > 0])).sum()),
        "Brier score": float((share_of * (1 - share_of)).sum()) / (2 if count == 2 else 1),
    }
    return Evaluation(
        "classification",
        len(labels),
        found,
        chance,
        tuple(map(str, classes)),
        tuple(map(tuple, metrics.confusion_matrix(labels, guess, labels=list(range(count))).tolist())),
        tuple((str(classes[c]), *_roc(hot[:, c], shares[:, c])) for c in both),
        calibration,
    )


def evaluate_numbers(truth: npt.ArrayLike, predictions: npt.ArrayLike) -> Evaluation:
    """Root mean squared error, mean absolute error and R² (0: no better than the mean; NaN if all values are equal)."""
    values, guess = np.asarray(truth, dtype=np.float64), np.asarray(predictions, dtype=np.float64)
    require(values.ndim == 1 and values.shape == guess.shape, "predictions", guess.shape, f"of shape ({len(values)},)")
    require(len(values) >= 1, "rows", 0, "at least one to compare with")
    require(bool(np.isfinite(guess).all()), "predictions", "some are not finite", "finite numbers")
    varied = len(values) > 1 and bool(values.std() > 0)
    found = {
        "RMSE": float(metrics.root_mean_squared_error(values, guess)),
        "MAE": float(metrics.mean_absolute_error(values, guess)),
        "R²": float(metrics.r2_score(values, guess)) if varied else math.nan,
    }
    chance = {"RMSE": float(values.std()), "MAE": float(np.abs(values - np.median(values)).mean()), "R²": 0.0}
    pairs = (tuple(values.tolist()), tuple(guess.tolist()))
    return Evaluation("regression", len(values), found, chance, pairs=pairs)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else math.nan


def _normalised(shares: Floats) -> Floats:
    """Rows that sum to one: fixed-point probabilities do so only nearly."""
    kept = np.maximum(shares, 2.0**-20)
    return kept / kept.sum(axis=1, keepdims=True)


def _roc(truth: npt.NDArray[np.int64], share: Floats) -> tuple[tuple[float, ...], tuple[float, ...]]:
    false, true, _ = metrics.roc_curve(truth, share)
    if len(false) > _CURVE:
        kept = np.linspace(0, len(false) - 1, _CURVE).round().astype(int)
        false, true = false[kept], true[kept]
    return tuple(false.tolist()), tuple(true.tolist())


def _calibration(
    truth: npt.NDArray[np.int64], share: Floats
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[int, ...]]:
    """Mean prediction, observed share and rows of each bin that is not empty."""
    bins = np.minimum((share * BINS).astype(int), BINS - 1)
    rows = np.bincount(bins, minlength=BINS)
    full = rows > 0
    predicted = np.bincount(bins, share, BINS)[full] / rows[full]
    observed = np.bincount(bins, truth, BINS)[full] / rows[full]
    return tuple(predicted.tolist()), tuple(observed.tolist()), tuple(rows[full].tolist())


def _distance(predicted: Sequence[float], observed: Sequence[float], rows: Sequence[int]) -> float:
    return float(np.average(np.abs(np.subtract(predicted, observed)), weights=rows))
