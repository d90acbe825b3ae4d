"""What is learned: many classes (softmax), two classes as one logit, or a number; errors, losses and scores of each.

| task | outputs | error δ of a row | label that is shared |
|---|---|---|---|
| ``classification`` | one logit a class | softmax(z) − one-hot(y) | one-hot row |
| ``binary`` | one logit | sigmoid(z) − y | 0 or 1 |
| ``regression`` | one number | z − y | y, scaled to −1 … 1 by a public range |

The gradient of a row is [h 1] ⊗ δ in all of them, so noise and claim are the same. With many classes it is clipped to
γ, and class weights multiply δ before the clip. With one output it is γ·F·[h 1]/‖[h 1]‖ with a smooth |F| ≤ 1 instead,
F ≈ δ/b where |δ| is below the public threshold b and ±1 far beyond it (``OneOutput``); class weights, over the
largest, multiply it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.validate import require, require_choice, require_real

__all__ = [
    "CEILING",
    "FARTHEST",
    "TASKS",
    "WAVES",
    "WEIGHT_BITS",
    "OneOutput",
    "check_task",
    "classes_of",
    "errors_and_losses",
    "half_wave",
    "output_count",
    "probabilities",
    "relative_weights",
    "scaled_targets",
    "score",
    "score_in_words",
    "score_name",
    "shared_labels",
    "softmax",
    "unscaled_targets",
    "wave_for",
    "weight_words",
]

Floats = npt.NDArray[np.floating]

TASKS = ("classification", "binary", "regression")
WEIGHT_BITS = 8  # of class weights
LARGEST_WEIGHT = 64.0
WAVES = ((64, 12), (128, 16), (256, 32))  # period of a sigmoid's wave, and its sines
WAVE_EDGE = 8.0  # it is a sigmoid up to this before half its period
LONGEST = 2.5  # rows for whose outputs a wave is chosen, in usual norms
FARTHEST = WAVES[-1][0] / 2 - WAVE_EDGE
CEILING = 63 / 64  # of F: what is above, up to 1, is for rounding


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


def relative_weights(class_weights: Sequence[float]) -> npt.NDArray[np.int64]:
    """Class weights over the largest, rounded down, at ``WEIGHT_BITS``."""
    words = weight_words(class_weights)
    return np.asarray((words << WEIGHT_BITS) // words.max())


def wave_for(argument: float) -> tuple[int, int]:
    """The shortest of ``WAVES`` that is a sigmoid up to this argument, or the longest there is."""
    fitting = [wave for wave in WAVES if wave[0] / 2 - WAVE_EDGE >= argument]
    return fitting[0] if fitting else WAVES[-1]


@dataclass(frozen=True)
class OneOutput:
    """What is public about the bounded error of a model with one output: γ, the threshold b, and a bound of ‖[h 1]‖."""

    task: str
    clip_norm: float
    threshold: float
    reach: float

    @classmethod
    def of_rows(cls, task: str, clip_norm: float, row_bound: float, width: int) -> OneOutput:
        """b is γ over the usual norm of [h 1]: that of ``width`` columns of deviation 1, or the row bound if it is
        less."""
        threshold = clip_norm / math.hypot(min(row_bound, math.sqrt(width)), 1.0)
        found = cls(task, clip_norm, threshold, math.hypot(row_bound, 1.0))
        word, bits = found.slope_word
        return replace(found, threshold=2.0 ** (bits + 1) / word) if task == "regression" else found

    @property
    def slope_word(self) -> tuple[int, int]:
        """(k, t): the slope 2/b of a regression as k/2^t, of six significant bits or an integer. It is at least 1/2."""
        slope = 2.0 / min(self.threshold, 4.0)
        bits = max(0, 5 - math.floor(math.log2(slope)))
        return round(slope * 2.0**bits), bits

    def argument(self, output_bound: float) -> float:
        """How far the wave is asked for outputs within a bound, of rows of at most ``LONGEST`` times the usual norm.
        Few are longer, none points along the weights, and what is at stake is accuracy."""
        usual = LONGEST * self.clip_norm / self.threshold
        reached = output_bound * min(1.0, usual / self.reach)
        return reached if self.task == "binary" else 2.0 * (reached + 1.0) / self.threshold

    def wave(self, output_bound: float) -> tuple[int, int]:
        """Period and sines for outputs within a bound."""
        return wave_for(self.argument(output_bound))

    def error(self, outputs: Floats, labels: npt.NDArray[Any], weights: Floats) -> Floats:
        """F of every row, before class weights: ±σ(±z)/b, smoothly bounded by 1, or tanh((z − y)/b)."""
        wave = self.wave(self.reach * float(np.linalg.norm(weights)))
        if self.task == "regression":
            argument = 2.0 * (outputs - np.clip(labels, -1.0, 1.0)) / self.threshold
            return np.asarray(CEILING * (2.0 * half_wave(argument, wave) - 1.0))
        signs = 1.0 - 2.0 * labels
        found = half_wave(signs * outputs, wave, min(1.0, self.threshold)) / max(1.0, self.threshold)
        return np.asarray(signs * CEILING * found)


def half_wave(x: Floats, wave: tuple[int, int], odds: float = 1.0) -> Floats:
    """σ(x − log odds), continued as a wave of a period by some sines: what ``refmpc.half_wave`` computes."""
    period, terms = wave
    omega = 2 * np.pi * np.arange(1, 2 * terms, 2) / period
    sizes = 4 * np.pi / period / np.sinh(np.pi * omega)
    return np.asarray(0.5 + np.sin(np.multiply.outer(x - math.log(odds), omega)) @ sizes)


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
