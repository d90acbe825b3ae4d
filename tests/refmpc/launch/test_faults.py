"""Killed, stopped and interrupted parties: everybody ends in time, says who and what, and nobody is left behind."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import refmpc
from refmpc.core.errors import PartyFailed
from refmpc.launch import processes
from refmpc.net import certificates
from tests.not_none import not_none

TIMEOUT = 1.0


@pytest.fixture
def folder(tmp_path):
    """Where parties write their process ids; afterwards none of them may live."""
    yield tmp_path
    assert multiprocessing.active_children() == []
    assert_gone(tmp_path)


def assert_gone(folder, within=5.0):
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    assert pids, "no party has started"
    until = time.monotonic() + within
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < until, f"processes {alive} are left behind"
        time.sleep(0.05)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def note(party, folder):
    partial = Path(folder, f"{party.id}.partial")
    partial.write_text(str(os.getpid()))
    partial.rename(Path(folder, f"{party.id}.pid"))


def multiply_for_ever(party, folder, victim=None, deed=None):
    """An endless program; in its tenth round party ``victim`` does something to itself."""
    note(party, folder)
    x = party.complete(refmpc.input_from_party(party, 0, np.ones(1000), shape=(1000,)))
    for turn in range(10**9):
        if turn == 10 and party.id == victim:
            os.kill(os.getpid(), deed)
        x = party.complete(refmpc.multiply(x, x))


def one_victim(party, argument):
    multiply_for_ever(party, *argument)


def run_with(victim, deed, folder, tls=False):
    begun = time.monotonic()
    with pytest.raises(PartyFailed) as caught:
        refmpc.run(one_victim, [(str(folder), victim, deed)] * 3, parties="processes", tls=tls, timeout=TIMEOUT)
    return caught.value, time.monotonic() - begun


@pytest.mark.parametrize(("victim", "tls"), [(0, False), (1, False), (2, True)])
def test_a_party_that_is_killed_is_named_by_all(folder, victim, tls):
    error, seconds = run_with(victim, signal.SIGKILL, folder, tls)
    lines = str(error).splitlines()
    assert lines[0] == f"server-{victim} failed: PartyFailed: its process died (killed by signal 9)"
    for peer in {0, 1, 2} - {victim}:
        (line,) = [line for line in lines if line.startswith(f"server-{peer} ended too: ")]
        assert f"server-{victim} closed the connection in 'multiply'" in line
        assert "it died or was killed" in line
    assert seconds < TIMEOUT + 5


@pytest.mark.parametrize(("victim", "tls"), [(0, False), (1, True), (2, False)])
def test_a_party_that_is_stopped_is_named_by_all_after_the_time_out(folder, victim, tls):
    error, seconds = run_with(victim, signal.SIGSTOP, folder, tls)
    lines = str(error).splitlines()
    assert lines[0].startswith(f"server-{victim} failed: PartyFailed: it did not end when the others had: it hangs")
    for peer in {0, 1, 2} - {victim}:
        (line,) = [line for line in lines if line.startswith(f"server-{peer} ended too: ")]
        assert f"server-{victim} (message " in line
        assert f"sent nothing in 'multiply' for {TIMEOUT:g} s" in line
    assert TIMEOUT <= seconds < 2 * TIMEOUT + 8


def stops_at_the_end(party, folder):
    note(party, folder)
    if party.id == 2:
        os.kill(os.getpid(), signal.SIGSTOP)


def test_a_party_that_is_stopped_when_nobody_waits_for_it_does_not_hang_the_caller(folder):
    with pytest.raises(PartyFailed, match=r"server-2 failed: .*it hangs, is stopped"):
        refmpc.run(stops_at_the_end, [str(folder)] * 3, parties="processes", timeout=0.5)


def dies_before_it_says_anything(party, folder):
    note(party, folder)
    if party.id == 0:
        os._exit(7)
    party._exchange("wait", {}, {0: [np.zeros(1)]})


def test_the_exit_code_of_a_party_that_ends_itself_is_told(folder):
    with pytest.raises(PartyFailed, match=r"server-0 failed: PartyFailed: its process died \(exit code 7\)"):
        refmpc.run(dies_before_it_says_anything, [str(folder)] * 3, parties="processes", timeout=TIMEOUT)


def sends_a_wrong_length(party, folder):
    note(party, folder)
    size = 3 if party.id == 2 else 4
    party._exchange("length", {party.next: [np.zeros(size)]}, {party.previous: [np.zeros(4)]})
    for _ in range(3):
        party._exchange("after", {party.next: [np.zeros(1)]}, {party.previous: [np.zeros(1)]})


def test_a_message_of_the_wrong_length_ends_the_run_at_all_parties(folder):
    with pytest.raises(PartyFailed) as caught:
        refmpc.run(sends_a_wrong_length, [str(folder)] * 3, parties="processes", timeout=TIMEOUT)
    lines = str(caught.value).splitlines()
    assert "server-0 failed: OutOfStep: server-2 sent 24 bytes in 'length'" in lines[0]
    assert "this party expects 32" in lines[0]
    for line in lines[1:3]:
        assert "server-2 sent 24 bytes in 'length'" in line, "the cause is told to everybody"


# before the run ---------------------------------------------------------------------------------


def doing_nothing(party, folder):
    note(party, folder)


def with_other_parameters(options, credentials, sender, id, *rest):
    """Server-2 was started with its own idea of the parameters."""
    parameters = {"rows": 11} if id == 2 else {"rows": 10}
    return honest_party(dataclasses.replace(options, parameters=parameters), credentials, sender, id, *rest)


honest_party = processes._party_process


@pytest.mark.parametrize("tls", [False, True])
def test_processes_with_different_parameters_do_not_begin_and_name_the_field(monkeypatch, tmp_path, tls):
    monkeypatch.setattr(processes, "_party_process", with_other_parameters)
    begun = time.monotonic()
    with pytest.raises(PartyFailed) as caught:
        refmpc.run(doing_nothing, [str(tmp_path)] * 3, parties="processes", tls=tls, timeout=10)
    lines = str(caught.value).splitlines()[:3]
    assert any("server-2 has parameter 'rows' = 11, server-0 has 10: they must agree" in line for line in lines)
    assert all("parameter 'rows'" in line and "11" in line for line in lines), lines
    assert time.monotonic() - begun < 8
    assert list(tmp_path.iterdir()) == [], "the program has begun"
    assert multiprocessing.active_children() == []


def test_a_process_with_a_wrong_certificate_is_refused_and_named(monkeypatch, tmp_path):
    honest = certificates.make_credentials

    def with_an_impostor(peers, directory):
        found = honest(peers, directory)
        certificate, key = certificates.make_certificate("impostor", directory)
        return found | {2: dataclasses.replace(found[2], certificate=certificate, key=key)}

    monkeypatch.setattr(certificates, "make_credentials", with_an_impostor)
    with pytest.raises(PartyFailed) as caught:
        refmpc.run(doing_nothing, [str(tmp_path)] * 3, parties="processes", tls=True, timeout=TIMEOUT)
    lines = str(caught.value).splitlines()[:3]
    assert "server-2 did not connect in 1 s; refused meanwhile: the TLS handshake with a caller" in lines[0]
    assert "self-signed certificate" in lines[0]
    assert all("server-2" in line for line in lines), lines
    assert list(tmp_path.iterdir()) == []
    assert multiprocessing.active_children() == []


# the caller -------------------------------------------------------------------------------------

CALLER = """
    import sys
    sys.path[:0] = {path!r}
    import refmpc
    from tests.refmpc.launch import test_faults
    if __name__ == "__main__":
        refmpc.run(test_faults.one_victim, [({folder!r},)] * 3, parties="processes", timeout=20)
"""


def start_caller(folder, tmp_path_factory):
    script = tmp_path_factory.mktemp("caller") / "caller.py"
    script.write_text(textwrap.dedent(CALLER).format(path=sys.path, folder=str(folder)))
    quick = os.environ | {"REFMPC_ACCEL": "numpy"}
    # a background shell ignores SIGINT, and its children inherit that: the caller listens again
    words = (
        f"import signal, runpy; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    caller = subprocess.Popen([sys.executable, "-c", words], stderr=subprocess.PIPE, text=True, env=quick)
    until = time.monotonic() + 30
    while len(list(folder.glob("*.pid"))) < 3:
        assert time.monotonic() < until
        assert caller.poll() is None, not_none(caller.stderr).read()
        time.sleep(0.05)
    return caller


def test_parties_end_when_their_caller_is_killed(folder, tmp_path_factory):
    caller = start_caller(folder, tmp_path_factory)
    caller.kill()
    caller.communicate(timeout=10)
    assert_gone(folder)


def test_an_interrupted_caller_ends_its_parties_at_once(folder, tmp_path_factory):
    caller = start_caller(folder, tmp_path_factory)
    begun = time.monotonic()
    caller.send_signal(signal.SIGINT)
    _, errors = caller.communicate(timeout=10)
    assert time.monotonic() - begun < 5
    assert "KeyboardInterrupt" in errors
    assert_gone(folder)


def test_an_interrupted_caller_ends_its_threads():
    ended = []

    def for_ever(party):
        try:
            while True:
                party._exchange("turn", {party.next: [np.zeros(1)]}, {party.previous: [np.zeros(1)]})
        finally:
            ended.append(party.id)

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored when started in the background
    try:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            refmpc.run(for_ever, timeout=20)
    finally:
        signal.signal(signal.SIGINT, usual)
    until = time.monotonic() + 5
    while len(ended) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    assert sorted(ended) == [0, 1, 2]
