"""Secure runs of GL-BMF on small federations, and how far parameters may be off."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

import refmpc
from protocols.methods import gl_bmf
from protocols.methods.gl_bmf import METHOD, server_jobs
from protocols.plan.gl_plan import LayerPlan, plan_layer_run
from protocols.plan.scales import RELEASE_BITS
from protocols.server import gl_training
from tests.protocols.conftest import lora_federation
from tests.protocols.secure_runs import released
from vfl.federation import Federation
from vfl.local.client import Client
from vfl.local.lora import ParallelLora
from vfl.training import TrainingConfig
from vfl.twins import TwinResult, train_gl_bmf

__all__ = [
    "BLOCKS",
    "CLASSES",
    "WIDTHS",
    "adapters_of",
    "crash_once",
    "difference",
    "make",
    "parameter_bound",
    "run_secure",
    "trained",
]

WIDTHS, BLOCKS, CLASSES = (5, 4), ((3, 4), (6,)), 3


def make(
    local_update: str = "released", momentum: float = 0.0, local: dict[str, Any] | None = None, **changes: Any
) -> tuple[Federation, LayerPlan]:
    """Two clients, three layers, six steps; noise small enough that gradients are seen next to it."""
    local = {"local_learning_rate": 0.5, **(local or {})}
    federation = lora_federation(96, WIDTHS, BLOCKS, CLASSES, local_update=local_update, momentum=momentum, **local)
    defaults = {"epochs": 2, "batch_size": 32, "learning_rate": 0.5, "epsilon": 20.0, "momentum": momentum}
    return federation, plan_layer_run(federation, TrainingConfig(**{**defaults, **changes}))


def run_secure(plan: LayerPlan, federation: Federation, directory: Path, keep: bool = False, clients=None, **options):
    return refmpc.run(
        gl_bmf.servers,
        server_jobs(plan, directory, keep),
        clients=clients or METHOD.clients(plan, federation, directory if keep else None),
        releases=plan.releases,
        timeout=60,
        **options,
    )


def lora_of(client: Client) -> ParallelLora:
    assert client.lora is not None
    return client.lora


def adapters_of(clients) -> np.ndarray:
    """All U and V of some clients, flat."""
    return np.concatenate([part.ravel() for c in clients for l in c.lora.layers for part in (l.up, l.down)])


def trained(result, twin: TwinResult) -> list[Client]:
    """The twin's clients, with the layers that the secure run has trained."""
    clients = [client.fresh() for client in twin.clients]
    for client in clients:
        client.load_adapter_state(result.client_outputs[client.name].layers)
    return clients


def difference(result, twin: TwinResult) -> float:
    """The norm of (W, U, V) − twin's (W, U, V), all clients."""
    adapters = adapters_of(trained(result, twin)) - adapters_of(twin.clients)
    return math.hypot(np.linalg.norm(released(result)[0] - twin.model.layers[0]), np.linalg.norm(adapters))


def parameter_bound(plan: LayerPlan, federation: Federation, noise: np.ndarray, estimated: bool = False) -> float:
    """How far (W, U, V) of the secure run may be from the twin's after all steps, in norm.

    Let E be that distance before a step. ω, μ, ν bound ‖W‖, ‖U‖, ‖V‖ along the twin's run (taken from the twin, and
    0.05 more), ‖x‖ ≤ 1, s the scale, N clients, L layers of a client. Row bounds clip, so they are projections.

        dh ≤ s(ν + μ)E,   dδ ≤ ‖[h 1]‖E + ω·dh (softmax is 1-Lipschitz),   da ≤ E + ν·dh/R_i
        global: ‖[h 1]‖dδ + √2·dh,    U: s(√2νE + ων·dδ + √2ω·da),    V: s√L(√2(ω+μ)E + μω·dδ + √2μω·dh/R_i)

    Clipping is a projection too, so the clipped gradient moves by at most the sum of these: L_g·E. Fresh errors of a
    step enter in the same way: δ by √S·2^-14; h by √d·2^-15; W̃, A, U, X, φ, t by their grids (added up as an E of
    2^-12, which is more than all of them together); the clip factor by 2^-14 + 2^-18 + half the rounding of q (below
    2^-11 γ); the release by 1.5·2^-12 an entry, of the sum. So E' ≤ (1 + ηL_g)E + η·fresh, η the larger of both
    learning rates, times 1/(1−β) with momentum.

    ``estimated``: the estimate is (MᵀM + λ)⁻¹MᵀY with ‖M‖ ≤ s√B(ν+μ), so dĜ ≤ dY/(2√λ) + 9/4·‖dM‖‖Y‖/λ, and the update
    moves by s√B((ν+μ)dĜ + 2‖Ĝ‖E), with ‖Y‖ ≤ γ + the noise in it.
    """
    training, classes = plan.training, plan.classes
    steps = plan.schedule.num_steps
    states = [train_gl_bmf(federation, training, noise=noise, num_steps=k) for k in range(1, steps + 1)]
    omega = max(float(np.linalg.norm(s.model.layers[0], 2)) for s in states) + 0.05
    layers = [l for s in states for c in s.clients for l in lora_of(c).layers]
    depth = max(len(lora_of(c).layers) for c in federation.clients)
    mu = math.sqrt(depth) * max(float(np.linalg.norm(l.up, 2)) for l in layers) + 0.05
    nu = math.sqrt(depth) * max(float(np.linalg.norm(l.down, 2)) for l in layers) + 0.05
    s = lora_of(federation.clients[0]).scale
    radius = min(c.row_bound.norm for c in federation.clients)
    reach = math.hypot(plan.scales.row_bound, 1.0)

    def gradient_moves(e: float, e_delta: float, e_rows: float) -> float:
        dh = s * (nu + mu) * e + e_rows
        d_delta = reach * e + omega * dh + e_delta
        da = e + nu * dh / radius
        root = math.sqrt(2)
        up = s * (root * nu * e + omega * nu * d_delta + root * omega * da)
        down = s * math.sqrt(depth) * (root * (omega + mu) * e + mu * omega * (d_delta + root * dh / radius))
        return float(reach * d_delta + root * dh + len(federation.clients) * (up + down))

    fresh = gradient_moves(2.0**-12, math.sqrt(classes) * 2.0**-14, math.sqrt(plan.width) * 2.0**-15)
    fresh += training.clip_norm * (2.0**-14 + 2.0**-18 + 2.0**-11) + plan.adapters.clip_rounding
    fresh += math.sqrt(plan.parameters) * 1.5 * 2.0**-RELEASE_BITS / training.batch_size
    growth = gradient_moves(1.0, 0.0, 0.0)
    rate = max(training.learning_rate, plan.local_update.learning_rate) / (1 - training.momentum)
    if estimated:
        root_b = math.sqrt(training.batch_size)
        lam = float(plan.local_update.regularisation)
        y = training.clip_norm + float(np.linalg.norm(noise, axis=1).max()) / training.batch_size
        g = y / (2 * math.sqrt(lam))
        dm = s * root_b * (1 + (nu + mu) * (nu + mu) * s / radius)  # per unit of E
        slope = s * root_b * (nu + mu)
        growth += slope * (growth / (2 * math.sqrt(lam)) + 2.25 * dm * y / lam) + 2 * s * root_b * g
        fresh += slope * fresh / (2 * math.sqrt(lam))
    distance = 0.0
    for _ in range(steps):
        distance = (1 + rate * growth) * distance + rate * fresh
    return distance


class Crash(Exception):
    """What a test makes a participant die of."""


def crash_once(monkeypatch, where: str, server: int, step: int) -> None:
    """Server ``server`` dies at a point of ``step``: before or after it wrote its release, or between its two sends."""
    left = [1]

    def die(run_party, now: str) -> None:
        if left and now == where and run_party.id == server and run_party.step == step:
            left.pop()
            raise Crash

    send = refmpc.open_to_client
    sent: dict[tuple[int, int], int] = defaultdict(int)

    def dying(write):
        async def release(self, at, openings):
            die(self.party, "before writing")
            await write(self, at, openings)
            die(self.party, "after sending")

        return release

    def open_(party, words, client, release):
        sent[party.id, party.step] += 1
        if sent[party.id, party.step] == 1:
            die(party, "after writing")
        else:
            die(party, "between the clients")
        send(party, words, client, release)

    for run in (gl_training.SecretLayerRun, gl_training.OpenLayerRun):
        monkeypatch.setattr(run, "release_gradients", dying(run.release_gradients))
    monkeypatch.setattr(refmpc, "open_to_client", open_)
