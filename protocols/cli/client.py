"""``ppvfl client``: a data holder. Aligns its rows with the other clients, shares its columns, waits for the model.

The file stays here: the other clients learn which ids all have in common, each server gets shares, which are uniform.
The client may be stopped and started again at any time, with the same ``--state``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
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
from protocols.client.align import MOST_ALIGNMENTS, Aligner
from protocols.client.columns import EmbeddedRows, OwnColumns, add_column_options, read_columns, rule_warning
from protocols.client.people import people_tag
from protocols.client.stay_connected import train_with_servers
from protocols.client.upload import ClientJob, chunks_of, receive_model, share_columns
from protocols.federation.public_plan import log_claim, plan_for
from protocols.federation.read import ClientEntry, FederationConfig, load
from protocols.log import Log
from protocols.net.credentials import load_credentials, own_directory, two_pins, validity_warning
from protocols.net.server_calls import CurvePoint
from protocols.net.uplink import UplinkTransport, UploadLost
from protocols.net.wire import TRAINING, Identity
from protocols.plan.gl_plan import LayerPlan
from protocols.plan.run_plan import Plan
from protocols.state.model_file import ReleasedModel, SharedModel, write_model
from refmpc import Client
from refmpc.net.framing import listed, printable
from refmpc.primitives.io import SHARE_DIGEST_BYTES
from vfl.dp.certificate_cache import announced
from vfl.local.lora import LoraLayer, ParallelLora
from vfl.progress import progress_bar
from vfl.tables import read_table, refuse_private_ids

__all__ = ["SharedColumns", "add_parser", "client_identity", "embeddings_for", "released", "run", "take_part"]


def add_parser(subparsers: Any) -> None:
    """The command line."""
    parser = subparsers.add_parser("client", help="take part with a file of columns", description=__doc__)
    add_client_options(parser)
    parser.add_argument("--label-column", metavar="COLUMN", help="the labels, at the label client (default label)")
    parser.add_argument("--model-out", metavar="FILE", help="where the released model goes (default model-NAME.npz)")
    add_column_options(parser)


def add_client_options(parser: argparse.ArgumentParser) -> None:
    """Options of every command that a client runs against the servers."""
    parser.add_argument("--as", dest="name", required=True, metavar="NAME", help="which client of the file")
    parser.add_argument("--config", default="federation.toml", metavar="FILE")
    parser.add_argument("--columns", required=True, metavar="FILE", help="CSV, Parquet, .npz or .npy")
    parser.add_argument("--credentials", metavar="DIR", help="where key.pem and certificate.pem lie (default: ./NAME)")
    parser.add_argument("--state", metavar="DIR", help="what survives a restart is kept here (default: ./NAME/state)")
    parser.add_argument("--listen", metavar="HOST", help="address to listen on while rows are aligned (label client)")
    parser.add_argument(
        "--pad-to",
        type=int,
        metavar="N",
        help="pad the id list to N so others do not learn your row count (at all clients)",
    )
    parser.add_argument(
        "--minimum-common",
        type=int,
        default=0,
        metavar="N",
        help="stop if fewer ids are common: then only their number is known",
    )
    parser.add_argument("--align-again", action="store_true", help="forget an earlier alignment (at all clients)")
    parser.add_argument("--log", metavar="FILE", help="structured log, a JSON object a line (default: stderr)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def client_identity(arguments: argparse.Namespace) -> tuple[Identity, ClientEntry, Path, Log]:
    """Who this client is, where it keeps things, and its log."""
    config = load(arguments.config)
    entry = config.participant(arguments.name, "--as")
    require(isinstance(entry, ClientEntry), "--as", arguments.name, "a client", "servers run `ppvfl server`")
    assert isinstance(entry, ClientEntry)
    identity = Identity(config, entry.name, load_credentials(config, entry.name, arguments.credentials))
    state = Path(arguments.state or own_directory(config, entry.name, arguments.credentials) / "state")
    log = Log(entry.name, None if arguments.log is None else Path(arguments.log))
    if expiry := validity_warning(identity.credentials.certificate):
        log.warning("own certificate", reason=expiry)
    for window in two_pins(config, identity.credentials.certificate):
        log.info("a key is being replaced", reason=window)
    return identity, entry, identity.kept_in(state), log


def run(arguments: argparse.Namespace) -> int:
    """Take part in the training; ends when the model is here."""
    identity, entry, state, log = client_identity(arguments)
    config = identity.config
    require(
        entry.label or arguments.label_column is None,
        "--label-column",
        arguments.label_column,
        f"absent at {entry.name}",
        f"{config.label_client.name} holds the labels",
    )
    own = read_columns(config, entry, arguments.columns, arguments, label_column=arguments.label_column)
    if arguments.public is not None and own.schema is not None:
        public = read_table(arguments.public, id_column=own.schema.id.column)
        refuse_private_ids("--public", public, own.ids, own.schema.id)
    log.info("columns read", rows=len(own.ids), width=entry.width, public=own.source)
    for note in own.notes:
        log.warning("something in the file is not used", reason=note)
    destroyed = rule_warning(config, entry)
    if destroyed:
        log.warning("the row rule does not suit this client's columns", reason=destroyed)
    file = Path(arguments.model_out or f"model-{entry.name}.npz")
    with Aligner(
        identity,
        TRAINING,
        own.ids,
        state,
        log,
        id_form=own.id_form,
        listen_on=arguments.listen,
        pad_to=arguments.pad_to,
        minimum=arguments.minimum_common,
        most=MOST_ALIGNMENTS,
    ).open() as aligner:
        with progress_bar("aligning rows", 2 * len(own.ids)) as advance:
            agreed = aligner.agree(advance, again=arguments.align_again)
        log.info(
            "rows aligned",
            common=len(agreed.rows),
            of=len(own.ids),
            from_disk=agreed.from_disk,
            bytes_moved=agreed.bytes_moved,
        )
        with announced(log.info):
            plan = plan_for(config, len(agreed.rows))
        log_claim(log, plan.claim)
        if isinstance(plan, LayerPlan):
            with _waiting() as on_beat:
                train_with_servers(
                    identity,
                    plan,
                    own,
                    agreed.rows,
                    agreed.session,
                    log,
                    state,
                    on_model=lambda trained: write_model(
                        file, released(config, plan, [trained.model], trained.layers, own, entry.name)
                    ),
                    on_beat=on_beat,
                )
        else:
            take_part(
                identity,
                plan,
                own,
                agreed.rows,
                agreed.session,
                log,
                state,
                on_model=lambda layers, curve: write_model(
                    file, replace(released(config, plan, layers, None, own, entry.name), curve=curve)
                ),
            )
    _print(arguments, config, plan, file, len(agreed.rows))
    return 0


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
    with _waiting() as on_beat:
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
def _waiting() -> Iterator[Any]:
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


def _print(arguments: argparse.Namespace, config: FederationConfig, plan: Plan, file: Path, rows: int) -> None:
    claim = plan.claim
    if arguments.json:
        facts = {"model": str(file), "rows": rows, "claim": json.loads(claim.to_json())}
        print(json.dumps({**facts, "classes": list(config.run.classes)}, indent=2))
        return
    console = Console()
    console.print(f"[bold]{file}[/bold]: the model, trained on {plan.schedule.num_samples} of {rows} common rows")
    console.print(claim.paragraph())
