"""What the real fits of this process have spent together, and what the owner of the rows is told about a fit.

Counts of private rows are shown where the rows lie, and nowhere else: they are in no claim, report or file.
"""

from __future__ import annotations

import secrets
import threading
import warnings
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from accel.validate import require
from protocols.plan.run_plan import Plan
from vfl.data.scaling import RowBound
from vfl.dp import Claim, PrivacyBudget
from vfl.dp.budget import composed_epsilon

__all__ = ["DataWarning", "PrivacyWarning", "charge", "warn_of_clipping", "warn_of_noise", "warn_of_unmatched"]

_FEW = 0.5  # of the smallest table
_MUCH_CLIPPED = 0.5
_DROWNING = 0.2  # noise of the model over the furthest that its gradients can move it; above it accuracy is near chance

_fits: list[Claim] = []
_lock = threading.Lock()


class PrivacyWarning(UserWarning):
    """Several fits spend more privacy together than each of their claims says."""


class DataWarning(UserWarning):
    """A fit is likely to learn nothing: few rows match, columns are not scaled, or noise drowns the signal."""


def charge(plan: Plan, budget: PrivacyBudget | None) -> tuple[float, float] | None:
    """Count a real fit before it starts; (ε, δ) of all of this process, if their rows are the same people. A simulation
    is not counted.

    ``budget``: the fit is charged to it, and refused beyond it (``BudgetExceededError``); it holds over processes and
    restarts. Without one the second fit of a process, and every further one, warns.
    """
    require(budget is None or isinstance(budget, PrivacyBudget), "budget", budget, "a vfl.dp.PrivacyBudget, or None")
    if plan.claim.simulated:
        return None
    if budget is not None:
        budget.spend(f"{plan.protocol} {plan.fingerprint[:16]} {secrets.token_hex(8)}", plan.claim)
    with _lock:
        _fits.append(plan.claim)
        fits = list(_fits)
    delta = sum(claim.delta for claim in fits)
    total = composed_epsilon(fits, delta) if delta < 1 else float("inf")
    if len(fits) > 1 and budget is None:
        warnings.warn(
            f"{len(fits)} real fits in this process: if their rows are the same people, they spend ε = {total:.4g}, "
            f"δ = {delta:.3g} "
            "together, and each claim_ speaks of one fit alone. Search on public or made-up rows (backend='twin'), "
            "or give "
            "budget=PrivacyBudget(file, total_epsilon, total_delta), which refuses what goes beyond it",
            PrivacyWarning,
            stacklevel=3,
        )
    return total, delta


def warn_of_unmatched(given: Mapping[str, int], common: int) -> None:
    """Few of the rows were matched by id."""
    fewest = min(given.values())
    if common < _FEW * fewest:
        counts = ", ".join(f"{name} {rows:,}" for name, rows in given.items())
        warnings.warn(
            f"{common:,} of {fewest:,} rows matched by id (tables: {counts}): are ids written in the same way "
            f"everywhere? "
            "id_rule='integer' takes 007 and 7 for one person",
            DataWarning,
            stacklevel=4,
        )


def warn_of_clipping(name: str, rows: npt.NDArray[np.float64], bound: RowBound, *, scaled: bool) -> float:
    """The share of rows beyond the bound, which are shortened to it."""
    norms = np.linalg.norm(rows, axis=1)
    share = float((norms > bound.norm * (1 + 1e-9)).mean()) if len(norms) else 0.0
    if bound.rule == "clip" and share > _MUCH_CLIPPED:
        way_out = "raise row_bound" if scaled else "pass public= rows or schemas=, which scale them by public constants"
        warnings.warn(
            f"{name}: {share:.0%} of the rows are longer than the row bound {bound.norm:.4g} (half of them than "
            f"{np.median(norms):.4g}) and are shortened to it, so that little but their direction is left: {way_out}",
            DataWarning,
            stacklevel=5,
        )
    return share


def warn_of_noise(plan: Plan) -> float:
    """The model's noise over the furthest that all its gradients can move it: from public sizes alone."""
    deviation = plan.noise.outsider_std * plan.factorisation.workload_error("mean") / plan.schedule.divisor
    ratio = float(deviation * np.sqrt(plan.parameters) / (plan.training.clip_norm * plan.schedule.num_steps))
    if ratio > _DROWNING:
        warnings.warn(
            f"the noise in the model is {ratio:.0%} of the furthest that the gradients of "
            f"{plan.schedule.num_samples:,} rows can move it, "
            f"so that it is next to nothing but noise; up to {_DROWNING / 4:.0%} is usual: more rows, fewer columns, "
            f"or a larger epsilon",
            DataWarning,
            stacklevel=4,
        )
    return ratio
