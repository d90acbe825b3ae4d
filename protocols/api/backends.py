"""Where a training runs: the real protocol at three processes (or threads) of this machine, or its plaintext twin."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from protocols.plan.run_plan import Plan
from protocols.run.session import Session, Where, train_twin
from vfl.dp import Claim
from vfl.federation import Federation

__all__ = ["BACKENDS", "Trained", "train"]

BACKENDS = ("local", "threads", "federation", "twin")


@dataclass(frozen=True)
class Trained:
    """A model and its claim; ``cost`` holds rounds, bytes and seconds of a real run."""

    layers: list[np.ndarray]
    claim: Claim
    cost: dict[str, float] = field(default_factory=dict)


def train(backend: str, plan: Plan, federation: Federation, timeout: float) -> Trained:
    """Run the plan on this machine."""
    if backend == "twin":
        return Trained(train_twin(plan, federation).model.layers, plan.claim)
    where = Where("processes" if backend == "local" else backend, timeout=timeout)
    found = Session(plan, where).fit(federation)
    cost = {"rounds": found.run.rounds, "bytes": found.run.bytes, "seconds": found.run.seconds}
    return Trained(found.layers, plan.claim, cost)
