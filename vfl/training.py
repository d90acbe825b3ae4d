"""The public options of a training run, shared by the twins and (through them) by the secure protocols."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.validate import require
from vfl.data.sets import usable_rows
from vfl.dp.factorisation import KINDS
from vfl.dp.random_allocation.allocation import padding
from vfl.losses import TASKS, check_task
from vfl.settings import DOORS, check_settings, setting

__all__ = [
    "ADAM_FLOOR",
    "ADAM_MEMORY",
    "AVERAGES",
    "LARGEST_EPSILON",
    "LOSSES",
    "OPTIMISERS",
    "ORDERS",
    "SETTINGS",
    "Schedule",
    "TrainingConfig",
    "averaging_share",
    "first_averaged",
    "halving_steps",
]

AVERAGES = ("none", "fifth", "exponential")
OPTIMISERS = ("sgd", "adam")
ORDERS = ("fixed", "secret")
LOSSES = ("softmax", "bounded_softmax")

ADAM_MEMORY = 10, 1000  # steps over which Adam's two means reach: of the gradient, and of its square
ADAM_FLOOR = 10  # what a mean gradient is divided by is at least a tenth of the noise of one step

# The paper's two sets of learning parameters: α (weight decay) and β (momentum) of the workload.
SETTINGS = {1: {"weight_decay": 1.0, "momentum": 0.0}, 2: {"weight_decay": 1.0, "momentum": 0.9}}

LARGEST_EPSILON = 100.0  # beyond it e^ε makes δ of the arithmetic's slack meaningless
AUTOMATIC = tuple((door, None) for door in DOORS)  # chosen from public sizes where nothing is said (vfl.defaults)
_BETWEEN_0_AND_1: dict[str, Any] = {"low": 0.0, "high": 1.0, "open_low": True, "open_high": True}


@dataclass(frozen=True)
class TrainingConfig:
    """One run. The defaults make sense on the embedded digits (rows of norm 1).

    SGD follows the workload matrix: v ← β·v + g, θ ← α·θ − η·v, with g the noised mean gradient;
    ``momentum`` is β and ``weight_decay`` is α (1 means none).
    ``optimiser``: ``adam`` takes clamp(m/√q, ±1) in the place of v: m and q are the means of g and of g² less the
    variance of its noise, over all steps so far, at most over ``ADAM_MEMORY``; q is at least that variance over
    ``ADAM_FLOOR``². It is post-processing.
    ``rows_per_person``: the most rows that one person may have; ε and δ are then about people, and the noise grows
    (proofs §9.3). ``noise``: ``distributed`` (what an outsider faces is 1.5σ², proofs §6.4) or ``joint`` (exactly σ²).
    ``order`` (G-BMF only): ``fixed`` (public) or ``secret`` (rows and dummies shuffled once, in secret: less noise,
    proofs §9.6). ``accounting`` (G-Shuff only): ``proven`` calibrates for its secret order, ``any-order`` for no secret
    at all, ``paper`` as if batches were Poisson samples, which is proven by nothing. ``weights``: ``open`` (the noised
    gradient sum of every step is opened, so the weights are public while they are trained; same claim, less work) or
    ``secret`` (only the last model is opened). It changes nothing for the twins. The commands and ``federation.toml``
    say ``open``. ``average``: which model a run gives: the last one (``none``), the mean of those of the last fifth of
    all steps (``fifth``), or an ``exponential`` average. It is post-processing; secure runs do it with open weights.
    ``task`` and ``class_weights`` (public, one for each class, of its rows' gradients before the clip): ``vfl.losses``.
    """

    epochs: int = setting(40, "passes over the rows", low=1, usual=AUTOMATIC)
    batch_size: int = setting(128, "rows of a step", low=1, usual=AUTOMATIC)
    learning_rate: float = setting(
        2.0, "η; 2 suits one layer on rows of norm 1, 0.5 hidden layers", low=0.0, open_low=True, usual=AUTOMATIC
    )
    clip_norm: float = setting(1.0, "γ, the bound on each person's gradient", low=0.0, open_low=True, group="privacy")
    epsilon: float = setting(
        3.0,
        "ε of the claim, which is printed before a run and kept with the model",
        low=0.0,
        high=LARGEST_EPSILON,
        open_low=True,
        group="privacy",
        way_out="lower epsilon: above 10 a claim protects next to nothing (`python -m protocols.plain` has no privacy)",
    )
    delta: float = setting(
        1e-5, "δ of the claim; well below one over the number of people", group="privacy", **_BETWEEN_0_AND_1
    )
    rows_per_person: int = setting(
        1,
        "the most rows that one person may have; with more, ε and δ are about people, and the noise grows",
        low=1,
        high=1000,
        metavar="K",
        group="privacy",
        agreed="if changed",
    )
    momentum: float = setting(0.0, "β: v ← β·v + g", low=0.0, high=1.0, open_high=True)
    weight_decay: float = setting(
        1.0, "α, which multiplies the weights at every step; 1 means none", low=0.0, high=1.0, open_low=True
    )
    optimiser: str = setting(
        "sgd",
        "sgd, or adam, which divides each weight's gradient by its size without the noise: one rate for all data (open "
        "weights; no privacy cost)",
        choices=OPTIMISERS,
        needs="frozen rows",
        open_weights="what is opened must be known to divide by it: use optimiser = 'sgd', or weights = 'open'",
        written="comment",
        agreed="if changed",
    )
    hidden: tuple[int, ...] = setting(
        (),
        "widths of hidden layers (tanh; ReLU with secret weights), such as 128,64; none: one linear layer",
        kind=int,
        low=1,
        metavar="N,N",
        needs="hidden layers",
    )
    factorisation: str = setting(
        "bisr", "factorisation of the workload", choices=tuple(KINDS), group="privacy", needs="correlated noise"
    )
    bands: int | None = setting(
        None,
        "bands of the factorisation; none: from the batches, or by σ·RMSE with a secret order",
        kind=int,
        optional=True,
        low=1,
        group="privacy",
        needs="correlated noise",
        written="comment",
    )
    noise: str = setting(
        "distributed",
        "distributed: each server adds its own, 1.5σ² in all, free; joint: σ², unknown to all, 1.4 kB a parameter",
        choices=("distributed", "joint"),
        group="privacy",
        needs="joint noise",
        written="nothing",
    )
    accounting: str = setting(
        "proven",
        "which ε calibrates the noise: proven, for the secret order; any-order, without amplification; paper, as if "
        "batches were "
        "Poisson samples, which nothing proves",
        choices=("proven", "any-order", "paper"),
        group="privacy",
        needs="a new order in every epoch",
        written="comment",
    )
    accountant: str = setting("rdp", "how a baseline's ε is counted", doors=())
    gradients: str = setting(
        "factored",
        "explicit builds every per-sample gradient, as the paper does: the reference, 60 times the bytes",
        choices=("factored", "explicit"),
        doors=("command", "file"),
        written="comment",
    )
    schedule: str = setting("constant", "of the learning rate", choices=("constant", "linear", "cosine"))
    weights: str = setting(
        "secret",
        "open: every noised gradient sum is opened, so weights are public while training; same claim, fewer rounds "
        "and bytes. "
        "secret: only the last model is opened, to the clients",
        choices=("open", "secret"),
        needs="servers",
        usual=tuple((door, "open") for door in DOORS),
        written="comment",
    )
    order: str = setting(
        "fixed",
        "fixed: everybody knows the batches; secret: rows and dummies are shuffled once, in secret, and less noise "
        "gives the same claim",
        choices=ORDERS,
        group="privacy",
        needs="a secret order",
        written="comment",
    )
    average: str = setting(
        "none",
        "fifth: the model is the mean over the last fifth of all steps; exponential; none: the last one (open "
        "weights; no privacy cost)",
        choices=AVERAGES,
        needs="averages",
        open_weights="averages of secret weights would cost as much as a step; use open weights",
        usual=AUTOMATIC,
    )
    task: str = setting(
        "classification",
        "classification; binary: two classes as one logit, half the bytes; regression: the label is a number. Chosen "
        "from the label "
        "where nothing is said",
        choices=TASKS,
        needs="losses",
        doors=("command", "file"),
        written="comment",
    )
    loss: str = setting(
        "softmax",
        "of more than one logit: softmax, or bounded_softmax, whose other classes are capped at odds 2 against the "
        "label: 7 instead of 17 rounds a step",
        choices=LOSSES,
        needs="losses",
        agreed="if changed",
    )
    class_weights: tuple[float, ...] = setting(
        (),
        "public weights of the classes' gradients, before the clip; never computed from private labels",
        kind=float,
        metavar="W,W",
        needs="losses",
        doors=("command", "file"),
        written="comment",
    )
    seed: int = setting(0, "of splits, an MLP's start and the twin; never of masks or noise", low=0, doors=("command",))
    dtype: str = setting("float64", "of the twins", choices=("float32", "float64"), doors=())

    def __post_init__(self) -> None:
        check_settings(self)
        require(
            self.rows_per_person == 1 or self.accounting != "paper",
            "rows_per_person",
            self.rows_per_person,
            "1 with accounting = 'paper'",
            "the paper's accounting is about one row; use 'proven' or 'any-order'",
        )
        require(
            self.optimiser == "sgd" or self.momentum == 0.0,
            "momentum",
            self.momentum,
            f"0 with optimiser = {self.optimiser!r}",
            "it has a momentum of its own",
        )
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
    """Batch b of every epoch is rows b·B..(b+1)·B of the order: the aligned one, or a secret one of rows and
    ``dummies``.

    ``batch_size`` is what a step computes on, dummies included; sums are divided by ``divisor``, the records of a batch
    on average.
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
