"""What a step costs, in figures: a dry run follows the program, so only figures notice that a step sends more.

A change that lowers (or has to raise) them changes this table, the documentation and the changelog.
"""

from __future__ import annotations

import pytest

from protocols.plan.gl_plan import plan_layer_run
from protocols.plan.run_plan import plan_run
from protocols.step.cost import step_cost
from refmpc import Cost
from tests.protocols.conftest import lora_federation, small_federation
from vfl.training import TrainingConfig

GLOBAL = {
    "linear": ({}, Cost(52, 54150)),
    "decay and momentum": ({"weight_decay": 0.99, "momentum": 0.5}, Cost(53, 54950)),
    "explicit": ({"gradients": "explicit"}, Cost(51, 86974)),
    "one hidden layer": ({"hidden": (16,)}, Cost(65, 166671)),
    "two hidden layers": ({"hidden": (16, 8), "momentum": 0.5}, Cost(75, 229001)),
}
LAYERS = {
    "∂U and ∂V": ({}, "UV", Cost(57, 101996)),
    "∂U alone": ({}, "U", Cost(55, 75932)),
    "decay": ({"weight_decay": 0.99, "momentum": 0.5}, "UV", Cost(58, 103972)),
    "explicit": ({"gradients": "explicit"}, "UV", Cost(53, 152474)),
}


def training(**changes) -> TrainingConfig:
    return TrainingConfig(epochs=1, batch_size=32, learning_rate=0.1, epsilon=8.0, **changes)


@pytest.mark.parametrize("changes,cost", GLOBAL.values(), ids=GLOBAL)
def test_a_step_on_the_global_model_costs_no_more_than_before(changes, cost):
    plan = plan_run("g_bmf", small_federation(96, (5, 4), 4), training(**changes))
    assert step_cost(plan) == cost


@pytest.mark.parametrize("changes,parts,cost", LAYERS.values(), ids=LAYERS)
def test_a_step_of_gl_bmf_costs_no_more_than_before(changes, parts, cost):
    federation = lora_federation(96, (5, 4), ((6, 3), (4,)), 4, parts=parts)
    assert step_cost(plan_layer_run(federation, training(**changes).with_(learning_rate=0.5))) == cost
