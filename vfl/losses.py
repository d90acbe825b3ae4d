"""What is learned: many classes (softmax), two classes as one logit, or a number; errors, losses and scores of each.

| task | outputs | error δ of a row | label that is shared |
|---|---|---|---|
| ``classification`` | one logit a class | softmax(z) − one-hot(y) | one-hot row |
| ``binary`` | one logit | sigmoid(z) − y | 0 or 1 |
| ``regression`` | one number | z − y | y, scaled to −1 … 1 by a public range |

The gradient of a row is [h 1] ⊗ δ in all of them, so clip, noise and claim are the same. Class weights multiply δ
before the clip.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.validate import require, require_choice, require_real

__all__ = [
    "TASKS",
    "WEIGHT_BITS",
    "check_task",
    "classes_of",
    "errors_and_losses",
    "output_count",
    "probabilities",
    "scaled_targets",
    "score",
    "score_in_words",
    "score_name",
    "shared_labels",
    "softmax",
    "unscaled_targets",
    "weight_words",
]

Floats = npt.NDArray[np.floating]

TASKS = ("classification", "binary", "regression")
WEIGHT_BITS = 8  # of class weights
LARGEST_WEIGHT = 64.0


def check_task(task: str, class_weights: Sequence[float]) -> None:
    """Refuse what no run could mean, whatever the data are."""
    require_choice("task", task, TASKS)
    for weight in class_weights:
        require_real("class_weights", weight, 2.0**-4, LARGEST_WEIGHT, way_out="only their ratios and the clip matter")
    require(
        not class_weights or task != "regression",
        "class_weights",
        tuple(class_weights),
        "empty in a regression, which has no classes",
    )


def output_count(task: str, classes: int, class_weights: Sequence[float] = ()) -> int:
    """Columns of the last layer, or refuse a task that does not fit the data. ``classes`` is 1 if the label is a
    number."""
    if task == "regression":
        require(classes == 1, "task", task, f"classification: the labels are {classes} classes, not numbers")
        return 1
    require(classes >= 2, "task", task, "regression: the label is a number, not a class")
    require(task != "binary" or classes == 2, "task", task, f"classification: there are {classes} classes, not two")
    require(len(class_weights) in (0, classes), "class_weights", tuple(class_weights), f"{classes}, one for each class")
    return 1 if task == "binary" else classes


def weight_words(class_weights: Sequence[float]) -> npt.NDArray[np.int64]:
    """Class weights as integers at ``WEIGHT_BITS``: what servers and twins use."""
    return np.rint(np.asarray(class_weights, dtype=np.float64) * 2.0**WEIGHT_BITS).astype(np.int64)


def shared_labels(task: str, labels: npt.NDArray[Any], classes: int) -> npt.NDArray[Any]:
    """What the label client shares: a one-hot row, a 0 or 1, or the scaled target."""
    if task == "classification":
        return np.eye(classes, dtype=np.int64)[labels]
    if task == "binary":
        return labels.astype(np.int64).reshape(-1, 1)
    return np.clip(labels.astype(np.float64), -1.0, 1.0).reshape(-1, 1)


def scaled_targets(targets: npt.NDArray[Any], target_range: tuple[float, float]) -> Floats:
    """Numbers of a public range as −1 … 1; those beyond it count as its ends."""
    low, high = target_range
    return np.clip(2.0 * (np.asarray(targets, dtype=np.float64) - low) / (high - low) - 1.0, -1.0, 1.0)


def unscaled_targets(outputs: Floats, target_range: tuple[float, float]) -> Floats:
    """The inverse of ``scaled_targets``; a model's outputs may lie beyond the range."""
    low, high = target_range
    return low + (outputs + 1.0) * (high - low) / 2.0


def softmax(logits: Floats) -> Floats:
    """Row-wise softmax, shifted by the row maximum."""
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def _sigmoid(logits: Floats) -> Floats:
    e = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1.0, e) / (1.0 + e)


def probabilities(task: str, logits: Floats) -> Floats:
    """Probabilities of each class, (rows, classes)."""
    require(task != "regression", "task", task, "classification or binary: a regression has no probabilities")
    if task == "classification":
        return softmax(logits)
    positive = _sigmoid(logits[:, 0])
    return np.stack([1.0 - positive, positive], axis=1)


def errors_and_losses(
    task: str, logits: Floats, labels: npt.NDArray[Any], class_weights: Sequence[float] = ()
) -> tuple[Floats, Floats]:
    """δ of every row, (rows, outputs), and its loss: cross-entropy, or half the squared error."""
    if task == "regression":
        delta = logits - np.clip(labels, -1.0, 1.0).astype(logits.dtype).reshape(-1, 1)
        return delta, 0.5 * delta[:, 0] ** 2
    rows = np.arange(len(labels))
    if task == "binary":
        signs = np.where(labels == 1, -logits[:, 0], logits[:, 0])
        losses = np.logaddexp(0.0, signs).astype(logits.dtype)
        delta = (_sigmoid(logits[:, 0]) - labels).astype(logits.dtype).reshape(-1, 1)
    else:
        delta = softmax(logits)
        losses = -np.log(np.maximum(delta[rows, labels], np.finfo(delta.dtype).tiny))
        delta[rows, labels] -= 1
    if class_weights:
        of_row = (weight_words(class_weights)[labels] * 2.0**-WEIGHT_BITS).astype(logits.dtype)
        delta, losses = delta * of_row[:, np.newaxis], losses * of_row
    return delta, losses


def score(task: str, logits: Floats, labels: npt.NDArray[Any]) -> float:
    """Share of rows with the right class, or R² of a regression; not a number without rows."""
    if len(labels) == 0:
        return float("nan")
    if task == "regression":
        residual = float(((logits[:, 0] - labels) ** 2).sum())
        spread = float(((labels - labels.mean()) ** 2).sum())
        return 1.0 - residual / spread if spread > 0 else float("nan")
    return float((classes_of(task, logits) == labels).mean())


def classes_of(task: str, logits: Floats) -> npt.NDArray[np.int64]:
    """The class that each row's logits say."""
    require(task != "regression", "task", task, "classification or binary: a regression has no classes")
    return logits.argmax(axis=1) if task == "classification" else (logits[:, 0] > 0).astype(np.int64)


def score_name(task: str) -> str:
    """What ``score`` is."""
    return "R²" if task == "regression" else "accuracy"


def score_in_words(task: str, value: float, *, named: bool = True) -> str:
    """``accuracy 89.14%`` or ``R² 0.4321``."""
    shown = f"{value:.4f}" if task == "regression" else f"{value:.2%}"
    return f"{score_name(task)} {shown}" if named else shown
