"""GL-BMF computes what its plaintext twin computes, tells each client its own gradient only, and survives a crash."""

from __future__ import annotations

import json
import re
from collections import defaultdict

import numpy as np
import pytest

import protocols.client.gl_client
import protocols.server.training
import refmpc
from protocols.client.gl_client import client_program
from protocols.methods.gl_bmf import METHOD
from protocols.plan.gl_plan import plan_layer_run
from protocols.plan.gl_scales import FactorBounds
from protocols.plan.scales import RELEASE_BITS
from protocols.run import launch
from protocols.run.report import estimate
from protocols.server.gl_training import OpenLayerRun
from protocols.server.training import release_model
from protocols.step.cost import step_cost
from protocols.step.public_weights import moved as moved_layers
from protocols.step.public_weights import public_start
from refmpc.core.errors import PartyFailed
from refmpc.primitives.io import SHARE_DIGEST_BYTES
from tests.not_none import not_none
from tests.protocols.conftest import small_federation
from tests.protocols.gl_runs import adapters_of, crash_once, difference, make, parameter_bound, run_secure, trained
from tests.protocols.secure_runs import noise_of_the_servers, released
from vfl.data.scaling import RowBound
from vfl.federation import Federation
from vfl.local.client import make_clients
from vfl.training import TrainingConfig
from vfl.twins import train_gl_bmf

WEIGHTS = pytest.mark.parametrize("weights", ["open", "secret"])


@WEIGHTS
@pytest.mark.parametrize("momentum", [0.0, 0.5], ids=["plain", "momentum"])
def test_weights_and_adapters_are_the_twins(tmp_path, momentum, weights):
    local = {"local_learning_rate": 0.1}
    federation, plan = make(momentum=momentum, local=local, epochs=1, learning_rate=0.1, weights=weights)
    result = run_secure(plan, federation, tmp_path)
    noise = noise_of_the_servers(plan, tmp_path)
    twin = train_gl_bmf(federation, plan.training, noise=noise)
    bound = parameter_bound(plan, federation, noise)
    print(f"distance {difference(result, twin):.3g}, bound {bound:.3g}")
    assert difference(result, twin) <= bound
    assert bound < 0.25 * np.linalg.norm(twin.model.layers[0])  # the bound says something
    for name in plan.client_names:
        assert (result.client_outputs[name].model == released(result)[0]).all()


@pytest.mark.parametrize(("rule", "weights"), [("clip", "secret"), ("normalise", "secret"), ("normalise", "open")])
def test_adapters_follow_gradients_and_not_only_noise(tmp_path, rule, weights):
    """Tighter than any worst case: after six steps all parameters agree to 1 % of what the gradients have moved
    them."""
    federation, plan = make(local={"rule": rule}, learning_rate=2.0, weights=weights)
    result = run_secure(plan, federation, tmp_path)
    noise = noise_of_the_servers(plan, tmp_path)
    twin = train_gl_bmf(federation, plan.training, noise=noise)
    # what the adapters would be if the released layer gradients were pure noise
    rate, start = plan.local_update.learning_rate / plan.training.batch_size, adapters_of(federation.clients)
    parts = [noise[:, part].sum(axis=0) for part in plan.noise_slices()]
    only_noise = start - rate * np.concatenate(parts)
    moved = np.linalg.norm(adapters_of(twin.clients) - only_noise)
    found = adapters_of(trained(result, twin))
    assert np.linalg.norm(found - adapters_of(twin.clients)) < 0.01 * moved
    assert moved > 0.01


def test_estimated_updates_are_the_twins(tmp_path):
    local = {"local_learning_rate": 0.02, "regularisation": 10.0}
    federation, plan = make("estimated", local=local, epochs=1, learning_rate=0.02, epsilon=8.0)
    result = run_secure(plan, federation, tmp_path)
    noise = noise_of_the_servers(plan, tmp_path)
    twin = train_gl_bmf(federation, plan.training, noise=noise)
    bound = parameter_bound(plan, federation, noise, estimated=True)
    print(f"distance {difference(result, twin):.3g}, bound {bound:.3g}")
    assert difference(result, twin) <= bound < 0.25 * np.linalg.norm(twin.model.layers[0])
    frozen = adapters_of(federation.clients)
    moved = np.linalg.norm(adapters_of(twin.clients) - frozen)
    assert difference(result, twin) < 0.01 * moved  # and much closer than the worst case
    for client in twin.clients:
        log = result.client_outputs[client.name].estimate_log
        assert [r.step for r in log] == list(range(plan.schedule.num_steps))
        assert log[0].noise_std == pytest.approx(client.estimate_log[0].noise_std, rel=1e-4)


def test_claims_of_both_local_updates():
    released, estimated = make(epsilon=8.0)[1].claim, make("estimated", epsilon=8.0)[1].claim
    assert released.covers == "features and labels"
    assert released.proven
    assert estimated.covers == "labels only"
    assert estimated.epsilon == pytest.approx(released.epsilon_replace_one, rel=1e-3)
    assert any("factors within public bounds" in sentence for sentence in released.public)
    slack = dict(released.slack)
    assert slack["clip rounding"] == make(epsilon=8.0)[1].adapters.clip_rounding > 0


@WEIGHTS
def test_the_ledger_holds_exactly_the_declared_releases_and_costs(tmp_path, weights):
    federation, plan = make(weights=weights)
    result = run_secure(plan, federation, tmp_path)
    steps = plan.schedule.num_steps
    step = [
        (f"layer gradient of {name}", f"client {name!r}", shape.parameters)
        for name, shape in zip(plan.client_names, plan.shapes, strict=True)
    ]
    model = [("global model", f"client {name!r}", plan.global_parameters) for name in plan.client_names]
    if weights == "open":
        step = [("noised gradient sums", "all servers", plan.global_parameters), *step]
        assert f"sums of the global layer of all {steps} steps are opened" in plan.claim.paragraph()
    else:
        assert "opened to the three servers" not in plan.claim.paragraph()
        assert "opened to the clients only" in plan.claim.paragraph()
    for ledger in result.ledgers:
        found = [(r.name, r.receiver, r.elements) for r in ledger.releases]
        tests = [("fault in a step of " + name, "all servers", 1) for name in plan.client_names]
        labels = [(f"fault in the upload of {plan.client_names[-1]}", "all servers", 1)]
        assert found == labels + (tests + step) * steps + model
        claimed = [r for r in ledger.releases if not r.name.startswith("fault in")]
        assert all("differentially private" in r.claim or plan.claim.headline() in r.claim for r in claimed)
    counted = step_cost(plan)
    total = {
        name: sum(ledger.phases[name].bytes_sent for ledger in result.ledgers) for name in result.ledgers[0].phases
    }
    assert result.ledgers[0].phases["training"].rounds == steps * counted.rounds
    assert total["layer gradients"] == steps * 12 * sum(shape.parameters for shape in plan.shapes)
    if weights == "secret":
        assert total["training"] == steps * counted.bytes
        assert estimate(plan)["bytes"] == total["training"] + total["layer gradients"]
    else:  # bytes depend on how large logits can be in each step, which is public
        assert 0.8 * steps * counted.bytes < total["training"] <= steps * counted.bytes
        secret = step_cost(make()[1])
        assert counted.rounds < secret.rounds and counted.bytes < secret.bytes


@pytest.mark.parametrize(
    "changes", [{}, {"momentum": 0.9}, {"gradients": "explicit"}], ids=["plain", "momentum", "explicit"]
)
def test_open_sums_are_the_twins_gradients_and_what_everybody_computes_from_them_is_the_model(
    tmp_path, monkeypatch, changes
):
    """Step by step, at the very weights and layers that were used: the sums that servers open, and those that clients
    get. The model is an exact function of the opened sequence."""
    momentum = changes.pop("momentum", 0.0)
    federation, plan = make(momentum=momentum, weights="open", **changes)
    sums: dict[int, dict[int, np.ndarray]] = defaultdict(dict)
    told: dict[str, list[np.ndarray]] = defaultdict(list)
    move, receive = OpenLayerRun._move, refmpc.receive_opening

    def noting(self, step, opened):
        sums[self.party.id][step] = opened.copy()
        move(self, step, opened)

    def noted(client, *arguments, **options):
        told[client.name].append(receive(client, *arguments, **options))
        return told[client.name][-1]

    monkeypatch.setattr(OpenLayerRun, "_move", noting)
    monkeypatch.setattr(protocols.client.gl_client, "receive_opening", noted)
    result = run_secure(plan, federation, tmp_path)
    noise = noise_of_the_servers(plan, tmp_path)
    model = public_start(plan.start, plan.scales, plan.training)
    clients, size = federation.fresh().clients, plan.global_parameters
    for step in range(plan.schedule.num_steps):
        assert all((sums[server][step] == sums[0][step]).all() for server in range(3))
        twin = train_gl_bmf(federation, plan.training, noise=noise, num_steps=step + 1)
        before = train_gl_bmf(federation, plan.training, noise=noise, num_steps=step) if step else None
        mine = np.concatenate([sums[0][step] * 2.0**-RELEASE_BITS, *(told[c.name][step] for c in clients)])
        previous = plan.start[0] if before is None else before.model.layers[0]
        if not momentum:  # what the twin's weights moved by is its sum
            moved = (
                (previous - twin.model.layers[0]).reshape(-1) * plan.training.batch_size / plan.training.learning_rate
            )
            assert np.abs(mine[:size] - moved).max() <= 0.02 * np.abs(moved).max()
        model = moved_layers(model, plan.unflatten(sums[0][step]), plan.scales.rate_word(0.5), plan.training)
        rest = mine[size:] - noise[step][size:]
        assert np.linalg.norm(rest) <= plan.training.batch_size * plan.training.clip_norm * 1.01
    assert (released(result)[0] == model[0].values * 2.0**-plan.scales.weight_bits).all()


def test_a_step_of_the_papers_size_stays_within_its_budget():
    """B = 128, S = 10, two clients with d = 1000 and ResNet-18's eight blocks, r = 8, 20 epochs of 50,000 rows."""

    def wide(width: int) -> np.ndarray:
        return np.broadcast_to(np.zeros((1, width)), (50_000, width))  # sizes only: no memory behind it

    blocks = [[wide(m) for m in (64, 64, 128, 128, 256, 256, 512, 512)]] * 2
    labels = np.zeros(50_000, dtype=np.int64)
    clients = make_clients([wide(1000)] * 2, labels, [RowBound(0.5**0.5)] * 2, block_outputs=blocks, rank=8)
    federation = Federation(clients, 10, labels[:0], [], [], 1.0)
    plan = plan_layer_run(federation, TrainingConfig(epochs=20, learning_rate=0.5))
    found = estimate(plan)
    assert found["rounds_per_step"] <= 31
    once = found["upload_bytes"] / plan.schedule.num_steps  # X and labels spread over the run
    # The first budget was 12 MB in 70 rounds. The low-round softmax and clip factor cost 40 kB more and save 39 rounds,
    # which is less time on every link with more than 80 Mbit/s and 0.1 ms.
    assert found["bytes"] / plan.schedule.num_steps + once <= 12.05e6
    assert plan.adapters.clip_rounding <= 2e-4 * plan.training.clip_norm


def logging_client(client, job):
    """The client program, with a note of every message that reaches this client; its inputs are the servers' only."""
    log, collect = [], client.collect

    def noted(operation, receives, timeout=None):
        log.append((operation, sorted(receives), [part.size for parts in receives.values() for part in parts]))
        collect(operation, receives, timeout)

    client.collect = noted
    return client_program(client, job), log


def test_a_client_receives_its_own_gradient_and_the_model_and_nothing_else(tmp_path):
    federation, plan = make(epochs=1)
    jobs = {name: (logging_client, job) for name, job in METHOD.client_jobs(plan, federation, None).items()}
    result = run_secure(plan, federation, tmp_path, clients=jobs)
    for name, shape in zip(plan.client_names, plan.shapes, strict=True):
        assert result.client_outputs[name][1] == [
            ("salt", [0, 1, 2], [32] * 3),
            ("verdict", [0, 1, 2], [2] * 3),
            ("first step", [0, 1, 2], [1] * 3),
            *[("open_to_client", [0, 1, 2], [shape.parameters] * 3)] * plan.schedule.num_steps,
            ("reveal_to_client", [0, 1, 2], [plan.global_parameters, SHARE_DIGEST_BYTES] * 3),
        ]


def test_factors_beyond_their_bounds_are_shared_within_them():
    federation, plan = make()
    bounds = FactorBounds(block=0.5, row_factor=0.25, projected=0.01, up=0.1)
    client = federation.fresh().clients[0]
    for layer in not_none(client.lora).layers:
        layer.up += 1.0
    projected, up, factors = protocols.client.gl_client.bounded_factors(client, slice(0, 32), bounds)
    assert np.linalg.norm(projected, axis=1).max() <= 0.01
    assert np.linalg.norm(up) <= 0.1 * (1 + 1e-12)
    assert factors.max() == 0.25
    assert protocols.client.gl_client.rows_beyond(client, slice(0, 32), bounds) == 32
    whole = plan_layer_run(federation, plan.training, bounds)
    blocks = protocols.client.gl_client.shared_blocks(client, slice(0, 32), whole).astype(np.float64) * 2.0**-14
    assert np.linalg.norm(blocks[: 32 * 3].reshape(32, 3), axis=1).max() <= 0.5 + 2.0**-13


def test_a_client_hears_that_its_factors_were_shortened(tmp_path):
    """It lost two points of accuracy without a word where rows were stretched to a large norm."""
    for bounds, shortened in ((None, 0.0), (FactorBounds(block=1.0, row_factor=9.0, projected=1e-3, up=9.0), 1.0)):
        federation, _ = make(epochs=1)
        plan = plan_layer_run(federation, make(epochs=1)[1].training, bounds)
        found = run_secure(plan, federation, tmp_path / str(shortened)).client_outputs
        for client in found.values():
            assert client.shortened == shortened
            assert client.warning.startswith("the layer factors of 100% of the rows") == bool(shortened)


def test_what_does_not_fit_is_refused_before_anything_is_shared():
    federation, _ = make()
    with pytest.raises(ValueError, match="lora = None: must be present"):
        plan_layer_run(small_federation(64, (4, 3), 3), TrainingConfig(batch_size=32))
    with pytest.raises(ValueError, match=r"learning_rate = 1000000000\.0: must be small enough"):
        plan_layer_run(federation, TrainingConfig(batch_size=32, learning_rate=1e9))
    with pytest.raises(ValueError, match="learning_rate = 100"):
        plan_layer_run(federation, TrainingConfig(batch_size=32, learning_rate=1e4, epochs=4000, clip_norm=1e-2))
    with pytest.raises(ValueError, match="hidden"):
        plan_layer_run(federation, TrainingConfig(batch_size=32, hidden=(4,)))


# crash and resume --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["before writing", "after writing", "between the clients", "after sending"])
@pytest.mark.parametrize(("server", "weights"), [(0, "secret"), (1, "open")])
def test_after_a_crash_no_step_is_released_with_two_values(tmp_path, monkeypatch, where, server, weights):
    federation, plan = make(epochs=1, momentum=0.5, weights=weights)
    seen: dict[tuple[str, int], list[np.ndarray]] = defaultdict(list)
    receive = refmpc.receive_opening
    count: dict[str, int] = defaultdict(int)
    first: dict[str, int] = {}
    named = protocols.client.gl_client._first_step

    def noted_first(client):
        first[client.name] = named(client)
        count[client.name] = max(0, first[client.name] - 1)
        return first[client.name]

    def noted(client, *arguments, **options):
        found = receive(client, *arguments, **options)
        seen[client.name, count[client.name]].append(found)
        count[client.name] += 1
        return found

    monkeypatch.setattr(protocols.client.gl_client, "receive_opening", noted)
    monkeypatch.setattr(protocols.client.gl_client, "_first_step", noted_first)
    crash_once(monkeypatch, where, server, step=1)
    with pytest.raises(PartyFailed, match="Crash"):
        run_secure(plan, federation, tmp_path, keep=True)
    result = run_secure(plan, federation, tmp_path, keep=True)
    assert first == dict.fromkeys(plan.client_names, 1 if where == "before writing" else 2)
    assert set(seen) == {(name, step) for name in plan.client_names for step in range(plan.schedule.num_steps)}
    for values in seen.values():
        assert all((value == values[0]).all() for value in values)
    noise = noise_of_the_servers(plan, tmp_path)
    twin = train_gl_bmf(federation, plan.training, noise=noise)
    assert difference(result, twin) <= parameter_bound(plan, federation, noise)


def test_a_server_that_has_not_written_the_last_step_means_nobody_opened_the_model(tmp_path, monkeypatch):
    federation, plan = make(epochs=1)
    opened = []

    def watching(party, plan, weights):
        release_model(party, plan, weights)
        opened.append(party.id)

    monkeypatch.setattr(protocols.server.training, "release_model", watching)
    crash_once(monkeypatch, "before writing", 1, step=plan.schedule.num_steps - 1)
    with pytest.raises(PartyFailed, match="Crash"):
        run_secure(plan, federation, tmp_path, keep=True)
    assert opened == []
    model = released(run_secure(plan, federation, tmp_path, keep=True))
    again = run_secure(plan, federation, tmp_path, keep=True)  # a finished run sends the same model again
    assert "training" not in again.ledgers[0].phases
    assert sorted(opened) == [0, 0, 1, 1, 2, 2] and (released(again)[0] == model[0]).all()


@WEIGHTS
def test_a_run_without_checkpoints_is_not_begun_again(tmp_path, weights):
    federation, plan = make(epochs=1, weights=weights)
    run_secure(plan, federation, tmp_path)
    with pytest.raises(PartyFailed, match="start a new run in an empty directory"):
        run_secure(plan, federation, tmp_path)


def test_a_client_that_lost_its_adapters_is_refused(tmp_path):
    federation, plan = make(epochs=1)
    run_secure(plan, federation, tmp_path, keep=True)
    (tmp_path / "client-1" / "adapters.npz").unlink()
    with pytest.raises(PartyFailed, match="client 1: steps applied = 0: must be 2 or 3"):
        run_secure(plan, federation, tmp_path, keep=True)


# the command -------------------------------------------------------------------------------------


def test_a_whole_run_from_the_command_line(tmp_path, capsys):
    words = ["--epochs", "1", "--parties", "threads", "--out", str(tmp_path), "--json", "--twin", "--rank", "4"]
    launch.main("gl_bmf", None, words)
    report = json.loads(capsys.readouterr().out)
    (run,) = tmp_path.iterdir()
    assert abs(report["test_accuracy"] - report["twin_accuracy"]) <= 0.01
    assert report["claim"]["covers"] == "features and labels"
    names = [release["name"] for release in report["releases"]]
    assert names.count("layer gradient of client 1") == names.count("layer gradient of client 2") == report["steps"]
    with pytest.raises(SystemExit, match="the directory of a run with --checkpoint-every"):
        launch.main("gl_bmf", None, ["--resume", str(run)])


@pytest.mark.parametrize("layers", ["first", "2"])
def test_lora_reads_the_layers_that_were_asked_for(tmp_path, capsys, layers):
    """Three servers and twin train the same model on one block of an MLP's two, and release a gradient of that size."""
    pytest.importorskip("torch")
    words = ["--local-model", "mlp", "--epochs", "1", "--parties", "threads", "--twin", "--rank", "4", "--json"]
    launch.main("gl_bmf", None, [*words, "--out", str(tmp_path), "--lora-layers", layers])
    report = json.loads(capsys.readouterr().out)
    assert abs(report["test_accuracy"] - report["twin_accuracy"]) <= 0.01
    sizes = {r["elements"] for r in report["releases"] if r["name"] == "layer gradient of client 1"}
    assert sizes == {60 * 4 + 4 * 128}
    assert any(note.endswith(f"{layers} of 2") for note in report["notes"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--lora-layers", "3"], "lora_layers = '3': must be all, first, last, or different numbers from 1 to 2"),
        (["--lora-layers", "fc"], "client 1 has 2 blocks"),
        (
            ["--lora-layers", "first", "--train-layer", "last"],
            "lora_layers = 'first': must be left out beside train_layer",
        ),
    ],
)
def test_layers_that_do_not_exist_are_refused(words, sentence):
    pytest.importorskip("torch")
    with pytest.raises(SystemExit, match=re.escape(sentence)):
        launch.main("gl_bmf", None, ["--local-model", "mlp", "--estimate", *words])


def test_the_estimate_and_the_labels_only_claim_from_the_command_line(capsys):
    launch.main("gl_bmf", None, ["--estimate", "--json", "--local-update", "estimated"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["rounds_per_step"] <= 70
    assert printed["claim"]["covers"] == "labels only"
