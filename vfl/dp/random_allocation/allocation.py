"""A secret order: in which batch a record is, what everybody else's places say about it, and what that is worth.

``padding`` appends D empty rows (dummies) to n records and cuts the n + D rows, shuffled in secret, into b batches of
public size. Given the places of all other records, a record is in any of the D + 1 free slots with the same
probability: it is in batch j with probability d_j/(D + 1), d_j free slots of batch j. Without dummies the others'
places give it away, and nothing is amplified.

``Allocation`` is the pair of distributions that bounds every adversary (proofs §9.6, Theorem 7): records move the
releases along one of b public *modes*, chosen by d; only their Gram matrix counts.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from scipy.stats import binom

from accel.validate import require, require_integer
from vfl.dp.factorisation import Factorisation

__all__ = ["Allocation", "Padding", "allocation_every_epoch", "allocation_once", "padding"]

_MOST_ENTRIES = 1 << 10  # of an alias table


@dataclass(frozen=True)
class Padding:
    """n records and D dummies in b batches of ``slots`` rows."""

    num_samples: int
    bins: int
    slots: int

    @property
    def dummies(self) -> int:
        """D."""
        return self.bins * self.slots - self.num_samples

    @property
    def mean_batch(self) -> float:
        """n/b: what sums are divided by; public, whatever the batches hold."""
        return self.num_samples / self.bins


def padding(num_samples: int, batch_size: int) -> Padding:
    """How n records are padded: b = n/batch_size batches, rounded, with about ¾·√(n/b) dummies each, at least 4.

    c dummies a batch cost c·b/n of the time and, at small noise, about 1/2c of σ: ¾·√(n/b) keeps both at a few percent.
    """
    n = require_integer("num_samples", num_samples, 1)
    size = require_integer("batch_size", batch_size, 1, n, way_out="a batch cannot be larger than the data")
    bins = max(1, round(n / size))
    spare = max(4, round(0.75 * math.sqrt(n / bins)))
    return Padding(n, bins, -(-n // bins) + spare)


@dataclass(frozen=True)
class Allocation:
    """A record in one of ``bins`` batches, ``free`` = D + 1 slots free: once for all epochs, or (``every_epoch``) drawn
    anew in each.

    ``gram`` is MᵀM of the modes, for contributions of norm 1, divided by ``scale``²; so a σ of 1 is noise of the size
    of the longest mode. ``identity`` names everything else that the numbers depend on, in integers.
    """

    bins: int
    slots: int
    free: int
    epochs: int
    every_epoch: bool
    scale: float
    identity: str
    gram: np.ndarray = field(compare=False, repr=False)

    @cached_property
    def cholesky(self) -> np.ndarray:
        """L with LLᵀ = K; K may be singular by rounding, so an eigenvalue below 10^-12 counts as 10^-12."""
        values, vectors = np.linalg.eigh(self.gram)
        root = vectors * np.sqrt(np.maximum(values, 1e-12))
        return np.asarray(root)

    @cached_property
    def counts_table(self) -> tuple[np.ndarray, np.ndarray]:
        """(accept, alias) of a binomial, from which free slots are drawn (``accel.reference.allocation``): Walker's
        method."""
        aim = max(0.25, self.free - 1.5 * math.sqrt(self.free)) / (self.bins * self.slots)
        mean = aim * self.slots
        most = min(self.slots, self.free, math.ceil(mean + 12 * math.sqrt(mean)) + 24)  # beyond: below 10^-20
        entries = 1 << most.bit_length()
        require(entries <= _MOST_ENTRIES, "dummies", self.free - 1, f"fewer than {_MOST_ENTRIES // 2} a batch")
        left = binom.pmf(np.arange(entries), self.slots, min(aim, 0.5))
        left *= entries / left.sum()
        accept, alias = np.ones(entries), np.arange(entries)
        small, large = list(np.flatnonzero(left < 1)), list(np.flatnonzero(left >= 1))
        while small and large:
            low, high = small.pop(), large.pop()
            accept[low], alias[low] = left[low], high
            left[high] -= 1 - left[low]
            (small if left[high] < 1 else large).append(high)
        return np.rint(accept * 2.0**48).astype(np.uint64), alias.astype(np.int64)


def allocation_every_epoch(shape: Padding, epochs: int) -> Allocation:
    """G-Shuff: a fresh padded shuffle in every epoch, independent noise in every step."""
    return Allocation(
        shape.bins,
        shape.slots,
        shape.dummies + 1,
        require_integer("epochs", epochs, 1),
        True,
        1.0,
        f"every epoch {epochs}; {shape.bins} bins of {shape.slots}, {shape.dummies} dummies",
        np.eye(shape.bins),
    )


def allocation_once(shape: Padding, epochs: int, factorisation: Factorisation, grid_exponent: int) -> Allocation:
    """G-BMF: one padded shuffle, the same batches in every epoch, correlated noise.

    Mode i at step t is Σ_e ĉ_{t−i−eb} plus 2^``grid_exponent``, what rounding may add in a step, from the record's
    first step on (relative to the bound of a contribution). Needs ĉ ≥ 0, which is checked.
    """
    steps, bins = factorisation.num_steps, shape.bins
    require(steps == epochs * bins, "num_steps", steps, f"{epochs} epochs of {bins} batches")
    strategy = factorisation.strategy_coefficients()
    require(
        bool(np.all(strategy >= 0)),
        "factorisation",
        f"{factorisation.kind} with {factorisation.bands} bands",
        "one whose coefficients are not negative, with a secret order",
        "choose other bands, or order = 'fixed'",
    )
    independent = factorisation.kind == "identity"
    grid = 2.0**grid_exponent
    if independent:  # a step in which the record does not take part does not differ at all
        gram = np.eye(bins) * epochs * (1 + grid) ** 2
    else:
        padded = np.concatenate([np.zeros(bins), strategy])  # index t − i + bins
        summed = np.zeros(steps + bins)
        for epoch in range(epochs):
            summed[bins + epoch * bins :] += padded[bins : len(padded) - epoch * bins]
        modes = np.stack([summed[bins - i : bins - i + steps] for i in range(bins)], axis=1)
        modes = np.where(np.arange(steps)[:, None] >= np.arange(bins), modes + grid, 0.0)
        gram = modes.T @ modes
    scale = math.sqrt(float(np.max(np.diag(gram)))) * (1 + 1e-9)
    taps = factorisation.integer_taps if factorisation.integer_taps is not None else factorisation.integer_strategy
    assert taps is not None
    digest = hashlib.sha256(np.ascontiguousarray(taps, dtype="<i8").tobytes()).hexdigest()[:32]
    return Allocation(
        bins,
        shape.slots,
        shape.dummies + 1,
        epochs,
        False,
        scale,
        f"once {epochs}; {bins} bins of {shape.slots}, {shape.dummies} dummies; {factorisation.kind} "
        f"{factorisation.bands} {digest}; grid {'none' if independent else grid_exponent}",
        gram / scale**2,
    )
