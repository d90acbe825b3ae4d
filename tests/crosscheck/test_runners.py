"""What the runners say when a peer is missing or broken, and that the relay delays and limits. No peer is needed."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest

from bench.compare import main as compare_main
from bench.comparison.relay import free_ports, relay
from bench.comparison.workloads import make_workload, standard_workloads
from bench.mpspdz.runner import HOME_VARIABLE, PARTY, MpSpdz, MpSpdzError, find_home
from bench.spu.runner import PYTHON_VARIABLE, Spu, SpuError
from refmpc.net.emulation import NetworkProfile


def test_a_missing_or_broken_mpspdz_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv(HOME_VARIABLE, raising=False)
    with pytest.raises(MpSpdzError, match="MPSPDZ_HOME is not set: point it to a checkout"):
        find_home()
    with pytest.raises(MpSpdzError, match="there is no such directory"):
        find_home(tmp_path / "nowhere")
    with pytest.raises(MpSpdzError, match=r"no compile\.py there"):
        find_home(tmp_path)
    (tmp_path / "compile.py").write_text("")
    with pytest.raises(MpSpdzError, match=r"replicated-ring-party\.x is not there or not executable"):
        find_home(tmp_path)


@pytest.fixture
def broken(tmp_path, monkeypatch) -> MpSpdz:
    """A checkout whose compiler and parties fail with a message."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "compile.py").write_text("raise SystemExit('compiler says no')")
    party = tmp_path / PARTY
    party.write_text("#!/bin/sh\necho 'party says no' >&2\nexit 3\n")
    party.chmod(0o755)
    return MpSpdz(tmp_path)


def test_a_compiler_that_fails_is_quoted(broken):
    with pytest.raises(MpSpdzError, match=r"compile\.py refused multiply-8: compiler says no"):
        broken.compile("multiply", 8)
    with pytest.raises(ValueError, match="program = 'unknown': must be one of clip_factor, comparison, division"):
        broken.compile("unknown")


def test_a_party_that_fails_is_named_and_quoted(broken, tmp_path):
    from bench.mpspdz.runner import Compiled

    (tmp_path / "Programs").mkdir()
    with pytest.raises(MpSpdzError, match="multiply-8: party 0 ended with code 3: party says no"):
        broken.run(Compiled("multiply-8", tmp_path, 0.0), [np.ones(8)])
    with pytest.raises(ValueError, match="inputs = 'inf or nan': must be finite numbers"):
        broken.run(Compiled("multiply-8", tmp_path, 0.0), [np.full(8, np.nan)])


def test_a_missing_spu_is_named(monkeypatch):
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    with pytest.raises(SpuError, match="SPU_PYTHON is not set"):
        Spu()
    with pytest.raises(SpuError, match="there is no such executable"):
        Spu("/no/such/python")


def test_spu_refuses_what_it_cannot_run(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no module named spu' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(SpuError, match=r"cannot import spu \(no module named spu\)"):
        Spu(str(python)).version()
    with pytest.raises(ValueError, match="program = 'shuffle': must be one of multiply"):
        Spu(str(python)).run([make_workload("shuffle", "shuffle", (4, 2))])
    with pytest.raises(SpuError, match=r"party \d ended with code 1: no module named spu"):
        Spu(str(python)).run([make_workload("products", "multiply", (4,))])


def test_compare_runs_without_peers_and_says_so(monkeypatch, capsys):
    monkeypatch.delenv(HOME_VARIABLE, raising=False)
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    compare_main(["--quick", "--only", "shuffle", "--repeat", "1", "--inner", "1", "--markdown"])
    out, err = capsys.readouterr()
    assert "| shuffle of 100×20 |" in out and "2 rounds" in out
    assert "MP-SPDZ is left out: MPSPDZ_HOME is not set" in err.replace("\n", " ")
    with pytest.raises(SystemExit):
        compare_main(["--only", "no such workload"])


@pytest.mark.parametrize("workload", standard_workloads(quick=True), ids=lambda w: w.title)
def test_the_error_of_a_workload_notices_a_wrong_answer(workload):
    """The oracle can fail: the exact answer has no error, one wrong entry has its size."""
    if workload.exact is None:
        assert workload.error(np.full(100, 3.0)) == 1.0
        return
    assert workload.error(workload.exact) == 0
    wrong = workload.exact.copy()
    wrong.flat[0] += 10.0
    assert workload.error(wrong) >= 1.0
    with pytest.raises(ValueError, match="numbers"):
        workload.error(workload.exact.ravel()[:-1])


def _echo_once(port: int) -> threading.Thread:
    """A server that returns whatever it gets on one connection."""
    listener = socket.create_server(("127.0.0.1", port))

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def test_the_relay_delays_and_limits_both_ways():
    profile = NetworkProfile("test", 0.05, 4e6)
    ports = dict(enumerate(free_ports(2)))
    thread = _echo_once(ports[1])
    payload = np.random.default_rng(0).bytes(400_000)  # 0.1 s at 4 MB/s
    with relay(ports, profile) as routes, socket.create_connection(("127.0.0.1", routes[0, 1])) as connection:
        begun = time.monotonic()
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        assert time.monotonic() - begun >= 2 * profile.delay
        begun = time.monotonic()
        connection.sendall(payload)
        received = b""
        while len(received) < len(payload):
            received += connection.recv(1 << 16)
        assert received == payload
        assert time.monotonic() - begun >= 2 * profile.delay + len(payload) / profile.bandwidth
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""  # the end of a stream passes too
    thread.join(5)
    assert not thread.is_alive()
