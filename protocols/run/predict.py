"""Predict the test rows of a finished run on shares: three server processes, one process per client, a table at the
end."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import refmpc
from accel.errors import PpvflError
from accel.validate import require, require_integer
from protocols.methods.prediction import (
    OUTPUTS,
    PREDICTION_RELEASE,
    PredictionClientJob,
    PredictionPlan,
    PredictionServerJob,
    client_program,
    plan_with_released_model,
    plan_with_shares,
    servers,
)
from protocols.methods.registry import method
from protocols.run.data import make_federation
from protocols.run.exit import leaving
from protocols.run.report import size_in_words
from protocols.settings import RunOptions
from protocols.state.checkpoint import ServerDirectory
from protocols.state.model_file import MODEL, SharedModel, read_model
from protocols.version import add_version_option
from vfl.dp.claim import NO_CLAIM
from vfl.federation import Federation
from vfl.gradients import GlobalModel
from vfl.losses import classes_of, score, score_name
from vfl.methods import facts

__all__ = ["FinishedRun", "load_run", "main", "predict"]


@dataclass
class FinishedRun:
    """What a run left: its options, its data (test rows included), its released layers and its claim."""

    directory: Path
    options: RunOptions
    federation: Federation
    layers: Sequence[np.ndarray]
    claim: str
    activation: str

    def test_columns(self) -> list[np.ndarray]:
        """Each client's bounded embeddings of the test rows."""
        federation = self.federation
        return [
            client.embed_other_rows(rows)
            for client, rows in zip(federation.clients, federation.test_embeddings, strict=True)
        ]


def load_run(directory: Path) -> FinishedRun:
    """Read the folder of a finished run."""
    for name in ("config.json", MODEL, "claim.txt"):
        require(
            (directory / name).exists(), "--run", str(directory), f"the folder of a finished run: {name} is missing"
        )
    options = RunOptions.from_dict(json.loads((directory / "config.json").read_text()))
    require(
        not facts(options.protocol).takes("layers"),
        "protocol of the run",
        options.protocol,
        "one with frozen local models",
        "new rows need the layers that each client has trained and keeps for itself",
    )
    federation = make_federation(options)
    claim = (directory / "claim.txt").read_text().strip()
    model = read_model(directory / MODEL)
    return FinishedRun(directory, options, federation, model.layers, claim, model.activation)


@dataclass(frozen=True)
class PredictOptions:
    """The command line."""

    run: str
    model: str | None = None
    output: str | None = None
    client: str | None = None
    rows: int | None = None
    clear: bool = False
    parties: str = "processes"
    network: str = "loopback"
    tls: bool = False
    timeout: float = 60.0
    json: bool = False


def predict(run: FinishedRun, options: PredictOptions) -> dict[str, Any]:
    """Predict the test rows on shares, beside the released model in the clear; returns all facts."""
    federation = run.federation
    count = len(federation.test_labels)
    rows = count if options.rows is None else require_integer("rows", options.rows, 1, count)
    columns = [part[:rows] for part in run.test_columns()]
    labels = federation.test_labels[:rows]
    task = run.options.training.task
    output = options.output or ("value" if task == "regression" else "label")
    clear = GlobalModel(list(run.layers), run.activation).logits(np.concatenate(columns, axis=1))
    facts = {
        **({"no_claim": NO_CLAIM} if run.claim.startswith(NO_CLAIM) else {}),
        "run": str(run.directory),
        "rows": rows,
        "score": score_name(task),
        "clear_accuracy": score(task, clear, labels),
        "claim": run.claim,
    }
    if options.clear:
        return facts
    names = [client.name for client in federation.clients]
    receiver = options.client or names[-1]
    is_open = run.options.training.weights == "open"
    model = options.model or ("released" if is_open else "shares")
    way_out = "with secret weights the servers do not know the model"
    require(is_open or model == "shares", "--model", model, "shares", way_out)
    plan, jobs = _server_jobs(run, model, output, names, receiver, rows)
    begun = time.perf_counter()
    result = refmpc.run(
        servers,
        jobs,
        parties=options.parties,
        clients={
            name: (client_program, PredictionClientJob(plan, part)) for name, part in zip(names, columns, strict=True)
        },
        network=options.network,
        releases=plan.releases,
        parameters=plan.public_parameters(),
        tls=options.tls,
        timeout=options.timeout,
    )
    seconds = time.perf_counter() - begun
    received = result.client_outputs[receiver]
    error = plan.logit_error([float(np.linalg.norm(layer, 2)) for layer in run.layers])
    phases = {name: [ledger.phases[name] for ledger in result.ledgers] for name in ("prediction", "release")}
    return {
        **facts,
        "model": model,
        "output": output,
        "receiver": receiver,
        **_compared(task, output, received, clear, labels, error),
        "logit_error_bound": error,
        "rounds": phases["prediction"][0].rounds,
        "bytes": sum(counters.bytes_sent for counters in phases["prediction"]),
        "bytes_to_client": sum(counters.bytes_sent for counters in phases["release"]),
        "bytes_from_clients": 16 * rows * sum(plan.client_widths),
        "seconds_computing": sum(max(counters.seconds for counters in phase) for phase in phases.values()),
        "seconds": seconds,
        "releases": [asdict(release) for release in result.ledgers[0].releases],
        "claim": plan.releases[PREDICTION_RELEASE],
    }


def _compared(
    task: str, output: str, received: np.ndarray, clear: np.ndarray, labels: np.ndarray, error: float
) -> dict[str, Any]:
    """What was received, beside the same model in the clear; ``error`` bounds a logit."""
    if task == "regression":
        return {"accuracy": score(task, received, labels), "largest_gap": float(np.abs(received - clear).max())}
    found = classes_of(task, received) if output == "logits" else received
    found = found if found.ndim == 1 else found.argmax(axis=1)
    both = np.concatenate([np.zeros_like(clear), clear], axis=1) if task == "binary" else clear
    top = np.sort(both, axis=1)[:, -2:]
    return {
        "accuracy": float((found == labels).mean()),
        "different_labels": int((found != classes_of(task, clear)).sum()),
        "close_rows": int((top[:, 1] - top[:, 0] <= 2 * error).sum()),
    }


def _server_jobs(
    run: FinishedRun, model: str, output: str, names: list[str], receiver: str, rows: int
) -> tuple[PredictionPlan, list[PredictionServerJob]]:
    if model == "released":
        plan = plan_with_released_model(
            run.layers,
            run.federation.row_bound,
            names,
            [client.width for client in run.federation.clients],
            receiver=receiver,
            output=output,
            rows=rows,
            training_claim=run.claim,
            task=run.options.training.task,
            activation=run.activation,
        )
        return plan, [PredictionServerJob(plan, tuple(run.layers))] * 3
    training = method(run.options.protocol).plan(run.federation, run.options.training)
    shared = SharedModel.of(training.as_simulation() if run.options.twin else training)
    plan = plan_with_shares(
        shared,
        names,
        [client.width for client in run.federation.clients],
        receiver=receiver,
        output=output,
        rows=rows,
        training_claim=run.claim,
        task=run.options.training.task,
    )
    jobs = []
    for i in range(3):
        folder = ServerDirectory(run.directory / f"server-{i}")
        steps = folder.steps()
        require(shared.steps in steps, f"checkpoints of server-{i}", steps, f"with that of step {shared.steps}")
        jobs.append(PredictionServerJob(plan, checkpoint=shared.file(folder.path)))
    return plan, jobs


def _print(facts: dict[str, Any], console: Console) -> None:
    if "no_claim" in facts:
        console.print(facts["no_claim"], style="bold")
    view = Table(title=f"{facts['rows']} test rows of {facts['run']}", show_header=False)
    view.add_column(style="bold")
    view.add_column()
    name, shown = facts["score"], "{:.2%}" if facts["score"] == "accuracy" else "{:.4f}"
    clear = shown.format(facts["clear_accuracy"])
    view.add_row(f"{name} in the clear", f"{clear} (whoever computes this sees all columns)")
    if "accuracy" in facts:
        view.add_row(f"{name} on shares", f"{shown.format(facts['accuracy'])} (model: {facts['model']})")
    if "largest_gap" in facts:
        bound = f"may be {facts['logit_error_bound']:.1e}"
        view.add_row("values differ", f"by at most {facts['largest_gap']:.1e} ({bound}), targets scaled to −1 … 1")
    if "different_labels" in facts:
        view.add_row(
            "labels that differ",
            f"{facts['different_labels']} (rows whose two largest logits are as close as the rounding may be, "
            f"{2 * facts['logit_error_bound']:.1e}: {facts['close_rows']})",
        )
    if "accuracy" in facts:
        view.add_row("received", f"{facts['output']}, by {facts['receiver']} only")
        view.add_row("between the servers", f"{facts['rounds']} rounds, {size_in_words(facts['bytes'])}")
        view.add_row(
            "with the clients",
            f"{size_in_words(facts['bytes_from_clients'])} from them, {size_in_words(facts['bytes_to_client'])} to "
            f"{facts['receiver']}",
        )
        view.add_row("time", f"{facts['seconds_computing']:.3f} s computing, {facts['seconds']:.1f} s with start-up")
    console.print(view)
    console.print(facts["claim"])


def main(description: str | None, argv: list[str] | None = None) -> None:
    """The command ``python -m protocols.predict``."""
    default = PredictOptions("")
    parser = argparse.ArgumentParser(
        prog="python -m protocols.predict",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version_option(parser)
    parser.add_argument("--run", required=True, metavar="DIR", help="folder of a finished run")
    parser.add_argument(
        "--model",
        choices=("released", "shares"),
        default=default.model,
        help="shares: what the servers kept, one layer (default with secret weights, whose servers do not know the "
        "model)",
    )
    parser.add_argument(
        "--output", choices=OUTPUTS, default=default.output, help="what is opened (default: label, or value)"
    )
    parser.add_argument("--client", metavar="NAME", help="who receives it (default: the client with the labels)")
    parser.add_argument("--rows", type=int, help="only the first so many test rows")
    parser.add_argument("--clear", action="store_true", help="only in the clear, without servers")
    parser.add_argument("--parties", choices=("processes", "threads"), default=default.parties)
    parser.add_argument("--network", choices=("loopback", "lan", "wan"), default=default.network)
    parser.add_argument("--tls", action="store_true", help="mutual TLS between all participants (own certificates)")
    parser.add_argument("--timeout", type=float, default=default.timeout, help="seconds to wait for a silent peer")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = PredictOptions(**vars(parser.parse_args(argv)))
    try:
        facts = predict(load_run(Path(options.run)), options)
    except PpvflError as error:
        raise leaving("predict", error) from error
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts, Console())
