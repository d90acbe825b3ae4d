"""Start a run on this machine: three server processes, one process per client, a progress bar, a report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import accel
import refmpc
from accel.errors import InvalidArgument, PpvflError
from accel.files import private_folder, write_arrays, write_text
from accel.validate import require
from protocols.methods.gl_bmf import client_directory
from protocols.methods.registry import method
from protocols.plan.gl_plan import LayerPlan
from protocols.plan.gl_shapes import JacobianShape
from protocols.plan.run_plan import Plan
from protocols.run.calibration import Forecast, calibrate, forecast, measure_here
from protocols.run.curves import Timeline
from protocols.run.data import make_federation, measured_plan
from protocols.run.exit import leaving
from protocols.run.options import parse_options
from protocols.run.progress import ProgressBars
from protocols.run.report import NoiseChoice, RunReport, estimate, print_estimate, print_report, write_report
from protocols.run.run_log import RunLog
from protocols.run.session import Session, Where
from protocols.server.open_training import durability
from protocols.settings import RunOptions
from protocols.state.run_identity import require_same_run
from refmpc.launch.processes import start_ahead
from vfl.federation import Federation
from vfl.gradients import GlobalModel
from vfl.hidden import activation
from vfl.losses import score_in_words
from vfl.twins import TwinResult

__all__ = ["launch", "main", "main_in_the_clear", "run_directory"]


def _plan(options: RunOptions, federation: Federation) -> Plan:
    plan = method(options.protocol).plan(federation, options.training)
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
    """Run one method to its end, with progress and log. A failure is noted in the log and says how to go on."""
    plan, directory = _plan(options, federation), run_directory(options)
    session = Session(plan, Where.of(options), directory)
    require_same_run(directory, plan)  # before the log names a claim
    timeline, begun = Timeline(), time.perf_counter()
    with RunLog(directory / "run.log") as log, ProgressBars(console, options.json) as show:
        log.begin(plan, options.resume is not None)

        def on_report(peer: Any, message: dict[str, Any]) -> None:
            for listener in (show, timeline.listen, log.listen):
                listener(peer, message)

        try:
            found = session.fit(federation, on_report, resumes=options.resume is not None)
        except refmpc.RefmpcError as error:
            error.add_note(session.way_on())
            raise
        seconds = time.perf_counter() - begun
        log.end(found.run.ledgers[0], seconds)
    _keep_own_layers(plan, directory, found.run.client_outputs, console)
    accuracy = GlobalModel(found.layers, activation(options.training.hidden, options.training.weights)).accuracy(
        found.federation.test_rows(), federation.test_labels, options.training.task
    )
    twin = session.twin(federation).test_accuracy if options.twin else None
    session.forget_noise()
    notes = (*federation.notes, *_notes(plan, session.where))
    return RunReport(
        options, plan, directory, found.layers, accuracy, twin, found.run.ledgers, seconds, notes, timeline
    )


def _keep_own_layers(plan: Plan, directory: Path, outputs: Mapping[str, Any], console: Console) -> None:
    """Without its own layers the global model is of no use to a client that trains some."""
    for name, output in outputs.items() if isinstance(plan, LayerPlan) else ():
        if output.warning:
            console.print(f"{name}: {output.warning}", style="yellow", markup=False)
        own = client_directory(directory, name)
        private_folder(own)
        write_arrays(own / "layers.npz", output.layers, private=True)


def _notes(plan: Plan, where: Where) -> list[str]:
    notes = []
    if isinstance(plan, LayerPlan):
        written_out = sum(isinstance(shape, JacobianShape) for shape in plan.shapes)
        how = f", Jacobians of {written_out} clients written out" if written_out else ""
        notes.append(
            f"local update: {plan.local_update.kind}{how}; each client gets the gradient of its own layers only"
        )
    if plan.opens_sums or not isinstance(plan, LayerPlan):
        notes.append(durability(plan, plan.resumable(where.checkpoint_every), where.synced))
    elif where.checkpoint_every:
        notes.append(
            "all three servers have every release on disk before any of them sends its part (files and names synced)"
        )
    return [note for note in notes if note]


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
        require_small(method(options.protocol).plan(federation, options.training))
        report = launch(options, federation, console)
        noise = noise_of_the_servers(report.plan, report.directory)
        theirs = train_with_mpspdz(system, report.plan, federation, noise, options.network)
    except MpSpdzError as error:
        raise InvalidArgument(f"--backend mpspdz: {error}") from None
    (ours,) = report.layers
    gap = float(np.abs(theirs.weights - ours).max())
    note = (
        f"MP-SPDZ executed the same {report.plan.schedule.num_steps} steps with the same noise in "
        f"{theirs.seconds:.2f} s,"
        f" {theirs.bytes / 1e6:.1f} MB and {theirs.rounds} rounds: its weights differ from ours by at most {gap:.2e}"
        f" (largest weight {np.abs(ours).max():.3g})"
    )
    return replace(report, notes=(*report.notes, note))


def _estimate(options: RunOptions, federation: Federation) -> tuple[Plan, dict[str, float]]:
    plan = _plan(options, federation)
    return plan, estimate(plan, keeps_steps=options.checkpoint_every > 0)


def _forecast(plan: Plan, options: RunOptions) -> Forecast:
    here = measure_here(options.checkpoint_every, synced=options.durability == "power", tls=options.tls)
    found = forecast(plan, calibrate(plan, here), options.network, keeps_steps=options.checkpoint_every > 0)
    return replace(found, seconds={name: seconds for name, seconds in found.seconds.items() if name != "align"})


def _with_other_noise(options: RunOptions, federation: Federation) -> NoiseChoice:
    """The same run with the other kind of noise, so that a user can trade; or why there is none."""
    other = "distributed" if options.training.noise == "joint" else "joint"
    changed = replace(options, training=options.training.with_(noise=other))
    try:
        return NoiseChoice.of(*_estimate(changed, federation))
    except InvalidArgument as error:
        return NoiseChoice(other, refused=str(error))


def main(name: str, description: str | None, argv: list[str] | None = None) -> None:
    """The command ``python -m protocols.<name>``."""
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
        federation = make_federation(options)
        if options.estimate:
            plan, found = _estimate(options, federation)
            expected = _forecast(plan, options) if options.calibrate else None
            print_estimate(plan, options, console, found, _with_other_noise(options, federation), expected)
            return
        report = _launch_beside_mpspdz(options, federation, console)
    except PpvflError as error:
        raise leaving(name, error) from error
    write_report(report)
    print_report(report, console)


def main_in_the_clear(name: str, description: str | None, train: Callable[..., TwinResult]) -> None:
    """The command of a method without secure computation: same data and options, one process."""
    options = parse_options(name, description)
    console = Console()
    try:
        result = train(make_federation(options), options.training, progress=not options.json)
    except PpvflError as error:
        raise leaving(name, error) from error
    if options.json:
        print(json.dumps(result.summary(), indent=2))
        return
    claim = result.claim
    console.print("No privacy: nothing is claimed." if claim is None else claim.paragraph())
    found = score_in_words(options.training.task, result.test_accuracy)
    console.print(f"[bold]{result.method}[/bold]: test {found}, {result.seconds:.1f} s")
    for note in result.notes:
        console.print(f"- {note}", style="dim")
