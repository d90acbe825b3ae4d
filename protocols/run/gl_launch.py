"""Start GL-BMF on this machine: three server processes, one process per client that stays until the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

import refmpc
from accel.files import private_folder, write_arrays
from accel.validate import require
from protocols.client.gl_client import LayerClientJob, TrainedClient
from protocols.methods.registry import protocol
from protocols.plan.gl_plan import LayerPlan, plan_layer_run
from protocols.plan.gl_shapes import JacobianShape
from protocols.run.launch import Command, execute, run_directory
from protocols.run.launch import main as main_of_protocol
from protocols.run.report import RunReport
from protocols.server.gl_training import LayerServerJob
from protocols.server.open_training import durability
from protocols.server.server_noise import insecure_total_noise
from protocols.settings import RunOptions
from protocols.state.checkpoint import ServerDirectory
from protocols.step.cost import step_cost
from vfl.data.sets import load_data
from vfl.federation import Federation, build_federation
from vfl.gradients import GlobalModel
from vfl.local.client import LocalUpdate
from vfl.local.config import LocalModelConfig
from vfl.local.lora import ALL_LAYERS
from vfl.twins import train_gl_bmf

__all__ = ["client_jobs", "launch", "layer_estimate", "main", "make_federation", "server_jobs"]


def make_federation(options: RunOptions) -> Federation:
    """Data, frozen local models with their block outputs, and fresh LoRA layers (or the layer to be trained), as the
    clients hold them."""
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
    config = LocalModelConfig(kind=options.local_model, weights=options.local_weights)
    if options.train_layer is not None:
        require(
            options.lora_layers == ALL_LAYERS,
            "lora_layers",
            options.lora_layers,
            "left out beside train_layer",
            "the layer that train_layer names is trained instead of LoRA layers",
        )
        from vfl.local.layer_client import build_layer_federation

        return build_layer_federation(
            data,
            config,
            options.train_layer,
            update=update,
            row_bound=options.row_bound,
            row_rule=options.row_rule,
            largest_jacobian=options.jacobian_bound,
        )
    return build_federation(
        data,
        config,
        row_bound=options.row_bound,
        row_rule=options.row_rule,
        lora=True,
        rank=options.rank,
        lora_alpha=options.lora_alpha,
        lora_layers=options.lora_layers,
        update=update,
        seed=training.seed,
    )


def server_jobs(plan: LayerPlan, directory: Path, keep: bool, synced: bool = True) -> list[LayerServerJob]:
    """What each server gets."""
    return [LayerServerJob(plan, directory / f"server-{i}", keep, synced) for i in range(3)]


def client_directory(directory: Path, name: str) -> Path:
    """Where a client of a run on this machine keeps what is its own."""
    return directory / name.replace(" ", "-")


def client_jobs(
    plan: LayerPlan, federation: Federation, directory: Path | None
) -> dict[str, tuple[Any, LayerClientJob]]:
    """What each client gets: its own columns, blocks and layers."""
    return {
        client.name: (
            protocol(plan.protocol).client,
            LayerClientJob(plan, client.fresh(), directory and client_directory(directory, client.name)),
        )
        for client in federation.clients
    }


def launch(options: RunOptions, federation: Federation, console: Console) -> RunReport:
    """Run GL-BMF to its end. Everything that can be refused is refused before a value is shared."""
    plan = plan_layer_run(federation, options.training)
    plan = plan.as_simulation() if options.twin else plan  # the twin's process sees the servers' noise
    keep = options.checkpoint_every > 0
    require(
        keep or options.resume is None,
        "resume",
        options.resume,
        "the directory of a run with --checkpoint-every",
        "without checkpoints its releases are not on disk, and releasing again would spend the claim twice",
    )
    synced = options.durability == "power"
    directory = run_directory(options)
    way_on = (
        f"continue with: python -m protocols.gl_bmf --resume {directory}"
        if keep
        else "it cannot be continued: only a run with --checkpoint-every keeps what it has released"
    )
    result, seconds, timeline = execute(
        options,
        plan,
        directory,
        protocol(plan.protocol).servers,
        server_jobs(plan, directory, keep, synced),
        client_jobs(plan, federation, directory if keep else None),
        console,
        way_on,
    )
    trained = federation.fresh()
    for client in trained.clients:
        output: TrainedClient = result.client_outputs[client.name]
        weights = output.model
        client.load_adapter_state(output.layers)
        if output.warning:
            console.print(f"{client.name}: {output.warning}", style="yellow", markup=False)
        own = client_directory(directory, client.name)
        private_folder(own)
        write_arrays(
            own / "layers.npz", output.layers, private=True
        )  # without them the global model is of no use to this client
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
        (*federation.notes, *_notes(plan, keep, synced)),
        timeline,
    )


def _notes(plan: LayerPlan, keep: bool, synced: bool) -> list[str]:
    written_out = sum(isinstance(shape, JacobianShape) for shape in plan.shapes)
    how = f", Jacobians of {written_out} clients written out" if written_out else ""
    notes = [f"local update: {plan.local_update.kind}{how}; each client gets the gradient of its own layers only"]
    if plan.opens_sums:
        notes.append(durability(plan, int(keep), synced))
    elif keep:
        notes.append(
            "all three servers have every release on disk before any of them sends its part (files and names synced)"
        )
    return notes


def layer_estimate(plan: LayerPlan) -> dict[str, float]:
    """Rounds, bytes and memory of a run, from a dry run of one step; uploads and layer gradients are per step here."""
    step = step_cost(plan)
    steps, batch = plan.schedule.num_steps, plan.schedule.batch_size
    upload, blocks, written_out = 0, 0, 0
    for shape in plan.shapes:
        upload += 16 * batch * shape.width
        if isinstance(shape, JacobianShape):
            upload += 16 * batch * shape.width * shape.parameters
            written_out += 16 * batch * shape.width * shape.parameters
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
        "shuffles": 0,
        "memory_per_server": written_out + blocks + 16 * plan.schedule.num_samples * plan.classes + history,
        "seconds_lan": step.rounds * steps * 1e-3 + bytes_per_step * steps / 3 / (1e9 / 8),
        "seconds_wan": step.rounds * steps * 20e-3 + bytes_per_step * steps / 3 / (200e6 / 8),
    }


def _estimate(options: RunOptions, federation: Federation) -> tuple[LayerPlan, dict[str, float]]:
    plan = plan_layer_run(federation, options.training)
    plan = plan.as_simulation() if options.twin else plan
    return plan, layer_estimate(plan)


def main(description: str | None, argv: list[str] | None = None) -> None:
    """The command ``python -m protocols.gl_bmf``."""
    main_of_protocol("gl_bmf", description, argv, Command(make_federation, _estimate, launch))
