"""A deployed server's recorded steps: their rounds are prepared over the same sockets, and counted with what clients
get."""

import socket
import threading

import numpy as np

import refmpc
from protocols.net.spool import Spool, SpoolTransport
from refmpc import Party
from refmpc.net.prepared import PreparedRound
from refmpc.net.sockets import SocketTransport

STEPS = 3


def _transports(directory):
    """Transports of three servers, connected with each other; each keeps a spool of one client."""
    ends = {}
    for a, b in ((0, 1), (1, 2), (2, 0)):
        ends[a, b], ends[b, a] = socket.socketpair()
    return [
        SpoolTransport(
            SocketTransport({other: ends[me, other] for other in range(3) if other != me}, 10.0),
            {"bank": Spool(directory / f"server-{me}")},
        )
        for me in range(3)
    ]


def _train(server, transport):
    """Some steps and a message for the client: shares of the results, and what the ledger counts."""
    party = Party(server, transport, insecure_seed=4)
    party.declare({"squares": "of a test"})

    async def step(x):
        return await refmpc.multiply_truncate(x, x, 16)

    repeated, results = party.recorded(step), []
    for number in range(STEPS):
        party.step = number
        x = party.complete(
            refmpc.input_from_party(party, 0, np.arange(5.0) + number if server == 0 else None, (5,), 16)
        )
        product = party.complete(repeated(x))
        results.append(party.complete(refmpc.reveal(product, release="squares")).tolist())
    party.send("a message", "bank", [np.zeros(3, dtype=np.uint8)])
    total = party.ledger.total()
    return results, total.bytes_sent, total.frames_sent, total.rounds


def _everywhere(transports):
    found = [None] * 3

    def run(server):
        found[server] = _train(server, transports[server])

    threads = [threading.Thread(target=run, args=(server,)) for server in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_recorded_steps_of_a_deployed_server_are_the_same_and_their_rounds_prepared(tmp_path, monkeypatch):
    codes = []
    call = PreparedRound.__call__

    def noting(self, code):
        codes.append(code)
        return call(self, code)

    monkeypatch.setattr(PreparedRound, "__call__", noting)
    found = {}
    for recording in (False, True):
        monkeypatch.setenv("REFMPC_RECORD", "1" if recording else "0")
        transports = _transports(tmp_path / str(recording))
        found[recording] = _everywhere(transports)
        for transport in transports:
            assert transport.outbox["bank"] == [("a message", bytes(3))]
            transport.close()
        assert len(codes) == (3 * 2 * (STEPS - 1) if recording else 0)  # two rounds, of all but the first step
    assert None not in found[True]
    assert found[True] == found[False]
    for results, *_ in found[True]:
        for number, squares in enumerate(results):
            assert np.allclose(squares, (np.arange(5.0) + number) ** 2, atol=2**-14)
