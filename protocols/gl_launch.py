"""Start GL-BMF on this machine: three server processes, one process per client that stays until the end."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import refmpc
from accel.validate import require, require_integer
from protocols import gl_bmf
from protocols.adapters import joint_step_cost
from protocols.checkpoint import ServerDirectory
from protocols.gl_client import JointClientJob, TrainedClient, client_program
from protocols.gl_plan import JointPlan, plan_joint_run
from protocols.gl_scales import JacobianShape
from protocols.launch import _progress, _run_directory
from protocols.noise import insecure_total_noise
from protocols.options import RunOptions, parse_options
from protocols.report import RunReport, print_estimate, print_report, write_report
from vfl.client import LocalUpdate
from vfl.data import load_data
from vfl.federation import Federation, build_federation
from vfl.gradients import GlobalModel
from vfl.local_config import LocalModelConfig
from vfl.twins import train_gl_bmf

__all__ = ["client_jobs", "joint_estimate", "launch", "main", "make_federation", "server_jobs"]


def make_federation(options: RunOptions) -> Federation:
    """Data, frozen local models with their block outputs, and fresh LoRA layers, as the clients hold them."""
    require(
        options.embeddings is None, "embeddings", options.embeddings, "absent: GL-BMF needs the local models' blocks"
    )
    data = load_data(options.data, num_clients=options.clients, data_root=options.data_root, seed=options.training.seed)
    training = options.training
    update = LocalUpdate(
        options.local_update,
        learning_rate=options.local_learning_rate,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
    )
    return build_federation(
        data,
        LocalModelConfig(kind=options.local_model, weights=options.local_weights),
        row_bound=options.row_bound,
        row_rule=options.row_rule,
        lora=True,
        rank=options.rank,
        lora_alpha=options.lora_alpha,
        update=update,
        seed=training.seed,
    )


def server_jobs(plan: JointPlan, directory: Path, keep: bool) -> list[gl_bmf.JointServerJob]:
    """What each server gets."""
    return [gl_bmf.JointServerJob(plan, directory / f"server-{i}", keep) for i in range(3)]


def client_jobs(
    plan: JointPlan, federation: Federation, directory: Path | None
) -> dict[str, tuple[Any, JointClientJob]]:
    """What each client gets: its own columns, blocks and layers."""
    return {
        client.name: (
            client_program,
            JointClientJob(plan, client.fresh(), directory and directory / client.name.replace(" ", "-")),
        )
        for client in federation.clients
    }


def launch(options: RunOptions, federation: Federation, console: Console) -> RunReport:
    """Run GL-BMF to its end. Everything that can be refused is refused before a value is shared."""
    plan = plan_joint_run(federation, options.training)
    keep = require_integer("checkpoint_every", options.checkpoint_every, 0) > 0
    require(
        keep or options.resume is None,
        "resume",
        options.resume,
        "the directory of a run with --checkpoint-every",
        "without checkpoints its releases are not on disk, and releasing again would spend the claim twice",
    )
    directory = _run_directory(options)
    begun = time.perf_counter()
    with _progress(console, options.json) as on_report:
        result = refmpc.run(
            gl_bmf.servers,
            server_jobs(plan, directory, keep),
            parties=options.parties,
            clients=client_jobs(plan, federation, directory if keep else None),
            network=options.network,
            releases=plan.releases,
            parameters=plan.public_parameters(),
            tls=options.tls,
            timeout=options.timeout,
            on_report=on_report,
        )
    seconds = time.perf_counter() - begun
    weights: np.ndarray = result.outputs[0]
    trained = federation.fresh()
    for client in trained.clients:
        output: TrainedClient = result.client_outputs[client.name]
        client.load_adapter_state(output.layers)
    accuracy = GlobalModel([weights]).accuracy(trained.test_rows(), federation.test_labels)
    twin = None
    if options.twin:  # given the servers' own noise, which lies on this machine
        streams = [ServerDirectory(directory / f"server-{i}").noise_stream(plan.fingerprint) for i in range(3)]
        noise = insecure_total_noise(plan, streams)
        twin = train_gl_bmf(federation, options.training, noise=noise).test_accuracy
    return RunReport(
        options,
        plan,
        directory,
        [weights],
        accuracy,
        twin,
        result.ledgers,
        seconds,
        (*federation.notes, *_notes(plan, keep)),
    )


def _notes(plan: JointPlan, keep: bool) -> list[str]:
    written_out = sum(isinstance(shape, JacobianShape) for shape in plan.shapes)
    how = f", Jacobians of {written_out} clients written out" if written_out else ""
    notes = [f"local update: {plan.local_update.kind}{how}; each client gets the gradient of its own layers only"]
    if keep:
        notes.append("every step is on disk: a release is written before it is opened")
    return notes


def joint_estimate(plan: JointPlan) -> dict[str, float]:
    """Rounds, bytes and memory of a run, from the declared costs; uploads and layer gradients are per step here."""
    step = joint_step_cost(plan)
    steps, batch = plan.schedule.num_steps, plan.schedule.batch_size
    upload, blocks = 0, 0
    for shape in plan.shapes:
        upload += 16 * batch * shape.width
        if isinstance(shape, JacobianShape):
            upload += 16 * batch * shape.width * shape.parameters
        else:
            upload += 16 * (batch * (shape.stacked_rank + 1) + shape.width * shape.stacked_rank)
            blocks += 16 * plan.schedule.num_samples * sum(shape.block_widths) if shape.with_down else 0
    opening = refmpc.opening_bytes(plan.scales.truncated_bits) * sum(shape.parameters for shape in plan.shapes)
    history = 8 * plan.parameters * (plan.factorisation.bands + 128)
    bytes_per_step = step.bytes + upload + opening
    return {
        "rounds_per_step": step.rounds,
        "bytes_per_step": bytes_per_step,
        "rounds": step.rounds * steps,
        "bytes": (step.bytes + opening) * steps,
        "upload_bytes": upload * steps + blocks + 16 * plan.schedule.num_samples * plan.classes,
        "shuffle_bytes_per_epoch": 0,
        "memory_per_server": blocks + 16 * plan.schedule.num_samples * plan.classes + history,
        "seconds_lan": step.rounds * steps * 1e-3 + bytes_per_step * steps / 3 / (1e9 / 8),
        "seconds_wan": step.rounds * steps * 20e-3 + bytes_per_step * steps / 3 / (200e6 / 8),
    }


def main(description: str | None, argv: list[str] | None = None) -> None:
    """The command ``python -m protocols.gl_bmf``."""
    options = parse_options("gl_bmf", description, argv)
    if options.resume is not None:
        stored = json.loads((Path(options.resume) / "config.json").read_text())
        options = replace(RunOptions.from_dict(stored), resume=options.resume, json=options.json, twin=options.twin)
    console = Console()
    try:
        federation = make_federation(options)
        if options.estimate:
            plan = plan_joint_run(federation, options.training)
            print_estimate(plan, options, console, joint_estimate(plan))
            return
        report = launch(options, federation, console)
    except (ValueError, refmpc.RefmpcError) as error:
        lines = str(error).split("\n\nTraceback of")[0]
        raise SystemExit(f"gl_bmf: {lines}") from (error if isinstance(error, refmpc.RefmpcError) else None)
    write_report(report)
    print_report(report, console)
