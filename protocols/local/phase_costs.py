"""What every phase of a run costs between the servers, before it runs: rounds and bytes, exactly (with open weights the steps' bytes
are a bound, ``protocols.step.cost``).

Phases are named as in the ledger. What is done block by block is run dry for every size of a block, of which there are two, and
counted; so the cost of a million rows takes as long to find as that of a thousand. Not counted: how the servers get ready (keys, where
to go on, commitments), a handful of rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

import refmpc
from accel.prg import KEY_BYTES
from protocols.client.upload import CHUNK_ROWS
from protocols.client.verification import require_labels, require_norms_within
from protocols.noise.joint_noise import joint_block_rows, joint_noise_cost
from protocols.plan.row_test import NORM_ROWS, RowTest, row_test
from protocols.plan.run_plan import Plan
from protocols.plan.scales import EMBEDDING_BITS
from protocols.step.clip import NORM_CHUNK, norms_of_squares, squared_norms
from protocols.step.cost import step_cost
from refmpc import ArithmeticTensor, Cost, Party
from refmpc.primitives.input_checks import PROJECTIONS, Faults, public_coins, side_by_side

__all__ = ["phase_costs", "total_cost"]

_COINS = bytes(KEY_BYTES)


def phase_costs(plan: Plan, *, keeps_steps: bool = False) -> dict[str, Cost]:
    """The phases of a run of G-BMF or G-Shuff. ``keeps_steps``: whether steps are kept on disk (checkpoints are asked for)."""
    steps, clients = plan.schedule.num_steps, len(plan.client_names)
    step = step_cost(plan)
    found = {"upload": Cost(-(-plan.schedule.num_samples // CHUNK_ROWS) * (clients + 1), 0)}
    if plan.row_test is not None:
        found["verification"] = _verification(plan, plan.row_test)
    found["norms"] = _norms(plan)
    shuffles = plan.schedule.epochs if plan.protocol == "g_shuff" else int(plan.secret_order)
    if shuffles:
        entries = plan.schedule.num_rows * (plan.width + 1 + plan.outputs + 1)
        rounds = 2 * len(refmpc.column_chunks((plan.schedule.num_rows, plan.width + 1)))
        found["shuffle"] = Cost(rounds * shuffles, 32 * entries * shuffles)
    if plan.training.noise == "joint":
        found["noise"] = joint_noise_cost(plan)
    found["training"] = Cost(step.rounds * steps, step.bytes * steps)
    kept = steps if plan.opens_sums else 0
    if plan.training.noise == "joint":  # a block of it, too, is on all disks before it is used
        kept += -(-steps // joint_block_rows(plan.parameters))
    if keeps_steps and kept:
        found["checkpoint"] = Cost(kept, 6 * kept)
    to_clients = Cost(clients, 24 * plan.parameters * clients)
    to_servers = Cost(0, 0) if plan.opens_sums else Cost(3, 24 * plan.parameters + 12)
    found["release"] = total_cost([to_clients, to_servers])
    return found


def total_cost(costs: Any) -> Cost:
    """One after the other."""
    every = list(costs)
    return Cost(sum(cost.rounds for cost in every), sum(cost.bytes for cost in every))


def _blocks(program: Callable[..., Any], rows: int, size: int, *arguments: Any) -> Cost:
    """``program(party, rows of a block, …)`` for all blocks of ``size`` rows."""
    sizes = Counter(min(size, rows - start) for start in range(0, rows, size))
    each = {block: refmpc.dry_run(program, block, *arguments)["main"] for block in sizes}
    return Cost(
        sum(count * each[block].rounds for block, count in sizes.items()),
        sum(count * each[block].bytes for block, count in sizes.items()),
    )


def _verification(plan: Plan, test: RowTest) -> Cost:
    clients = len(plan.client_names)
    digests = Cost(2, 3 * (32 + 2) * clients)
    rows = _blocks(_rows_block, plan.schedule.num_rows, NORM_ROWS, test, plan.client_widths)
    return total_cost([digests, rows, _labels(plan), _run(_coins_and_bit)])


def _labels(plan: Plan) -> Cost:
    if plan.training.task != "regression":
        return _run(_label_tests, plan)
    test = row_test(1, 1.0)
    assert test is not None
    return _blocks(_rows_block, plan.schedule.num_samples, NORM_ROWS, test, (1,))


def _norms(plan: Plan) -> Cost:
    return _blocks(
        _norms_of_squares if plan.row_test is not None else _norms_of_rows, plan.schedule.num_rows, NORM_CHUNK, plan
    )


def _run(program: Callable[..., Any], *arguments: Any) -> Cost:
    releases = {"bit": "nothing: no secret is here"}
    return refmpc.dry_run(program, *arguments, releases=releases)["main"]


# programs on zeros -------------------------------------------------------------------------------


async def _rows_block(party: Party, rows: int, test: RowTest, widths: tuple[int, ...]) -> None:
    groups = [min(test.rows, rows - start) for start in range(0, rows, test.rows)]
    count = sum(side_by_side(group * width) for group in groups for width in widths)
    sums = np.zeros((2, PROJECTIONS, count), dtype=np.uint64)
    faults = Faults(party, _COINS)
    await faults.require_small_sums(refmpc.seal(sums), 1, 1)
    await require_norms_within(faults, ArithmeticTensor.zeros(party, (rows, 1), EMBEDDING_BITS), test)


async def _label_tests(party: Party, plan: Plan) -> None:
    labels = ArithmeticTensor.zeros(party, (1, plan.outputs), plan.label_bits)
    await require_labels(Faults(party, _COINS), plan, labels)


async def _coins_and_bit(party: Party) -> None:
    faults = Faults(party, await public_coins(party))
    await refmpc.reveal(await faults.any(), "bit")


async def _norms_of_rows(party: Party, rows: int, plan: Plan) -> None:
    await squared_norms(ArithmeticTensor.zeros(party, (rows, 1), EMBEDDING_BITS), plan.scales)


async def _norms_of_squares(party: Party, rows: int, plan: Plan) -> None:
    await norms_of_squares(ArithmeticTensor.zeros(party, (rows,), 2 * EMBEDDING_BITS), plan.scales)
