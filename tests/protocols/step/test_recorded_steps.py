"""Training steps, recorded: six chained steps with changing batches, noise and rates are those of the same steps
eager."""

from __future__ import annotations

import functools
import os
import warnings

import numpy as np
import pytest

import refmpc
from bench.shapes import StepShape, step_inputs, step_plan
from protocols.plan.gl_plan import plan_layer_run
from protocols.plan.run_plan import plan_run
from protocols.plan.scales import EMBEDDING_BITS, RELEASE_BITS
from protocols.step.gl_step import layer_step
from protocols.step.secret_step import SharedRows, Weights, gradient_step, rate_input, squared_norms
from refmpc import ArithmeticTensor
from tests.protocols.conftest import lora_federation, small_federation
from tests.protocols.step.gl_inputs import make_inputs, shared_inputs
from vfl.training import TrainingConfig

STEPS = 6


def share(party, values, bits):
    return party.complete(refmpc.input_from_party(party, 0, values if party.id == 0 else None, np.shape(values), bits))


def counted(party, before):
    """Counters since ``before``, without times."""
    now = party.ledger.total()
    return [getattr(now, name) - getattr(before, name) for name in ("rounds", "bytes_sent", "frames_sent")]


def global_steps(party, plan, inputs):
    """This party's shares after each step of a linear model or an MLP, and its counters."""
    rows = share(party, inputs["rows"], EMBEDDING_BITS)
    everyone = SharedRows(
        rows,
        share(party, inputs["labels"], 0),
        party.complete(squared_norms(rows, plan.scales)),
    )
    layers = [
        Weights(
            share(party, layer, plan.scales.weight_bits),
            ArithmeticTensor.zeros(party, layer.shape, RELEASE_BITS) if plan.training.momentum else None,
        )
        for layer in inputs["layers"]
    ]

    async def secret_step(rows, layers, noise, rate):
        return await gradient_step(rows, layers, noise, rate, plan.training, plan.scales)

    step, batch, found = party.recorded(secret_step), plan.training.batch_size, []
    before = party.ledger.total()
    for number in range(STEPS):
        party.step = number
        start = number * batch % (len(inputs["rows"]) - batch + 1)
        noise = np.random.default_rng((number, party.id)).integers(-(2**40), 2**40, plan.parameters)
        rate = rate_input(party, 0.5 / (number + 1), plan.scales)
        layers = party.complete(step(everyone.batch(slice(start, start + batch)), layers, noise, rate))
        found += [refmpc.unseal(layer.values.shares).copy() for layer in layers]
        found += [refmpc.unseal(layer.velocity.shares).copy() for layer in layers if layer.velocity is not None]
    return found, counted(party, before), len(step._programs)


def joint_steps(party, plan, inputs):
    """The same for GL-BMF: shares of the weights and this party's words of all openings."""
    embeddings, labels, weights, clients = party.complete(shared_inputs(party, plan, inputs))
    step, state, found = party.recorded(functools.partial(layer_step, plan=plan)), Weights(weights, None), []
    before = party.ledger.total()
    for number in range(STEPS):
        party.step = number
        noise = np.random.default_rng((number, party.id)).integers(-(2**40), 2**40, plan.parameters)
        rate = rate_input(party, 0.5 / (number + 1), plan.scales)
        state, openings = party.complete(step(embeddings, labels, clients, state, noise, rate))
        found += [refmpc.unseal(state.values.shares).copy(), *(refmpc.unseal(words).copy() for words in openings)]
    return found, counted(party, before), len(step._programs)


def linear():
    shape = StepShape(16, 40, 4, samples=160, epochs=2)
    plan, inputs = step_plan(shape), step_inputs(shape)
    rows = np.concatenate([inputs.rows, inputs.rows[::-1]])
    labels = np.concatenate([inputs.one_hot, inputs.one_hot])
    return global_steps, plan, {"rows": rows, "labels": labels, "layers": [inputs.weights]}


def mlp():
    training = TrainingConfig(
        epochs=2, batch_size=8, learning_rate=0.5, clip_norm=1.0, epsilon=8.0, hidden=(6,), momentum=0.5
    )
    plan = plan_run("g_bmf", small_federation(48, (4, 3), 3), training)
    rng = np.random.default_rng(1)
    rows = np.rint(np.concatenate([rng.uniform(-0.3, 0.3, (48, 7)), np.ones((48, 1))], axis=1) * 2**14) / 2**14
    inputs = {"rows": rows, "labels": np.eye(3)[rng.integers(0, 3, 48)], "layers": [np.asarray(w) for w in plan.start]}
    return global_steps, plan, inputs


def gl_bmf():
    plan = plan_layer_run(
        lora_federation(32, (4, 3), ((3,), (2,)), 3),
        TrainingConfig(epochs=1, batch_size=8, learning_rate=0.5, clip_norm=1.0, epsilon=8.0),
    )
    return joint_steps, plan, make_inputs(plan, 1.0)


MODELS = {"linear": linear, "mlp": mlp, "gl_bmf": gl_bmf}


def play(party, job):
    name, recording = job
    os.environ["REFMPC_RECORD"] = "1" if recording else "0"
    steps, plan, inputs = MODELS[name]()
    return steps(party, plan, inputs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["threads", "plain", "tls"])
def test_chained_steps_are_the_same_recorded_and_eager(name, way, monkeypatch):
    monkeypatch.setenv("REFMPC_RECORD", "1")  # and back afterwards
    outputs = {}
    for recording in (False, True):
        options = {} if way == "threads" else {"parties": "processes", "tls": way == "tls"}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="insecure_")
            result = refmpc.run(play, [(name, recording)] * 3, insecure_seed=5, timeout=60, **options)
        outputs[recording] = result.outputs
    for (eager, sent, none), (recorded, sent_recorded, programs) in zip(outputs[False], outputs[True], strict=True):
        assert none == 0 and 1 <= programs <= 3
        assert sent == sent_recorded
        assert len(eager) == len(recorded) and all(map(np.array_equal, eager, recorded))
