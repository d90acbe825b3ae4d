"""Defaults for tables that work: row bound, batch size, epochs and learning rate, from public sizes and ε alone.

Chosen with twins on public and made-up tables (``python -m bench.defaults`` prints them beside a grid of others):

- ``clip`` with R = 2·√width. The claim bounds each gradient by γ whatever R is, so a wide R costs no privacy; a narrow one, or
  ``normalise``, takes away what tells rows apart (of one column only the sign is left).
- Batches of a fifth of the rows, at most 1024 (more only if an epoch had over 250 of them); hardly a row is left over.
- One step for every 30 rows·ε, between 100 and 500: more steps are more noise for few rows, and no gain for many.
- Learning rate √(rows·ε/4000), between 0.25 and 1; half of it for hidden layers, a tenth for a regression, whose loss is as
  steep far from its minimum as close to it.
"""

from __future__ import annotations

import math

from accel.validate import require_integer, require_real

__all__ = ["AUTOMATIC", "NARROW", "table_row_bound", "training_defaults"]

AUTOMATIC = ("batch_size", "epochs", "learning_rate")  # what `training_defaults` chooses
NARROW = 4  # columns of a client, up to which `normalise` leaves little but signs
_LEAST_STEPS, _MOST_STEPS, _ROWS_A_STEP = 100, 500, 30.0
_LEAST_BATCHES, _MOST_BATCHES, _USUAL_BATCH = 5, 250, 1024
_LEAST_RATE, _MOST_RATE, _RATE_ROWS = 0.25, 1.0, 4000.0
_LARGEST_BOUND = 1024.0


def table_row_bound(width: int) -> float:
    """R for rows of ``width`` columns that are scaled to about −1..1 or unit deviation; two digits are enough."""
    bound = 2.0 * math.sqrt(require_integer("width", width, 1))
    return min(_LARGEST_BOUND, float(f"{bound:.3g}"))


def training_defaults(
    rows: int, epsilon: float, *, hidden: bool = False, regression: bool = False
) -> dict[str, int | float]:
    """``batch_size``, ``epochs`` and ``learning_rate`` for ``rows`` training rows at ``epsilon``."""
    require_integer("rows", rows, 1)
    worth = rows * require_real("epsilon", epsilon, 0.0, open_low=True)
    batches = min(_MOST_BATCHES, max(_LEAST_BATCHES, math.ceil(rows / _USUAL_BATCH)))
    batch = max(1, rows // batches)
    steps = min(_MOST_STEPS, max(_LEAST_STEPS, worth / _ROWS_A_STEP))
    rate = min(_MOST_RATE, max(_LEAST_RATE, math.sqrt(worth / _RATE_ROWS))) / (2 if hidden else 10 if regression else 1)
    return {
        "batch_size": batch,
        "epochs": max(1, round(steps / (rows // batch))),
        "learning_rate": float(f"{rate:.2g}"),
    }
