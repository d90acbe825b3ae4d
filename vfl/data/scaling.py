"""Scaling with public constants, and the row bound R that is part of the DP claim.

Nothing here is ever fitted on private rows: one person's record would then move everybody's embedding and
the per-record claim would be void (proofs §10.1). Constants are stated (pixel range), or fitted on the
*public* rows. Everything after that works on one row at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from accel.validate import require, require_choice, require_integer, require_real

__all__ = [
    "PublicProjection",
    "PublicScaling",
    "RowBound",
    "bound_jacobians",
    "bound_rows",
    "row_bound_from_public",
    "split_row_bound",
]

Floats = npt.NDArray[np.floating]


@dataclass(frozen=True)
class PublicScaling:
    """x ↦ clip((x − centre)/spread, −limit, limit), column by column, with public constants.

    ``source`` says where the constants come from; it is copied into the DP claim.
    """

    centre: Floats
    spread: Floats
    limit: float
    source: str

    @classmethod
    def from_range(cls, low: float, high: float, *, signed: bool = False) -> PublicScaling:
        """Stated range low..high onto 0..1, or onto −1..1 when ``signed``."""
        require_real("low", low)
        require_real("high", high, low, open_low=True)
        spread = (high - low) / 2 if signed else high - low
        centre = (high + low) / 2 if signed else low
        return cls(np.asarray(centre), np.asarray(spread), 1.0, f"stated range {low:g}..{high:g}")

    @classmethod
    def from_public(cls, public_rows: Floats, *, method: str = "standard", limit: float = 4.0) -> PublicScaling:
        """Constants fitted on public rows: ``standard`` (mean, deviation) or ``range`` (minimum, maximum)."""
        require_choice("method", method, ("standard", "range"))
        require_real("limit", limit, 0.0, open_low=True)
        require(
            public_rows.ndim == 2 and len(public_rows) >= 2,
            "public_rows",
            public_rows.shape,
            "a table with at least two rows",
            "set rows aside with public_fraction, or state column ranges",
        )
        rows = public_rows.astype(np.float64)
        if method == "standard":
            centre, spread = rows.mean(axis=0), rows.std(axis=0)
        else:
            centre = (rows.max(axis=0) + rows.min(axis=0)) / 2
            spread, limit = (rows.max(axis=0) - rows.min(axis=0)) / 2, 1.0
        spread = np.where(spread > 0, spread, 1.0)
        return cls(centre, spread, limit, f"{method} fitted on {len(rows)} public rows")

    def apply(self, rows: Floats) -> Floats:
        scaled = (rows.astype(np.float64) - self.centre) / self.spread
        return np.clip(scaled, -self.limit, self.limit).astype(np.float32)


@dataclass(frozen=True)
class PublicProjection:
    """x ↦ (x − centre)·matrix with public constants: centred, whitened, and cut to the directions that tell classes
    apart. Noise is added to every coordinate of a gradient, so each direction without signal costs accuracy.
    """

    centre: Floats
    matrix: Floats
    source: str

    @classmethod
    def from_public(
        cls,
        public_rows: Floats,
        labels: npt.NDArray[np.int64],
        *,
        width: int,
        shrinkage: float = 0.1,
    ) -> PublicProjection:
        """Fisher's discriminant directions of labelled public rows.

        Whitened by the covariance within classes, shrunk towards a multiple of the identity by ``shrinkage``; of
        the whitened space the ``width`` leading directions of the covariance are kept.
        """
        columns = public_rows.shape[1]
        require(len(labels) == len(public_rows), "labels", len(labels), f"one per public row ({len(public_rows)})")
        require_integer("width", width, 1, columns)
        require_real("shrinkage", shrinkage, 0.0, 1.0, open_low=True)
        rows = public_rows.astype(np.float64)
        centre = rows.mean(axis=0)
        classes, place = np.unique(labels, return_inverse=True)
        sums = np.zeros((len(classes), columns))
        np.add.at(sums, place, rows)
        inside = rows - (sums / np.bincount(place)[:, None])[place]
        within = inside.T @ inside / len(rows)
        within = (1 - shrinkage) * within + shrinkage * np.trace(within) / columns * np.eye(columns)
        values, vectors = np.linalg.eigh(within)
        whiten = vectors / np.sqrt(values)
        spread = (rows - centre) @ whiten
        _, directions = np.linalg.eigh(spread.T @ spread)
        matrix = whiten @ directions[:, ::-1][:, :width]
        source = f"projection to {width} directions fitted on {len(rows)} public rows of {len(classes)} classes"
        return cls(centre, matrix, source)

    def apply(self, rows: Floats) -> Floats:
        return ((rows - self.centre) @ self.matrix).astype(np.float32)


@dataclass(frozen=True)
class RowBound:
    """The bound one client enforces on each of its rows.

    ``clip`` shrinks rows longer than ``norm``; ``normalise`` gives every non-zero row exactly that norm.
    Both look at one row only.
    """

    norm: float
    rule: str = "clip"

    def __post_init__(self) -> None:
        require_real("row bound", self.norm, 0.0, open_low=True)
        require_choice("row bound rule", self.rule, ("clip", "normalise"))

    def factors(self, rows: Floats) -> Floats:
        """The factor by which each row is multiplied."""
        norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
        if self.rule == "normalise":
            return np.divide(self.norm, norms, out=np.zeros_like(norms), where=norms > 0)
        return self.norm / np.maximum(norms, self.norm)

    def apply(self, rows: Floats) -> Floats:
        return bound_rows(rows, self.norm, self.rule)


def bound_rows(rows: Floats, norm: float, rule: str = "clip") -> Floats:
    """``rows`` with every row's l2 norm at most ``norm`` (float32 rounding included: it is rounded
    inwards). Where no row is too long these are the rows themselves, not a copy.
    """
    factors = RowBound(norm, rule).factors(rows)
    if rule == "clip" and (factors == 1.0).all():
        return rows
    # A float32 product may round up by 2^-24 per entry; the margin keeps the row inside the bound.
    factors = np.where((factors < 1.0) | (rule == "normalise"), factors * (1.0 - 2.0**-22), 1.0)
    return (rows * factors[:, None]).astype(rows.dtype)


def bound_jacobians(jacobians: Floats, norm: float) -> Floats:
    """``jacobians`` (B, d, n) with the spectral norm of each at most ``norm``; looks at one sample at a time."""
    wide = jacobians.astype(np.float64)
    squares = np.einsum("jdn,jdn->j", wide, wide)  # Frobenius: an upper bound, which often is enough
    long = squares > norm**2
    if not long.any():
        return jacobians
    squares[long] = np.linalg.eigvalsh(np.matmul(wide[long], wide[long].transpose(0, 2, 1)))[:, -1]
    factors = np.where(squares > norm**2, norm * (1.0 - 2.0**-22) / np.sqrt(np.maximum(squares, 1e-300)), 1.0)
    return (jacobians * factors[:, None, None]).astype(jacobians.dtype)


def split_row_bound(row_bound: float, num_clients: int, widths: Sequence[int] | None = None) -> tuple[float, ...]:
    """Each client's R_i with Σ R_i² = R², so that the concatenated row obeys R whatever the clients hold: R/√N, or with
    ``widths`` R·√(w_i/Σw), so that a client with one column does not get the room of fifty."""
    require_real("row_bound", row_bound, 0.0, open_low=True)
    require_integer("num_clients", num_clients, 1)
    if widths is None:
        return (row_bound / num_clients**0.5,) * num_clients
    require(len(widths) == num_clients and min(widths) >= 1, "widths", list(widths), f"{num_clients} positive numbers")
    return tuple(row_bound * (width / sum(widths)) ** 0.5 for width in widths)


def row_bound_from_public(public_rows: Floats, quantile: float = 0.95) -> float:
    """A bound that ``quantile`` of the *public* rows obey: a public number by construction."""
    require_real("quantile", quantile, 0.0, 1.0, open_low=True)
    require(
        len(public_rows) >= 1,
        "public_rows",
        len(public_rows),
        "at least one row",
        "state the row bound instead",
    )
    return float(np.quantile(np.linalg.norm(public_rows.astype(np.float64), axis=1), quantile))
