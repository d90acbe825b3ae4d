"""What a run with open weights makes of its weights besides training: averages, a learning curve, an early end.

All of it is post-processing of what was opened (proofs §6.6), in exact integers, the same at every server. Its state is
part of the state that a run keeps, so a run that goes on comes to the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protocols.plan.public_rows import PublicRows
from protocols.plan.run_plan import Plan
from protocols.plan.scales import EMBEDDING_BITS
from protocols.step.public_weights import PublicLayer, rounded, rounded_head
from vfl.training import first_averaged, halving_steps

__all__ = ["Iterates", "Point", "correct_and_loss"]

LOSS_BITS = 20  # of a loss that is kept
_NOT_YET = -1


@dataclass(frozen=True)
class Point:
    """One point of the learning curve."""

    epoch: int
    accuracy: float
    loss: float


def correct_and_loss(values: Sequence[np.ndarray], rows: PublicRows, plan: Plan) -> tuple[int, float]:
    """How many public rows these layers (integers at ``weight_bits``) classify rightly, exactly; and their mean loss,
    in doubles."""
    inputs, bits = rows.words, plan.scales.weight_bits
    for layer in values[:-1]:
        outputs = np.maximum(rounded(inputs @ layer, bits), 0)
        inputs = np.concatenate([outputs, np.full((len(rows), 1), 1 << EMBEDDING_BITS)], axis=1)
    head = rounded_head(values[-1], bits, plan.scales.layers[-1].reach)
    words = inputs @ head.words
    if plan.training.task == "binary":  # one logit: that of the second class, against 0
        words = np.concatenate([np.zeros_like(words), words], axis=1)
    logits = words * 2.0**-head.logit_bits
    logits -= logits.max(axis=1, keepdims=True)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(rows)), rows.labels]
    return int((words.argmax(axis=1) == rows.labels).sum()), float(losses.mean())


class Iterates:
    """Takes note of the weights after every step. ``flat`` and ``restore`` keep and bring back all it knows."""

    def __init__(self, plan: Plan):
        self._plan, self._rows, self._kind = plan, plan.public_rows, plan.training.average
        self._steps, self._size = plan.schedule.num_steps, plan.global_parameters
        self._average = np.zeros(self._size if self._kind != "none" else 0, dtype=np.int64)
        measured = self._rows is not None
        self._counts = np.full((2, plan.schedule.epochs if measured else 0), _NOT_YET, dtype=np.int64)
        self._best = np.zeros(self._size if measured else 0, dtype=np.int64)

    # along the way -------------------------------------------------------------------------------

    def note(self, step: int, layers: Sequence[PublicLayer]) -> None:
        """The weights after ``step``."""
        now = np.concatenate([layer.values.reshape(-1) for layer in layers])
        if self._kind == "fifth" and step >= first_averaged(self._steps):
            count = step - first_averaged(self._steps) + 1
            gap = now - self._average
            self._average = self._average + np.floor_divide(2 * gap + count, 2 * count)
        elif self._kind == "exponential":
            gap = now - self._average
            self._average = now if step == 0 else self._average + rounded(gap, halving_steps(self._steps))
        epoch, left = divmod(step + 1, self._plan.schedule.num_batches)
        if self._rows is not None and left == 0:
            measured = self._average if self._kind == "exponential" else now
            correct, loss = correct_and_loss(self._plan.unflatten(measured), self._rows, self._plan)
            if correct > self._counts[0].max():
                self._best = measured
            self._counts[:, epoch - 1] = correct, round(loss * 2.0**LOSS_BITS)

    @property
    def has_stopped(self) -> bool:
        """Whether so many epochs have not brought a better accuracy on the public rows as the run has patience."""
        if self._rows is None or not self._rows.patience:
            return False
        done = int((self._counts[0] != _NOT_YET).sum())
        return done > 0 and done - self.best_epoch >= self._rows.patience

    @property
    def best_epoch(self) -> int:
        """The first with the best accuracy on the public rows, from 1 on."""
        return int(self._counts[0].argmax()) + 1

    @property
    def curve(self) -> list[Point]:
        """Accuracy and loss on the public rows after every epoch so far."""
        rows = self._rows
        done = [(epoch, *pair) for epoch, pair in enumerate(self._counts.T.tolist(), 1) if pair[0] != _NOT_YET]
        return [Point(e, right / len(rows), loss * 2.0**-LOSS_BITS) for e, right, loss in done] if rows else []

    def released(self, layers: Sequence[PublicLayer]) -> list[np.ndarray]:
        """The model that the run gives: the best on public rows if it may stop early, the average, or the last one."""
        if self._rows is not None and self._rows.patience and self.curve:
            return self._plan.unflatten(self._best)
        if self._kind != "none":
            return self._plan.unflatten(self._average)
        return [layer.values for layer in layers]

    # keeping -------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Numbers in ``flat``."""
        return self._average.size + self._counts.size + self._best.size

    def flat(self) -> np.ndarray:
        """All that is known, as integers."""
        return np.concatenate([self._average, self._counts.reshape(-1), self._best])

    def restore(self, flat: np.ndarray) -> None:
        """The inverse of ``flat``."""
        ends = np.cumsum([self._average.size, self._counts.size])
        average, counts, best = np.split(flat, ends)
        self._average, self._counts, self._best = average, counts.reshape(self._counts.shape).copy(), best
