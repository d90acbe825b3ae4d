"""``ppvfl client``: a data holder. Aligns its rows with the other clients, shares its columns, waits for the model.

The file stays here: the other clients learn which ids all have in common, each server gets shares, which are uniform.
The client may be stopped and started again at any time, with the same ``--state``.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from accel.validate import require
from protocols.client.align import MOST_ALIGNMENTS, Aligner
from protocols.client.columns import add_column_options, read_columns, rule_warning
from protocols.client.stay_connected import train_with_servers
from protocols.client.take_part import progress_while_waiting, released, take_part
from protocols.federation.public_plan import log_claim, plan_for
from protocols.federation.read import ClientEntry, FederationConfig, load
from protocols.log import Log
from protocols.net.credentials import load_credentials, own_directory, two_pins, validity_warning
from protocols.net.wire import TRAINING, Identity
from protocols.plan.gl_plan import LayerPlan
from protocols.plan.run_plan import Plan
from protocols.state.model_file import write_model
from vfl.dp.certificate_cache import announced
from vfl.progress import progress_bar
from vfl.tables import read_table, refuse_private_ids

__all__ = ["add_client_options", "add_parser", "client_identity", "run"]


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
            with progress_while_waiting() as on_beat:
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


def _print(arguments: argparse.Namespace, config: FederationConfig, plan: Plan, file: Path, rows: int) -> None:
    claim = plan.claim
    if arguments.json:
        facts = {"model": str(file), "rows": rows, "claim": json.loads(claim.to_json())}
        print(json.dumps({**facts, "classes": list(config.run.classes)}, indent=2))
        return
    console = Console()
    console.print(f"[bold]{file}[/bold]: the model, trained on {plan.schedule.num_samples} of {rows} common rows")
    console.print(claim.paragraph())
