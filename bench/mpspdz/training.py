"""The steps of a G-BMF run executed by MP-SPDZ: an independent check of a whole training run, at small sizes.

It is a check, not a private run: one party is given all rows and the noise that our three servers drew. MP-SPDZ's
numbers have 16 fraction bits and 15 before the point, so noise and gradients must stay below 2^15.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from accel.validate import require
from bench.mpspdz.runner import MpSpdz
from bench.shapes import public_norms
from protocols.plan.run_plan import Plan
from protocols.server.server_noise import insecure_total_noise
from protocols.state.checkpoint import ServerDirectory
from vfl.federation import Federation

__all__ = ["MOST_STEPS", "MpSpdzTraining", "noise_of_the_servers", "require_small", "train_with_mpspdz"]

MOST_STEPS = 40  # every step is compiled on its own
RANGE = 2.0**14


@dataclass(frozen=True)
class MpSpdzTraining:
    """The weights [W; b] that MP-SPDZ arrived at, and what its run cost."""

    weights: np.ndarray
    seconds: float
    bytes: int
    rounds: int


def noise_of_the_servers(plan: Plan, directory: Path) -> np.ndarray:
    """All three servers' filtered noise, a row per step, from the keys that a run left in its directory."""
    streams = [ServerDirectory(directory / f"server-{i}").noise_stream(plan.fingerprint) for i in range(3)]
    noise = insecure_total_noise(plan, streams)
    return np.stack([noise(step).reshape(-1) for step in range(plan.schedule.num_steps)])


def require_small(plan: Plan) -> None:
    """Refuse, before anything runs, a plan that MP-SPDZ cannot be given here."""
    training, schedule = plan.training, plan.schedule
    way_out = "use fewer epochs, larger batches or fewer rows (--epochs 1 --batch-size 512)"
    require(
        schedule.num_steps <= MOST_STEPS, "steps", schedule.num_steps, f"at most {MOST_STEPS} with MP-SPDZ", way_out
    )
    require(training.optimiser == "sgd", "optimiser", training.optimiser, "'sgd' with MP-SPDZ")
    require(training.weight_decay == 1.0, "weight_decay", training.weight_decay, "1 with MP-SPDZ")
    require(training.schedule == "constant", "schedule", training.schedule, "'constant' with MP-SPDZ")


def train_with_mpspdz(
    system: MpSpdz, plan: Plan, federation: Federation, noise: np.ndarray, network: str = "loopback"
) -> MpSpdzTraining:
    """Run all steps of the plan with the given noise (steps × parameters) and open the weights."""
    require_small(plan)
    training, schedule = plan.training, plan.schedule
    largest = float(np.abs(noise).max()) / (1.0 - training.momentum)
    require(largest < RANGE, "noise", largest, f"below {RANGE:g}, which MP-SPDZ's numbers hold", "raise epsilon")
    used = slice(0, schedule.num_samples)
    columns = [client.embedding_rows(used) for client in federation.clients]
    rows = np.concatenate([*columns, np.ones((schedule.num_samples, 1))], axis=1)
    owner = next(client for client in federation.clients if client.is_label_client)
    one_hot = owner.one_hot_rows(used, plan.classes)
    norms = public_norms(rows, training.clip_norm)
    rate = plan.scales.learning_rate_used(training.learning_rate) / training.batch_size
    compiled = system.compile(
        "training",
        training.batch_size,
        plan.width + 1,
        plan.classes,
        schedule.num_batches,
        schedule.epochs,
        rate,
        training.momentum,
    )
    out = system.run(compiled, [rows, one_hot, norms, noise], network)
    return MpSpdzTraining(out.values.reshape(plan.width + 1, plan.classes), out.seconds, out.bytes, out.rounds)
