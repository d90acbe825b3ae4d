"""Checks that an opened value is possible under clip, rate, noise and steps, before it is used or handed over.

Rows are tested when they come in (proofs §11), so no upload leads out of these bounds. Where clients are trusted with
the row bound, a client that breaks it can exceed them. So can a server that computes wrongly, because of a bit flip in
memory or another build. The bounds are those for which the ranges of the ring were chosen (``protocols.plan.scales``).
Bounds and values are public, so the check reveals nothing.

A sum or a weight of a run that follows the protocol is beyond its bound with a probability below 2·Φ(−12) < 2^−107.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from accel.errors import PpvflError
from protocols.plan.run_plan import Plan
from protocols.plan.scales import NOISE_DEVIATIONS, RELEASE_BITS

__all__ = ["Impossible", "largest_sum", "largest_weights", "require_possible_model", "require_possible_sums"]


class Impossible(PpvflError):
    """Something was opened that clip, noise, rate and steps do not allow: its claim does not hold, and it is not
    used."""


def largest_sum(plan: Plan) -> float:
    """What no coordinate of one step's noised gradient sum exceeds: all rows of the batch at the clip norm, and 12
    deviations."""
    clipped = 1.01 * plan.schedule.batch_size * (plan.training.clip_norm + plan.scales.clip_rounding)
    return (
        clipped + NOISE_DEVIATIONS * plan.noise_std * plan.factorisation.velocity_norm(0.0) + 2.0 ** (2 - RELEASE_BITS)
    )


def largest_weights(plan: Plan) -> list[float]:
    """What no weight, or with hidden layers no norm, of each layer exceeds after all steps."""
    if plan.training.hidden:
        return [layer.weight_bound for layer in plan.scales.layers]
    column = plan.scales.logit_bound / math.hypot(plan.scales.row_bound, 1.0)
    return [column if plan.training.optimiser == "sgd" else column / math.sqrt(plan.width + 1)]  # Adam: all alike


def require_possible_sums(plan: Plan, step: int, sums: np.ndarray) -> None:
    """Check the sums that a step opened, integers at RELEASE_BITS; raises ``Impossible``."""
    largest = 2.0**-RELEASE_BITS * max(abs(int(sums.max())), abs(int(sums.min())))
    if not largest <= (limit := largest_sum(plan)):
        raise Impossible(
            f"step {step + 1} opened a gradient sum of {largest:.3g}; {plan.schedule.batch_size} clipped rows and "
            f"the noise give {limit:.3g} at most. {_CAUSES}"
        )


def require_possible_model(plan: Plan, layers: Sequence[np.ndarray]) -> None:
    """Check a model that was released, read from a file, or is about to be used in a step; raises ``Impossible``.

    One layer: every weight, because ranges follow the weights of the step (``protocols.step.public_weights``). Hidden
    layers: ‖W_l‖, for which the ranges of activations, errors and the clip of every step are made.
    """
    measured, found = ("norm", _norm) if plan.training.hidden else ("weight", _largest)
    for place, (layer, limit) in enumerate(zip(layers, largest_weights(plan), strict=True)):
        largest = found(layer, limit)
        if not largest <= limit:  # also if it is no number
            raise Impossible(
                f"layer {place} of the model has a {measured} of {largest:.3g}; {plan.schedule.num_steps} steps with "
                f"this clip norm, rate and noise lead to {limit:.3g} at most. {_CAUSES}"
            )


def _largest(layer: np.ndarray, limit: float) -> float:
    return float(np.abs(layer).max())


def _norm(layer: np.ndarray, limit: float) -> float:
    """‖layer‖, or what is above it and within ``limit``: singular values are computed only where they decide."""
    whole = float(np.linalg.norm(layer))
    if whole <= limit or not math.isfinite(whole):
        return whole
    lines = layer if layer.shape[0] <= layer.shape[1] else layer.T
    return math.sqrt(max(0.0, float(np.linalg.eigvalsh(lines @ lines.T)[-1])))


_CAUSES = (
    "So a server has computed wrongly (memory, mixed versions), or clients are trusted with the row bound and one "
    "broke it. The "
    "model is not handed over; look at the hosts and the files, and begin a new run: what was opened stays spent"
)
