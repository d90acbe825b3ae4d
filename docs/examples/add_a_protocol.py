"""A new protocol: sums of one client's columns by the other client's groups, with noise and a claim.

Client ``card`` knows each person's group, client ``bank`` each person's columns. Nobody but the servers' arithmetic
ever brings the two together, and what is released is Σ_j [group of j] ⊗ h_j plus Gaussian noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import refmpc
from vfl.data.scaling import bound_rows
from vfl.dp import CalibratedNoise, FixedPointSlack, calibrate_matrix_factorisation, factorise

# --8<-- [start:plan]
ROW_BITS, GROUP_BITS = 14, 32  # together 46: the noise's 30 bits and the filter's 16
RELEASE_BITS = 12
RELEASE = "group sums"


@dataclass(frozen=True)
class Plan:
    """Public: sizes, the row bound R, and the noise with its claim."""

    people: int
    columns: int
    groups: int
    row_bound: float
    noise: CalibratedNoise

    @property
    def cut(self) -> int:
        return ROW_BITS + GROUP_BITS - RELEASE_BITS


def make_plan(people: int, columns: int, groups: int, epsilon: float, delta: float, row_bound: float = 1.0) -> Plan:
    """One release in which every person takes part once: Ω = 1, one step."""
    rounding = np.sqrt(columns) * 2.0 ** -(ROW_BITS + 1)  # of a row, when it becomes fixed point
    slack = FixedPointSlack(
        row_bound=row_bound,
        classes=groups,
        width=columns,
        steps=1,
        batch_size=people,
        truncated_bits=ROW_BITS + GROUP_BITS - RELEASE_BITS,
        coordinates=groups * columns,
        clip_rounding=float(rounding),
    )
    one_step = factorise("identity", 1)
    noise = calibrate_matrix_factorisation(epsilon, delta, row_bound, one_step, 1, 1, slack)
    return Plan(people, columns, groups, row_bound, noise)


# --8<-- [end:plan]


# --8<-- [start:servers]
async def servers(party: refmpc.Party, plan: Plan) -> np.ndarray | None:
    """What each server runs."""
    rows = refmpc.input_from_client(party, "bank", (plan.people, plan.columns), ROW_BITS)
    groups = refmpc.input_from_client(party, "card", (plan.people, plan.groups), GROUP_BITS)
    shape = plan.groups, plan.columns
    own_noise = refmpc.gaussian_addend(party, shape, plan.noise.server_std_in_grid_units, step=0)
    own_noise = own_noise << np.uint64(16)  # from the noise's 30 bits to the 46 of the product
    sums = await refmpc.matmul_truncate(groups.T, rows, plan.cut, addend=own_noise)
    return await refmpc.reveal(sums, RELEASE)


def bank(client: refmpc.Client, job: tuple[Plan, np.ndarray]) -> None:
    """The row bound is enforced here, at the client: it is part of the claim."""
    plan, rows = job
    client.share(bound_rows(rows, plan.row_bound), ROW_BITS)


def card(client: refmpc.Client, job: tuple[Plan, np.ndarray]) -> None:
    plan, groups = job
    client.share(np.eye(plan.groups)[groups], GROUP_BITS)


# --8<-- [end:servers]


# --8<-- [start:run]
def main() -> None:
    rng = np.random.default_rng(0)
    rows, groups = rng.uniform(-1, 1, (2000, 4)), rng.integers(0, 3, 2000)
    plan = make_plan(2000, 4, 3, epsilon=1.0, delta=1e-6)
    result = refmpc.run(
        servers,
        [plan] * 3,
        clients={"bank": (bank, (plan, rows)), "card": (card, (plan, groups))},
        releases={RELEASE: plan.noise.claim.paragraph()},  # nothing else can be opened
    )
    bounded = bound_rows(rows, plan.row_bound)
    exact = np.stack([bounded[groups == group].sum(axis=0) for group in range(3)])
    noise = result.outputs[0] - exact
    assert all(np.array_equal(output, result.outputs[0]) for output in result.outputs)
    assert 0.2 < noise.std() / plan.noise.outsider_std < 2.5, noise.std()  # 12 samples
    released = [(release.name, release.elements) for release in result.ledgers[0].releases]
    assert released == [(RELEASE, 12)], released
    claim = plan.noise.claim
    print(f"released: {released[0][1]} sums; ε = {claim.epsilon:.3g}, δ = {claim.delta:.3g}")
    print(f"noise: std {plan.noise.outsider_std:.3g} a sum; {result.rounds} rounds, {result.bytes} bytes")


if __name__ == "__main__":
    main()
# --8<-- [end:run]
