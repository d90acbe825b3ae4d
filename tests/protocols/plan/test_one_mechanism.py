"""Twin, product and benchmark choose the same mechanism: what is found with the twin holds for the run on shares."""

from __future__ import annotations

from itertools import product

import pytest

from bench.shapes import StepShape, step_plan
from protocols.plan.gl_plan import plan_layer_run
from protocols.plan.run_plan import Plan, plan_run
from protocols.run.options import parse_options
from tests.protocols.conftest import lora_federation, small_federation
from vfl.dp.factorisation import KINDS
from vfl.training import TrainingConfig
from vfl.twins.mechanisms import NoisePlan, plan_matrix_factorisation, plan_shuffled

PROTOCOLS = ("g_bmf", "g_shuff", "gl_bmf")
WORKLOADS = [(1.0, 0.0), (1.0, 0.9), (0.99, 0.5), (0.8, 0.9)]  # α, β; the last has no square root


def both(protocol: str, training: TrainingConfig) -> tuple[Plan, NoisePlan]:
    """The plan of the servers and that of the twin, for the same public sizes."""
    schedule = training.steps(128)
    if protocol == "gl_bmf":
        federation = lora_federation(128, (3, 2), ((2, 3), (3, 3)), 3)
        return plan_layer_run(federation, training), plan_matrix_factorisation(training, schedule)
    federation = small_federation(128, (3, 2), 3)
    twin = plan_shuffled if protocol == "g_shuff" else plan_matrix_factorisation
    return plan_run(protocol, federation, training), twin(training, schedule)


@pytest.mark.parametrize("bands", [None, 2])
@pytest.mark.parametrize("protocol,kind", list(product(PROTOCOLS, KINDS)))
def test_twin_and_product_choose_the_same_mechanism(protocol, kind, bands):
    for weight_decay, momentum in WORKLOADS:
        training = TrainingConfig(
            epochs=2,
            batch_size=32,
            learning_rate=0.1,
            epsilon=8.0,
            factorisation=kind,
            weight_decay=weight_decay,
            momentum=momentum,
            bands=bands,
            accounting="any-order",
        )
        if momentum >= weight_decay and kind != "identity" and protocol != "g_shuff":
            with pytest.raises(ValueError, match="the square root of the workload needs β < α"):
                both(protocol, training)
            with pytest.raises(ValueError, match="the square root of the workload needs β < α"):
                plan_matrix_factorisation(training, training.steps(128))
            continue
        secure, twin = both(protocol, training)
        assert secure.factorisation == twin.factorisation
        assert (secure.factorisation.weight_decay, secure.factorisation.momentum) == (weight_decay, momentum)
        assert secure.factorisation.workload_error() == twin.factorisation.workload_error()
        assert secure.claim.mechanism == twin.claim.mechanism
        assert secure.claim.participation == twin.claim.participation
        # fixed point costs the product a little, never the twin
        assert twin.noise_multiplier <= secure.noise.noise_multiplier <= 1.001 * twin.noise_multiplier
        assert twin.sensitivity <= secure.noise.sensitivity <= 1.01 * twin.sensitivity


def test_a_benchmark_runs_the_plan_of_the_product():
    shape = StepShape(32, 6, 3, samples=128, epochs=2)
    for gradients in ("factored", "explicit"):
        made = step_plan(shape, gradients=gradients)
        training = made.training
        assert (training.clip_norm, training.learning_rate) == (shape.clip_norm, shape.learning_rate)
        federation = small_federation(128, (3, 3), 3, row_bound=shape.row_bound)
        product_plan = plan_run("g_bmf", federation, training)
        assert made.scales == product_plan.scales and made.factorisation == product_plan.factorisation
        assert made.noise.noise_multiplier == product_plan.noise.noise_multiplier


def test_the_choices_of_a_factorisation_are_those_that_exist():
    for kind in KINDS:
        assert TrainingConfig(factorisation=kind).factorisation == kind
        assert parse_options("g_bmf", None, ["--factorisation", kind]).training.factorisation == kind
    with pytest.raises(ValueError, match=", ".join(map(repr, KINDS))):
        TrainingConfig(factorisation="dct")
