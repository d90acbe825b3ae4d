"""GL-BMF with Jacobians written out: layers that have no factors, and ``explicit`` gradients, against the twin."""

from __future__ import annotations

import json
import math
from collections import defaultdict

import numpy as np
import pytest

import refmpc
from protocols.methods.gl_bmf import METHOD
from protocols.plan.gl_plan import LayerPlan, plan_layer_run
from protocols.plan.gl_shapes import JacobianShape
from protocols.plan.scales import EMBEDDING_BITS, RELEASE_BITS
from protocols.run.launch import main
from protocols.run.report import estimate
from protocols.step.cost import step_cost
from protocols.step.gl_step import clip_factors, layer_step, weight_products
from protocols.step.jacobians import ClientJacobian, global_samples, layer_samples
from protocols.step.secret_step import SharedRows, Weights, logit_errors
from refmpc.core.errors import PartyFailed
from tests.protocols.conftest import lora_federation
from tests.protocols.gl_runs import BLOCKS, CLASSES, WIDTHS, crash_once, difference, make, run_secure, trained
from tests.protocols.secure_runs import noise_of_the_servers, released
from tests.protocols.step.gl_inputs import on_grid, rounded_up, within
from vfl.data.scaling import RowBound
from vfl.federation import Federation
from vfl.gradients import AdapterJacobian, GlobalModel, clipped_gradient, with_ones
from vfl.local.client import LocalUpdate
from vfl.training import TrainingConfig
from vfl.twins import train_gl_bmf

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from vfl.local.config import LocalModelConfig  # noqa: E402
from vfl.local.layer_client import LayerClient  # noqa: E402
from vfl.local.models import build_local_model  # noqa: E402


def layer_federation(kind: str = "released", mixed: bool = False, rows: int = 96, rule: str = "clip") -> Federation:
    """Client 2 trains the last layer of a small network; client 1 does too, or has LoRA layers (``mixed``)."""
    federation = lora_federation(rows, (5, 4), ((3, 4), (6,)), CLASSES, local_update=kind, rule=rule)
    rng = np.random.default_rng(5)
    update = LocalUpdate(kind, learning_rate=0.3, regularisation=10.0)
    for index in (1,) if mixed else (0, 1):
        old = federation.clients[index]
        inputs = rng.normal(size=(rows + 64, 5)).astype(np.float32)
        if old.is_label_client:
            inputs[:rows, :CLASSES] += np.eye(CLASSES, dtype=np.float32)[old.labels]
            inputs[rows:, :CLASSES] += np.eye(CLASSES, dtype=np.float32)[federation.test_labels]
        config = LocalModelConfig("mlp", output_width=old.width, hidden=6)
        federation.clients[index] = LayerClient(
            name=old.name,
            embeddings=np.zeros((rows, old.width)),
            row_bound=RowBound(old.row_bound.norm, rule),
            columns=old.columns,
            labels=old.labels,
            update=update,
            model=build_local_model(config, (5,)),
            rows=inputs[:rows],
            config=config,
            largest_jacobian=4.0,
        )
        federation.test_embeddings[index] = inputs[rows:]
    if mixed:
        federation.clients[0].update = update
    return federation


def small_training(**changes) -> TrainingConfig:
    return TrainingConfig(**{"epochs": 2, "batch_size": 32, "learning_rate": 0.5, "epsilon": 20.0, **changes})


def layers_of(clients) -> np.ndarray:
    """All trained parameters of some clients, flat, without their momentum."""
    states = [c.adapter_state() for c in clients]
    return np.concatenate([np.ravel(v) for state in states for name, v in state.items() if "velocity" not in name])


def moved_without_noise(federation: Federation, plan: LayerPlan) -> float:
    """How far the gradients take the clients' layers: what a run that left them out could not reach."""
    silent = train_gl_bmf(federation, plan.training, noise=np.zeros((plan.schedule.num_steps, plan.parameters)))
    return float(np.linalg.norm(layers_of(silent.clients) - layers_of(federation.clients)))


# one step ----------------------------------------------------------------------------------------


def make_step(gradients: str, clip: float, seed: int, batch: int = 16):
    """A plan whose clients all share Jacobians, and a batch on its grids, with Jacobians up to their bound."""
    federation = lora_federation(batch, WIDTHS, BLOCKS, CLASSES, seed=seed)
    if gradients == "factored":
        federation = layer_federation(rows=batch)
    training = TrainingConfig(
        epochs=1, batch_size=batch, learning_rate=1.0, clip_norm=clip, epsilon=8.0, gradients=gradients
    )
    plan = plan_layer_run(federation, training)
    rng, scales = np.random.default_rng(seed), plan.adapters
    rows = on_grid(within(rng.normal(size=(batch, plan.width)), plan.scales.row_bound * 0.999), EMBEDDING_BITS)
    weights = rng.normal(size=(plan.width + 1, plan.classes))
    weights = on_grid(weights * 0.8 * scales.weight_bound / np.linalg.norm(weights), scales.block_bits)
    jacobians = []
    for shape in plan.shapes:
        whole = rng.normal(size=(batch, shape.width, shape.parameters)) * np.exp2(-np.arange(batch) / 2)[:, None, None]
        longest = np.linalg.norm(whole, 2, axis=(1, 2))[:, None, None]
        jacobians.append(
            on_grid(whole * np.minimum(1.0, 0.99 * scales.bounds.jacobian / longest), scales.jacobian_bits)
        )
    return plan, (rows, rng.integers(0, plan.classes, batch), weights, jacobians)


async def shared(party, plan, inputs):
    rows, labels, weights, jacobians = inputs
    mine = party.id == 0

    async def share(values, bits):
        return await refmpc.input_from_party(party, 0, values if mine else None, values.shape, bits)

    one_hot = np.eye(plan.classes, dtype=np.int64)[labels]
    clients = [
        ClientJacobian(shape, await share(jacobian, plan.adapters.jacobian_bits))
        for shape, jacobian in zip(plan.shapes, jacobians, strict=True)
    ]
    embeddings = await share(with_ones(rows), EMBEDDING_BITS)
    return embeddings, await share(one_hot, 0), await share(weights, plan.scales.weight_bits), clients


async def one_step(party, job):
    plan, inputs = job
    embeddings, labels, weights, clients = await shared(party, plan, inputs)
    noise = np.zeros(plan.parameters, dtype=np.int64)
    with party.phase("step"):
        after, openings = await layer_step(embeddings, labels, clients, Weights(weights, None), noise, 1.0, plan)
    return await refmpc.reveal(after.values, release="test"), [refmpc.unseal(words) for words in openings]


def step_bound(plan: LayerPlan, inputs) -> float:
    """‖secure sum − float sum‖ of one step, for inputs on their grids.

    The clip is a projection, so it moves a gradient by no more than the gradient has moved: [h 1] ⊗ δ by ‖[h 1]‖e_δ
    with e_δ = √S·2^-14, and by its own grid if it is written out; J ᵀv by ‖J‖(ω·e_δ + √d·2^-signal_bits) and by its
    grid. The clip factor is too small by 2^-14 + 2^-18 and by half of the relative error of q: 1/γ² rounded up, and
    five units. The release is off by at most 1.5·2^-12 an entry.
    """
    _, _, weights, jacobians = inputs
    scales, gamma, batch = plan.adapters, plan.training.clip_norm, plan.schedule.batch_size
    e_delta, omega = math.sqrt(plan.classes) * 2.0**-14, np.linalg.norm(weights, 2)
    reach = math.hypot(plan.scales.row_bound, 1.0)
    moved = (reach * e_delta) ** 2 + plan.global_parameters * 2.0**-40
    for shape, jacobian in zip(plan.shapes, jacobians, strict=True):
        longest = np.linalg.norm(jacobian, 2, axis=(1, 2)).max()
        signal = omega * e_delta + math.sqrt(shape.width) * 2.0**-scales.signal_bits
        moved += (longest * signal + math.sqrt(shape.parameters) * 2.0**-scales.sample_bits) ** 2
    squared = scales.sample_norms, plan.scales.norms, plan.scales.written_out
    loose = max(rounded_up(over) for over in squared if over is not None)
    excess = loose + 5 * 2.0**-26 + 4 * 2.0**-plan.scales.norm_bits
    sample = math.sqrt(moved) + gamma * (2.0**-14 + 2.0**-18 + excess / 2) + scales.clip_rounding
    return batch * sample + math.sqrt(plan.parameters) * 1.5 * 2.0**-RELEASE_BITS


@pytest.mark.parametrize("gradients", ["factored", "explicit"])
@pytest.mark.parametrize(("clip", "seed"), [(0.3, 0), (1.0, 1), (4.0, 2)])
def test_one_step_is_the_float_gradient(gradients, clip, seed):
    plan, inputs = make_step(gradients, clip, seed)
    rows, labels, weights, jacobians = inputs
    assert all(isinstance(shape, JacobianShape) for shape in plan.shapes)
    result = refmpc.run(one_step, [(plan, inputs)] * 3, releases={"test": "no claim"}, timeout=60)
    rate = plan.scales.learning_rate_used(1.0) / plan.schedule.batch_size
    parts, bits = [(weights - result.outputs[0][0]).reshape(-1) / rate], plan.scales.truncated_bits
    for words in zip(*(openings for _, openings in result.outputs), strict=True):
        total = sum(w.astype(np.uint64) for w in words)
        parts.append((((total << np.uint64(bits)).view(np.int64) >> bits) + 1.5) * 2.0**-RELEASE_BITS)
    adapters = [AdapterJacobian(shape.columns, j) for shape, j in zip(plan.shapes, jacobians, strict=True)]
    expected = clipped_gradient(GlobalModel([weights]), with_ones(rows), labels, clip, adapters=adapters).total
    bound, start = step_bound(plan, inputs), 0
    assert np.linalg.norm(np.concatenate(parts) - expected) <= bound
    for size in (plan.global_parameters, *(shape.parameters for shape in plan.shapes)):
        assert np.linalg.norm(expected[start : start + size]) > bound  # no part could be left out unnoticed
        start += size
    counted = step_cost(plan)
    assert result.ledgers[0].phases["step"].rounds == counted.rounds
    assert sum(ledger.phases["step"].bytes_sent for ledger in result.ledgers) == counted.bytes


async def clip_only(party, job):
    plan, inputs = job
    embeddings, labels, weights, clients = await shared(party, plan, inputs)
    errors = await logit_errors(SharedRows(embeddings, labels, labels), weights, plan.scales)
    written = []
    for client in clients:
        block = (await weight_products(client, weights, plan.adapters)).block
        written.append(layer_samples(errors, block, client, plan))
    written.append(global_samples(embeddings, errors, plan))
    factor, _, samples = await clip_factors(errors, None, [], [], plan.adapters, written)
    return [await refmpc.reveal(x, release="test") for x in (factor, *(each.gradients for each in samples))]


@pytest.mark.parametrize("way", ["down", "up", "against_the_value", "by_lot"])
def test_no_rounding_makes_the_clip_factor_too_large(monkeypatch, way):
    """c_j·‖g_j‖ ≤ γ for the very g_j that are added up: nothing has to be added to γ."""
    from tests.refmpc import rounding

    rounding.forced(monkeypatch, rounding.by_lot(1) if way == "by_lot" else getattr(rounding, way))
    for clip, seed in ((0.05, 0), (0.7, 1), (3.0, 2)):
        plan, inputs = make_step("explicit", clip, seed)
        assert plan.adapters.clip_rounding == 0.0
        result = refmpc.run(clip_only, [(plan, inputs)] * 3, releases={"test": "no claim"}, timeout=60)
        factor, *samples = result.outputs[0]
        norms = np.linalg.norm(np.concatenate(samples, axis=1), axis=1)
        ratio = factor[:, 0] * norms / clip
        assert ratio.max() <= 1.0 and factor.max() <= 1.0
        assert (ratio[norms > 1.05 * clip] > 0.96).all() and (norms > 1.05 * clip).any()


# whole runs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["clip", "normalise"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_explicit_gradients_of_lora_layers_are_the_twins(tmp_path, momentum, rule):
    """Six steps, the servers' own noise: all parameters agree to 1 % of what the gradients have moved them."""
    federation, plan = make(momentum=momentum, local={"rule": rule}, gradients="explicit", learning_rate=1.0)
    result = run_secure(plan, federation, tmp_path)
    noise = noise_of_the_servers(plan, tmp_path)
    twin = train_gl_bmf(federation, plan.training, noise=noise)
    factored = train_gl_bmf(federation, plan.training.with_(gradients="factored"), noise=noise)
    moved = moved_without_noise(federation, plan)
    assert moved > 0.01
    assert difference(result, twin) < 0.01 * moved
    assert difference(result, factored) < 0.01 * moved


@pytest.mark.parametrize("kind", ["released", "estimated"])
@pytest.mark.parametrize("mixed", [False, True], ids=["both layers", "beside LoRA"])
def test_a_layer_without_factors_is_trained_as_by_the_twin(tmp_path, kind, mixed):
    federation = layer_federation(kind, mixed)
    plan = plan_layer_run(federation, small_training())
    assert [isinstance(shape, JacobianShape) for shape in plan.shapes] == [not mixed, True]
    assert plan.claim.covers == ("features and labels" if kind == "released" else "labels only")
    assert any("Jacobians of their layers within a public bound (4)" in text for text in plan.claim.public)
    result = run_secure(plan, federation, tmp_path)
    noise = noise_of_the_servers(plan, tmp_path)
    twin = train_gl_bmf(federation, plan.training, noise=noise)
    moved = moved_without_noise(federation, plan)
    print(f"moved {moved:.3g}, apart {np.linalg.norm(layers_of(trained(result, twin)) - layers_of(twin.clients)):.3g}")
    assert moved > 0.002
    assert np.linalg.norm(layers_of(trained(result, twin)) - layers_of(twin.clients)) < 0.01 * moved
    assert np.linalg.norm(released(result)[0] - twin.model.layers[0]) < 0.01 * np.linalg.norm(twin.model.layers[0])
    steps = plan.schedule.num_steps
    counted = step_cost(plan)
    assert result.ledgers[0].phases["training"].rounds == steps * counted.rounds
    total = sum(l.phases[name].bytes_sent for l in result.ledgers for name in ("training", "layer gradients"))
    assert estimate(plan)["bytes"] == total
    names: dict[str, int] = defaultdict(int)
    for release in result.ledgers[0].releases:
        names[release.name] += release.elements
    for name in plan.client_names:
        assert names.pop(f"fault in a step of {name}") == steps
    assert names.pop(f"fault in the upload of {plan.client_names[-1]}") == 1
    sizes = {f"layer gradient of {c.name}": steps * c.shared_parameters for c in federation.clients}
    assert names == {**sizes, "global model": len(plan.client_names) * plan.global_parameters}


def test_a_layer_without_factors_survives_a_crash(tmp_path, monkeypatch):
    federation = layer_federation()
    plan = plan_layer_run(federation, small_training(epochs=1, momentum=0.5))
    with monkeypatch.context() as patch:
        crash_once(patch, "after sending", 1, step=1)
        with pytest.raises(PartyFailed, match="Crash"):
            run_secure(plan, federation, tmp_path, keep=True)
    result = run_secure(plan, federation, tmp_path, keep=True)
    assert result.ledgers[0].phases["training"].rounds == step_cost(plan).rounds  # the third step only
    twin = train_gl_bmf(federation, plan.training, noise=noise_of_the_servers(plan, tmp_path))
    assert np.linalg.norm(layers_of(trained(result, twin)) - layers_of(twin.clients)) < 1e-3
    client = federation.clients[0]
    assert isinstance(client, LayerClient)
    client.rows = client.rows[::-1].copy()
    with pytest.raises(PartyFailed, match="client 'client 1' came back with different columns"):
        run_secure(plan, federation, tmp_path, keep=True, clients=METHOD.clients(plan, federation, tmp_path))


def test_jacobians_beyond_their_bound_are_shared_within_it():
    federation = layer_federation()
    client = federation.clients[0]
    assert isinstance(client, LayerClient)
    client.largest_jacobian = 0.3
    found = np.linalg.norm(client.layer_jacobian(slice(0, 20)), 2, axis=(1, 2))
    assert found.max() <= 0.3 and found.min() > 0.2


def test_explicit_from_the_command_line(tmp_path, capsys):
    words = ["--epochs", "1", "--parties", "threads", "--out", str(tmp_path), "--json", "--twin", "--rank", "1"]
    main("gl_bmf", None, [*words, "--gradients", "explicit"])
    report = json.loads(capsys.readouterr().out)
    assert abs(report["test_accuracy"] - report["twin_accuracy"]) <= 0.01
    assert any("Jacobians of 2 clients written out" in note for note in report["notes"])


def test_a_convolution_from_the_command_line(capsys):
    main("gl_bmf", None, ["--local-model", "cnn", "--train-layer", "one", "--estimate", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["memory_per_server"] > 2 * 16 * 128 * 60 * 192  # the Jacobians of a batch, of both clients
    assert any("but for its layer one" in text for text in printed["claim"]["public"])
    for words, sentence in (
        (["--train-layer", "one"], "local_model = 'identity': must be a network"),
        (["--local-model", "cnn", "--train-layer", "three"], "layer = 'three': must be one of last, one, two"),
        (
            ["--local-model", "mlp", "--train-layer", "last"],
            "entries of the Jacobians of a batch = 59443200: must be at",
        ),
    ):
        with pytest.raises(SystemExit, match=sentence):
            main("gl_bmf", None, [*words, "--estimate"])
