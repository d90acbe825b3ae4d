"""What a client of GL-BMF does: share its batch and its layer factors, receive its own layer gradient, apply it.

Who sees what: the servers get shares of H, A, X, U (or of ∂H/∂φ, for a layer without factors) and of the labels. The
client gets the noised gradient of its own layers in each step, and the global model at the end; nothing of any other
client.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from accel.files import private_folder, read_arrays, write_arrays
from accel.validate import require
from protocols.plan.gl_plan import LayerPlan
from protocols.plan.gl_scales import FactorBounds
from protocols.plan.gl_shapes import AdapterShape
from protocols.plan.plausibility import require_possible_model
from protocols.plan.scales import EMBEDDING_BITS, RELEASE_BITS
from protocols.state.commitment import commit_to_columns
from refmpc import Client, receive_opening
from refmpc.core.fixed import encode
from vfl.data.scaling import bound_jacobians, bound_rows
from vfl.local.client import Client as LocalClient
from vfl.local.client import EstimateRecord

__all__ = [
    "LayerClientJob",
    "TrainedClient",
    "client_program",
    "receive_end",
    "rows_beyond",
    "shared_blocks",
    "shared_factors",
    "shared_jacobians",
]

PATIENCE = 30 * 24 * 3600.0  # a client waits as long as the servers take; one that dies is noticed at once
Words = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LayerClientJob:
    """One client's own data and layers; nobody else receives this object. ``directory`` None: no checkpoints.
    ``on_step`` is told how many gradients have been applied."""

    plan: LayerPlan
    client: LocalClient = field(repr=False)
    directory: Path | None = None
    on_step: Callable[[int], None] | None = field(default=None, repr=False)


@dataclass
class TrainedClient:
    """What a client has at the end: the global model, its own trained layers, and its log of estimates.

    ``shortened``: of what it shared, the part of rows whose layer factors were beyond their public bounds. It tells how
    much less its layers have learned than they could; it is about its own rows and covered by no claim, so it is for
    the client alone.
    """

    model: npt.NDArray[np.float64]
    layers: dict[str, npt.NDArray[np.floating]]  # for ``load_adapter_state`` of such a client
    estimate_log: list[EstimateRecord]
    shortened: float = 0.0

    @property
    def warning(self) -> str:
        """A sentence if that is more than one in a hundred."""
        if self.shortened <= 0.01:
            return ""
        return (
            f"the layer factors of {self.shortened:.0%} of the rows it shared were longer than their public bounds "
            f"and were "
            "shortened, so its layers learn less than they could: lower the row bound, or clip rows instead of "
            "normalising them"
        )


def _integers(values: npt.NDArray[np.floating], bits: int) -> Words:
    words: np.ndarray = np.rint(values * 2.0**bits).astype(np.int64)
    return words.reshape(-1)


def bounded_factors(
    local: LocalClient, rows: slice, bounds: FactorBounds
) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.floating], npt.NDArray[np.floating]]:
    """(s·A, s·U, φ) of all shared layers side by side, within the public bounds: A and φ row by row, U as a whole."""
    projected, up = _stacked(local, rows)
    norm = float(np.linalg.norm(up))
    return (
        bound_rows(projected, bounds.projected, "clip"),
        up * min(1.0, bounds.up / norm) if norm else up,
        np.minimum(local.row_factors(rows), bounds.row_factor),
    )


def _stacked(local: LocalClient, rows: slice) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.floating]]:
    """s·A and s·U of all shared layers side by side."""
    factors = local.lora_factors(rows)
    projected = np.concatenate([f.scale * f.projected for f in factors], axis=1)
    return projected, np.concatenate([f.scale * f.up for f in factors], axis=1)


def rows_beyond(local: LocalClient, rows: slice, bounds: FactorBounds) -> int:
    """How many of these rows have factors beyond the public bounds, all of them if U has: ``bounded_factors`` shortens
    these."""
    projected, up = _stacked(local, rows)
    if np.linalg.norm(up) > bounds.up:
        return len(projected)
    long = np.linalg.norm(projected, axis=1) > bounds.projected
    return int((long | (local.row_factors(rows) > bounds.row_factor)).sum())


def shared_factors(local: LocalClient, rows: slice, plan: LayerPlan) -> Words:
    """Everything a client shares in a step, as one vector of integers: H, s·A, s·U, φ, each at its scale."""
    scales = plan.adapters
    projected, up, row_factors = bounded_factors(local, rows, scales.bounds)
    return np.concatenate(
        [
            _integers(local.embedding_rows(rows), EMBEDDING_BITS),
            _integers(projected, scales.projected_bits),
            _integers(up, scales.up_bits),
            _integers(row_factors, scales.row_factor_bits),
        ]
    )


def shared_jacobians(local: LocalClient, rows: slice, plan: LayerPlan) -> Words:
    """What a client shares in a step whose layers have no factors: H, and ∂H_j/∂φ within its public bound."""
    jacobians = bound_jacobians(local.jacobians(rows), plan.adapters.bounds.jacobian)
    embeddings = _integers(local.embedding_rows(rows), EMBEDDING_BITS)
    return np.concatenate([embeddings, _integers(jacobians, plan.adapters.jacobian_bits)])


def shared_blocks(local: LocalClient, rows: slice, plan: LayerPlan) -> Words:
    """X of every shared layer for a batch: frozen, so it is shared when the batch comes up for the first time."""
    limit = plan.adapters.bounds.block
    blocks = [bound_rows(local.block_outputs[index][rows], limit, "clip") for index in local.shared_layers]
    return np.concatenate([_integers(block, EMBEDDING_BITS) for block in blocks])


class _Memory:
    """The client's adapters on disk, written before anything that follows from them is shared."""

    def __init__(self, local: LocalClient, directory: Path | None):
        self._local = local
        self.step = 0  # gradients applied so far
        self._file = None
        if directory is not None:
            private_folder(directory)
            os.chmod(directory, 0o700)
            self._file = directory / "adapters.npz"
            if self._file.exists():
                state = read_arrays(self._file)
                self.step = int(state.pop("step"))
                local.load_adapter_state(state)

    def applied(self, step: int) -> None:
        self.step = step + 1
        if self._file is not None:
            state = {"step": np.array(self.step), **self._local.adapter_state()}
            write_arrays(self._file, state, private=True, sealed=True)


class _Receiver:
    """What a client does with what it is told: it applies every gradient once, and takes the model at the end."""

    def __init__(self, client: Client, job: LayerClientJob):
        self._client, self._job, self._local = client, job, job.client
        self.shape = job.plan.shapes[job.plan.client_names.index(job.client.name)]
        self.memory = _Memory(job.client, job.directory)
        self._row_norms = job.plan.factorisation.noise_norms()
        self._shared = self._shortened = 0

    def require_step(self, first: int) -> None:
        """Refuse to go on from other layers than those that the servers' next step is about."""
        name, applied = f"{self._local.name}: steps applied", self.memory.step
        if first > 0:
            allowed = f"{first - 1} or {first}, where the servers are"
            require(
                applied in (first - 1, first),
                name,
                applied,
                allowed,
                "resume with the directory that this client used before",
            )
        else:
            require(applied == 0, name, applied, "0: the servers start afresh")

    def note_shared(self, rows: slice) -> None:
        """Counts rows whose factors are about to be shared."""
        self._shared += rows.stop - rows.start
        self._shortened += rows_beyond(self._local, rows, self._job.plan.adapters.bounds)

    def gradient(self, step: int) -> None:
        """The released sum of this client's layers; applied once, also when it is sent again after a crash."""
        plan, training, norm = self._job.plan, self._job.plan.training, float(self._row_norms[step])
        bits = plan.scales.truncated_bits
        total = receive_opening(self._client, self.shape.parameters, bits, RELEASE_BITS, timeout=PATIENCE)
        if step < self.memory.step:
            return
        self._local.receive_gradient(
            plan.schedule.rows(step),
            total / training.batch_size,
            step=step,
            learning_rate_factor=training.learning_rate_factor(step, plan.schedule.num_steps),
            noise_std=plan.noise.outsider_std * norm / training.batch_size,
            noise_row_norm=norm,
            clip_norm=training.clip_norm,
        )
        self.memory.applied(step)
        if self._job.on_step is not None:
            self._job.on_step(self.memory.step)

    def model(self) -> TrainedClient:
        """The global model, beside the layers that belong to it."""
        plan, local = self._job.plan, self._local
        model = self._client.receive((plan.width + 1, plan.classes), plan.scales.weight_bits, timeout=PATIENCE)
        require_possible_model(plan, [model])
        shortened = self._shortened / max(1, self._shared)
        return TrainedClient(model, local.adapter_state(), local.estimate_log, shortened)


def client_program(client: Client, job: LayerClientJob) -> TrainedClient:
    """Share, receive, apply, step by step; then receive the released model."""
    plan, local, schedule = job.plan, job.client, job.plan.schedule
    receiver = _Receiver(client, job)
    commit_to_columns(client, plan.client_names, _fixed_columns(job))
    first = _first_step(client)
    receiver.require_step(first)
    if first > 0:
        receiver.gradient(first - 1)
    if local.is_label_client:
        client.share(local.one_hot_rows(slice(0, schedule.num_samples), plan.classes), 0)
    for step in range(first, schedule.num_steps):
        rows = schedule.rows(step)
        if isinstance(receiver.shape, AdapterShape):
            if receiver.shape.with_down and step < first + schedule.num_batches:
                client.share(shared_blocks(local, rows, plan), 0)
            receiver.note_shared(rows)
            client.share(shared_factors(local, rows, plan), 0)
        else:
            client.share(shared_jacobians(local, rows, plan), 0)
        receiver.gradient(step)
    return receiver.model()


def receive_end(client: Client, job: LayerClientJob) -> TrainedClient:
    """For a client that was away when the training ended: its last gradient and the model, which the servers have
    kept."""
    receiver, steps = _Receiver(client, job), job.plan.schedule.num_steps
    receiver.require_step(steps)
    receiver.gradient(steps - 1)
    return receiver.model()


def _fixed_columns(job: LayerClientJob) -> Iterator[Words]:
    """What this client's shares are computed from and training never changes: frozen outputs, blocks, labels."""
    local, count = job.client, job.plan.schedule.num_samples
    for columns in local.fixed_columns(count):
        yield encode(columns, EMBEDDING_BITS, name=f"{local.name}: columns").view(np.int64)
    if local.is_label_client:
        yield local.label_rows(slice(0, count))


def _first_step(client: Client) -> int:
    """The step at which the servers begin; all three must name the same."""
    steps = [np.empty(1, dtype=np.int64) for _ in range(3)]
    client.collect("first step", {server: [step] for server, step in enumerate(steps)}, PATIENCE)
    named = {int(step[0]) for step in steps}
    require(len(named) == 1, "first step", sorted(named), "the same at all servers")
    return named.pop()
