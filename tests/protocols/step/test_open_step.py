"""A step with open weights: the opened sequence word for word, the twin's gradients at the weights that were used, its
cost."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

import refmpc
from protocols.methods import g_bmf, g_shuff
from protocols.plan.run_plan import Plan, plan_run
from protocols.plan.scales import EMBEDDING_BITS, RELEASE_BITS
from protocols.server.open_training import OpenTrainingRun
from protocols.step.cost import step_cost
from protocols.step.hidden_step import hidden_weights
from protocols.step.public_weights import Head, PublicLayer, moved, norm_above, public_start, rounded_head
from refmpc.core.words import unseal
from tests.protocols.conftest import small_federation
from tests.protocols.secure_runs import noise_of_the_servers, released, run_secure, small_training, weight_bound
from vfl.gradients import GlobalModel, clipped_gradient, with_ones
from vfl.hidden import WEIGHT_BITS
from vfl.twins import train_g_bmf, train_g_shuff
from vfl.twins.engine import Optimiser

CASES = [
    {},
    {"momentum": 0.9},
    {"weight_decay": 0.999},
    {"gradients": "explicit"},
    {"hidden": (6,), "learning_rate": 0.25},
    {"hidden": (5, 4), "learning_rate": 0.25, "momentum": 0.9, "weight_decay": 0.999},
    {"hidden": (6,), "learning_rate": 0.05, "optimiser": "adam"},
]
IDS = ["one layer", "momentum", "decay", "explicit", "hidden", "two hidden", "adam"]


def open_plan(federation, protocol: str = "g_bmf", **changes) -> Plan:
    return plan_run(protocol, federation, small_training(weights="open", **changes))


class Spy:
    """All servers' products that are about to be opened, and every sum that was opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.products: dict[tuple[int, int], list[tuple[np.ndarray, ...]]] = defaultdict(list)  # by server and step
        self.sums: dict[int, dict[int, np.ndarray]] = defaultdict(dict)
        lock = threading.Lock()
        opening, move = refmpc.matmul_opening, OpenTrainingRun._move
        monkeypatch.setenv("REFMPC_RECORD", "0")  # a repeated step does not come by here

        def spying(x, y, bits, addend):
            with lock:
                parts = tuple(unseal(part).copy() for part in (x.first, y.first, addend))
                self.products[x.party.id, x.party.step].append(parts)
            return opening(x, y, bits, addend)

        def moving(run, step, sums):
            with lock:
                self.sums[run.party.id][step] = sums.copy()
            move(run, step, sums)

        monkeypatch.setattr(refmpc, "matmul_opening", spying)
        monkeypatch.setattr(OpenTrainingRun, "_move", moving)

    def exact(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """All layers' sums as integers before anything is cut, and what the servers have added, flat."""
        totals, added = [], []
        for layers in zip(*(self.products[server, step] for server in range(3)), strict=True):
            x, y, addend = (sum(parts[1:], parts[0]) for parts in zip(*layers, strict=True))
            totals.append((x @ y + addend).reshape(-1).view(np.int64))
            added.append(addend.reshape(-1).view(np.int64))
        return np.concatenate(totals), np.concatenate(added)


def layers_before(plan: Plan, sums: dict[int, np.ndarray]) -> list[list[PublicLayer]]:
    """The public layers before every step, and after the last."""
    found = [public_start(plan.start, plan.scales, plan.training)]
    for step in range(plan.schedule.num_steps):
        word = plan.scales.rate_word(plan.learning_rate(step))
        noise = plan.noise_square(step)
        found.append(moved(found[-1], plan.unflatten(sums[step]), word, plan.training, step, noise))
    return found


@pytest.mark.parametrize("changes", CASES, ids=IDS)
def test_the_opened_sequence_is_that_of_the_twin_word_for_word(federation, tmp_path, monkeypatch, changes):
    """Given the servers' noise and what their cuts rounded, which is 0, 1 or 2 units: nothing else is in what is
    opened."""
    plan, spy = open_plan(federation, **changes), Spy(monkeypatch)
    result = run_secure(plan, federation, tmp_path)
    noise = noise_of_the_servers(plan, tmp_path)
    cut, unit = plan.scales.truncated_bits, 2.0**-plan.scales.gradient_bits
    roundings = []
    for step in range(plan.schedule.num_steps):
        exact, added = spy.exact(step)
        assert np.abs((added - (3 << (cut - 1))) * unit - noise[step]).max() <= 2.0**-40
        for server in range(3):
            assert (spy.sums[server][step] == spy.sums[0][step]).all()
        roundings.append((exact >> cut) - spy.sums[0][step])
    assert set(np.concatenate(roundings).tolist()) <= {0, 1, 2}
    final = layers_before(plan, spy.sums[0])[-1]
    for everybody in (*result.outputs, *result.client_outputs.values()):
        for theirs, layer in zip(everybody, final, strict=True):
            assert (theirs == layer.values * 2.0**-plan.scales.weight_bits).all()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_every_opened_sum_is_the_twins_gradient_at_the_rounded_weights(federation, tmp_path, monkeypatch, momentum):
    """No error is carried on: each step is compared at the very weights that it used."""
    plan, spy = open_plan(federation, momentum=momentum, epochs=3), Spy(monkeypatch)
    run_secure(plan, federation, tmp_path)
    noise, scales = noise_of_the_servers(plan, tmp_path), plan.scales
    rows, labels = with_ones(np.rint(federation.rows() * 2**EMBEDDING_BITS) * 2.0**-EMBEDDING_BITS), federation.labels
    reach = np.hypot(scales.row_bound, 1.0)
    sample = reach * math.sqrt(plan.classes) * 2.0**-14 + plan.training.clip_norm * 2.0**-12
    allowed = plan.training.batch_size * sample + 1.5 * 2.0**-RELEASE_BITS
    for step, layers in enumerate(layers_before(plan, spy.sums[0])[:-1]):
        head = rounded_head(layers[-1].values, scales.weight_bits, scales.layers[-1].reach)
        model = GlobalModel([head.words * 2.0**-head.bits])
        here = plan.schedule.rows(step)
        wanted = clipped_gradient(model, rows[here], labels[here], plan.training.clip_norm).total + noise[step]
        got = spy.sums[0][step] * 2.0**-RELEASE_BITS
        assert np.linalg.norm(got - wanted.reshape(-1)) <= allowed * math.sqrt(plan.parameters)
        assert np.abs(got - wanted.reshape(-1)).max() <= allowed


@pytest.mark.parametrize("weights", ["open", "secret"])
@pytest.mark.parametrize("changes", CASES[:4], ids=IDS[:4])
def test_open_and_secret_weights_train_the_same_model(federation, tmp_path, changes, weights):
    plan = plan_run("g_bmf", federation, small_training(weights=weights, **changes))
    result = run_secure(plan, federation, tmp_path)
    twin = train_g_bmf(federation, plan.training, noise=noise_of_the_servers(plan, tmp_path))
    assert np.abs(released(result)[0] - twin.model.layers[0]).max() <= weight_bound(plan)


def test_g_shuff_with_open_weights_is_its_twin_when_the_order_does_not_matter(tmp_path):
    federation = small_federation(32, (4, 3), 3)
    plan = open_plan(federation, "g_shuff", epochs=2)
    result = run_secure(plan, federation, tmp_path, g_shuff.servers)
    twin = train_g_shuff(federation, plan.training, noise=noise_of_the_servers(plan, tmp_path))
    assert np.abs(released(result)[0] - twin.model.layers[0]).max() <= weight_bound(plan)


@pytest.mark.parametrize(("protocol", "servers"), [("g_bmf", g_bmf.servers), ("g_shuff", g_shuff.servers)])
def test_the_ledger_holds_every_step_and_the_model_and_the_claim_says_so(federation, tmp_path, protocol, servers):
    plan = open_plan(federation, protocol, epochs=2)
    steps = plan.schedule.num_steps
    result = run_secure(plan, federation, tmp_path, servers)
    for ledger in result.ledgers:
        assert [(r.name, r.receiver, r.elements) for r in ledger.releases] == [
            ("fault in the upload of client 1", "all servers", 1),
            ("fault in the upload of client 2", "all servers", 1),
            *[("noised gradient sums", "all servers", plan.parameters)] * steps,
            ("global model", "client 'client 1'", plan.parameters),
            ("global model", "client 'client 2'", plan.parameters),
        ]
        assert f"one of {steps} steps" in ledger.releases[2].claim
        assert plan.claim.headline() in ledger.releases[2].claim
    assert f"the noised gradient sums of all {steps} steps are opened" in plan.claim.paragraph()
    secret = plan_run(protocol, federation, small_training(epochs=2))
    assert "opened to the three" not in secret.claim.paragraph() and "noised gradient sums" not in secret.releases
    assert (plan.claim.epsilon, plan.claim.delta) == (secret.claim.epsilon, secret.claim.delta)
    assert plan.fingerprint != secret.fingerprint


@pytest.mark.parametrize("changes", CASES, ids=IDS)
def test_the_declared_cost_of_a_step_is_what_it_costs(federation, tmp_path, monkeypatch, changes):
    """Bytes depend on the bound of the logits of each step, which is public."""
    plan, spy = open_plan(federation, **changes), Spy(monkeypatch)
    result = run_secure(plan, federation, tmp_path)
    scales = plan.scales
    costs = []
    for layers in layers_before(plan, spy.sums[0])[:-1]:
        if scales.smooth is not None:
            used = hidden_weights(layers, scales.weight_bits, scales.smooth)
            costs.append(step_cost(plan, Head(used.others[-1], WEIGHT_BITS, 0.0, hidden=used)))
        else:
            costs.append(step_cost(plan, rounded_head(layers[-1].values, scales.weight_bits, scales.layers[-1].reach)))
    training = [ledger.phases["training"] for ledger in result.ledgers]
    assert training[0].rounds == sum(cost.rounds for cost in costs)
    assert sum(counters.bytes_sent for counters in training) == sum(cost.bytes for cost in costs)
    if plan.training.hidden:
        assert {cost.rounds for cost in costs} == {14 + 2 * len(plan.training.hidden)}
        return
    assert max(cost.bytes for cost in costs) <= step_cost(plan).bytes
    saved = 1 if scales.low_round is not None else 3
    saved += plan.training.weight_decay != 1.0
    assert costs[0].rounds == step_cost(replace(plan, training=plan.training.with_(weights="secret"))).rounds - saved


def test_no_operation_leaves_its_domain(federation, tmp_path):
    plan = open_plan(federation, epochs=2, momentum=0.9)
    with pytest.warns(UserWarning, match="insecure_check_ranges is set"):
        run_secure(plan, federation, tmp_path, insecure_check_ranges=True)


def test_joint_noise_goes_with_open_weights(tmp_path):
    federation = small_federation(16, (2,), 2)
    plan = open_plan(federation, noise="joint", batch_size=16, epochs=2)
    result = run_secure(plan, federation, tmp_path)
    assert all((output[0] == result.outputs[0][0]).all() for output in result.outputs)
    assert [r.name for r in result.ledgers[0].releases].count("noised gradient sums") == 2


# public integers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 40, 2**20, 2**45])
@pytest.mark.parametrize("rows", [1, 7, 3000])
def test_the_bound_of_norms_is_above_and_close(size, rows):
    columns = np.random.default_rng(rows).integers(-size, size + 1, (rows, 4))
    largest = max(math.isqrt(sum(int(value) ** 2 for value in column)) for column in columns.T)
    assert largest <= norm_above(columns) <= largest * (1 + 2.0**-16) + 2
    assert norm_above(np.zeros((3, 2), dtype=np.int64)) <= 1


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 300.0, 2.0**28])
def test_the_head_has_the_softmax_of_the_weights_and_bounds_the_logits(scale):
    rng = np.random.default_rng(3)
    values = np.rint((rng.normal(size=(50, 6)) + 5.0) * scale * 2.0**26).astype(np.int64)
    head = rounded_head(values, 26, 2.0)
    rows = rng.normal(size=(40, 50))
    rows *= 2.0 / np.linalg.norm(rows, axis=1, keepdims=True)
    logits = rows @ (head.words * 2.0**-head.bits)
    assert np.abs(logits).max() <= head.logit_bound
    plain = rows @ (values * 2.0**-26)
    gaps = (plain - plain[:, :1]) - (logits - logits[:, :1])
    assert np.abs(gaps).max() <= 2 * math.sqrt(50) * 2.0 * 2.0**-head.bits
    assert head.high_bit <= 61 and (head.bits == 16 or scale == 2.0**28)


def test_weights_that_outgrow_the_ring_end_the_run_with_a_sentence():
    huge = np.full((3, 2), 1 << 60)
    huge[:, 1] = 0
    with pytest.raises(ValueError, match="the training diverges: lower the learning rate"):
        rounded_head(huge, 20, 1.0)
    layer = PublicLayer(np.full((2, 2), 1 << 60))
    with pytest.raises(ValueError, match="lower the learning rate"):
        moved([layer], [np.full((2, 2), -(1 << 20))], 1 << 40, small_training())


def test_a_step_of_public_weights_is_exact_integer_arithmetic():
    """Against Python's integers, momentum and decay included."""
    training = small_training(momentum=0.9, weight_decay=0.999)
    rng = np.random.default_rng(0)
    layer = PublicLayer(rng.integers(-(2**40), 2**40, (4, 3)), (rng.integers(-(2**20), 2**20, (4, 3)),))
    sums = rng.integers(-(2**20), 2**20, (4, 3))
    after = moved([layer], [sums], 12345, training)[0]
    beta, alpha = round(0.9 * 2**20), round(0.999 * 2**16)
    for index in np.ndindex(4, 3):
        w, v, y = int(layer.values[index]), int(layer.memory[0][index]), int(sums[index])
        velocity = (beta * v + 2**19 >> 20) + y
        assert int(after.memory[0][index]) == velocity
        assert int(after.values[index]) == (alpha * w + 2**15 >> 16) - 12345 * velocity


def test_adam_is_exact_integer_arithmetic_close_to_the_twins():
    """Against Python's integers, at the ends of what words hold too; and against the twin's floating point."""
    training, rng = small_training(optimiser="adam", learning_rate=0.1), np.random.default_rng(0)
    for size, noise_square in ((2**29 - 1, 0), (2**29 - 1, 2**50), (2**18, 2**34), (40, 0)):
        start = rng.integers(-(2**36), 2**36, 6)
        layer, replayed = PublicLayer(start, (np.zeros(6, dtype=np.int64),) * 2), [[int(w), 0, 0] for w in start]
        twin, floating = start * 2.0**-36, Optimiser(training, np.zeros(6))
        rate = round(0.1 * 2 ** (36 - RELEASE_BITS))
        for step in range(25):
            sums = rng.integers(-size, size + 1, 6) // rng.integers(1, 50) + (size // 3 if step % 3 else 0)
            sums[0] = (size, -size)[step % 2]
            (layer,) = moved([layer], [sums], rate, training, step, noise_square)
            floating.move(twin, sums * 2.0**-RELEASE_BITS, 0.1, math.sqrt(noise_square) * 2.0**-RELEASE_BITS)
            for state, y in zip(replayed, map(int, sums), strict=True):
                first, second = min(step + 1, 10), min(step + 1, 1000)
                state[1] += (2 * (y * 256 - state[1]) + first) // (2 * first)
                state[2] += (2 * (y * y - noise_square - state[2]) + second) // (2 * second)
                root = math.isqrt(max(state[2], noise_square // 100, 1))
                state[0] -= rate * min(4096, max(-4096, (32 * state[1] + root) // (2 * root)))
            assert [(layer.values[i], layer.memory[0][i], layer.memory[1][i]) for i in range(6)] == [
                *map(tuple, replayed)
            ]
            coarse = 1e-3 if size > 40 else 0.1  # sums of a hundredth have few bits
            assert np.abs(layer.values * 2.0**-36 - twin).max() <= coarse * 0.1 * (step + 1)


@pytest.mark.parametrize(
    ("protocol", "rows", "servers", "train"),
    [("g_bmf", 96, g_bmf.servers, train_g_bmf), ("g_shuff", 32, g_shuff.servers, train_g_shuff)],
)
def test_adam_trains_the_twins_model(tmp_path, protocol, rows, servers, train):
    federation = small_federation(rows, (5, 4), 4)
    plan = open_plan(federation, protocol, optimiser="adam", learning_rate=0.05, epochs=4)
    result = run_secure(plan, federation, tmp_path, servers)
    twin = train(federation, plan.training, noise=noise_of_the_servers(plan, tmp_path))
    gap = np.abs(released(result)[0] - twin.model.layers[0]).max()
    assert gap <= 2.0**-9 * 0.05 * plan.schedule.num_steps < 0.05 * np.abs(twin.model.layers[0]).max()
    sgd = plan_run(protocol, federation, plan.training.with_(optimiser="sgd"))
    assert plan.claim.epsilon == sgd.claim.epsilon and plan.fingerprint != sgd.fingerprint
    assert (step_cost(plan).rounds, plan.claim.paragraph()) == (step_cost(sgd).rounds, sgd.claim.paragraph())


def test_a_smaller_bound_of_the_logits_takes_fewer_bytes(federation):
    plan = open_plan(federation)
    near, far = (step_cost(replace(plan, scales=replace(plan.scales, logit_bound=bound))) for bound in (1.0, 2.0**14))
    assert near.bytes < far.bytes and near.rounds == far.rounds
    assert Head(np.zeros((1, 2), np.int64), 16, 1.0).high_bit == 38
