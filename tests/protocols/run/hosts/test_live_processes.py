"""GL-BMF as it is deployed: `ppvfl init`, servers and clients as processes, predictions; some are killed in between.

``tests.protocols.run.hosts.test_stay_connected`` has the same with threads, which is quick."""

from __future__ import annotations

import csv
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocols.federation.public_plan import layer_plan_for
from protocols.federation.read import load
from protocols.state.audit_log import compare, read_log
from protocols.state.model_file import read_model
from protocols.state.step_log import OpenedSteps
from tests.protocols.run.hosts.commands_at_hosts import (
    CLIENTS,
    NEW,
    ROWS,
    SERVERS,
    WIDTHS,
    columns,
    free_block,
    init,
    write_data,
)
from tests.protocols.run.hosts.hosts import Processes, loopback
from vfl.data.scaling import bound_rows

PUBLIC = {"protocol": "gl_bmf", "epsilon": 20.0, "row_rule": "clip", "row_bound": 1.0, "held_out": 0.0}


def start_client(run: Processes, name: str) -> None:
    label = ["--label-column", "defaulted"] if name == "card" else []
    run.participant("client", name, *columns(name), *label, "--model-out", f"model-{name}.npz")


def expected_logits(directory: Path, values: np.ndarray) -> np.ndarray:
    """What the clients' model files say of rows in the clear."""
    parts, start = [], 0
    for name, width in WIDTHS.items():
        scaled = values[:, start : start + width]
        start += width
        model = read_model(directory / f"model-{name}.npz")
        up, down, (layer,) = model.local["up_0"], model.local["down_0"], model.layers
        assert up.shape == (width, 8) and np.abs(up).max() > 1e-4  # trained: it starts at zero
        assert model.row_bound is not None and np.isclose(model.row_bound, (width / sum(WIDTHS.values())) ** 0.5)
        unit = bound_rows(scaled, 1.0, "normalise")
        parts.append(bound_rows(scaled + unit @ down.T @ up.T, model.row_bound, "clip"))
    return np.column_stack([*parts, np.ones(len(values))]) @ layer


def releases(directory: Path, server: str) -> Counter[tuple[str, str]]:
    (file,) = (directory / "federation" / server / "state").glob("*/training-*/ledger.json")
    return Counter((release["name"], release["receiver"]) for release in json.loads(file.read_text())["releases"])


@pytest.mark.heavy
@pytest.mark.timeout(240)
def test_a_federation_trains_its_clients_layers_and_predicts_with_them(tmp_path: Path) -> None:
    hosts = loopback((*SERVERS, *CLIENTS))
    new = write_data(tmp_path)
    init(hosts, tmp_path, free_block(), **PUBLIC, epochs=6)
    plan = layer_plan_for(load(tmp_path / "federation" / "federation.toml"), ROWS)
    with Processes(hosts, tmp_path) as run:
        for name in SERVERS:
            run.participant("server", name)
        for name in CLIENTS:
            start_client(run, name)
        for name in CLIENTS:
            assert "differentially private for features and labels" in " ".join(run.wait(name, 120).split())
        for name in CLIENTS:
            out = ["--out", "predictions.csv"] if name == "card" else []
            model = ["--model", f"model-{name}.npz", "--output", "logits"]
            run.participant("predict", name, *columns(name, new=True), *model, *out)
        for name in CLIENTS:
            run.wait(name, 60)
        for name in SERVERS:
            run.stop(name)
        for name in SERVERS:
            run.wait(name, 20)
    with (tmp_path / "predictions.csv").open() as file:
        rows = {row["customer_id"]: [float(row["no"]), float(row["yes"])] for row in csv.DictReader(file)}
    got = np.array([rows[name] for name in new["ids"]])
    assert np.abs(got - expected_logits(tmp_path, new["values"])).max() < 1e-3
    assert len(got) == NEW  # how often they are right says little: six noisy epochs on 300 rows within a norm of 1
    layers = {(f"layer gradient of {name}", f"client {name!r}"): plan.schedule.num_steps for name in CLIENTS}
    opened = {**layers, ("noised gradient sums", "all servers"): plan.schedule.num_steps}
    opened |= {(f"fault in a step of {name}", "all servers"): plan.schedule.num_steps for name in CLIENTS}
    opened[("fault in the upload of card", "all servers")] = 1
    to_clients: list[Any] = [("global model", to) for to in ("client 'bank'", "client 'card'")]
    for name in SERVERS:
        assert releases(tmp_path, name) == Counter(opened) + Counter(to_clients)


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_a_server_and_a_client_are_killed_and_each_step_is_released_once(tmp_path: Path) -> None:
    hosts = loopback((*SERVERS, *CLIENTS))
    new = write_data(tmp_path)
    init(hosts, tmp_path, free_block(), **PUBLIC, epochs=60)
    plan = layer_plan_for(load(tmp_path / "federation" / "federation.toml"), ROWS)
    with Processes(hosts, tmp_path) as run:
        for name in SERVERS:
            run.participant("server", name, "--until-trained")
        for name in CLIENTS:
            start_client(run, name)
        for victim, attempt in (("server-1", 1), ("bank", 2)):
            before = run.wait_for("server-0", "training begins", 60, count=attempt)["step"]
            _wait_for_step(tmp_path, before + 20)
            run.kill(victim)
            run.wait_for("server-0", "the attempt failed, the servers will meet again", 60, count=attempt)
            if victim == "bank":
                start_client(run, "bank")
            else:
                run.participant("server", victim, "--until-trained")
        for name in (*CLIENTS, *SERVERS):
            run.wait(name, 200)
    logs = {}
    for name in SERVERS:
        (file,) = (tmp_path / "federation" / name / "state").glob("*/audit.jsonl")
        logs[name] = read_log(file)
    assert not compare(logs)
    begins = {name: [r.facts["step"] for r in log if r.event == "training begins"] for name, log in logs.items()}
    assert begins["server-0"] == begins["server-1"] == begins["server-2"]
    starts = begins["server-0"]
    assert len(starts) == 3 and starts[0] == 0 and starts[1] >= 20 and starts[2] >= starts[1] + 20
    # server 0 lived through everything: in each attempt it sent the steps of that attempt and one again; when the
    # attempt failed it may have sent one that another had not kept (nobody could read it), or not yet sent one that all
    # had kept
    noted = [(r.facts["attempt"], r.facts["name"], r.facts["times"]) for r in logs["server-0"] if "times" in r.facts]
    for name in CLIENTS:
        times = [count for _, what, count in noted if what == f"layer gradient of {name}"]
        ends = [*starts[1:], plan.schedule.num_steps]
        extra = [count - (end - begin + (begin > 0)) for count, begin, end in zip(times, starts, ends, strict=True)]
        assert extra[-1] == 0 and max(map(abs, extra)) <= 1
    expected_logits(tmp_path, new["values"])


def _wait_for_step(directory: Path, step: int) -> None:
    """Until a server has written this step, or a later one."""
    until = time.monotonic() + 60
    while True:
        folders = (directory / "federation" / "server-0" / "state").glob("*/training-*/server")
        if any(OpenedSteps(folder, np.uint32, 0, synced=False).written >= step for folder in folders):
            return
        assert time.monotonic() < until, f"no checkpoint of step {step}"
        time.sleep(0.02)
