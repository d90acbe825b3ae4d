"""What every phase of a run costs between the servers, before it runs: rounds and bytes, exactly (with open weights the
steps' bytes are a bound, ``protocols.step.cost``).

Phases are named as in the ledger. What is done block by block is run dry for every size of a block, of which there are
two, and counted; so the cost of a million rows takes as long to find as that of a thousand. Not counted: how the
servers get ready (keys, where to go on, commitments), a handful of rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

import refmpc
from accel.prg import KEY_BYTES
from protocols.plan.row_test import NORM_ROWS, RowTest, row_test
from protocols.plan.run_plan import CHUNK_ROWS, Plan
from protocols.plan.scales import EMBEDDING_BITS
from protocols.server.joint_noise import joint_block_rows, joint_noise_cost
from protocols.server.verification import COMPARED_ROWS
from protocols.state.commitment import SALT_BYTES
from protocols.step.clip import NORM_CHUNK, norms_of_squares, squared_norms
from protocols.step.cost import step_cost
from refmpc import ArithmeticTensor, Cost, Party
from refmpc.primitives.input_checks import PROJECTIONS, Faults, side_by_side
from refmpc.primitives.io import SHARE_DIGEST_BYTES

__all__ = ["phase_costs", "total_cost"]

_COINS = bytes(KEY_BYTES)


def phase_costs(plan: Plan, *, keeps_steps: bool = False) -> dict[str, Cost]:
    """The phases of a run of G-BMF or G-Shuff. ``keeps_steps``: whether steps are kept on disk (checkpoints are asked
    for)."""
    steps, clients = plan.schedule.num_steps, len(plan.client_names)
    step = step_cost(plan)
    found = _beginning(plan, clients)
    found["upload"] = Cost(-(-plan.schedule.num_samples // CHUNK_ROWS) * (clients + 1), 0)
    if plan.row_tests:
        found["verification"] = _verification(plan)
    found["norms"] = _norms(plan)
    shuffles = plan.shuffles
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
    to_clients = Cost(clients, (24 * plan.parameters + 3 * SHARE_DIGEST_BYTES) * clients)
    confirmed = Cost(0, 0) if plan.opens_sums else Cost(2, 12)  # written, and marked, at all three
    found["release"] = total_cost([to_clients, confirmed])
    return found


def _beginning(plan: Plan, clients: int) -> dict[str, Cost]:
    """Digests of what is public are compared, where each server's disk stands, and what clients committed to."""
    joint = plan.training.noise == "joint"
    stands = Cost(int(joint), 6 * 8 * (joint + (not plan.opens_sums)))
    tags = (SALT_BYTES + clients) * 3 * clients + 6 * clients  # a salt and a verdict to each, votes between servers
    main = Cost(1 + stands.rounds, 6 * 32 + stands.bytes)
    return {"set-up": Cost(1, 6 * 16), "main": main, "commitments": Cost(3 * clients + 1, tags)}


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


def _verification(plan: Plan) -> Cost:
    """Coins, and at the end a word for each client; all else at the same time: squares, hashes and sums of labels in
    the first round, comparisons in the others."""
    rows, clients = plan.schedule.num_rows, len(plan.client_names)
    together = [_rows_within(rows, test) for test in plan.row_tests] + [_labels(plan)]
    together.append(Cost(1, 3 * 32 * clients))  # hashes
    return total_cost(
        [
            Cost(1, 3 * KEY_BYTES),
            Cost(max(cost.rounds for cost in together), sum(cost.bytes for cost in together)),
            Cost(1, 48 * clients),
        ]
    )


def _rows_within(rows: int, test: RowTest) -> Cost:
    """``require_rows_within``: the sharing of squares, the projections in two rounds beside the first comparisons."""
    block = min(test.rows, rows)
    sums = -(-rows // block) * side_by_side(block * test.width)
    squares = sum(side_by_side(min(NORM_ROWS, rows - start)) for start in range(0, rows, NORM_ROWS))
    projections = [_run(_small_sums, sums, test.entry_limit(rows)), _run(_small_sums, squares, test.square_limit(rows))]
    compared = _blocks(_squares_within, rows, COMPARED_ROWS, test.high_bit(rows), test.low_bit)
    return Cost(1 + compared.rounds, 24 * rows + compared.bytes + sum(cost.bytes for cost in projections))


def _labels(plan: Plan) -> Cost:
    rows = plan.schedule.num_samples
    if plan.training.task == "regression":
        test = row_test(1, 1.0, exact=True)
        assert test is not None
        return _rows_within(rows, test)
    zeros = [side_by_side(rows * plan.outputs)]
    if plan.training.task == "classification":
        zeros.append(side_by_side(rows))
    costs = [_run(_zero_sums, count) for count in zeros]
    return Cost(3, sum(cost.bytes for cost in costs))


def _norms(plan: Plan) -> Cost:
    if plan.scales.smooth is not None:
        return Cost(0, 0)
    return _blocks(_norms_of_squares if plan.row_tests else _norms_of_rows, plan.schedule.num_rows, NORM_CHUNK, plan)


def _run(program: Callable[..., Any], *arguments: Any) -> Cost:
    releases = {"bit": "nothing: no secret is here"}
    return refmpc.dry_run(program, *arguments, releases=releases)["main"]


# programs on zeros -------------------------------------------------------------------------------


async def _small_sums(party: Party, count: int, limit: int) -> None:
    sums = np.zeros((2, PROJECTIONS, count), dtype=np.uint64)
    await Faults(party, _COINS).require_small(refmpc.seal(sums), limit)


async def _zero_sums(party: Party, count: int) -> None:
    sums = np.zeros((1, PROJECTIONS, count), dtype=np.uint64)
    await Faults(party, _COINS).require_zero(refmpc.seal(sums))


async def _squares_within(party: Party, rows: int, high_bit: int, low_bit: int) -> None:
    squares = ArithmeticTensor.zeros(party, (rows,), 0)
    await Faults(party, _COINS).require_not_negative(squares, high_bit, low_bit)


def _zero_labels(party: Party, rows: int, plan: Plan) -> ArithmeticTensor:
    return ArithmeticTensor.zeros(party, (rows, plan.outputs), plan.label_bits)


async def _norms_of_rows(party: Party, rows: int, plan: Plan) -> None:
    await squared_norms(
        ArithmeticTensor.zeros(party, (rows, 1), EMBEDDING_BITS), plan.scales, _zero_labels(party, rows, plan)
    )


async def _norms_of_squares(party: Party, rows: int, plan: Plan) -> None:
    await norms_of_squares(
        ArithmeticTensor.zeros(party, (rows,), 2 * EMBEDDING_BITS), plan.scales, _zero_labels(party, rows, plan)
    )
