"""``refmpc.run``: arguments, results, counters, errors of programs and what cannot be sent to a process."""

from __future__ import annotations

import functools
import json
import multiprocessing
import sys
import textwrap
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import accel
import refmpc
from accel.prg import KEY_BYTES
from refmpc.core.errors import OutOfStep, PartyFailed, PeerAborted
from refmpc.launch import participants
from refmpc.launch.participants import explain, hanging
from refmpc.launch.processes import modules_of
from refmpc.net.framing import Peer

WHERE = ["threads", "processes"]
CLAIM = {"squares": "a test, no claim"}


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    assert multiprocessing.active_children() == []


async def squares(party, own):
    x = await refmpc.input_from_party(party, 0, own, shape=(3,))
    return await refmpc.reveal(x * x, release="squares")


def add_to_input(party, own):
    return party.id, own


def alone(party):
    return party.id


@pytest.mark.parametrize(("parties", "tls"), [("threads", False), ("processes", False), ("processes", True)])
def test_one_call_runs_a_program_at_three_parties(parties, tls):
    result = refmpc.run(squares, [[1.0, -2.0, 3.0], None, None], parties=parties, tls=tls, releases=CLAIM)
    for output in result.outputs:
        assert np.abs(output - [1.0, 4.0, 9.0]).max() < 1e-3
    assert [release.name for ledger in result.ledgers for release in ledger.releases] == ["squares"] * 3
    assert result.seconds > 0


@pytest.mark.parametrize("parties", WHERE)
def test_each_party_gets_its_own_input_and_returns_its_own_output(parties):
    assert refmpc.run(add_to_input, ["x", None, [1]], parties=parties).outputs == [(0, "x"), (1, None), (2, [1])]
    assert refmpc.run(alone, parties=parties).outputs == [0, 1, 2]


def test_arguments_are_refused_by_name():
    refused: list[tuple[dict[str, Any], str]] = [
        ({"parties": "trees"}, "parties = 'trees': must be one of 'threads', 'processes'"),
        ({"inputs": [1]}, "inputs"),
        ({"timeout": 0}, "timeout = 0"),
        ({"tls": True}, "tls = True: must be False with threads"),
        ({"network": "moon"}, "network = 'moon'"),
        ({"parameters": {"x": object()}}, "plain JSON"),
    ]
    for arguments, words in refused:
        with pytest.raises(ValueError, match=words):
            refmpc.run(alone, **arguments)


@pytest.mark.parametrize("option", [{"insecure_seed": 1}, {"insecure_check_ranges": True}, {"insecure_record": True}])
def test_every_insecure_option_warns(option):
    with pytest.warns(UserWarning, match=f"{next(iter(option))} is set: this run protects nothing"):
        refmpc.run(alone, **option)


def test_an_ordinary_run_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refmpc.run(squares, [[1.0, 2.0, 3.0], None, None], releases=CLAIM)


def parameters_of(party):
    return party.parameters


@pytest.mark.parametrize("parties", WHERE)
def test_parameters_reach_the_program(parties):
    assert refmpc.run(parameters_of, parties=parties, parameters={"rows": 3}).outputs == [{"rows": 3}] * 3


# counters ---------------------------------------------------------------------------------------


async def count_me(party):
    """One input (8 B a value), one product in a phase of its own (24 B), one release (24 B)."""
    x = await refmpc.input_from_party(party, 1, np.ones(5) if party.id == 1 else None, shape=(5,))
    with party.phase("product"):
        y = await refmpc.multiply(x, x)
    await refmpc.reveal(y, release="squares")


@pytest.mark.parametrize("parties", WHERE)
def test_bytes_frames_and_rounds_are_exact_by_phase(parties):
    result = refmpc.run(count_me, parties=parties, releases=CLAIM)
    phases = [ledger.phases for ledger in result.ledgers]
    for phase in phases:
        assert set(phase) == {"set-up", "main", "product"}
        assert (phase["set-up"].rounds, phase["set-up"].bytes_sent, phase["set-up"].frames_sent) == (1, KEY_BYTES, 1)
        assert (phase["product"].rounds, phase["product"].bytes_sent, phase["product"].frames_sent) == (1, 40, 1)
        assert phase["main"].rounds == 2
    assert [phase["main"].bytes_sent for phase in phases] == [40, 80, 40]  # server-1 also shares its input
    assert [phase["main"].frames_sent for phase in phases] == [1, 2, 1]
    assert (result.rounds, result.bytes) == (3, (8 + 24 + 24) * 5)


# errors of programs -----------------------------------------------------------------------------


async def fails_at_one(party, secret):
    x = await refmpc.input_from_party(party, 0, [1.0], shape=(1,))
    if party.id == 1:
        raise LookupError(f"no record for {secret}")
    return await refmpc.reveal(await refmpc.multiply(x, x), release="squares")


@pytest.mark.parametrize("parties", WHERE)
def test_an_error_at_one_party_is_raised_with_its_traceback_and_the_others_end(parties):
    begun = time.monotonic()
    with pytest.raises(PartyFailed) as caught:
        refmpc.run(fails_at_one, [None, "patient 4711", None], parties=parties, releases=CLAIM, timeout=20)
    assert time.monotonic() - begun < 10, "the others waited for the time-out"
    text = str(caught.value)
    assert text.startswith("server-1 failed: LookupError: no record for patient 4711\n")
    assert "Traceback of server-1:" in text
    assert "in fails_at_one" in text
    assert 'raise LookupError(f"no record for {secret}")' in text
    assert isinstance(caught.value.__cause__, LookupError)
    assert set(caught.value.tracebacks) == {0, 1, 2}


def test_parties_that_fail_together_write_their_tracebacks_one_after_the_other(monkeypatch):
    """Python 3.11 parses source lines for a traceback, and cannot do so in two threads at once."""
    real, all_failed = traceback.format_exc, threading.Barrier(3)
    inside: list[None] = []
    most: list[int] = []

    def formatting() -> str:
        inside.append(None)
        most.append(len(inside))
        time.sleep(0.02)  # the others are at this line too, if nothing holds them back
        inside.pop()
        return real()

    def program(party: refmpc.Party) -> None:
        all_failed.wait(10)
        raise LookupError(f"record {party.id}")

    monkeypatch.setattr(traceback, "format_exc", formatting)
    with pytest.raises(PartyFailed) as caught:
        refmpc.run(program, releases=CLAIM, timeout=20)
    assert [f"record {peer}" in caught.value.tracebacks[peer] for peer in range(3)] == [True] * 3
    assert most == [1, 1, 1]


@pytest.mark.parametrize("parties", WHERE)
def test_the_text_of_a_programs_error_never_leaves_the_party(parties):
    with pytest.raises(PartyFailed) as caught:
        refmpc.run(fails_at_one, [None, "patient 4711", None], parties=parties, releases=CLAIM, timeout=20)
    others = [line for line in str(caught.value).splitlines() if "ended too" in line]
    assert len(others) == 2
    assert all("gave up while this party was in" in line for line in others)
    assert any("server-1 gave up" in line and line.endswith("LookupError") for line in others)
    for peer in (0, 2):
        assert "4711" not in caught.value.tracebacks[peer]
    assert not any("4711" in line for line in others)


class ChattyError(OutOfStep):
    """A program's own subclass of an error of the library: its text is the program's, too."""


async def fails_with_a_disguised_error(party):
    if party.id == 2:
        raise ChattyError("secret 4711")
    return await refmpc.input_from_party(party, 2, None, shape=(1,))


def test_a_programs_subclass_of_a_library_error_keeps_its_text_too():
    with pytest.raises(PartyFailed) as caught:
        refmpc.run(fails_with_a_disguised_error, timeout=5)
    assert "4711" not in caught.value.tracebacks[0]


class NeedsTwo(Exception):
    """An exception that pickle can write but not read."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def raises_odd(party):
    if party.id == 0:
        raise NeedsTwo("salt", "pepper")


@pytest.mark.parametrize("parties", WHERE)
def test_an_exception_that_cannot_be_pickled_is_still_told(parties):
    with pytest.raises(PartyFailed, match=r"server-0 failed: .*salt and pepper"):
        refmpc.run(raises_odd, parties=parties, timeout=5)


def leaves(party):
    if party.id == 1:
        raise SystemExit(3)
    party._exchange("wait", {}, {1: [np.zeros(1)]})


@pytest.mark.parametrize("parties", WHERE)
def test_a_program_that_exits_is_a_failure_like_any_other(parties):
    with pytest.raises(PartyFailed, match="server-1 failed: SystemExit: 3"):
        refmpc.run(leaves, parties=parties, timeout=5)


def different_programs(party):
    operation = "reveal" if party.id == 2 else "multiply"
    party._exchange(operation, {party.next: [np.zeros(1)]}, {party.previous: [np.zeros(1)]})


@pytest.mark.parametrize("parties", WHERE)
def test_parties_that_run_different_programs_raise_and_name_both_operations(parties):
    with pytest.raises(PartyFailed) as caught:
        refmpc.run(different_programs, parties=parties, releases=CLAIM, timeout=5)
    assert isinstance(caught.value.__cause__, OutOfStep)
    assert "is out of step: it sent message" in str(caught.value)
    assert "'reveal'" in str(caught.value)
    assert "'multiply'" in str(caught.value)


def ends_early(party):
    if party.id != 0:
        party._exchange("more", {}, {0: [np.zeros(1)]})


@pytest.mark.parametrize("parties", WHERE)
def test_a_party_that_ends_early_is_named_as_such(parties):
    with pytest.raises(PartyFailed, match=r"server-0 has ended its program after . messages, this party expects"):
        refmpc.run(ends_early, parties=parties, timeout=5)


def loops(party):
    if party.id == 1:
        time.sleep(60)
    party._exchange("wait", {}, {1: [np.zeros(1)]})


@pytest.mark.parametrize("parties", WHERE)
def test_a_program_that_never_ends_does_not_hang_the_caller(parties, monkeypatch):
    monkeypatch.setattr(participants, "LATER", 2.0)
    begun = time.monotonic()
    with pytest.raises(PartyFailed) as caught:
        refmpc.run(loops, parties=parties, timeout=0.5)
    assert time.monotonic() - begun < 10
    assert str(caught.value).startswith("server-1 failed: PartyFailed: it did not end when the others had")
    assert "server-0 ended too: server-1 (message" in str(caught.value)
    assert "sent nothing in 'wait' for 0.5 s" in str(caught.value)


def test_the_root_cause_comes_before_its_echoes():
    echoes: dict[Peer, tuple[BaseException, str]] = {
        0: (PeerAborted("server-1 gave up"), "-"),
        1: (refmpc.PeerTimeout("server-2 sent nothing"), "-"),
    }
    assert str(explain(echoes)).startswith("server-1 failed: PeerTimeout")
    assert str(explain({**echoes, 2: (KeyError("x"), "-")})).startswith("server-2 failed: KeyError")
    waiting = {0: hanging(), "a": (PartyFailed("its process died (killed by signal 9)"), "-"), 1: hanging()}
    assert str(explain(waiting)).startswith("client 'a' failed: PartyFailed: its process died")


# processes --------------------------------------------------------------------------------------


def test_a_program_that_holds_a_lock_is_refused_with_the_way_out():
    lock = threading.Lock()
    with pytest.raises(ValueError, match=r"server-0 cannot be sent to a process .*functions of a module.*'threads'"):
        refmpc.run(lambda party: lock.locked(), parties="processes")


def test_an_input_that_cannot_be_pickled_is_refused_and_names_the_party():
    with pytest.raises(ValueError, match="an input of server-1 cannot be sent to a process"):
        refmpc.run(add_to_input, [1, threading.Lock(), 3], parties="processes")


async def returns_a_secret(party):
    return await refmpc.input_from_party(party, 0, [1.0], shape=(1,))


def test_a_secret_that_is_returned_from_a_process_is_refused():
    with pytest.raises(PartyFailed, match="a secret tensor of it, stays in its process: return what was revealed"):
        refmpc.run(returns_a_secret, parties="processes", timeout=5)


def returns_a_lock(party):
    return threading.Lock()


def test_a_result_that_cannot_be_pickled_is_named():
    with pytest.raises(PartyFailed, match="what the program returned cannot be sent back: TypeError"):
        refmpc.run(returns_a_lock, parties="processes", timeout=5)


class Unreadable:
    def __reduce__(self):
        return int, ("not a number",)


def returns_unreadable(party):
    return Unreadable() if party.id == 2 else None


def test_a_result_that_cannot_be_read_back_is_named():
    with pytest.raises(PartyFailed, match="server-2 failed: ValueError: what the program returned cannot be read back"):
        refmpc.run(returns_unreadable, parties="processes", timeout=5)


def returns_much(party):
    return np.full(4 << 20, party.id, np.uint64)


def test_large_results_come_back_whole():
    for i, output in enumerate(refmpc.run(returns_much, parties="processes").outputs):
        assert output.nbytes == 32 << 20
        assert (output == i).all()


def loaded(party):

    from accel.compiled import ring

    return "refmpc.launch.preload" in sys.modules, len(ring._encode_fixed.overloads)


@pytest.mark.skipif(accel.backend() is accel.backend("numpy"), reason="there is nothing to compile")
def test_processes_start_from_a_warm_fork_server():
    for preloaded, compiled in refmpc.run(loaded, parties="processes").outputs:
        assert preloaded
        assert compiled > 0, "a party has to load its first kernel itself"


def test_the_fork_server_imports_the_programs_but_not_the_command():
    here = lambda: None  # noqa: E731
    here.__module__ = "__main__"
    programs: list[Callable[..., Any]] = [json.dumps, functools.partial(textwrap.dedent, "x"), here]
    assert modules_of(programs) == ["json", "textwrap"]
