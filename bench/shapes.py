"""Training shapes for measurement: the paper's sizes, random rows of bounded norm, and the public plan of such a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from accel.validate import require_integer
from protocols.plan.run_plan import Plan
from protocols.plan.scales import EMBEDDING_BITS, GRADIENT_BITS, RELEASE_BITS, plan_scales
from vfl.dp import FixedPointSlack, calibrate_matrix_factorisation, default_bands, factorise
from vfl.training import Schedule, TrainingConfig

__all__ = ["PAPER_SHAPES", "StepInputs", "StepShape", "step_inputs", "step_plan"]

GRID_BITS = 14  # inputs lie on this grid, so every system represents them exactly and only its computation counts


@dataclass(frozen=True)
class StepShape:
    """Sizes of one training step; ``samples`` and ``epochs`` only size the noise and the ranges."""

    batch: int
    width: int
    classes: int
    samples: int = 49920
    epochs: int = 20
    row_bound: float = 8.0
    clip_norm: float = 1.0
    learning_rate: float = 0.5

    def __post_init__(self) -> None:
        require_integer("batch", self.batch, 1)
        require_integer("width", self.width, 1)
        require_integer("classes", self.classes, 2, 64)

    @property
    def rate(self) -> float:
        """η/B, the factor of the clipped sum."""
        return self.learning_rate / self.batch


# CIFAR-10: 50,000 rows; EMNIST letters: 124,800 rows, 26 classes; two clients of 1000 or 512 columns.
PAPER_SHAPES = {
    ("CIFAR-10", "Pre-ImageNet"): StepShape(128, 2000, 10),
    ("CIFAR-10", "Pre-Cifar100"): StepShape(128, 1024, 10),
    ("EMNIST", "Pre-ImageNet"): StepShape(128, 2000, 26, samples=124_800),
    ("EMNIST", "Pre-Cifar100"): StepShape(128, 1024, 26, samples=124_800),
}


@dataclass(frozen=True)
class StepInputs:
    """[H 1], one-hot labels, (‖h‖²+1)/γ² per row, and [W; b], all on the grid."""

    rows: np.ndarray
    one_hot: np.ndarray
    norms: np.ndarray
    weights: np.ndarray


def on_grid(values: np.ndarray, bits: int = GRID_BITS) -> np.ndarray:
    """Rounded to multiples of 2^-bits."""
    return np.rint(values * 2.0**bits) / 2.0**bits


def step_inputs(shape: StepShape, seed: int = 1) -> StepInputs:
    """Random rows with norms up to the bound, random labels, weights as after some training."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(shape.batch, shape.width))
    lengths = rng.uniform(0.5, 0.99, size=(shape.batch, 1)) * shape.row_bound
    rows = on_grid(rows / np.linalg.norm(rows, axis=1, keepdims=True) * lengths)
    rows = np.concatenate([rows, np.ones((shape.batch, 1))], axis=1)
    one_hot = np.eye(shape.classes)[rng.integers(0, shape.classes, shape.batch)]
    norms = (rows**2).sum(axis=1) / shape.clip_norm**2
    weights = on_grid(rng.normal(size=(shape.width + 1, shape.classes)) * 0.25)
    return StepInputs(rows, one_hot, norms, weights)


@cache
def step_plan(shape: StepShape, epsilon: float = 8.0) -> Plan:
    """The public plan of a G-BMF run of this shape: factorisation, noise, scales."""
    training = TrainingConfig(
        epochs=shape.epochs,
        batch_size=shape.batch,
        learning_rate=shape.learning_rate,
        clip_norm=shape.clip_norm,
        epsilon=epsilon,
    )
    schedule: Schedule = training.steps(max(shape.batch, shape.samples))
    factorisation = factorise(
        "bisr", schedule.num_steps, weight_decay=1.0, momentum=0.0, bands=default_bands(schedule.num_batches)
    )
    slack = FixedPointSlack(
        row_bound=shape.row_bound * 1.01,
        classes=shape.classes,
        width=shape.width,
        steps=schedule.num_steps,
        batch_size=shape.batch,
        truncated_bits=GRADIENT_BITS - RELEASE_BITS,
        overflow_probability=1e-20,
    )
    noise = calibrate_matrix_factorisation(
        epsilon,
        training.delta,
        shape.clip_norm,
        factorisation,
        schedule.epochs,
        schedule.num_batches,
        slack,
        "distributed",
    )
    scales = plan_scales(
        training,
        schedule,
        factorisation,
        row_bound=shape.row_bound + shape.width**0.5 * 2.0**-EMBEDDING_BITS,
        width=shape.width,
        classes=shape.classes,
        noise_std=noise.outsider_std,
    )
    first = shape.width // 2 or 1
    widths = (first, shape.width - first) if shape.width > first else (first,)
    names = tuple(f"client {i + 1}" for i in range(len(widths)))
    return Plan("g_bmf", training, schedule, factorisation, noise, scales, names, widths, shape.classes)
