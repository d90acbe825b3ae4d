"""The alignment over sockets: TLS, wrong frames, silence, and what the others are told when somebody gives up."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bench.alignment import measure
from refmpc.net.certificates import make_credentials
from refmpc.net.tls import secure, shake_hands
from vfl.alignment import Alignment, AlignmentError, align_as_leader, align_as_member


@contextlib.contextmanager
def running(ids: Sequence[object], link: socket.socket, **options: object) -> Iterator[list[Alignment | Exception]]:
    """A member "a" of ("a", "b") in a thread; its result or error is in the list afterwards."""
    outcome: list[Alignment | Exception] = []

    def work() -> None:
        try:
            outcome.append(align_as_member(ids, link, name="a", clients=("a", "b"), **options))  # type: ignore[arg-type]
        except Exception as error:
            outcome.append(error)
        finally:
            link.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield outcome
    finally:
        thread.join(timeout=20)
        assert not thread.is_alive()


def test_over_mutual_tls_and_the_same_counts_at_both_ends(tmp_path: Path) -> None:
    credentials = make_credentials(["a", "b"], tmp_path)
    here, there = socket.socketpair()
    with (
        running(["x", "y", "z"], secure(there, credentials["a"], server_side=False), pad_to=300) as outcome,
        secure(here, credentials["b"], server_side=True) as link,
    ):
        shake_hands(link, "a")
        found = align_as_leader(["z", "w", "y"], {"a": link}, name="b", pad_to=300)
    member = outcome[0]
    assert isinstance(member, Alignment)
    assert [["z", "w", "y"][i] for i in found.rows] == [["x", "y", "z"][i] for i in member.rows]
    assert sorted(found.rows) == [0, 2]
    assert (found.bytes_sent, found.bytes_received) == (member.bytes_received, member.bytes_sent)
    terms = len('{"version": 1, "clients": ["a", "b"], "pad_to": 300}')
    lists, positions, headers = 3 * 300 * 32, 3 * 2 * 4, 8 * 5
    assert found.bytes_sent + found.bytes_received == 2 * terms + lists + positions + headers


def test_different_terms_are_named_at_both_ends() -> None:
    here, there = socket.socketpair()
    with here, running(["x"], there, pad_to=5) as outcome, pytest.raises(AlignmentError, match='"pad_to": 5'):
        align_as_leader(["x"], {"a": here}, name="b", pad_to=6)
    assert isinstance(outcome[0], AlignmentError) and '"pad_to": 6' in str(outcome[0])


def test_a_problem_with_own_ids_stays_at_home() -> None:
    here, there = socket.socketpair()
    with here, running(["x", "x"], there) as outcome:
        with pytest.raises(AlignmentError, match="client 'a' gave up: it has a problem of its own") as caught:
            align_as_leader(["x"], {"a": here}, name="b")
        assert "rows" not in str(caught.value)
    assert "rows 0 and 1 have the same id" in str(outcome[0])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (struct.pack("<cI", b"T", 2**32 - 1), "4294967295 bytes"),
        (struct.pack("<cI", b"L", 32) + bytes(32), "kind b'L' with 32 bytes, due is b'T'"),
        (b"GET / HTTP/1.1\r\n\r\n", "kind b'G'"),
        (struct.pack("<cI", b"T", 10) + b"half", "closed the link"),
        (b"", "closed the link"),
        (struct.pack("<cI", b"X", 6) + b"no\n\x1bno", "gave up: no\\?\\?no"),
    ],
)
def test_wrong_frames_are_refused(data: bytes, message: str) -> None:
    here, there = socket.socketpair()
    with running(["x"], there) as outcome:
        here.sendall(data)
        here.shutdown(socket.SHUT_WR)
    here.close()
    assert isinstance(outcome[0], AlignmentError)
    with pytest.raises(AlignmentError, match=message):
        raise outcome[0]


def test_silence_and_trickling_are_not_waited_for() -> None:
    here, there = socket.socketpair()
    with here, running(["x"], there, timeout=0.3) as outcome:
        here.sendall(b"T")
    assert "client 'b' sent nothing for 0.3 s" in str(outcome[0])
    with pytest.raises(ValueError, match="timeout = 0"):
        align_as_member(["x"], there, name="a", clients=("a", "b"), timeout=0)
    with pytest.raises(ValueError, match="link to 'b'.*connected"):
        align_as_member(["x"], there, name="a", clients=("a", "b"))


def test_three_processes_align() -> None:
    found = measure(clients=3, count=200, overlap=0.25)
    assert found["matched"] == 50
    terms = len('{"version": 1, "clients": ["client 0", "client 1", "client 2"], "pad_to": null}')
    # lists: 2 offered, one visit for each of them, two for the leader's; positions: the same visits, and 2 results
    assert found["bytes"] == 4 * terms + 10 * 200 * 32 + 10 * 50 * 4 + 24 * 5


@pytest.mark.heavy
def test_a_hundred_thousand_ids_in_a_minute() -> None:
    found = measure(clients=2, count=100_000, overlap=0.5)
    assert found["matched"] == 50_000
    assert found["leader_cpu_seconds"] < 60
