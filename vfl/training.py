"""The public options of a training run, shared by the twins and (through them) by the secure protocols."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.validate import require, require_choice, require_integer, require_real
from vfl.data.sets import usable_rows
from vfl.dp.factorisation import KINDS
from vfl.dp.random_allocation.allocation import padding
from vfl.losses import check_task

__all__ = [
    "AVERAGES",
    "LARGEST_EPSILON",
    "ORDERS",
    "SETTINGS",
    "Schedule",
    "TrainingConfig",
    "averaging_share",
    "first_averaged",
    "halving_steps",
]

AVERAGES = ("none", "fifth", "exponential")
ORDERS = ("fixed", "secret")

# The paper's two sets of learning parameters: α (weight decay) and β (momentum) of the workload.
SETTINGS = {1: {"weight_decay": 1.0, "momentum": 0.0}, 2: {"weight_decay": 1.0, "momentum": 0.9}}

LARGEST_EPSILON = 100.0  # beyond it e^ε makes δ of the arithmetic's slack meaningless


@dataclass(frozen=True)
class TrainingConfig:
    """One run. The defaults make sense on the embedded digits (rows of norm 1).

    SGD follows the workload matrix: v ← β·v + g, θ ← α·θ − η·v, with g the noised mean gradient;
    ``momentum`` is β and ``weight_decay`` is α (1 means none).
    ``rows_per_person``: the most rows that one person may have; ε and δ are then about people, and the noise grows (proofs §9.3).
    ``noise``: ``distributed`` (what an outsider faces is 1.5σ², proofs §6.4) or ``joint`` (exactly σ²).
    ``order`` (G-BMF only): ``fixed`` (public) or ``secret`` (rows and dummies shuffled once, in secret: less noise, proofs §9.6).
    ``accounting`` (G-Shuff only): ``proven`` calibrates for its secret order, ``any-order`` for no secret at all, ``paper`` as if
    batches were Poisson samples, which is proven by nothing.
    ``weights``: ``open`` (the noised gradient sum of every step is opened, so the weights are public while they are trained;
    same claim, less work) or ``secret`` (only the last model is opened). It changes nothing for the twins. The commands and
    ``federation.toml`` say ``open``.
    ``average``: which model a run gives: the last one (``none``), the mean of those of the last fifth of all steps (``fifth``), or
    an ``exponential`` average. It is post-processing; secure runs do it with open weights.
    ``task`` and ``class_weights`` (public, one for each class, of its rows' gradients before the clip): ``vfl.losses``.
    """

    epochs: int = 40
    batch_size: int = 128
    learning_rate: float = 2.0
    clip_norm: float = 1.0
    epsilon: float = 3.0
    delta: float = 1e-5
    rows_per_person: int = 1
    momentum: float = 0.0
    weight_decay: float = 1.0
    hidden: tuple[int, ...] = ()
    factorisation: str = "bisr"
    bands: int | None = None
    noise: str = "distributed"
    accounting: str = "proven"
    accountant: str = "rdp"
    gradients: str = "factored"
    schedule: str = "constant"
    weights: str = "secret"
    order: str = "fixed"
    average: str = "none"
    task: str = "classification"
    class_weights: tuple[float, ...] = ()
    seed: int = 0
    dtype: str = "float64"

    def __post_init__(self) -> None:
        require_integer("epochs", self.epochs, 1)
        require_integer("batch_size", self.batch_size, 1)
        require_real("learning_rate", self.learning_rate, 0.0, open_low=True)
        require_real("clip_norm", self.clip_norm, 0.0, open_low=True)
        way_out = "above 10 a claim says next to nothing; `python -m protocols.plain` trains without privacy"
        require_real("epsilon", self.epsilon, 0.0, LARGEST_EPSILON, open_low=True, way_out=way_out)
        require_real("delta", self.delta, 0.0, 1.0, open_low=True, open_high=True)
        require_integer("rows_per_person", self.rows_per_person, 1, 1000)
        require(
            self.rows_per_person == 1 or self.accounting != "paper",
            "rows_per_person",
            self.rows_per_person,
            "1 with accounting = 'paper'",
            "that number is about one row of Poisson samples; take 'proven' or 'any-order'",
        )
        require_real("momentum", self.momentum, 0.0, 1.0, open_high=True)
        require_real("weight_decay", self.weight_decay, 0.0, 1.0, open_low=True)
        for width in self.hidden:
            require_integer("hidden", width, 1)
        require_choice("factorisation", self.factorisation, KINDS)
        require_choice("noise", self.noise, ("distributed", "joint"))
        require_choice("accounting", self.accounting, ("proven", "any-order", "paper"))
        require_choice("gradients", self.gradients, ("factored", "explicit"))
        require_choice("schedule", self.schedule, ("constant", "linear", "cosine"))
        require_choice("weights", self.weights, ("open", "secret"))
        require_choice("order", self.order, ORDERS)
        require_choice("average", self.average, AVERAGES)
        require_choice("dtype", self.dtype, ("float32", "float64"))
        require_integer("seed", self.seed, 0)
        check_task(self.task, self.class_weights)

    def with_(self, **changes: Any) -> TrainingConfig:
        return replace(self, **changes)

    def require_single_rows(self, method: str) -> None:
        """Refuse several rows of a person in a baseline whose claim is about one."""
        require(
            self.rows_per_person == 1, "rows_per_person", self.rows_per_person, f"1 in {method}", "use g_bmf or g_shuff"
        )

    def steps(self, num_samples: int) -> Schedule:
        """The public schedule of batches for ``num_samples`` aligned rows."""
        used, sentence = usable_rows(num_samples, self.batch_size)
        return Schedule(used, self.batch_size, self.epochs, sentence)

    def padded_steps(self, num_samples: int) -> Schedule:
        """The public schedule for a secret order: no row is left out, and every batch has room for dummies."""
        shape = padding(num_samples, self.batch_size)
        sentence = (
            f"{num_samples} rows and {shape.dummies} dummies in a secret order: {shape.bins} batches of {shape.slots}, "
            f"{shape.mean_batch:.4g} rows each on average"
        )
        return Schedule(num_samples, shape.slots, self.epochs, sentence, shape.dummies)

    def learning_rate_factor(self, step: int, num_steps: int) -> float:
        """Public schedule of the learning rate; it changes nothing in the DP claim."""
        done = step / max(1, num_steps)
        if self.schedule == "linear":
            return 1.0 - done
        if self.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        return 1.0


@dataclass(frozen=True)
class Schedule:
    """Batch b of every epoch is rows b·B..(b+1)·B of the order: the aligned one, or a secret one of rows and ``dummies``.

    ``batch_size`` is what a step computes on, dummies included; sums are divided by ``divisor``, the records of a batch on
    average.
    """

    num_samples: int
    batch_size: int
    epochs: int
    sentence: str
    dummies: int = 0

    def __post_init__(self) -> None:
        require(
            self.num_rows % self.batch_size == 0,
            "num_samples",
            self.num_samples,
            "a multiple of batch_size" if not self.dummies else "with the dummies a multiple of batch_size",
        )

    @property
    def num_rows(self) -> int:
        """Records and dummies."""
        return self.num_samples + self.dummies

    @property
    def num_batches(self) -> int:
        return self.num_rows // self.batch_size

    @property
    def divisor(self) -> float:
        """Records of a batch on average, n/b: public, and the batch size where there are no dummies."""
        return self.num_samples / self.num_batches

    @property
    def num_steps(self) -> int:
        return self.epochs * self.num_batches

    def rows(self, step: int) -> slice:
        """The rows of step ``step``."""
        start = (step % self.num_batches) * self.batch_size
        return slice(start, start + self.batch_size)

    def epoch(self, step: int) -> int:
        return step // self.num_batches

    def permuted_rows(self, step: int, order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows of step ``step`` when this epoch's rows are read in ``order`` (G-Shuff)."""
        return order[self.rows(step)]

    def records(self, step: int, order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The records of step ``step`` when records and dummies (from num_samples on) are read in ``order``."""
        here = self.permuted_rows(step, order)
        return here[here < self.num_samples]


def first_averaged(num_steps: int) -> int:
    """The first step whose weights are in the average of the last fifth."""
    return num_steps - math.ceil(num_steps / 5)


def halving_steps(num_steps: int) -> int:
    """k of the exponential average A ← A + (W − A)/2^k: it forgets over about a tenth of all steps."""
    return max(1, round(math.log2(max(2.0, num_steps / 10))))


def averaging_share(kind: str, step: int, num_steps: int) -> float:
    """By which share of their distance the average moves to the weights after ``step``; 0 if it does not."""
    if kind == "exponential":
        return 1.0 if step == 0 else 0.5 ** halving_steps(num_steps)
    first = first_averaged(num_steps)
    return 1 / (step - first + 1) if kind == "fifth" and step >= first else 0.0
