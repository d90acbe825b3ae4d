"""Training shapes for measurement: the paper's sizes, random rows of bounded norm, and the public plan of such a
run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from accel.validate import require_integer
from protocols.plan.run_plan import Plan, PublicClient, PublicFederation, plan_run
from vfl.training import TrainingConfig

__all__ = ["PAPER_SHAPES", "StepInputs", "StepShape", "public_norms", "step_inputs", "step_plan"]

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


def public_norms(rows: np.ndarray, clip_norm: float) -> np.ndarray:
    """‖row‖²/γ² in the clear, as other systems are given it; on shares it is ``protocols.plan.squared_norm_ratio``."""
    return (rows**2).sum(axis=1) / clip_norm**2


def step_inputs(shape: StepShape, seed: int = 1) -> StepInputs:
    """Random rows with norms up to the bound, random labels, weights as after some training."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(shape.batch, shape.width))
    lengths = rng.uniform(0.5, 0.99, size=(shape.batch, 1)) * shape.row_bound
    rows = on_grid(rows / np.linalg.norm(rows, axis=1, keepdims=True) * lengths)
    rows = np.concatenate([rows, np.ones((shape.batch, 1))], axis=1)
    one_hot = np.eye(shape.classes)[rng.integers(0, shape.classes, shape.batch)]
    weights = on_grid(rng.normal(size=(shape.width + 1, shape.classes)) * 0.25)
    return StepInputs(rows, one_hot, public_norms(rows, shape.clip_norm), weights)


@cache
def step_plan(shape: StepShape, epsilon: float = 8.0, gradients: str = "factored", weights: str = "secret") -> Plan:
    """The plan that the product makes for a G-BMF run of this shape: two clients, half of the columns each."""
    training = TrainingConfig(
        epochs=shape.epochs,
        batch_size=shape.batch,
        learning_rate=shape.learning_rate,
        clip_norm=shape.clip_norm,
        epsilon=epsilon,
        delta=1e-6,  # below 1/n for every shape
        gradients=gradients,
        weights=weights,
    )
    first = shape.width // 2 or 1
    widths = (first, shape.width - first) if shape.width > first else (first,)
    clients = tuple(PublicClient(f"client {place}", width) for place, width in enumerate(widths, 1))
    samples = max(shape.batch, shape.samples)
    facts = PublicFederation(clients, samples, shape.classes, shape.row_bound, ("random rows of a benchmark",))
    return plan_run("g_bmf", facts, training)
