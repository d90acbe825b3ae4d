"""What a step costs, in figures: a dry run follows the program, so only figures notice that a step sends more.

A change that lowers (or has to raise) them changes this table, the documentation and the changelog.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.shapes import StepShape, step_plan
from protocols.plan.gl_plan import plan_layer_run
from protocols.plan.run_plan import plan_run
from protocols.step.cost import step_cost
from refmpc import Cost
from tests.protocols.conftest import lora_federation, small_federation
from vfl.training import TrainingConfig

GLOBAL = {  # with secret weights, with open weights
    "linear": ({}, Cost(18, 83447), Cost(17, 80694)),
    "decay and momentum": ({"weight_decay": 0.99, "momentum": 0.5}, Cost(19, 84247), Cost(17, 80694)),
    "explicit": ({"gradients": "explicit"}, Cost(25, 117457), Cost(22, 112183)),
    "one hidden layer": ({"hidden": (16,)}, Cost(27, 227471), Cost(16, 187514)),
    "two hidden layers": ({"hidden": (16, 8), "momentum": 0.5}, Cost(49, 260946), Cost(18, 258723)),
}
LAYERS = {
    "∂U and ∂V": ({}, "UV", Cost(31, 134311)),
    "∂U alone": ({}, "U", Cost(29, 108247)),
    "decay": ({"weight_decay": 0.99, "momentum": 0.5}, "UV", Cost(32, 136491)),
    "explicit": ({"gradients": "explicit"}, "UV", Cost(27, 184789)),
}
PAPER = {10: (Cost(18, 1535597), Cost(17, 1128338)), 26: (Cost(21, 3382175), Cost(20, 2323846))}


def training(**changes) -> TrainingConfig:
    return TrainingConfig(epochs=1, batch_size=32, learning_rate=0.1, epsilon=8.0, **changes)


@pytest.mark.parametrize("changes,secret,opened", GLOBAL.values(), ids=GLOBAL)
def test_a_step_on_the_global_model_costs_no_more_than_before(changes, secret, opened):
    federation = small_federation(96, (5, 4), 4)
    for weights, cost in (("secret", secret), ("open", opened)):
        assert step_cost(plan_run("g_bmf", federation, training(weights=weights, **changes))) == cost


@pytest.mark.parametrize("classes", PAPER)
def test_a_step_of_the_papers_sizes(classes):
    """B = 128, d = 2000."""
    plan = step_plan(StepShape(128, 2000, classes))
    opened = replace(plan, training=plan.training.with_(weights="open"))
    assert (step_cost(plan), step_cost(opened)) == PAPER[classes]


@pytest.mark.parametrize("changes,parts,cost", LAYERS.values(), ids=LAYERS)
def test_a_step_of_gl_bmf_costs_no_more_than_before(changes, parts, cost):
    federation = lora_federation(96, (5, 4), ((6, 3), (4,)), 4, parts=parts)
    assert step_cost(plan_layer_run(federation, training(**changes).with_(learning_rate=0.5))) == cost
