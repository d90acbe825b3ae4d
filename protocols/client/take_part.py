"""A client's part in a training: it shares its columns, waits for the model, and keeps what is its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from accel.files import private_folder, read_json, write_json
from accel.validate import require
from protocols.client.columns import EmbeddedRows, OwnColumns
from protocols.client.people import people_tag
from protocols.client.upload import ClientJob, chunks_of, receive_model, share_columns
from protocols.federation.read import FederationConfig
from protocols.log import Log
from protocols.net.server_calls import CurvePoint
from protocols.net.uplink import UplinkTransport, UploadLost
from protocols.net.wire import TRAINING, Identity
from protocols.plan.run_plan import Plan
from protocols.state.model_file import ReleasedModel, SharedModel
from refmpc import Client
from refmpc.net.framing import listed, printable
from refmpc.primitives.io import SHARE_DIGEST_BYTES
from vfl.hidden import activation
from vfl.local.lora import LoraLayer, ParallelLora
from vfl.progress import progress_bar

__all__ = ["SharedColumns", "embeddings_for", "progress_while_waiting", "released", "take_part"]


def take_part(
    identity: Identity,
    plan: Plan,
    own: OwnColumns,
    rows: np.ndarray,
    session: str,
    log: Log,
    state: Path,
    on_model: Callable[[list[np.ndarray], tuple[CurvePoint, ...]], None] = lambda layers, curve: None,
) -> list[np.ndarray]:
    """Share the aligned rows, and wait for the released model. ``state`` keeps what tells that columns have changed;
    ``on_model`` keeps the model, and the curve on public rows if the run has any, before the servers are told that it
    is here and may end."""
    config = identity.config
    used = rows[: plan.schedule.num_samples]
    labels = None
    if identity.name == config.label_client.name:
        labels = plan.labels_to_share(own.labels_of(used, config.run))
    job = ClientJob(plan, EmbeddedRows(own, used), labels)
    parameters = plan.public_parameters()
    shared = SharedColumns(state / "shared.json", session, job)
    people = people_tag(state.parent, identity.name, own.ids)
    with progress_while_waiting() as on_beat:
        while True:
            transport = UplinkTransport(
                identity,
                log,
                kind=TRAINING,
                session=session,
                rows=len(rows),
                parameters=parameters,
                largest_result=8 * plan.parameters + SHARE_DIGEST_BYTES,
                anew=shared.differs,
                people=people,
                on_beat=on_beat,
            )
            shared.note()
            log.info("servers reached, parameters agree", already_kept=transport.resumed)
            try:
                client = Client(identity.name, transport)
                with progress_bar("sharing rows", len(used)) as advance:
                    share_columns(client, job, advance)
                transport.complete()
                log.info("upload complete, all servers have it", bytes_sent=transport.bytes_sent)
                model = receive_model(client, plan)
                on_model(model, transport.curve)
                transport.confirm()
                break
            except UploadLost as error:
                log.warning("the upload begins again", reason=str(error))
            finally:
                transport.close()
    log.info("model received")
    return model


class SharedColumns:
    """What this client shares in a session, as a hash on its own disk: parts of two different uploads must not be
    mixed."""

    def __init__(self, file: Path, session: str, job: ClientJob):
        digest = hashlib.sha256()
        for numbers in chunks_of(job):
            digest.update(np.ascontiguousarray(numbers).data)
        self._file = file
        self._facts = {"session": session, "digest": digest.hexdigest()}

    @property
    def differs(self) -> bool:
        """Whether other columns were shared in the same session before."""
        before = read_json(self._file) if self._file.exists() else {}
        return before != self._facts and (
            not isinstance(before, dict) or before.get("session") == self._facts["session"]
        )

    def note(self) -> None:
        """The servers take these from now on."""
        private_folder(self._file.parent)
        write_json(self._file, self._facts)


def released(
    config: FederationConfig,
    plan: Plan,
    layers: Sequence[np.ndarray],
    own: Mapping[str, np.ndarray] | None = None,
    columns: OwnColumns | None = None,
    client: str = "",
) -> ReleasedModel:
    """What goes into this client's file. ``own``: the layers it has trained itself (GL-BMF), without which the model is
    of no use here; how they came about (velocities) is not needed any more. ``columns``: how ``client`` reads its
    columns, for new rows."""
    local = {name: array for name, array in (own or {}).items() if "velocity" not in name}
    model = ReleasedModel(
        layers,
        config.run.classes,
        plan.client_names,
        plan.client_widths,
        plan.claim.paragraph(),
        local,
        task=plan.training.task,
        target_range=config.run.target_range,
        activation=activation(plan.training.hidden, plan.training.weights),
        shared=None if plan.opens_sums or plan.training.hidden else SharedModel.of(plan),
    )
    if columns is None:
        return model
    bound = columns.bound
    return replace(
        model,
        schema=columns.schema,
        row_bound=bound.norm,
        row_rule=bound.rule,
        local_model=columns.local_model,
        client=client,
    )


def embeddings_for(config: FederationConfig, own: OwnColumns, rows: np.ndarray, model: ReleasedModel) -> np.ndarray:
    """What this client shares of new rows: through the layers that it has trained, if it has any."""
    if config.run.layers is None:
        return own.embeddings(rows)
    require(
        {"up_0", "down_0"} <= set(model.local),
        "--model",
        f"with the own layers {sorted(model.local)}",
        "the file that this client of gl_bmf wrote",
    )
    layer = LoraLayer(model.local["up_0"], model.local["down_0"])
    return own.embeddings(rows, ParallelLora([layer], config.run.layers.lora_alpha / config.run.layers.rank))


@contextmanager
def progress_while_waiting() -> Iterator[Any]:
    """What the servers are doing while this client waits, for people."""
    console = Console(stderr=True)
    columns = (TextColumn("servers: {task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = None

        def beat(message: Mapping[str, Any]) -> None:
            nonlocal task
            if task is None:
                task = bar.add_task("waiting", total=None)
            progress = message.get("progress") or {}
            others = listed(map(printable, message.get("missing", ()))) or "the other clients"
            doing = f"waiting for {others}" if not message.get("complete") else progress.get("phase", "meeting")
            bar.update(task, description=str(doing), completed=progress.get("done", 0), total=progress.get("total"))

        yield beat
