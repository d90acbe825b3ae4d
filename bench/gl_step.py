"""One step of GL-BMF at the paper's size: real servers and clients, random data, timed from outside.

Two clients with a ResNet-18 each share, in every step, embeddings and the factors of eight LoRA layers of rank 8, and get
their layer gradients back. The inputs of the layers are shared once, in the first epoch; a step carries its part of that,
1/epochs of it, in time and in bytes.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

import refmpc
from bench.shapes import StepShape
from protocols import gl_bmf
from protocols.local.gl_launch import client_jobs, layer_estimate, server_jobs
from protocols.plan.gl_plan import plan_layer_run
from vfl.data.scaling import RowBound
from vfl.federation import Federation
from vfl.local.client import make_clients
from vfl.training import TrainingConfig

__all__ = ["measure_layer_step"]

BLOCK_WIDTHS = (64, 64, 128, 128, 256, 256, 512, 512)  # the outputs of ResNet-18's blocks
RANK = 8
BATCHES = 2


def layer_federation(shape: StepShape, batches: int = BATCHES, seed: int = 1) -> Federation:
    """Random columns, layer inputs of norm one and labels for a few batches; two clients."""
    rng = np.random.default_rng(seed)
    rows = shape.batch * batches

    def unit(width: int) -> np.ndarray:
        values = rng.normal(size=(rows, width))
        return values / np.linalg.norm(values, axis=1, keepdims=True)

    first = shape.width // 2
    columns = [unit(width) for width in (first, shape.width - first)]
    labels = rng.integers(0, shape.classes, rows)
    blocks = [[unit(width) for width in BLOCK_WIDTHS] for _ in columns]
    bounds = [RowBound(0.5**0.5) for _ in columns]
    clients = make_clients(columns, labels, bounds, block_outputs=blocks, rank=RANK)
    return Federation(clients, shape.classes, labels[:0], [], [], 1.0)


def measure_layer_step(shape: StepShape, network: str, weights: str = "open", epochs: int = 3) -> tuple[float, float]:
    """Seconds and megabytes of one step, uploads, noise and layer gradients included; bytes with open weights at most that."""
    federation = layer_federation(shape)
    training = TrainingConfig(epochs=epochs, batch_size=shape.batch, learning_rate=0.5, weights=weights)
    plan = plan_layer_run(federation, training)
    ends: list[float] = []

    def note(peer: object, message: dict[str, object]) -> None:
        if peer == 0 and message.get("phase") == "training":
            ends.append(time.monotonic())

    with tempfile.TemporaryDirectory() as directory:
        refmpc.run(
            gl_bmf.servers,
            server_jobs(plan, Path(directory), keep=False),
            parties="processes",
            clients=client_jobs(plan, federation, None),
            network=network,
            releases=plan.releases,
            parameters=plan.public_parameters(),
            timeout=600,
            on_report=note,
        )
    steps = np.diff(ends)  # without the first, which compiles and connects
    first, later = steps[: BATCHES - 1].min(), steps[BATCHES - 1 :].min()
    estimate = layer_estimate(plan)
    once = 16 * shape.batch * len(federation.clients) * sum(BLOCK_WIDTHS)  # the inputs of the layers, for one batch
    seconds = later + max(0.0, first - later) / shape.epochs
    return float(seconds), (estimate["bytes_per_step"] + once / shape.epochs) / 1e6
