"""Clients outside: what they send to the byte, who learns what, and what happens when one misbehaves."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

import refmpc
from accel.prg import KEY_BYTES
from refmpc.core.errors import OutOfStep, PartyFailed, PeerLost, ReleaseRefused
from refmpc.net.framing import FRAME_OVERHEAD
from refmpc.primitives.io import SHARE_DIGEST_BYTES

WHERE = ["threads", "processes"]
SUM = {"sum": "a test, no claim"}


def share_and_count(client, values):
    client.share(values)
    return client.transport.bytes_sent, client.transport.frames_sent


def share_only(client, values):
    client.share(values)


def share_and_receive(client, values):
    client.share(values)
    return client.receive(np.shape(values))


async def sum_for_servers(party):
    total = refmpc.input_from_client(party, "a", (4,)) + refmpc.input_from_client(party, "b", (4,))
    return await refmpc.reveal(total, release="sum")


def sum_for_client_a(party):
    total = refmpc.input_from_client(party, "a", (4,)) + refmpc.input_from_client(party, "b", (4,))
    refmpc.reveal_to_client(total, "a", release="sum")


@pytest.mark.parametrize(("parties", "tls"), [("threads", False), ("processes", False), ("processes", True)])
def test_servers_compute_on_what_several_clients_share(parties, tls):
    clients = {"a": (share_and_count, [1.0, 2.0, 3.0, -4.5]), "b": (share_and_count, [0.5] * 4)}
    result = refmpc.run(sum_for_servers, parties=parties, tls=tls, clients=clients, releases=SUM, timeout=10)
    for output in result.outputs:
        assert output.tolist() == [1.5, 2.5, 3.5, -4.0]
    # 16 bytes a value in all, and each of two seeds to the two servers that hold its share
    assert result.client_outputs == dict.fromkeys("ab", (16 * 4 + 4 * KEY_BYTES, 3))


def test_sharing_costs_sixteen_bytes_a_value_and_servers_send_nothing():
    clients = {"a": (share_and_count, np.zeros((100, 10)))}
    result = refmpc.run(lambda party: refmpc.input_from_client(party, "a", (100, 10)).shape, clients=clients)
    assert result.client_outputs["a"] == (16 * 1000 + 4 * KEY_BYTES, 3)
    assert result.bytes == 0
    assert result.rounds == 1


@pytest.mark.parametrize("parties", WHERE)
def test_a_result_goes_to_one_client_only(parties):
    clients = {"a": (share_and_receive, [1.0, 2.0, 3.0, 4.0]), "b": (share_only, [10.0] * 4)}
    with pytest.warns(UserWarning, match="insecure_record"):
        result = refmpc.run(
            sum_for_client_a, parties=parties, clients=clients, releases=SUM, timeout=10, insecure_record=True
        )
    assert result.client_outputs["a"].tolist() == [11.0, 12.0, 13.0, 14.0]
    assert result.client_outputs["b"] is None
    assert result.outputs == [None] * 3
    assert result.bytes == 24 * 4 + 3 * SHARE_DIGEST_BYTES  # from each server a share, and nothing between servers
    for ledger, transcript in zip(result.ledgers, result.transcripts, strict=True):
        assert [(r.name, r.elements, r.receiver) for r in ledger.releases] == [("sum", 4, "client 'a'")]
        assert ledger.releases[0].claim == "a test, no claim"
        assert {operation for operation, _, _ in transcript} == {"input_from_client"}, "a server received a share"


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("server", [0, 1, 2])
def test_a_client_notices_a_share_that_its_two_holders_tell_differently(server, which):
    """One bit falls over in one server's memory: in the share whose words it sends, or in the one that it vouches
    for."""

    def damaged(party):
        x = refmpc.input_from_client(party, "a", (4,))
        if party.id == server:
            refmpc.unseal(x.shares)[which, 2] ^= np.uint64(1 << 40)
        refmpc.reveal_to_client(x, "a", release="sum")

    pair = (server + which - 1) % 3, (server + which) % 3
    with pytest.raises(
        PartyFailed, match=f"client 'a' failed: SharesDiffer: server-{pair[0]} and server-{pair[1]} sent 'a'"
    ):
        refmpc.run(damaged, clients={"a": (share_and_receive, [1.0] * 4)}, releases=SUM, timeout=10)


def test_a_release_that_was_not_declared_does_not_reach_the_client():
    clients = {"a": (share_and_receive, [1.0] * 4), "b": (share_only, [1.0] * 4)}
    with pytest.raises(PartyFailed, match=r"release 'sum' .4 elements to client 'a'. was not declared") as caught:
        refmpc.run(sum_for_client_a, clients=clients, timeout=3)
    assert isinstance(caught.value.__cause__, ReleaseRefused)
    assert "client 'a' ended too: server-0 gave up while this party was in 'reveal_to_client': Release" in str(
        caught.value
    )


def reveal_to_stranger(party):
    refmpc.reveal_to_client(refmpc.input_from_client(party, "a", (4,)), "mallory", release="sum")


@pytest.mark.parametrize("parties", WHERE)
def test_a_client_that_takes_no_part_cannot_receive(parties):
    clients = {"a": (share_only, [1.0] * 4)}
    with pytest.raises(PartyFailed, match="client 'mallory' takes no part in this run"):
        refmpc.run(reveal_to_stranger, parties=parties, clients=clients, releases=SUM, timeout=5)


@pytest.mark.parametrize("parties", WHERE)
def test_a_client_with_the_wrong_shape_is_named_with_both_sizes(parties):
    clients = {"a": (share_only, [1.0] * 4), "b": (share_only, [1.0] * 5)}
    with pytest.raises(PartyFailed) as caught:
        refmpc.run(sum_for_servers, parties=parties, clients=clients, releases=SUM, timeout=3)
    assert isinstance(caught.value.__cause__, OutOfStep)
    assert "client 'b' sent 72 bytes in 'input_from_client' (message 1), this party expects 64" in str(caught.value)


def fails(client, values):
    raise RuntimeError(f"the account is {values[0]}")


@pytest.mark.parametrize("parties", WHERE)
def test_a_client_that_fails_is_the_root_cause_and_its_values_stay_with_it(parties):
    clients = {"a": (share_only, [1.0] * 4), "b": (fails, [123456.0])}
    with pytest.raises(PartyFailed) as caught:
        refmpc.run(sum_for_servers, parties=parties, clients=clients, releases=SUM, timeout=5)
    first, *others = str(caught.value).split("\n\n")[0].splitlines()
    assert first == "client 'b' failed: RuntimeError: the account is 123456.0"
    assert any(
        "client 'b' gave up while this party was in 'input_from_client': RuntimeError" in line for line in others
    )
    assert not any("123456" in line for line in others)


def dies_half_way(client, values):
    """Sends the header and half of the payload to every server, and is gone."""
    transport = client.transport
    seed, correction = np.zeros(KEY_BYTES, np.uint8), np.zeros(1000, np.uint64)
    for server in range(3):
        parts = [seed, seed] if server == 0 else [seed, correction]
        header = transport._header(server, "input_from_client", parts)
        assert len(header) == FRAME_OVERHEAD
        transport._connections[server].setblocking(True)
        transport._connections[server].sendall(header + bytes(40))
    os.kill(os.getpid(), signal.SIGKILL)


def take_a_thousand(party):
    return refmpc.input_from_client(party, "a", (1000,)).shape


@pytest.mark.parametrize("tls", [False, True])
def test_a_client_that_dies_in_its_upload_is_named_by_the_servers(tls):
    with pytest.raises(PartyFailed) as caught:
        refmpc.run(take_a_thousand, parties="processes", tls=tls, clients={"a": (dies_half_way, None)}, timeout=5)
    text = str(caught.value)
    assert text.startswith("client 'a' failed: PartyFailed: its process died (killed by signal 9)")
    for server in range(3):
        assert f"server-{server} ended too: " in text
    assert "client 'a' closed the connection in 'input_from_client' (message 1): it died or was killed" in text
    assert not isinstance(caught.value.__cause__, PeerLost)


def test_clients_have_names():
    with pytest.raises(ValueError, match="clients = ''"):
        refmpc.run(sum_for_servers, clients={"": (share_only, [1.0])})
    unnamed: Any = 1
    with pytest.raises(ValueError, match="clients = 1"):
        refmpc.run(sum_for_servers, clients={unnamed: (share_only, [1.0])})
