"""What the fork server of a local run does once, so that servers and clients start warm.

Importing the protocols is half of it. The other half is compiled kernels: a training step is run dry here, at all three
servers' roles, so that every process forked from this one has them. On a machine that has none yet they are compiled
here, once, instead of in three servers at the same time.
"""

from __future__ import annotations

import contextlib

import refmpc
from accel.prg import KEY_BYTES, Stream
from protocols.plan.run_plan import Plan, PublicClient, PublicFederation, plan_run
from protocols.plan.scales import EMBEDDING_BITS
from protocols.step.cost import step_cost
from protocols.step.global_step import squared_norms
from refmpc import ArithmeticTensor, Party
from vfl.dp import NoiseSource
from vfl.training import TrainingConfig

__all__: list[str] = []

ROWS, WIDTH = 8, 4  # small: kernels are the same for every size


async def _norms(party: Party, plan: Plan) -> None:
    await squared_norms(ArithmeticTensor.zeros(party, (ROWS, WIDTH + 1), EMBEDDING_BITS), plan.scales)


def _warm_up(weights: str, task: str, classes: int) -> None:
    federation = PublicFederation((PublicClient("client", WIDTH),), ROWS, classes, 1.0, ())
    training = TrainingConfig(epochs=1, batch_size=ROWS, learning_rate=0.5, delta=1e-6, weights=weights, task=task)
    plan = plan_run("g_bmf", federation, training)
    step_cost(plan)
    refmpc.dry_run(_norms, plan)
    NoiseSource(
        plan.factorisation, plan.parameters, plan.server_noise_std, lambda _: Stream(bytes(KEY_BYTES))
    ).next_row()


with contextlib.suppress(Exception):  # a fork server must start: what is wrong here shows in the servers
    for each in ("open", "secret"):
        _warm_up(each, "classification", 3)
    _warm_up("open", "binary", 2)  # what an open regression needs is among it
