"""Who takes part when, and the l2 sensitivity of a Toeplitz strategy under that participation.

Notation: κ = ``max_participations``, b = ``min_separation``, T = number of steps, c = first column of Ω.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from accel.validate import require, require_integer

__all__ = ["Participation", "Sensitivity", "fixed_order", "gram_bound", "participation_sensitivity"]


@dataclass(frozen=True)
class Participation:
    """A record takes part in at most ``max_participations`` steps, ``min_separation`` apart."""

    num_samples: int
    batch_size: int
    epochs: int
    max_participations: int
    min_separation: int
    num_steps: int
    dropped: int  # rows left over by num_samples mod batch_size, by a public rule; they never take part


@dataclass(frozen=True)
class Sensitivity:
    """``value`` bounds the l2 sensitivity; ``exact`` says that some stream reaches it."""

    value: float
    exact: bool
    method: str


def fixed_order(num_samples: int, batch_size: int, epochs: int) -> Participation:
    """The paper's schedule: batches in one fixed order in every epoch, κ = epochs, b = batches per epoch."""
    num_samples = require_integer("num_samples", num_samples, 1)
    batch_size = require_integer(
        "batch_size", batch_size, 1, num_samples, way_out="a batch cannot be larger than the data"
    )
    epochs = require_integer("epochs", epochs, 1)
    batches = num_samples // batch_size
    return Participation(num_samples, batch_size, epochs, epochs, batches, epochs * batches, num_samples % batch_size)


def participation_sensitivity(coefficients: np.ndarray, max_participations: int, min_separation: int) -> Sensitivity:
    """l2 sensitivity of the lower-triangular Toeplitz Ω with first column ``coefficients``, contributions
    of norm ≤ 1.

    Non-negative decreasing coefficients: the norm of the sum of columns 0, b, 2b, ... (Kalinin & Lampert
    2024, Theorem 2), exact also when participations may be *further* than b apart; O(T). Otherwise
    ``gram_bound``, which holds for participations exactly b apart (fixed epoch order). √κ·‖c‖ is right
    for p ≤ b only and is not used.
    """
    c = np.asarray(coefficients, dtype=np.float64)
    steps = len(c)
    b = require_integer("min_separation", min_separation, 1, steps, way_out="the number of steps is the largest")
    most = -(-steps // b)
    kappa = require_integer(
        "max_participations",
        max_participations,
        1,
        most,
        way_out=f"{steps} steps hold at most {most} participations {b} apart",
    )
    require(bool(np.all(np.isfinite(c))), "coefficients", "an array", "finite numbers")
    if np.all(c >= 0) and np.all(np.diff(c) <= 0):
        return Sensitivity(_column_sum_norm(c, kappa, b), True, "sum of columns (Theorem 2)")
    value, non_negative = _gram(c, kappa, b)
    return Sensitivity(value, non_negative, "Gram bound, fixed order")


def gram_bound(coefficients: np.ndarray, max_participations: int, min_separation: int) -> float:
    """√ of max_i Σ_{j,j'} |⟨Ω[:,i+jb], Ω[:,i+j'b]⟩|: bounds the sensitivity of any signs in fixed order;
    O(κT).

    An upper bound; exact when no inner product is negative (all contributions equal reach it).
    """
    return _gram(np.asarray(coefficients, dtype=np.float64), max_participations, min_separation)[0]


def _column_sum_norm(c: np.ndarray, kappa: int, b: int) -> float:
    """Norm of Σ_{j<κ} (c shifted down by jb): running sums over the residues mod b."""
    rows = -(-len(c) // b)
    folded = np.zeros((rows, b))
    folded.reshape(-1)[: len(c)] = c
    sums = np.cumsum(folded, axis=0)
    sums[kappa:] -= sums[:-kappa].copy() if kappa < rows else 0.0
    return float(np.linalg.norm(sums.reshape(-1)[: len(c)]))


def _gram(c: np.ndarray, kappa: int, b: int) -> tuple[float, bool]:
    steps = len(c)
    totals = np.zeros(b)  # one per first participation i = 0..b−1
    non_negative = True
    for lag in range(kappa):
        offset = lag * b
        if offset >= steps:
            break
        prefix = np.concatenate([[0.0], np.cumsum(c[: steps - offset] * c[offset:])])
        # columns i+jb and i+j'b overlap in T−i−j'b entries, j' = lag..κ−1 the later one
        lengths = steps - np.arange(b)[None, :] - b * np.arange(lag, kappa)[:, None]
        inner = prefix[np.clip(lengths, 0, None)]
        non_negative = non_negative and bool(np.all(inner >= 0))
        totals += (1 if lag == 0 else 2) * np.abs(inner).sum(axis=0)
    return float(np.sqrt(totals.max())), non_negative
