"""A server's host crashes, and a link is unplugged, while everybody trains or waits: in network namespaces, where no
word of farewell gets through. Everybody goes on by itself and says whom it waited for. Time-outs are shortened by
configuration."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from protocols.state.model_file import read_model
from tests.protocols.run.hosts.commands_at_hosts import CLIENTS, SERVERS, columns, free_block, init, write_data
from tests.protocols.run.hosts.hosts import Processes, can_make_namespaces, namespaces, plug

TIMEOUT = 5.0


@pytest.mark.heavy
@pytest.mark.timeout(400)
@pytest.mark.skipif(not can_make_namespaces(), reason="needs root and network namespaces")
def test_a_crashed_host_and_an_unplugged_link_are_outlived_by_everybody(tmp_path: Path) -> None:
    write_data(tmp_path)
    with namespaces((*SERVERS, *CLIENTS)) as hosts, Processes(hosts, tmp_path) as run:
        init(hosts, tmp_path, free_block(), epochs=400, timeout=TIMEOUT)
        for name in SERVERS:
            run.participant("server", name, "--until-trained", "--status", "off")
        for name in CLIENTS:
            label = ["--label-column", "defaulted"] if name == "card" else []
            run.participant("client", name, *columns(name), *label, "--model-out", f"model-{name}.npz")
        run.wait_for("server-1", "all servers agree", 120)
        time.sleep(3.0)
        plug(hosts["server-1"], "down")  # longer than every time-out
        time.sleep(4 * TIMEOUT)
        for name in CLIENTS:
            said = [e for e in run.events(name) if e["event"] == "waiting"]
            assert any("server-1" in str(e.get("reason")) for e in said), run.events(name)[-3:]
        plug(hosts["server-1"], "up")
        run.wait_for("server-1", "all servers agree", 120, count=2)
        time.sleep(3.0)
        plug(hosts["server-2"], "down")  # its power is gone: no packet leaves, not even a reset
        run.kill("server-2")
        for name in ("server-0", "server-1"):
            until = time.monotonic() + 60.0
            while not any(e["event"] == "waiting" and e["peer"] == "server-2" for e in run.events(name)):
                assert time.monotonic() < until, run.events(name)[-5:]
                time.sleep(0.2)
        plug(hosts["server-2"], "up")
        run.participant("server", "server-2", "--until-trained", "--status", "off")
        for name in (*CLIENTS, *SERVERS):
            run.wait(name, 200)
    models = [read_model(tmp_path / f"model-{name}.npz").layers for name in CLIENTS]
    assert all(np.array_equal(left, right) for left, right in zip(*models, strict=True))
