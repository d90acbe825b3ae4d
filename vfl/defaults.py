"""Defaults for tables that work: row bound, batch size, epochs and learning rate, from public sizes and ε alone.

Chosen with twins on public and made-up tables (``python -m bench.defaults`` prints them beside a grid of others):

- ``clip`` with R = 4·√width, the norm of a row whose columns all lie at the schema's limit of four deviations. The
  claim bounds each gradient by γ whatever R is, so a wide R costs no privacy; a narrow one takes away what tells rows
  apart (with 2·√width a client with one column had it cut off at two deviations), and ``normalise`` leaves only the
  sign of one column.
- Batches of a fifth of the rows, at most 1024 (more only if an epoch had over 250 of them); hardly a row is left over.
  Never so many rows that their clipped gradients outgrow the ring: 2^13·(1 − momentum)/γ, which leaves a step of one
  output enough bits for rows of 1,000 columns.
- One step for every 30 rows·ε, between 100 and 500: more steps are more noise for few rows, and no gain for many.
- Learning rate √(rows·ε/4000), at least 0.25. At most 4, and the model is the mean over the last fifth of all steps, in
  which the noise of a high rate averages out; at most 1 where there is no averaging (secret weights, GL-BMF, hidden
  layers) and for a regression. Half of it for hidden layers, a tenth for a regression, whose loss is as steep far from
  its minimum as close to it.
- With ``optimiser = "adam"`` the rate is 0.1, whatever the rows: its steps have no unit. 0.03 with hidden layers, 0.01
  for a regression.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from accel.validate import require_integer, require_real
from vfl.training import TrainingConfig

__all__ = ["AUTOMATIC", "NARROW", "adam_rate", "chosen_training", "table_row_bound", "training_defaults"]

AUTOMATIC = ("batch_size", "epochs", "learning_rate", "average")  # what `training_defaults` chooses
NARROW = 4  # columns of a client, up to which `normalise` leaves little but signs
_LEAST_STEPS, _MOST_STEPS, _ROWS_A_STEP = 100, 500, 30.0
_LEAST_BATCHES, _MOST_BATCHES, _USUAL_BATCH = 5, 250, 1024
_LEAST_RATE, _MOST_RATE, _MOST_AVERAGED_RATE, _RATE_ROWS = 0.25, 1.0, 4.0, 4000.0
_MOST_GRADIENT = 2.0**13  # of a sum of clipped gradients
_LARGEST_BOUND = 1024.0
_ADAM_RATE, _ADAM_HIDDEN_RATE, _ADAM_REGRESSION_RATE = 0.1, 0.03, 0.01


def table_row_bound(width: int) -> float:
    """R for rows of ``width`` columns that are scaled to about −1..1 or unit deviation; two digits are enough."""
    bound = 4.0 * math.sqrt(require_integer("width", width, 1))
    return min(_LARGEST_BOUND, float(f"{bound:.3g}"))


def adam_rate(*, hidden: bool, regression: bool = False) -> float:
    """Of every data set: ``python -m bench.optimisers``."""
    return _ADAM_REGRESSION_RATE if regression else _ADAM_HIDDEN_RATE if hidden else _ADAM_RATE


def training_defaults(
    rows: int,
    epsilon: float,
    *,
    clip_norm: float = 1.0,
    momentum: float = 0.0,
    hidden: bool = False,
    regression: bool = False,
    averaging: bool = True,
    optimiser: str = "sgd",
) -> dict[str, Any]:
    """``batch_size``, ``epochs``, ``learning_rate`` and ``average`` for ``rows`` training rows at ``epsilon``.
    ``averaging``: whether the run can give an average (open weights, not GL-BMF). ``momentum``: that of what is cut on
    shares, 0 with open weights."""
    require_integer("rows", rows, 1)
    worth = rows * require_real("epsilon", epsilon, 0.0, open_low=True)
    batches = min(_MOST_BATCHES, max(_LEAST_BATCHES, math.ceil(rows / _USUAL_BATCH)))
    batches = max(batches, math.ceil(rows * clip_norm / (_MOST_GRADIENT * (1 - momentum))))
    batch = max(1, rows // batches)
    steps = min(_MOST_STEPS, max(_LEAST_STEPS, worth / _ROWS_A_STEP))
    averaged = averaging and not hidden
    highest = _MOST_AVERAGED_RATE if averaged and not regression else _MOST_RATE
    rate = min(highest, max(_LEAST_RATE, math.sqrt(worth / _RATE_ROWS))) / (2 if hidden else 10 if regression else 1)
    if optimiser == "adam":
        rate = adam_rate(hidden=hidden, regression=regression)
    return {
        "batch_size": batch,
        "epochs": max(1, round(steps / (rows // batch))),
        "learning_rate": float(f"{rate:.2g}"),
        "average": "fifth" if averaged else "none",
    }


def chosen_training(
    stated: Mapping[str, Any],
    rows: int,
    *,
    regression: bool = False,
    averages: bool = False,
    patience: int = 0,
) -> dict[str, Any]:
    """``training_defaults`` for what is not ``stated``, by name; the same at every door. ``averages``: whether the
    method can give an average of its weights, which somebody has to see on the way. Stated batches are as many steps; a
    stated rate was chosen for what it gives; with patience the last fifth is not known before the end."""

    def known(name: str) -> Any:
        return stated.get(name, getattr(TrainingConfig, name))

    is_open = known("weights") == "open"
    averaging = averages and is_open and not patience and not {"learning_rate", "average"} & set(stated)
    chosen = training_defaults(
        rows,
        known("epsilon"),
        clip_norm=known("clip_norm"),
        momentum=0.0 if is_open else known("momentum"),
        hidden=bool(known("hidden")),
        regression=regression,
        averaging=averaging,
        optimiser=known("optimiser"),
    )
    if "batch_size" in stated and "epochs" not in stated:
        steps = int(chosen["epochs"]) * (rows // int(chosen["batch_size"]))
        chosen["epochs"] = max(1, round(steps / max(1, rows // stated["batch_size"])))
    return chosen | {name: stated[name] for name in AUTOMATIC if name in stated}
