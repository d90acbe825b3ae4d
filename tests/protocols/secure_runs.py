"""Secure runs of G-BMF and G-Shuff on small federations, the servers' noise, and how far weights may be off."""

from __future__ import annotations

import numpy as np

import refmpc
from protocols.client.upload import ClientJob, client_program
from protocols.methods import g_bmf
from protocols.plan.run_plan import Plan
from protocols.plan.scales import RELEASE_BITS
from protocols.server.server_noise import insecure_total_noise
from protocols.server.training import ServerJob
from protocols.state.checkpoint import ServerDirectory
from vfl.federation import Federation
from vfl.training import TrainingConfig

__all__ = ["noise_of_the_servers", "released", "run_secure", "small_training", "weight_bound"]


def run_secure(
    plan: Plan, federation: Federation, directory, servers=g_bmf.servers, parties="threads", every=0, **options
):
    used = slice(0, plan.schedule.num_samples)
    clients = {
        c.name: (
            client_program,
            ClientJob(
                plan, c.embedding_rows(used), plan.labels_to_share(c.label_rows(used)) if c.is_label_client else None
            ),
        )
        for c in federation.clients
    }
    jobs = [ServerJob(plan, directory / f"server-{i}", every) for i in range(3)]
    return refmpc.run(servers, jobs, parties=parties, clients=clients, releases=plan.releases, timeout=60, **options)


def noise_of_the_servers(plan: Plan, directory) -> np.ndarray:
    """All three servers' filtered noise, from the keys they left: what an auditor with all keys would compute."""
    streams = [ServerDirectory(directory / f"server-{i}").noise_stream(plan.fingerprint) for i in range(3)]
    noise = insecure_total_noise(plan, streams)
    return np.stack([noise(step) for step in range(plan.schedule.num_steps)])


def weight_bound(plan: Plan) -> float:
    """How far the weights may be from the twin's, coordinate by coordinate, after all steps.

    One step: each sample's contribution is off by the softmax (2^-14 an entry, logits rounded to 2^-16 included), by
    the clip factor (2^-12 of γ, q rounded up included) and by the embedding's rounding (2^-15 a column, both factors);
    the sum of B of them is divided by B; then y is rounded to 2^-RELEASE_BITS. An error in W before the step grows by
    at most 1 + 2η‖[h 1]‖² (softmax is 1-Lipschitz, the clip doubles it).
    """
    training, scales = plan.training, plan.scales
    reach = np.hypot(scales.row_bound, 1.0)
    columns = np.sqrt(plan.width) * 2.0**-15
    sample = reach * np.sqrt(plan.classes) * 2.0**-14 + training.clip_norm * 2.0**-12 + 3 * columns
    step = training.learning_rate * (sample + 2.0**-RELEASE_BITS * 2 / training.batch_size)
    growth = 1 + 2 * training.learning_rate * reach**2
    momentum = 1 / (1 - training.momentum)
    return momentum * step * sum(growth**k for k in range(plan.schedule.num_steps))


def small_training(**changes) -> TrainingConfig:
    defaults = {"epochs": 1, "batch_size": 32, "learning_rate": 0.5, "clip_norm": 1.0, "epsilon": 8.0}
    # no certificate, which takes seconds, unless a test is about it
    return TrainingConfig(**{**defaults, "accounting": "any-order", **changes})


def released(result) -> list[np.ndarray]:
    """The layers that every client received, the same at all; servers that have some, with open weights, have these."""
    found = [getattr(output, "model", output) for output in result.client_outputs.values()]
    first, *others = [[layers] if isinstance(layers, np.ndarray) else layers for layers in found]
    for layers in (*others, *filter(None, result.outputs)):
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(first, layers, strict=True))
    return first
