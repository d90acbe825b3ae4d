"""``ppvfl predict``: predictions for new rows, with every client's columns, for the one client that the file names.

The clients align the new rows, share their embeddings, and the servers (`ppvfl server`, which stays after the training)
compute. Only the receiver learns predictions; servers learn nothing but the number of rows. With ``--clear`` no server
takes part: the other clients send the receiver their sums of the first layer, which tell it more about their columns
than a prediction does.

Columns are found by name and scaled as when the model was trained: the model's file holds names and constants. With
``--held-out`` the rows are those of the training file that ``[run] held_out`` kept apart, and the label client, if it
receives predictions, compares them with its labels and writes a report; ``--evaluate`` does this with labelled new
rows.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from accel.errors import InvalidArgument
from accel.files import write_text
from accel.validate import require
from protocols.cli.client import add_client_options, client_identity
from protocols.client.align import Agreed, Aligner
from protocols.client.columns import OwnColumns, add_column_options, read_columns
from protocols.client.evaluation import evaluation_output, print_evaluation
from protocols.client.take_part import embeddings_for
from protocols.federation.public_plan import held_out_rows
from protocols.federation.public_rows import public_rows_of
from protocols.federation.read import FederationConfig
from protocols.log import Log
from protocols.methods.prediction import OUTPUTS, receive_chunk
from protocols.net.uplink import UplinkTransport, UploadLost
from protocols.net.wire import PREDICTION, SUMS, TRAINING, Channel, Identity, call
from protocols.plan.scales import EMBEDDING_BITS
from protocols.run.hosts.jobs import prediction_plan
from protocols.state.model_file import ReleasedModel, read_model
from refmpc import Client
from refmpc.net.framing import listed, name_of
from refmpc.primitives.io import SHARE_DIGEST_BYTES
from vfl.hidden import activated
from vfl.losses import classes_of, probabilities, unscaled_targets
from vfl.progress import progress_bar

__all__ = ["add_parser", "read_own_model", "run", "stated_figures"]


def add_parser(subparsers: Any) -> None:
    """The command line."""
    parser = subparsers.add_parser("predict", help="predictions for new rows, to one client only", description=__doc__)
    add_client_options(parser)
    parser.add_argument("--model", metavar="FILE", help="the released model (default model-NAME.npz)")
    parser.add_argument("--output", choices=OUTPUTS, help="what is opened (default label, or value in a regression)")
    parser.add_argument("--out", metavar="FILE", help="CSV with ids and predictions, at the receiver (default: stdout)")
    parser.add_argument("--clear", action="store_true", help="without servers, see above (at all clients)")
    parser.add_argument(
        "--held-out", action="store_true", help="the training file's rows that took no part (at all clients)"
    )
    parser.add_argument("--evaluate", action="store_true", help="compare with the label column, at the label client")
    parser.add_argument("--label-column", metavar="COLUMN", help="labels to compare with (default: the model's)")
    parser.add_argument(
        "--non-private",
        metavar="FIGURE=VALUE,…",
        help="figures of a model without privacy, where somebody has one, for a column beside: AUC=0.9,accuracy=0.85",
    )
    parser.add_argument("--report", metavar="FILE", help="where the report goes (default evaluation-NAME.html)")
    add_column_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Take part in one prediction; the receiver writes the result."""
    identity, entry, state, log = client_identity(arguments)
    config, receiver = identity.config, identity.config.predict.receiver
    file = Path(arguments.model or f"model-{entry.name}.npz")
    model = read_own_model(file, entry.name, config, log)
    evaluate = entry.label and receiver == entry.name and (arguments.evaluate or arguments.held_out)
    require(
        evaluate or not arguments.evaluate,
        "--evaluate",
        entry.name,
        f"at {config.label_client.name}, which has the labels, and with it as [predict] receiver (now {receiver})",
    )
    figures = None if arguments.non_private is None else stated_figures(arguments.non_private)
    require(
        evaluate or not figures, "--non-private", arguments.non_private, "given with an evaluation, at its receiver"
    )
    if arguments.held_out or arguments.evaluate:
        arguments.output = evaluation_output(model)
    arguments.output = arguments.output or ("value" if model.task == "regression" else "label")
    own = read_columns(
        config,
        entry,
        arguments.columns,
        arguments,
        label_column=arguments.label_column,
        with_label=evaluate,
        model=model,
    )
    for note in own.notes:
        log.warning("something in the file is not used", reason=note)
    leader = config.label_client.name
    is_open = config.run.training.weights == "open"
    require(
        arguments.clear or is_open or model.shared is not None,
        "--clear",
        False,
        "given with secret weights and hidden layers",
        "servers hold this model on shares only, and its ranges are not certain",
    )
    require(
        not arguments.clear or receiver == leader,
        "--clear",
        receiver,
        f"with [predict] receiver = {leader!r}: only the label client listens for the others",
    )
    chosen = _held_out(identity, own, state, log) if arguments.held_out else np.arange(len(own.ids))
    kind = f"{PREDICTION}-in-the-clear" if arguments.clear else PREDICTION
    sums = PartialSums(identity, model)
    aligner = Aligner(
        identity,
        kind,
        own.ids.take(chosen),
        state,
        log,
        id_form=own.id_form,
        listen_on=arguments.listen,
        pad_to=arguments.pad_to,
        minimum=arguments.minimum_common,
        terms={"--output": arguments.output},
        handlers={"sums": sums.take},
    )
    with aligner.open():
        with progress_bar("aligning rows", 2 * len(chosen)) as advance:
            agreed = aligner.agree(advance, again=arguments.align_again)
        log.info("rows aligned", common=len(agreed.rows), of=len(chosen), from_disk=agreed.from_disk)
        agreed = replace(agreed, rows=chosen[agreed.rows])
        embeddings = embeddings_for(config, own, agreed.rows, model)
        if arguments.clear:
            found = sums.predict(embeddings, agreed, arguments.output)
        else:
            found = _with_servers(identity, embeddings, agreed, model, arguments.output, log)
        aligner.forget()
    if found is None:
        log.info("done: the predictions went to the receiver", receiver=receiver)
        return 0
    if evaluate:
        report = Path(arguments.report or f"evaluation-{entry.name}.html")
        print_evaluation(
            own,
            agreed.rows,
            found,
            model,
            report,
            held_out=arguments.held_out,
            as_json=arguments.json,
            public=public_rows_of(config),
            non_private=figures,
        )
        if arguments.out is None:
            return 0
    _write(arguments, own, agreed, found, model)
    return 0


def stated_figures(text: str) -> dict[str, float]:
    """AUC=0.9,accuracy=0.85 as numbers by name."""
    try:
        pairs = [item.split("=") for item in text.split(",")]
        return {name.strip(): float(value) for name, value in pairs}
    except ValueError:
        raise InvalidArgument(f"--non-private {text!r} must be FIGURE=VALUE,…, such as AUC=0.9,accuracy=0.85") from None


def read_own_model(file: Path, name: str, config: FederationConfig, log: Log) -> ReleasedModel:
    """This client's file of this federation's model."""
    model = read_model(file, "--model")
    own = f"that of {name}, which holds how its own columns are read"
    require(model.client in ("", name), "--model", f"{file}, the file of {model.client}", own)
    good = len(model.classes) > 0 or model.task == "regression"
    require(good, "--model", str(file), "the file that `ppvfl client` wrote")
    run = config.run
    same = (model.classes, model.task, model.target_range) == (run.classes, run.training.task, run.target_range)
    clients = config.ordered_clients
    trained = dict(zip(model.clients, model.widths, strict=True))
    require(
        trained == {client.name: client.width for client in clients} and same,
        "--model",
        f"{file}, of clients and widths {trained}, task {model.task} and classes {', '.join(model.classes) or 'none'}",
        f"a model of the federation in {config.source}: {', '.join(f'{c.name} {c.width}' for c in clients)}, task "
        f"{run.training.task}, "
        f"classes {', '.join(run.classes) or 'none'}, in this order",
    )
    if model.schema is None:
        log.warning(
            "the model's file knows no names of columns",
            reason="it was written by an older version: columns are taken in the order of the file, and must be "
            "scaled as in the "
            "training; train again to have this checked",
        )
    return model


def _held_out(identity: Identity, own: OwnColumns, state: Path, log: Log) -> np.ndarray:
    """This client's rows that were aligned for the training and took no part in it."""
    config = identity.config
    kept = Aligner(identity, TRAINING, own.ids, state, log, listen_on=None).kept()
    require(
        kept is not None,
        "--held-out",
        own.table.source,
        "the file of the training, with the --state in which its alignment is kept",
    )
    assert kept is not None
    count = held_out_rows(config, len(kept.rows))
    require(
        count >= 1, "[run] held_out", config.run.held_out, "above 0 before the training, so that rows are kept apart"
    )
    return kept.rows[len(kept.rows) - count :]


def _with_servers(
    identity: Identity,
    embeddings: np.ndarray,
    agreed: Agreed,
    model: ReleasedModel,
    output: str,
    log: Log,
) -> np.ndarray | None:
    """Share all rows, then fetch the predictions (at the receiver; None elsewhere)."""
    known = model.shared or model  # what the servers have of the model
    plan = prediction_plan(identity.config, len(agreed.rows), output, known, model.claim)
    while True:
        transport = UplinkTransport(
            identity,
            log,
            kind=PREDICTION,
            session=agreed.session,
            rows=plan.rows,
            output=output,
            parameters=plan.public_parameters(),
            largest_result=16 * plan.rows * plan.columns + SHARE_DIGEST_BYTES * len(plan.chunks),
        )
        try:
            client = Client(identity.name, transport)
            with progress_bar("sharing rows", plan.rows) as advance:
                for chunk in plan.chunks:
                    client.share(embeddings[chunk], EMBEDDING_BITS)
                    advance(chunk.stop - chunk.start)
            transport.complete()
            log.info("upload complete, all servers have it", bytes_sent=transport.bytes_sent)
            if identity.name != plan.receiver:
                return None
            found = np.concatenate([receive_chunk(client, plan, chunk.stop - chunk.start) for chunk in plan.chunks])
            transport.confirm()
            return found
        except UploadLost as error:
            log.warning("the upload begins again", reason=str(error))
        finally:
            transport.close()


class PartialSums:
    """Predictions in the clear: every client's sums of the first layer, put together at the receiver."""

    def __init__(self, identity: Identity, model: ReleasedModel):
        self._identity, self._layers, self._task = identity, model.layers, model.task
        self._activation = model.activation
        self._arrived: dict[str, tuple[str, np.ndarray]] = {}
        self._changed = threading.Condition()
        clients = identity.config.ordered_clients
        ends = np.cumsum([client.width for client in clients])
        at = [client.name for client in clients].index(identity.name)
        self._rows = slice(int(ends[at]) - clients[at].width, int(ends[at]))
        self._others = [client.name for client in clients if client.name != identity.name]

    def take(self, channel: Channel, hello: Mapping[str, Any]) -> None:
        """The receiver's door: another client's sums."""
        channel.answer(ok=True)
        limit = 8 * self._layers[0].shape[1] * self._identity.config.predict.maximum_rows
        message, payload = channel.receive_one_of(SUMS, limit)
        width = self._layers[0].shape[1]
        require(len(payload) % (8 * width) == 0, "bytes of sums", len(payload), f"a multiple of {8 * width}")
        sums = np.frombuffer(bytes(payload)).reshape(-1, width)
        with self._changed:
            self._arrived[name_of(channel.peer)] = message["session"], sums
            self._changed.notify_all()
        channel.send({"ok": True})

    def predict(self, embeddings: np.ndarray, agreed: Agreed, output: str) -> np.ndarray | None:
        """All clients do this; the receiver gets the predictions."""
        own = embeddings @ self._layers[0][self._rows]
        config = self._identity.config
        if self._identity.name != config.predict.receiver:
            address = config.label_client.alignment_address
            assert address is not None
            channel, _ = call(self._identity, config.predict.receiver, address, "sums", timeout=config.run.timeout)
            with channel:
                channel.send({"session": agreed.session}, [np.ascontiguousarray(own)])
                channel.receive()
            return None
        with self._changed:
            while missing := [n for n in self._others if self._arrived.get(n, ("",))[0] != agreed.session]:
                good = self._changed.wait(config.run.timeout)
                require(good, "sums", f"none from {listed(missing)}", "those of every client")
        for name in self._others:
            rows = len(self._arrived[name][1])
            require(rows == len(own), f"sums of {name}", f"{rows} rows", f"{len(own)} rows, as aligned")
        total = own + sum(self._arrived[name][1] for name in self._others) + self._layers[0][-1]
        for layer in self._layers[1:]:
            total = activated(total, self._activation) @ layer[:-1] + layer[-1]
        if output == "label":
            return classes_of(self._task, total)
        return probabilities(self._task, total) if output == "probabilities" else total


def _write(
    arguments: argparse.Namespace, own: OwnColumns, agreed: Agreed, found: np.ndarray, model: ReleasedModel
) -> None:
    """Ids and predictions, in the order of the receiver's own file."""
    order = np.argsort(agreed.rows)
    ids = list(own.ids.take(agreed.rows[order]))
    values = found[order]
    if found.ndim == 1:
        header, rows = ["prediction"], [[model.classes[int(value)]] for value in values]
    elif model.target_range is not None:
        numbers = unscaled_targets(values[:, 0], model.target_range)
        header, rows = ["prediction"], [[f"{value:.6g}"] for value in numbers]
    else:
        columns = model.classes[-values.shape[1] :]  # one logit is that of the second class
        header, rows = list(columns), [[f"{value:.6g}" for value in row] for row in values]
    if arguments.json:
        print(json.dumps({"output": arguments.output, "columns": header, "rows": dict(zip(ids, rows, strict=True))}))
        return
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([arguments.id or ("id" if own.schema is None else own.schema.id.column), *header])
    writer.writerows([name, *row] for name, row in zip(ids, rows, strict=True))
    if arguments.out is None:
        sys.stdout.write(text.getvalue())
        return
    write_text(Path(arguments.out), text.getvalue(), private=True)  # only for its owner
    Console().print(f"[bold]{arguments.out}[/bold]: {arguments.output} of {len(ids)} rows")
