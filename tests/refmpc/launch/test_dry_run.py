"""A dry run counts what a real run counts, exactly, in every phase."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

import refmpc
from refmpc import Cost
from refmpc.core.party import SMALL
from refmpc.launch.dry_run import CountingTransport
from refmpc.primitives.io import SHARE_DIGEST_BYTES

RELEASES = {"sum": "an example, no claim"}


async def program(party, rows):
    """Every kind of message: from a client, between servers alone and side by side, a shuffle, to all and to one."""
    with party.phase("upload"):
        x = refmpc.input_from_client(party, "hospital", (rows, 3), 16)
        y = await refmpc.input_from_party(party, 1, np.ones((rows, 3)) if party.id == 1 else None, (rows, 3), 16)
    with party.phase("computing"):
        x, y = cast("list[refmpc.ArithmeticTensor]", await refmpc.shuffle([x, y]))
        share, product = await refmpc.gather(refmpc.softmax(x, 16, 40), refmpc.multiply_truncate(x, y, 16))
        joint = await refmpc.joint_gaussian(party, (5,))
        factor = await refmpc.clip_factor((await refmpc.dot(y, y)).reinterpret(26), 100.0)
        total = share.sum() + product.sum() + factor.sum() + joint.sum()
    refmpc.reveal_to_client(total, "hospital", "sum")
    await refmpc.reveal(total, "sum")


def hospital(client, rows):
    client.share(np.ones((rows, 3)), 16)
    client.receive((), 30)


@pytest.mark.parametrize("rows", [1, 65, SMALL + 1])
def test_a_dry_run_counts_what_a_run_counts(rows):
    counted = refmpc.dry_run(program, rows, releases=RELEASES)
    result = refmpc.run(program, [rows] * 3, clients={"hospital": (hospital, rows)}, releases=RELEASES)
    names = [name for name in result.ledgers[0].phases if name != "set-up"]
    assert list(counted) == names == ["upload", "computing", "main"]
    for name in names:
        phases = [ledger.phases[name] for ledger in result.ledgers]
        assert counted[name] == Cost(phases[0].rounds, sum(phase.bytes_sent for phase in phases)), name
    assert counted["main"] == Cost(2, 2 * 24 + 3 * SHARE_DIGEST_BYTES) and counted["upload"] == Cost(2, 8 * 3 * rows)
    assert counted == refmpc.dry_run(program, rows, releases=RELEASES)


def test_a_transport_to_nobody_counts_payload_and_frames_and_delivers_zeros():
    transport, arrived = CountingTransport(), np.ones((2, 3), dtype=np.uint64)
    transport.exchange("test", {1: [np.zeros(5, np.uint8), np.zeros(2)], "bank": [np.zeros(1)]}, {2: [arrived]})
    assert (transport.bytes_sent, transport.frames_sent, transport.seconds_waiting) == (29, 2, 0.0)
    assert not arrived.any()


def test_what_a_program_refuses_is_refused_in_a_dry_run():
    with pytest.raises(refmpc.ReleaseRefused, match="'sum' .* was not declared"):
        refmpc.dry_run(program, 1)


def test_a_program_that_sends_nothing_costs_nothing():
    assert refmpc.dry_run(lambda party: None) == {}
