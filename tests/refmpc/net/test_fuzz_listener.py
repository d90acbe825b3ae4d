"""Garbage, half-open connections and crowds at a live listener: it stays up, stays small, and the run takes place."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import re
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st

import refmpc
from refmpc.core.errors import RefmpcError
from refmpc.net.certificates import make_credentials
from refmpc.net.framing import FRAME_OVERHEAD, HEADER
from refmpc.net.greeting import Greeting
from refmpc.net.rendezvous import Credentials, connect_client, connect_party, listen
from refmpc.net.sockets import SocketTransport
from tests.refmpc.listener_attacks import attacks, perform
from tests.refmpc.participants import all_end

GREETING = Greeting("the run that is besieged", {"rows": 10})
VALUES = [1.0, -2.0, 3.5]
PAGE = os.sysconf("SC_PAGE_SIZE")

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")


# a real run, server-0 in a process of its own -----------------------------------------------------


def play(id: int, listener: socket.socket, addresses: Any, credentials: Credentials | None, timeout: float) -> Any:
    """One party: connect, square what the client shares, open it to the client."""
    connections = connect_party(
        id, listener, addresses, GREETING, credentials=credentials, clients=("bank",), timeout=timeout
    )
    transport = SocketTransport(connections, 20.0)
    party = refmpc.Party(id, transport, run_id=b"besieged")
    party.declare({"squares": "a test"})

    async def program() -> np.ndarray | None:
        x = refmpc.input_from_client(party, "bank", (3,))
        squares = await refmpc.multiply_truncate(x, x, 16)
        refmpc.reveal_to_client(squares, "bank", "squares")
        return await refmpc.reveal(squares, "squares")

    with np.errstate(over="ignore"):
        found = party.complete(program())
    transport.close()
    return found


def play_client(addresses: Any, credentials: Credentials | None, timeout: float) -> Any:
    transport = SocketTransport(
        connect_client("bank", addresses, GREETING, credentials=credentials, timeout=timeout), 20.0
    )
    client = refmpc.Client("bank", transport)
    client.share(VALUES)
    found = client.receive((3,))
    transport.close()
    return found


def besieged_party(pipe: Connection, credentials: Credentials | None) -> None:
    with listen() as listener:
        pipe.send(listener.getsockname()[1])
        found = play(0, listener, {}, credentials, 600.0)
    time.sleep(0.2)  # threads that have just been sent away
    pipe.send((found, threading.active_count(), len(os.listdir("/proc/self/fd"))))


class Besieged:
    """Server-0 in a process, with its port, its memory and its end."""

    def __init__(self, credentials: dict[Any, Credentials] | None):
        self._credentials = credentials or {}
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=besieged_party, args=(theirs, self._credentials.get(0)), daemon=True)
        self.process.start()
        theirs.close()
        self.address = "127.0.0.1", self.pipe.recv()

    def memory(self) -> int:
        """Bytes of memory that the process really uses."""
        assert self.process.is_alive(), f"server-0 ended with exit code {self.process.exitcode}"
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * PAGE

    def complete_the_run(self, within: float) -> None:
        """The other two parties and the client come, and everybody gets the right result."""
        listeners = [listen() for _ in range(2)]
        addresses = {0: self.address, **{i: ("127.0.0.1", s.getsockname()[1]) for i, s in enumerate(listeners, 1)}}
        mine = self._credentials
        ended = all_end(
            {
                1: lambda: play(1, listeners[0], addresses, mine.get(1), within),
                2: lambda: play(2, listeners[1], addresses, mine.get(2), within),
                "bank": lambda: play_client(addresses, mine.get("bank"), within),
            },
            within + 15.0,
        )
        for listener in listeners:
            listener.close()
        assert self.pipe.poll(10.0)
        found, threads, descriptors = self.pipe.recv()
        for result in (found, *ended.values()):
            np.testing.assert_allclose(result, np.square(VALUES), atol=1e-4)
        assert threads == 1, f"{threads} threads are left"
        assert descriptors < 20, f"{descriptors} descriptors are left"

    def close(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture(params=["plain", "tls"])
def besieged(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Besieged, Credentials | None]]:
    credentials = make_credentials([0, 1, 2, "bank"], tmp_path) if request.param == "tls" else None
    target = Besieged(credentials)
    yield target, None if credentials is None else credentials[2]
    target.close()


def fuzz(address: tuple[str, int], stolen: Credentials | None, seconds: float, first_seed: int) -> int:
    """Attack for so long from the first attack on; returns the number of attacks. Some connections stay open until the
    end."""
    until, done = float("inf"), 0
    staying: list[socket.socket] = []
    for number in itertools.count(first_seed):

        @seed(number)
        @settings(max_examples=50, suppress_health_check=list(HealthCheck), deadline=None)
        @given(attacks())
        def attack_once(attack: Any) -> None:
            nonlocal done, until
            if time.monotonic() < until:
                until = min(until, time.monotonic() + seconds)
                staying.extend(perform(attack, address, stolen))
                done += 1

        attack_once()
        if time.monotonic() >= until:
            break
        for connection in staying[:-50]:
            connection.close()
        del staying[:-50]
    for connection in staying:
        connection.close()
    return done


def siege(besieged: tuple[Besieged, Credentials | None], seconds: float, allowed: int, attackers: int = 1) -> None:
    target, stolen = besieged
    fuzz(target.address, stolen, seconds / 4, 0)  # code is loaded, threads have had their stacks
    before = target.memory()
    counts = all_end(
        {
            i: lambda i=i: fuzz(target.address, stolen, seconds * 3 / 4, 1000 + 10**6 * i)  # type: ignore[misc]
            for i in range(attackers)
        },
        seconds + 120.0,
    )
    grown = target.memory() - before
    assert all(isinstance(count, int) and count > 0 for count in counts.values()), counts
    print(f"{sum(counts.values())} attacks, memory {before / 1e6:.1f} MB, then {grown / 1e6:+.1f} MB")
    assert grown < allowed, f"{grown / 1e6:.1f} MB more after {sum(counts.values())} attacks"
    target.complete_the_run(within=60.0)


def test_garbage_for_some_seconds(besieged: tuple[Besieged, Credentials | None]) -> None:
    siege(besieged, 2.5, allowed=8_000_000)


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_garbage_for_two_minutes(besieged: tuple[Besieged, Credentials | None]) -> None:
    siege(besieged, 120.0, allowed=16_000_000, attackers=3)


def test_the_run_takes_place_while_the_door_is_crowded(besieged: tuple[Besieged, Credentials | None]) -> None:
    """Two hundred callers who say nothing, from one address, replaced as soon as they are sent away."""
    target, _ = besieged
    stop = threading.Event()

    def crowd() -> int:
        waiting: list[socket.socket] = []
        while not stop.is_set():
            with contextlib.suppress(OSError):
                waiting.append(socket.create_connection(target.address, 0.2, source_address=("127.0.0.2", 0)))
            if len(waiting) > 200:
                waiting.pop(0).close()
            stop.wait(0.002)
        for connection in waiting:
            connection.close()
        return len(waiting)

    thread = threading.Thread(target=crowd)
    thread.start()
    try:
        time.sleep(1.0)
        target.complete_the_run(within=30.0)
    finally:
        stop.set()
        thread.join()


def test_what_strangers_say_is_not_kept_for_ever() -> None:
    """Sixty strangers with sixty names: the final sentence names some and counts the others."""
    with listen() as listener:
        address = listener.getsockname()
        waiting = {"party": lambda: connect_party(0, listener, {}, GREETING, timeout=2.0)}

        def strangers() -> None:
            for number in range(60):
                words = json.dumps({"from": f"eve {number} " + "x" * 500}).encode()
                with socket.create_connection(address) as connection:
                    connection.sendall(struct.pack("<I", len(words)) + words)
                    connection.recv(1 << 16)

        said = str(all_end({**waiting, "strangers": strangers})["party"])
    assert "'eve 0 x" in said
    assert re.search(r"others \(\d+ times\)", said)
    assert len(said) < 6000


# frames after the greeting -----------------------------------------------------------------------


def frame(operation: bytes, size: int, number: int, payload: bytes) -> bytes:
    return HEADER.pack(size, number, zlib.crc32(operation), 0, operation) + payload


@settings(max_examples=150)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.builds(
            frame,
            st.sampled_from([b"sum", b"product", b"\x1b[31m"]),
            st.one_of(st.sampled_from([0, 16, 2**64 - 1, 2**64 - 2, 2**63]), st.integers(0, 2**64 - 1)),
            st.one_of(st.sampled_from([0, 1, 2]), st.integers(0, 2**32 - 1)),
            st.binary(max_size=40),
        ),
    )
)
@example(frame(b"sum", 16, 1, bytes(16)))
@example(frame(b"sum", 16, 1, bytes(15)))
def test_any_bytes_of_a_peer_are_a_frame_or_an_error_of_the_library(data: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        transport = SocketTransport({1: here}, 5.0)
        there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        arrived = np.full(2, 7, dtype=np.uint64)
        begun = time.monotonic()
        try:
            transport.exchange("sum", {}, {1: [arrived]})
        except RefmpcError as error:
            assert str(error).isprintable()
        else:
            assert data[:FRAME_OVERHEAD][:8] == (16).to_bytes(8, "little")
            assert arrived.tobytes() == data[FRAME_OVERHEAD : FRAME_OVERHEAD + 16]
        assert time.monotonic() - begun < 2.0
