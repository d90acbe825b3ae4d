"""GL-BMF: are a client's rows and factors of this step what the claim presumes? Tested by the servers on shares: proofs
§11.6.

Clients share anew in every step, so the test is made in every step, for each client against its own public bounds. What
is opened, 40 parities that are 0 for a client that follows the protocol, depends on that client's words and public
coins alone.

Rounds: 5 a step, whatever the number of clients. Bytes: 143 a row and tensor, 43 a piece of a long row, 5 kB a tensor
(40 kB if it has more than 131,072 entries). A cheating client is missed with a probability of 4·2^−40 a step, an honest
one refused with 2^−80.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

import refmpc
from protocols.plan.gl_plan import LayerPlan
from protocols.plan.row_test import NormTest, step_release, upload_release
from protocols.server.verification import UploadRefused, projected_labels, require_one_hot
from refmpc import ArithmeticTensor, Party
from refmpc.primitives.input_checks import Faults, Subsets, public_coins

__all__ = ["verify_labels", "verify_step"]

Tested = Sequence[tuple[ArithmeticTensor, NormTest]]


async def verify_labels(party: Party, plan: LayerPlan, labels: ArithmeticTensor) -> None:
    """Tests that every label is one-hot, once; raises ``UploadRefused`` at all servers."""
    name = plan.client_names[-1]
    faults = Faults(party, await public_coins(party))
    await refmpc.gather(faults.require_same_shares([projected_labels(faults, labels)]), require_one_hot(faults, labels))
    if await faults.opened(upload_release(name)):
        raise UploadRefused(f"client {name!r} shared labels that are none: nothing was trained", [name])


async def verify_step(party: Party, clients: Mapping[str, Tested]) -> None:
    """Tests all that each client has shared in this step; raises ``UploadRefused`` at all servers, with the names."""
    coins = await public_coins(party)
    subsets = Subsets(coins)
    found = await refmpc.gather(
        *(
            _opened(Faults(party, coins, place, subsets), name, tested)
            for place, (name, tested) in enumerate(clients.items())
        )
    )
    if refused := [name for name, bad in zip(clients, found, strict=True) if bad]:
        who = " and ".join(f"client {name!r}" for name in refused)
        raise UploadRefused(
            f"{who} shared rows or factors of its layers beyond their public bounds in step {party.step + 1}: training "
            "stops here, and nothing of this step was released",
            refused,
        )


def _in_pieces(x: ArithmeticTensor, test: NormTest) -> ArithmeticTensor:
    """The pieces of all rows as rows of their own, the last of each filled up with zeros."""
    if test.pieces == 1:
        return x
    words = np.zeros((2, test.rows, test.pieces * test.size), dtype=np.uint64)
    words[:, :, : test.width] = refmpc.unseal(x.shares).reshape(2, test.rows, test.width)
    return ArithmeticTensor(x.party, words.reshape(2, -1, test.size), x.fraction_bits)


async def _opened(faults: Faults, name: str, tested: Tested) -> bool:
    projections = [faults.project_all(x.shares) for x, _ in tested]
    parts = [_in_pieces(x, test) for x, test in tested]
    *squares, _ = await refmpc.gather(*(refmpc.dot(x, x) for x in parts), faults.require_same_shares(projections))
    tests = [faults.require_small(words, test.limit) for words, (_, test) in zip(projections, tested, strict=True)]
    wholes = []
    for square, (_, test) in zip(squares, tested, strict=True):
        norms = square.reinterpret(0).reshape(test.rows, test.pieces)
        wholes.append((-norms.sum(axis=1)).reshape(-1) + test.squared)
        if test.pieces > 1:  # each piece is below 2·squared, so their sum has not wrapped
            tests.append(faults.require_not_negative((-norms).reshape(-1) + test.squared, 63, test.low_bit))
    await refmpc.gather(*tests, faults.require_not_negative(refmpc.concatenate(wholes)))
    return await faults.opened(step_release(name))
