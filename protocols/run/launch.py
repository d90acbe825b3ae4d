"""Start a run on this machine: three server processes, one process per client, a progress bar, a report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import accel
import refmpc
from accel.errors import InvalidArgument, PpvflError
from accel.files import write_text
from accel.validate import require
from protocols.client.upload import ClientJob
from protocols.methods.registry import protocol
from protocols.plan.run_plan import Plan
from protocols.run.calibration import Forecast, calibrate, forecast, measure_here
from protocols.run.curves import Timeline
from protocols.run.exit import leaving
from protocols.run.options import RunOptions, parse_options
from protocols.run.progress import ProgressBars
from protocols.run.public_split import measured_plan, set_aside, with_public
from protocols.run.report import NoiseChoice, RunReport, estimate, print_estimate, print_report, write_report
from protocols.run.run_log import RunLog
from protocols.server.open_training import durability
from protocols.server.server_noise import insecure_total_noise
from protocols.server.training import ServerJob
from protocols.state.checkpoint import ServerDirectory
from protocols.state.run_identity import require_same_run
from refmpc.launch.processes import start_ahead
from vfl.data.sets import load_data, load_embeddings
from vfl.federation import Federation, build_federation
from vfl.gradients import GlobalModel
from vfl.local.config import LocalModelConfig
from vfl.losses import score_in_words
from vfl.twins import TwinResult, train_g_bmf, train_g_shuff

__all__ = ["Command", "execute", "launch", "main", "main_in_the_clear", "make_federation", "run_directory"]


def _twin_accuracy(options: RunOptions, plan: Plan, federation: Federation, directory: Path) -> float:
    """Train the plaintext twin. G-BMF's gets the servers' own noise, which lies on this machine; the secret order of
    G-Shuff, and joint noise, lie nowhere, so their twins draw their own."""
    if options.protocol == "g_shuff":
        return train_g_shuff(federation, options.training, norm_limit=plan.scales.norm_limit).test_accuracy
    if options.training.noise == "joint":
        return train_g_bmf(federation, options.training, norm_limit=plan.scales.norm_limit).test_accuracy
    streams = [ServerDirectory(directory / f"server-{i}").noise_stream(plan.fingerprint) for i in range(3)]
    noise = insecure_total_noise(plan, streams)
    return train_g_bmf(federation, options.training, noise=noise, norm_limit=plan.scales.norm_limit).test_accuracy


def make_federation(options: RunOptions) -> Federation:
    """Data, local models and bounded embeddings, as the clients hold them."""
    if options.embeddings is not None:
        data = load_embeddings(options.embeddings, num_clients=options.clients)
    else:
        data = load_data(
            options.data, num_clients=options.clients, data_root=options.data_root, seed=options.training.seed
        )
    federation = build_federation(
        set_aside(data, options),
        LocalModelConfig(kind=options.local_model, weights=options.local_weights),
        row_bound=options.row_bound,
        row_rule=options.row_rule,
        seed=options.training.seed,
    )
    return with_public(federation, len(data.test_labels))


def _plan(options: RunOptions, federation: Federation) -> Plan:
    plan = protocol(options.protocol).plan(federation, options.training)
    require(
        not (options.twin and options.patience),
        "patience",
        options.patience,
        "0 with --twin",
        "the twin trains to the end",
    )
    measured = measured_plan(plan, federation, options.patience)
    return measured.as_simulation() if options.twin else measured  # the twin's process sees the servers' noise


def launch(options: RunOptions, federation: Federation, console: Console) -> RunReport:
    """Run one protocol to its end. Everything that can be refused is refused before a value is shared."""
    chosen = protocol(options.protocol)
    plan = _plan(options, federation)
    every, synced = options.checkpoint_every, options.durability == "power"
    if options.protocol == "g_shuff" and every and not plan.opens_sums:
        # within an epoch the order is one secret permutation that is not kept: only its boundaries can be resumed from
        batches = plan.schedule.num_batches
        every = max(batches, every // batches * batches)
    directory = run_directory(options)
    used = slice(0, plan.schedule.num_samples)
    clients = {
        client.name: (
            chosen.client,
            ClientJob(
                plan,
                client.embedding_rows(used),
                plan.labels_to_share(client.label_rows(used)) if client.is_label_client else None,
            ),
        )
        for client in federation.clients
    }
    jobs = [ServerJob(plan, directory / f"server-{i}", every, synced) for i in range(3)]
    kept = durability(plan, every, synced)
    way_on = f"continue with: python -m protocols.{options.protocol} --resume {directory}"
    if plan.opens_sums and not every:
        way_on = "start a new run; with --checkpoint-every it could be continued"
    result, seconds, timeline = execute(options, plan, directory, chosen.servers, jobs, clients, console, way_on)
    layers: list[np.ndarray] = result.client_outputs[plan.client_names[0]]
    accuracy = GlobalModel(layers).accuracy(federation.test_rows(), federation.test_labels, options.training.task)
    twin = _twin_accuracy(options, plan, federation, directory) if options.twin else None
    notes = (*federation.notes, *([kept] if kept else []))
    return RunReport(options, plan, directory, layers, accuracy, twin, result.ledgers, seconds, notes, timeline)


def execute(
    options: RunOptions,
    plan: Plan,
    directory: Path,
    servers: Callable[..., Any],
    jobs: Sequence[Any],
    clients: Mapping[str, tuple[Callable[..., Any], Any]],
    console: Console,
    way_on: str,
) -> tuple[refmpc.RunResult, float, Timeline]:
    """Run servers and clients with progress and log. A failure is noted in the log and carries ``way_on``."""
    require_same_run(directory, plan)  # before the log names a claim
    timeline, begun = Timeline(), time.perf_counter()
    with RunLog(directory / "run.log") as log, ProgressBars(console, options.json) as show:
        log.begin(plan, options.resume is not None)

        def on_report(peer: Any, message: dict[str, Any]) -> None:
            for listener in (show, timeline.listen, log.listen):
                listener(peer, message)

        try:
            result = refmpc.run(
                servers,
                jobs,
                parties=options.parties,
                clients=clients,
                network=options.network,
                releases=plan.releases,
                parameters=plan.public_parameters(),
                tls=options.tls,
                timeout=options.timeout,
                on_report=on_report,
            )
        except refmpc.RefmpcError as error:
            error.add_note(way_on)
            raise
        seconds = time.perf_counter() - begun
        log.end(result.ledgers[0], seconds)
    return result, seconds, timeline


def run_directory(options: RunOptions) -> Path:
    if options.resume is not None:
        return Path(options.resume)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    base = Path(options.out)
    for suffix in range(1000):
        directory = base / f"{options.protocol}-{stamp}{f'-{suffix}' if suffix else ''}"
        try:
            directory.mkdir(parents=True)
            break
        except FileExistsError:
            continue
    write_text(directory / "config.json", json.dumps(options.to_dict(), indent=2))
    return directory


def _launch_beside_mpspdz(options: RunOptions, federation: Federation, console: Console) -> RunReport:
    """``launch``, and with ``--backend mpspdz`` the same steps once more, executed by MP-SPDZ; a note gives the gap."""
    if options.backend == "refmpc":
        return launch(options, federation, console)
    from bench.mpspdz.runner import MpSpdz, MpSpdzError
    from bench.mpspdz.training import noise_of_the_servers, require_small, train_with_mpspdz

    try:
        system = MpSpdz()
        require(options.training.noise == "distributed", "noise", options.training.noise, "distributed with MP-SPDZ")
        require(not options.training.hidden, "hidden", options.training.hidden, "empty with MP-SPDZ")
        plain = options.training.task == "classification" and not options.training.class_weights
        require(plain, "task", options.training.task, "classification without class weights with MP-SPDZ")
        require(options.training.order == "fixed", "order", options.training.order, "fixed with MP-SPDZ")
        require_small(protocol(options.protocol).plan(federation, options.training))
        report = launch(options, federation, console)
        noise = noise_of_the_servers(report.plan, report.directory)
        theirs = train_with_mpspdz(system, report.plan, federation, noise, options.network)
    except MpSpdzError as error:
        raise InvalidArgument(f"--backend mpspdz: {error}") from None
    (ours,) = report.layers
    gap = float(np.abs(theirs.weights - ours).max())
    note = (
        f"MP-SPDZ executed the same {report.plan.schedule.num_steps} steps with the same noise in {theirs.seconds:.2f} s,"
        f" {theirs.bytes / 1e6:.1f} MB and {theirs.rounds} rounds: its weights differ from ours by at most {gap:.2e}"
        f" (largest weight {np.abs(ours).max():.3g})"
    )
    return replace(report, notes=(*report.notes, note))


@dataclass(frozen=True)
class Command:
    """What differs between the commands: how data are prepared, what a run would cost, and the run."""

    federation: Callable[[RunOptions], Federation]
    estimate: Callable[[RunOptions, Federation], tuple[Plan, dict[str, float]]]
    launch: Callable[[RunOptions, Federation, Console], RunReport]


def _estimate(options: RunOptions, federation: Federation) -> tuple[Plan, dict[str, float]]:
    plan = _plan(options, federation)
    return plan, estimate(plan, keeps_steps=options.checkpoint_every > 0)


def _forecast(plan: Plan, options: RunOptions) -> Forecast:
    here = measure_here(options.checkpoint_every, synced=options.durability == "power", tls=options.tls)
    found = forecast(plan, calibrate(plan, here), options.network, keeps_steps=options.checkpoint_every > 0)
    return replace(found, seconds={name: seconds for name, seconds in found.seconds.items() if name != "align"})


def _with_other_noise(options: RunOptions, federation: Federation, command: Command) -> NoiseChoice:
    """The same run with the other kind of noise, so that a user can trade; or why there is none."""
    other = "distributed" if options.training.noise == "joint" else "joint"
    changed = replace(options, training=options.training.with_(noise=other))
    try:
        return NoiseChoice.of(*command.estimate(changed, federation))
    except InvalidArgument as error:
        return NoiseChoice(other, refused=str(error))


def main(name: str, description: str | None, argv: list[str] | None = None, command: Command | None = None) -> None:
    """The command ``python -m protocols.<name>``."""
    command = command or Command(make_federation, _estimate, _launch_beside_mpspdz)
    options = parse_options(name, description, argv)
    if options.resume is not None:
        stored = json.loads((Path(options.resume) / "config.json").read_text())
        options = replace(RunOptions.from_dict(stored), resume=options.resume, json=options.json, twin=options.twin)
    console = Console()
    if options.calibrate and not options.estimate:
        raise leaving(name, InvalidArgument("--calibrate: must be given with --estimate"))
    if options.parties == "processes" and (options.calibrate or not options.estimate):
        if not accel.is_compiled() and not options.json:
            console.print("First start on this machine: compiling kernels, less than a minute.", style="dim")
        start_ahead("protocols.run.preload")
    try:
        federation = command.federation(options)
        if options.estimate:
            plan, found = command.estimate(options, federation)
            expected = _forecast(plan, options) if options.calibrate else None
            print_estimate(plan, options, console, found, _with_other_noise(options, federation, command), expected)
            return
        report = command.launch(options, federation, console)
    except PpvflError as error:
        raise leaving(name, error) from error
    write_report(report)
    print_report(report, console)


def main_in_the_clear(method: str, description: str | None, train: Callable[..., TwinResult]) -> None:
    """The command of a method without secure computation: same data and options, one process."""
    options = parse_options(method, description)
    console = Console()
    try:
        result = train(make_federation(options), options.training, progress=not options.json)
    except PpvflError as error:
        raise leaving(method, error) from error
    if options.json:
        print(json.dumps(result.summary(), indent=2))
        return
    claim = result.claim
    console.print("No privacy: nothing is claimed." if claim is None else claim.paragraph())
    found = score_in_words(options.training.task, result.test_accuracy)
    console.print(f"[bold]{result.method}[/bold]: test {found}, {result.seconds:.1f} s")
    for note in result.notes:
        console.print(f"- {note}", style="dim")
