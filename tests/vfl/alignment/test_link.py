"""The alignment over sockets: TLS, wrong frames, silence, and what the others are told when somebody gives up."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from bench.alignment import measure
from refmpc.net.certificates import make_credentials
from refmpc.net.tls import Credentials, secure, shake_hands, tls_context
from vfl.alignment import (
    MATCHINGS,
    Alignment,
    AlignmentError,
    AlignmentRefused,
    PeerTls,
    align_as_leader,
    align_as_member,
)
from vfl.alignment.steps import Terms


def _context(own: Credentials, server_side: bool) -> ssl.SSLContext:
    return tls_context(own, server_side=server_side)


@contextlib.contextmanager
def running(ids: Sequence[object], link: socket.socket, **options: object) -> Iterator[list[Alignment | Exception]]:
    """A member "a" of ("a", "b") in a thread; its result or error is in the list afterwards."""
    outcome: list[Alignment | Exception] = []
    options = {"name": "a", "clients": ("a", "b"), **options}

    def work() -> None:
        try:
            outcome.append(align_as_member(ids, link, **options))  # type: ignore[arg-type]
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


@pytest.mark.parametrize("matching", MATCHINGS)
@pytest.mark.parametrize("clients", ["ab", "abcd"])
def test_over_mutual_tls_and_the_same_counts_at_both_ends(tmp_path: Path, matching: str, clients: str) -> None:
    """Members recognise each other, too, through the leader, who passes on what they say."""
    *members, leader = list(clients)
    credentials = make_credentials(list(clients), tmp_path)
    ids = {name: [*"xyz", *(f"{name}{i}" for i in range(place))] for place, name in enumerate(clients)}

    def tls(name: str) -> PeerTls:
        own = credentials[name]
        return PeerTls(partial(_context, own), {str(peer): (pin,) for peer, pin in own.pinned.items()})

    with contextlib.ExitStack() as stack:
        outcomes, links = [], {}
        for name in members:
            here, there = socket.socketpair()
            link = secure(there, credentials[name], server_side=False)
            how = {"name": name, "clients": tuple(clients), "pad_to": 300, "matching": matching, "tls": tls(name)}
            outcomes.append(stack.enter_context(running(ids[name], link, **how)))
            links[name] = stack.enter_context(secure(here, credentials[leader], server_side=True))
            shake_hands(links[name], name)
        found = align_as_leader(ids[leader], links, name=leader, pad_to=300, matching=matching)
    order = [ids[leader][i] for i in found.rows]
    assert sorted(order) == [*"xyz"]
    moved = 0
    for name, (member,) in zip(members, outcomes, strict=True):
        assert isinstance(member, Alignment)
        assert [ids[name][i] for i in member.rows] == order
        moved += member.bytes_moved
    assert found.bytes_moved == moved
    if (matching, clients) == ("ecdh", "ab"):
        terms = len(Terms(("a", "b"), 300, "ecdh").encoded())
        lists, positions, count, headers = 3 * 300 * 32, 3 * 3 * 4, 8, 11 * 5
        assert moved == 2 * terms + lists + positions + count + headers


def test_a_member_whose_certificate_is_not_the_pinned_one_is_refused_by_the_other(tmp_path: Path) -> None:
    """The leader passes on what members say: it could put itself in between."""
    clients = ("a", "b", "c")
    credentials = make_credentials(clients, tmp_path)
    right = {str(peer): (pin,) for peer, pin in credentials["b"].pinned.items()}
    links, outcomes = {}, {}
    with contextlib.ExitStack() as stack:
        for name in clients[:-1]:
            here, there = socket.socketpair()
            links[name] = stack.enter_context(here)
            known = {**right, "b": right["c"]} if name == "a" else right
            tls = PeerTls(partial(_context, credentials[name]), known)
            outcomes[name] = stack.enter_context(running(["x"], there, name=name, clients=clients, tls=tls))
        with pytest.raises(AlignmentRefused, match="client '[ab]' gave up: .*client 'b' failed: .*not the one pinned"):
            align_as_leader(["x"], links, name="c")
    assert all(isinstance(outcome[0], AlignmentRefused) for outcome in outcomes.values())
    with pytest.raises(ValueError, match="tls = None: must be certificates"):
        align_as_member(["x"], links["a"], name="a", clients=clients)


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
        (struct.pack("<cI", b"V", 32) + bytes(32), "kind b'V' with 32 bytes, due is b'T'"),
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
    found = measure(clients=3, ids=200, overlap=0.25, matching="ecdh")
    assert found["matched"] == 50
    terms = len(Terms(("client 0", "client 1", "client 2"), None, "ecdh").encoded())
    # lists: 2 offered, one visit for each of them, two for the leader's; positions: the same visits, and 2 results; two
    # are told the count, agree, and say that they have all
    assert found["methods"][0]["bytes"] == 4 * terms + 10 * 200 * 32 + 10 * 50 * 4 + 2 * 8 + 30 * 5


def test_after_a_rehearsal_no_kernel_is_loaded_late() -> None:
    """`ppvfl warm` rehearses: the first alignment of an installation compiled for seconds, and others waited."""
    program = """
from numba.core.dispatcher import Dispatcher
from accel.compiled import oprf
from tests.vfl.alignment.exchange import Exchange
from vfl.alignment import rehearse

def loaded():
    return {name: len(value.overloads) for name, value in vars(oprf).items() if isinstance(value, Dispatcher)}

rehearse("ot", 64)
before = loaded()
ids = [str(i) for i in range(100)]
assert [len(Exchange([ids] * clients, matching="ot").run().rows[0]) for clients in (2, 3)] == [100, 100]
assert loaded() == before and all(before[name] == 1 for name in oprf.__all__), before
"""
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3], check=True, timeout=300)
