"""Two minutes without a link, two minutes without a host, and a disk that is really full: everybody goes on by itself,
and says whom or what it waited for. In network namespaces, with time-outs as an operator might set them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.soak.faults import fill_disk, small_disks
from protocols.state.model_file import read_model
from tests.protocols.run.hosts.commands_at_hosts import CLIENTS, SERVERS, columns, free_block, init, write_data
from tests.protocols.run.hosts.hosts import ROOT, Host, Processes, can_make_namespaces, namespaces, plug

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_namespaces(), reason="needs root and network namespaces"),
]
LONG = 120.0


@pytest.fixture
def hosts() -> Iterator[dict[str, Host]]:
    with namespaces((*SERVERS, *CLIENTS)) as found:
        yield found


def start(run: Processes, name: str) -> None:
    if name in SERVERS:
        run.participant("server", name, "--until-trained", "--status", "off")
        return
    label = ["--label-column", "defaulted"] if name == "card" else []
    run.participant("client", name, *columns(name), *label, "--model-out", f"model-{name}.npz")


def waits_of(run: Processes, name: str, since: int = 0) -> list[dict[str, Any]]:
    return [event for event in run.events(name)[since:] if event["event"] == "waiting"]


def same_models(directory: Path) -> None:
    models = [read_model(directory / f"model-{name}.npz").layers for name in CLIENTS]
    assert all(np.array_equal(left, right) for left, right in zip(*models, strict=True))


def test_two_minutes_without_a_link_and_two_without_a_host(tmp_path: Path, hosts: dict[str, Host]) -> None:
    write_data(tmp_path)
    init(hosts, tmp_path, free_block(), epochs=600, timeout=15.0)
    with Processes(hosts, tmp_path) as run:
        for name in (*SERVERS, *CLIENTS):
            start(run, name)
        run.wait_for("server-1", "all servers agree", 120)
        time.sleep(3.0)
        before = {name: len(run.events(name)) for name in (*SERVERS, *CLIENTS)}
        for name in ("server-1", "bank"):
            plug(hosts[name], "down")
        time.sleep(LONG)
        for name in ("server-0", "server-2"):
            assert {event["peer"] for event in waits_of(run, name, before[name])} == {"server-1"}
        assert {"server-0", "server-2"} & {event["peer"] for event in waits_of(run, "server-1", before["server-1"])}
        assert any("server-1" in event["reason"] for event in waits_of(run, "card", before["card"]))
        longest = max(event["seconds"] for event in waits_of(run, "bank", before["bank"]))
        assert longest >= 50  # it has said so again: at once, then after half a minute and a minute
        for name in (*SERVERS, *CLIENTS):
            lines = len(run.events(name)) - before[name]
            assert run.is_running(name) and lines < 40, f"{name} wrote {lines} lines"
        for name in ("server-1", "bank"):
            plug(hosts[name], "up")
        run.wait_for("server-0", "all servers agree", 90, count=2)
        time.sleep(3.0)
        before = {name: len(run.events(name)) for name in (*SERVERS, *CLIENTS)}
        plug(hosts["server-2"], "down")  # its power is gone: no packet leaves, not even a reset
        run.kill("server-2")
        time.sleep(LONG)
        for name in ("server-0", "server-1"):
            assert {event["peer"] for event in waits_of(run, name, before[name])} == {"server-2"}
        for name in CLIENTS:
            assert any("server-2" in event["reason"] for event in waits_of(run, name, before[name]))
        plug(hosts["server-2"], "up")
        start(run, "server-2")
        for name in (*CLIENTS, *SERVERS):
            run.wait(name, 240)
    same_models(tmp_path)


def doctor(run: Processes, hosts: dict[str, Host], directory: Path) -> tuple[int, str]:
    words = [*hosts["bank"].prefix, sys.executable, "-m", "protocols.deploy", "doctor", "--as", "bank"]
    words += ["--config", str(run.config("bank"))]
    done = subprocess.run(words, cwd=directory, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    return done.returncode, done.stdout + done.stderr


def test_a_full_disk_before_and_in_the_middle_of_the_training(tmp_path: Path, hosts: dict[str, Host]) -> None:
    write_data(tmp_path)
    init(hosts, tmp_path, free_block(), epochs=2000, timeout=10.0)  # long enough to fill a disk meanwhile
    with small_disks(tmp_path) as mounted:
        if not mounted:
            pytest.skip("needs the right to mount a file system")
        state = tmp_path / "federation" / "server-1" / "state"
        with Processes(hosts, tmp_path) as run:
            for name in SERVERS:
                start(run, name)
            run.wait_for("server-1", "listening", 60)
            run.wait_for("server-1", "kernels are loaded", 120)  # and the folder that this took is gone
            filler = fill_disk(state)
            for name in CLIENTS:
                start(run, name)
            run.wait_for("bank", "waiting", 60, reason="server-1 cannot write to its disk")
            time.sleep(20.0)
            errors = [event for event in run.events("server-1") if event["level"] == "error"]
            assert errors and all(event["errno"] == "ENOSPC" and str(state) in event["path"] for event in errors)
            assert len(errors) < 25  # both clients, every five seconds at most after a while
            assert not list(tmp_path.glob("federation/server-*/state/*/training-*/upload/*/*.message"))
            code, text = doctor(run, hosts, tmp_path)
            assert code == 1 and "make room" in text, text
            filler.unlink()
            run.wait_for("server-1", "all servers agree", 90)
            time.sleep(4.0)
            before = len(run.events("server-1"))
            filler = fill_disk(state)
            run.wait_for("server-0", "the attempt failed, the servers will meet again", 120)
            time.sleep(15.0)
            said = [event for event in run.events("server-1")[before:] if event.get("errno")]
            assert said and all(event["errno"] == "ENOSPC" and str(state) in event["path"] for event in said), said
            assert len(said) < 25 and all(run.is_running(name) for name in (*SERVERS, *CLIENTS))
            filler.unlink()
            for name in (*CLIENTS, *SERVERS):
                run.wait(name, 240)
    same_models(tmp_path)
