"""One step of GL-BMF at the paper's size: real servers and clients, random data, timed from outside.

Two clients with a ResNet-18 each share, in every step, embeddings and the factors of eight LoRA layers of rank 8, and
get their layer gradients back. The inputs of the layers are shared once, in the first epoch; a step carries its part of
that, 1/epochs of it, in time and in bytes.

``python -m bench.gl_step`` says what the servers' tests of each step (proofs §11.6) add to it: two runs, with them and
without.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from rich.table import Table

import refmpc
from bench.harness import Option, benchmark
from bench.shapes import StepShape
from protocols.methods import gl_bmf
from protocols.plan.gl_plan import LayerPlan, plan_layer_run
from protocols.run.report import estimate as estimate_of
from vfl.data.scaling import RowBound
from vfl.federation import Federation
from vfl.local.client import make_clients
from vfl.training import TrainingConfig

__all__ = ["LayerStep", "measure_layer_step", "measure_step_tests"]

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


def measure_layer_step(shape: StepShape, network: str, weights: str = "open", epochs: int = 8) -> tuple[float, float]:
    """Seconds and megabytes of one step, uploads, noise and layer gradients included; bytes with open weights at most
    that.

    With open weights a step is recorded anew whenever the public bound of its logits has doubled, which in a run's
    first steps happens in most: hence more epochs than a step that is repeated would need.
    """
    federation = layer_federation(shape)
    training = TrainingConfig(epochs=epochs, batch_size=shape.batch, learning_rate=0.5, weights=weights)
    plan = plan_layer_run(federation, training)
    ends, _ = _run(plan, federation, network)
    steps = np.diff(ends)  # without the first, which compiles and connects
    first, later = steps[: BATCHES - 1].min(), steps[BATCHES - 1 :].min()
    estimate = estimate_of(plan)
    once = 16 * shape.batch * len(federation.clients) * sum(BLOCK_WIDTHS)  # the inputs of the layers, for one batch
    seconds = later + max(0.0, first - later) / shape.epochs
    return float(seconds), (estimate["bytes_per_step"] + once / shape.epochs) / 1e6


def _run(plan: LayerPlan, federation: Federation, network: str) -> tuple[list[float], refmpc.RunResult]:
    """When server 0 had ended each step, and what came out."""
    ends: list[float] = []

    def note(peer: object, message: dict[str, object]) -> None:
        if peer == 0 and message.get("phase") == "training":
            ends.append(time.monotonic())

    with tempfile.TemporaryDirectory() as directory:
        result = refmpc.run(
            gl_bmf.servers,
            gl_bmf.server_jobs(plan, Path(directory), keep=0),
            parties="processes",
            clients=gl_bmf.METHOD.clients(plan, federation),
            network=network,
            releases=plan.releases,
            parameters=plan.public_parameters(),
            timeout=600,
            on_report=note,
        )
    return ends, result


class TrustingLayers(LayerPlan):
    """The same plan, of servers that take what clients share."""

    tests_steps = False


@dataclass(frozen=True)
class LayerStep:
    """One step: median of its seconds; rounds and bytes between the servers."""

    seconds: float
    rounds: float
    megabytes: float


def measure_step_tests(shape: StepShape, network: str = "loopback", epochs: int = 15) -> tuple[LayerStep, LayerStep]:
    """A step with the servers' tests, and without: medians over all steps after the first epoch, one run each."""
    federation = layer_federation(shape)
    tested = plan_layer_run(federation, TrainingConfig(epochs=epochs, batch_size=shape.batch, learning_rate=0.5))
    assert tested.tests_steps
    trusting = TrustingLayers(**{each.name: getattr(tested, each.name) for each in fields(tested)})
    found = []
    for plan in (tested, trusting):
        ends, result = _run(plan, federation, network)
        steps = len(ends)
        seconds = statistics.median(np.diff(ends)[BATCHES:].tolist())
        found.append(LayerStep(seconds, result.rounds / steps, result.bytes / steps / 1e6))
    return found[0], found[1]


def measure(batch: int = 128, width: int = 1024, network: str = "loopback") -> dict[str, LayerStep]:
    """A step with the servers' tests and one without."""
    tested, trusting = measure_step_tests(StepShape(batch, width, 10, row_bound=1.0), network)
    return {"tested": tested, "as it comes": trusting}


def table(found: dict[str, LayerStep]) -> Table:
    """Both steps, and what the tests add."""
    tested, trusting = found.values()
    view = Table("", "tested", "taken as it comes", "difference", title="one step of GL-BMF")
    for name, ours, other, form in (
        ("milliseconds", 1e3 * tested.seconds, 1e3 * trusting.seconds, ".1f"),
        ("rounds", tested.rounds, trusting.rounds, ".1f"),
        ("megabytes between servers", tested.megabytes, trusting.megabytes, ".3f"),
    ):
        view.add_row(name, format(ours, form), format(other, form), format(ours - other, form))
    return view


main = benchmark(
    measure,
    table,
    batch="rows of a batch",
    width="columns of all clients together",
    network=Option("emulated", ("loopback", "lan", "wan")),
)

if __name__ == "__main__":
    main()
