"""The two things that servers compute together: a training, and predictions with the model that was released."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from accel.files import write_bytes
from accel.prg import KEY_BYTES
from accel.validate import require
from protocols.federation.public_plan import plan_for
from protocols.federation.read import FederationConfig
from protocols.methods.prediction import PredictionPlan, PredictionServerJob, plan_with_released_model, plan_with_shares
from protocols.methods.prediction import servers as prediction_servers
from protocols.methods.registry import method
from protocols.net.wire import PREDICTION, TRAINING
from protocols.plan.gl_plan import LayerPlan
from protocols.plan.run_plan import CHUNK_ROWS, Plan
from protocols.server.gl_training import LayerServerJob
from protocols.server.intake import receive_rows
from protocols.server.open_training import STATE_EVERY, durability, training_run
from protocols.server.training import ServerJob
from protocols.state.model_file import MODEL, ReleasedModel, SharedModel, read_model, write_model
from protocols.state.stored_rows import IN_MEMORY, RowFolder
from refmpc import Party
from vfl.hidden import activation

__all__ = [
    "LiveTrainingTask",
    "MakeTask",
    "PredictionTask",
    "Task",
    "TrainingTask",
    "make_task",
    "prediction_plan",
    "shares_of_model",
]

SHARED_MODEL = "shared-model.json"  # beside the claim, where a server does not know the model
_HEAD = 1 << 12  # bytes of a message besides its values


class _Uploads(ABC):
    """How large the messages of a client are. A client shares 16 bytes a value: two of its three shares are seeds
    (``refmpc.Client.share``), so server 0 gets two seeds, the others one and the correction."""

    @abstractmethod
    def shape_of(self, client: str, number: int) -> tuple[int, int]:
        """Rows and columns of a client's message."""

    @abstractmethod
    def messages_of(self, client: str) -> int:
        """How many messages a client sends."""

    def message_of(self, client: str, number: int, server: int) -> tuple[int, str]:
        """Bytes of a client's message at one server, and what it holds, in words."""
        rows, columns = self.shape_of(client, number)
        return (2 * KEY_BYTES if server == 0 else KEY_BYTES + 8 * rows * columns), f"{rows} rows of {columns} columns"

    def upload_bytes(self, client: str, server: int, kept: int) -> int:
        """Bytes that a client still sends to one server when it has sent ``kept`` messages."""
        return sum(self.message_of(client, number, server)[0] for number in range(kept, self.messages_of(client)))


class TrainingTask(_Uploads):
    """Train the model of this federation on ``rows`` aligned rows, and release it to everybody."""

    kind = TRAINING
    live = False  # whether clients must be there while it runs
    in_memory = IN_MEMORY  # bytes of shares up to which a server has them in memory

    @property
    def opens_in_every_step(self) -> bool:
        """Whether something is released before the end, so that a run that fails has released something too."""
        return self.live or self.plan.opens_sums

    def __init__(self, config: FederationConfig, rows: int, plan: Plan | None = None):
        """``plan``: another one than that of the file (``protocols.run.timing_run``)."""
        self._config = config
        self.plan: Plan = plan_for(config, rows) if plan is None else plan
        self.receivers = self.plan.client_names
        kept = durability(self.plan, self.checkpoint_every, synced=True)
        self.claim = f"{self.plan.claim.paragraph()} {kept}".rstrip()

    @property
    def largest_message(self) -> int:
        """Bytes of the largest message that a client may send."""
        return 8 * CHUNK_ROWS * max(self.plan.outputs, *self.plan.client_widths) + _HEAD

    def messages_of(self, client: str) -> int:
        """How many messages a client sends: a chunk of embeddings each, and of labels."""
        chunks = -(-self.plan.schedule.num_samples // CHUNK_ROWS)
        return chunks * (2 if client == self.plan.client_names[-1] else 1)

    def shape_of(self, client: str, number: int) -> tuple[int, int]:
        """Rows and columns of a client's message: embeddings, at the label client followed by labels."""
        is_labels, chunk = False, number
        if client == self.plan.client_names[-1]:
            chunk, is_labels = number // 2, bool(number % 2)
        rows = min(CHUNK_ROWS, self.plan.schedule.num_samples - chunk * CHUNK_ROWS)
        width = self.plan.client_widths[self.plan.client_names.index(client)]
        return rows, self.plan.outputs if is_labels else width

    @property
    def checkpoint_every(self) -> int:
        """In steps. G-Shuff only between epochs: within one the order is a secret permutation. With open weights every
        step is kept, and this is how often the state is written anew."""
        every = self._config.run.checkpoint_every
        if self.plan.opens_sums:
            return every or STATE_EVERY
        return self.plan.resumable(every)

    async def run(self, party: Party, directory: Path) -> list[np.ndarray]:
        """At each server, when everything that clients send is there."""
        job = ServerJob(self.plan, directory / "server", self.checkpoint_every)
        with training_run(party, job) as run, RowFolder(run.directory.path, self.in_memory) as folder:
            rows = await receive_rows(party, self.plan, folder)
            layers: list[np.ndarray] = await method(self.plan.protocol).train(run, rows)
            return layers

    def keep(self, directory: Path, layers: list[np.ndarray]) -> None:
        """What the server's operator finds afterwards: the model, or what is public of one that it has on shares."""
        run = self._config.run
        if not self.plan.opens_sums:
            if not self.plan.training.hidden:
                content = json.dumps(asdict(SharedModel.of(self.plan)), indent=2)
                write_bytes(directory / SHARED_MODEL, content.encode(), private=True)
            return
        used = activation(run.training.hidden, run.training.weights)
        model = ReleasedModel(
            layers, run.classes, task=run.training.task, target_range=run.target_range, activation=used
        )
        write_model(directory / MODEL, model)


class LiveTrainingTask(TrainingTask):
    """GL-BMF: the clients share their layers' factors, and are told their own gradient, in every step."""

    live = True

    async def run(self, party: Party, directory: Path) -> list[np.ndarray]:
        """At each server, with all clients connected. Every release is on all three disks before it is opened."""
        assert isinstance(self.plan, LayerPlan)
        job = LayerServerJob(self.plan, directory / "server", keep=True)
        layers: list[np.ndarray] = await method(self.plan.protocol).servers(party, job)
        return layers


class PredictionTask(_Uploads):
    """Predict ``rows`` aligned rows with the released model, for the one client that the file names."""

    kind = PREDICTION
    live = False
    opens_in_every_step = False

    def __init__(self, config: FederationConfig, rows: int, output: str, trained: Path):
        limit = config.predict.maximum_rows
        require(rows <= limit, "rows", rows, f"at most {limit}, see [predict] maximum_rows", "ask in parts")
        known, claim = _known_model(trained), (trained / "claim.txt").read_text().strip()
        self.plan = prediction_plan(config, rows, output, known, claim)
        if isinstance(known, SharedModel):
            self._job = PredictionServerJob(self.plan, checkpoint=known.file(trained / "server"))
        else:
            self._job = PredictionServerJob(self.plan, layers=tuple(known.layers))
        self.receivers = (self.plan.receiver,)
        self.claim = next(iter(self.plan.releases.values()))

    @property
    def largest_message(self) -> int:
        """Bytes of the largest message that a client may send."""
        return 8 * CHUNK_ROWS * max(self.plan.client_widths) + _HEAD

    def messages_of(self, client: str) -> int:
        """How many messages a client sends."""
        return len(self.plan.chunks)

    def shape_of(self, client: str, number: int) -> tuple[int, int]:
        """Rows and columns of a client's message."""
        chunk = self.plan.chunks[number]
        return chunk.stop - chunk.start, self.plan.client_widths[self.plan.client_names.index(client)]

    async def run(self, party: Party, directory: Path) -> None:
        """At each server, when everything that clients send is there."""
        await prediction_servers(party, self._job)

    def keep(self, directory: Path, output: None) -> None:
        """Servers learn nothing that could be kept."""


Task = TrainingTask | PredictionTask
MakeTask = Callable[[FederationConfig, dict[str, Any], Path | None], Task]


def _known_model(trained: Path) -> SharedModel | ReleasedModel:
    """What a server has of the model of a training: all of it, or what is public of its shares."""
    if (trained / MODEL).exists():
        return read_model(trained / MODEL)
    return SharedModel(**json.loads((trained / SHARED_MODEL).read_text()))


def shares_of_model(trained: Path) -> Path | None:
    """The file of a server's shares of the model, if that is all it has of it: it predicts with them."""
    if not (trained / SHARED_MODEL).exists():
        return None
    known = _known_model(trained)
    return known.file(trained / "server") if isinstance(known, SharedModel) else None


def prediction_plan(
    config: FederationConfig, rows: int, output: str, known: SharedModel | ReleasedModel, claim: str
) -> PredictionPlan:
    """The public plan of a prediction: clients and servers make it alike. ``known``: what servers have of the model."""
    clients, run = config.ordered_clients, config.run
    facts: dict[str, Any] = {"output": output, "rows": rows, "training_claim": claim, "task": run.training.task}
    facts |= {
        "client_names": [client.name for client in clients],
        "client_widths": [client.width for client in clients],
    }
    facts |= {"receiver": config.predict.receiver}
    if isinstance(known, SharedModel):
        return plan_with_shares(known, **facts)
    return plan_with_released_model(known.layers, run.row_bound, activation=known.activation, **facts)


def make_task(config: FederationConfig, facts: dict[str, Any], trained: Path | None) -> Task:
    """The task that public facts describe; ``trained`` is the directory of a training that is done."""
    if facts["kind"] == TRAINING:
        return (LiveTrainingTask if method(config.run.protocol).stays else TrainingTask)(config, facts["rows"])
    require(
        trained is not None and any((trained / name).exists() for name in (MODEL, SHARED_MODEL)),
        "kind",
        facts["kind"],
        f"{TRAINING!r}: this server has no model to predict with",
        "train first; with secret weights and hidden layers use ppvfl predict --clear",
    )
    assert trained is not None
    return PredictionTask(config, facts["rows"], facts["output"], trained)
