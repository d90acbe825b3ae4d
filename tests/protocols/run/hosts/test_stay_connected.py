"""GL-BMF in a deployment: the clients stay while the servers train, and whoever leaves may come back."""

from __future__ import annotations

import csv
import json
import secrets
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocols.cli import main
from protocols.cli.audit_log import check, check_against_logs, collect
from protocols.client.gl_client import TrainedClient
from protocols.federation.public_plan import layer_plan_for
from protocols.net.credentials import load_credentials
from protocols.net.live_channels import Guests
from protocols.net.wire import Channel, Identity, Refused, call
from protocols.run.hosts.sessions import Session
from protocols.state.audit_log import read_log
from protocols.state.commitment import ColumnsChanged
from protocols.state.model_file import read_model
from refmpc.core.errors import HandshakeError, PeerLost
from tests.protocols.client.meetings import together
from tests.protocols.gl_runs import parameter_bound
from tests.protocols.run.hosts.federations import free_ports
from tests.protocols.run.hosts.live_runs import ROWS, WEAK_NOISE, LiveFederation
from tests.protocols.run.hosts.threads import CLIENTS, PATIENCE, _wait
from tests.protocols.run.hosts.wiretap import Relay
from tests.protocols.secure_runs import noise_of_the_servers
from vfl.data.scaling import bound_rows
from vfl.twins import train_gl_bmf


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[LiveFederation]:
    found = LiveFederation(tmp_path, **WEAK_NOISE)
    yield found
    found.stop()


def keep_noise(federation: LiveFederation) -> None:
    """Copies of the servers' noise keys, which they throw away when everybody has confirmed the model."""
    for number in range(3):
        federation.wait_for(f"server-{number}", "training begins")
        (federation.directory / "kept" / f"server-{number}").mkdir(parents=True)
        shutil.copy(federation.server_file(number, "noise.key"), federation.directory / "kept" / f"server-{number}")
    federation.noise_is_kept.set()


def check_twin(federation: LiveFederation) -> None:
    """The model and all layers are the twin's with the same noise, as near as fixed point goes (see
    parameter_bound)."""
    plan, local, outcome = federation.plan, federation.twin_federation(), federation.outcome
    noise = noise_of_the_servers(plan, federation.directory / "kept")
    twin = train_gl_bmf(local, plan.training, noise=noise)
    far = [np.linalg.norm(outcome["bank"].model - twin.model.layers[0])]
    for client in twin.clients:
        layers = outcome[client.name].layers
        far += [np.linalg.norm(layers[k] - v) for k, v in client.adapter_state().items() if "velocity" not in k]
    assert np.linalg.norm(far) <= parameter_bound(plan, local, noise)
    assert np.linalg.norm(outcome["bank"].layers["up_0"]) > 1e-3  # the layers have moved


def check_records(federation: LiveFederation) -> list[int]:
    """The three ledgers and audit logs agree, every release has the claim, each step was released by the attempt that
    reached it (the last one of an earlier attempt is sent again). Returns the steps at which attempts began."""
    plan, directory = federation.plan, federation.directory
    runs, logs, wrong = collect([directory / f"server-{number}" / "state" for number in range(3)])
    assert not wrong and not check(runs) and not check_against_logs(runs, logs) and len(runs) == len(logs) == 3
    (starts,) = {tuple(r.facts["step"] for r in log.records if r.event == "training begins") for log in logs}
    last = starts[-1]
    for run in runs:
        found = Counter((r["name"], r["receiver"], r["elements"]) for r in run.ledger["releases"])
        times = plan.schedule.num_steps - last + (last > 0)
        layers = {
            (f"layer gradient of {name}", f"client {name!r}", shape.parameters): times
            for name, shape in zip(plan.client_names, plan.shapes, strict=True)
        }
        model = [("global model", to, plan.global_parameters) for to in ("client 'bank'", "client 'card'")]
        for name in plan.client_names:
            tests = found.pop((f"fault in a step of {name}", "all servers", 1), 0)
            assert tests == plan.schedule.num_steps - last
        assert found.pop(("fault in the upload of card", "all servers", 1)) == 1
        sums = found.pop(("noised gradient sums", "all servers", plan.global_parameters), 0)
        # the last step of an earlier attempt is opened again, unless all three have its state
        assert plan.schedule.num_steps - last <= sums <= times
        assert found == Counter(layers) + Counter(model)
        assert {r["claim"] for r in run.ledger["releases"]} <= set(plan.releases.values())
    for number in range(3):
        assert not federation.server_file(number, "noise.key").exists()
        assert not list(federation.server_file(number, ".").glob("opened-*.log"))
    return list(starts)


def test_live_clients_train_what_the_twin_trains(federation: LiveFederation) -> None:
    federation.start_all()
    federation.stay("bank", on_model=federation.until_noise_is_kept)
    server, _ = federation.servers[0]
    _wait(lambda: server._state_in_words().startswith("waiting for card since 20"))  # and no longer for bank
    federation.stay("card")
    keep_noise(federation)
    federation.finish()
    check_twin(federation)
    assert check_records(federation) == [0]


def test_whatever_breaks_training_goes_on_where_it_was(federation: LiveFederation) -> None:
    """A connection breaks after step 2, a server is stopped after step 4: no step is released with two values, or the
    result would not be the twin's."""
    federation.start_all()
    relay = Relay(federation.config.addresses[1])
    federation.seen_by["bank", 1] = {"host": relay.address[0], "port": relay.address[1]}
    stopped = threading.Event()

    def disturb(done: int) -> None:
        if done == 2 and not relay.cuts:
            relay.cuts = 1
            relay.cut()
        if done == 4 and not stopped.is_set():
            federation.servers[2][0].stop.set()
            stopped.set()

    federation.stay("bank", on_step=disturb, on_model=federation.until_noise_is_kept)
    federation.stay("card")
    keep_noise(federation)
    assert stopped.wait(60)
    federation.servers[2][1].join(PATIENCE)
    federation.start(2)
    federation.finish()
    relay.close()
    check_twin(federation)
    starts = check_records(federation)
    assert len(starts) == 3 and starts[0] == 0 and 0 < starts[1] < starts[2]
    for name in ("bank", "card"):
        assert sum("the attempt failed" in event["event"] for event in federation.events(name)) == 2
    (log,) = (federation.directory / "server-0" / "state").glob("*/audit.jsonl")
    failed = [r.facts["times"] for r in read_log(log) if r.event == "release before a failure"]
    assert len(failed) == 12  # two attempts: layers and tests of two clients, the test of labels, and the sums


def test_a_client_that_comes_back_with_other_columns_is_refused_and_the_others_wait(federation: LiveFederation) -> None:
    federation.start_all()

    def die(done: int) -> None:
        if done == 2:
            raise RuntimeError("killed")

    first = federation.stay("bank", on_step=die)
    federation.stay("card")
    first.join(PATIENCE)
    assert str(federation.outcome.pop("bank")) == "killed"
    federation.stay("bank", scale=0.5).join(PATIENCE)
    changed = federation.outcome.pop("bank")
    assert isinstance(changed, ColumnsChanged) and "client 'bank' came back with different columns" in str(changed)
    federation.stay("bank")
    federation.finish()


def test_a_client_that_was_away_at_the_end_fetches_its_last_gradient_and_the_model(federation: LiveFederation) -> None:
    federation.start_all()
    models = list[Any]()
    steps = federation.plan.schedule.num_steps
    state = federation.directory / "state-bank" / f"training-{federation.session}"

    def full(trained: TrainedClient) -> None:
        models.append(trained)
        raise OSError("the disk is full")

    def keep(done: int) -> None:
        if done == steps - 1:
            shutil.copy(state / "adapters.npz", federation.directory)

    federation.stay("bank", on_step=keep, on_model=full)
    federation.stay("card")
    outcome = federation.wait()
    assert isinstance(outcome.pop("bank"), OSError) and isinstance(outcome["card"], TrainedClient)
    shutil.copy(federation.directory / "adapters.npz", state)  # as if it had died before the last gradient was on disk
    again: list[TrainedClient] = []
    federation.stay("bank", on_model=again.append)
    federation.finish()
    assert np.array_equal(again[0].model, models[0].model)
    assert all(np.array_equal(again[0].layers[name], value) for name, value in models[0].layers.items())


def test_a_server_that_fails_after_the_release_is_helped_by_everybody(
    federation: LiveFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers have finished, the third lost its result: the clients stay until it has it, too."""
    write, failed = Session.finish, list[Any]()

    def fail_once(session: Session, attempt: str, outbox: Any) -> None:
        if "server-1" in str(session.directory) and not failed:
            failed.append(attempt)
            raise PeerLost("the disk was full")
        write(session, attempt, outbox)

    monkeypatch.setattr(Session, "finish", fail_once)
    federation.start_all()
    models = list[Any]()
    federation.clients(on_model=models.append)
    federation.finish()
    assert failed and len(models) == 4 and all(np.array_equal(m.model, models[0].model) for m in models)
    assert check_records(federation) == [0, federation.plan.schedule.num_steps]


def test_garbage_on_a_live_channel_ends_an_attempt_and_nothing_else(federation: LiveFederation) -> None:
    """The caller has the bank's key, so it is let in; what it says is not understood, or not what the program
    expects."""
    federation.start_all()
    hello = federation.hello("bank", session=federation.session)

    def calls() -> list[Channel]:
        return [federation.call("bank", number, "live", **hello)[0] for number in range(3)]

    for channel in calls():
        channel.receive()
        channel.connection.sendall(secrets.token_bytes(200))
    federation.stay("card")
    channels = calls()
    for channel in channels:
        while "attempt" not in (message := channel.receive()[0]):
            channel.send({"waiting": True})
        channel.send({"takes": message["attempt"]})
    for channel in channels:
        channel.connection.sendall(secrets.token_bytes(500))
    for number in range(3):
        federation.wait_for(f"server-{number}", "the attempt failed, the servers will meet again")
    federation.stay("bank")
    federation.finish()


def test_clients_share_nothing_until_all_servers_name_one_attempt(
    federation: LiveFederation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server is in another attempt than the two others until both clients have noticed; then one goes well."""
    federation.start_all()
    gather, asked = Guests.gather, []

    def noticed(name: str) -> bool:
        return any("named different attempts" in event.get("reason", "") for event in federation.events(name))

    def one_differs(guests: Guests, attempt: str) -> dict[Any, Any]:
        asked.append(guests)
        return gather(guests, attempt if guests is not asked[0] or all(map(noticed, CLIENTS)) else "another")

    monkeypatch.setattr(Guests, "gather", one_differs)
    federation.clients()
    federation.finish()
    assert all(map(noticed, CLIENTS))
    for number in range(3):  # nothing was computed before
        begun = [event for event in federation.events(f"server-{number}") if event["event"] == "training begins"]
        assert [event["step"] for event in begun] == [0]


def test_a_client_with_another_plan_shares_nothing(federation: LiveFederation) -> None:
    federation.start_all()
    federation.plan = layer_plan_for(federation.config, ROWS // 2)
    federation.stay("bank")
    told = federation.wait()["bank"]
    assert isinstance(told, HandshakeError) and "they must agree" in str(told), told


def test_a_second_channel_of_a_client_ends_its_first(federation: LiveFederation) -> None:
    federation.start(0)
    hello = federation.hello("bank")
    first, second = (federation.call("bank", 0, "live", **hello)[0] for _ in range(2))
    assert second.receive()[0]["missing"] == ["card"]
    with pytest.raises(PeerLost):
        for _ in range(3):
            first.receive()
            first.send({"waiting": True})
    second.send({"waiting": True})
    assert second.receive()[0]["missing"] == ["card"]


def test_calls_for_another_way_of_training_are_refused(federation: LiveFederation) -> None:
    federation.start(0)
    hello = federation.hello("bank")
    with pytest.raises(Refused, match="purpose = 'upload': must be 'live' for this with gl_bmf"):
        federation.call("bank", 0, "upload", **hello)
    with pytest.raises(Refused, match="caller = 'server-1': must be a client"):
        server = Identity(federation.config, 1, load_credentials(federation.config, "server-1"))
        call(server, 0, federation.config.addresses[0], "live", timeout=5.0, **hello)
    federation.call("bank", 0, "live", **hello)[0].close()


@pytest.mark.parametrize("weights", ["open", "secret"])
def test_the_commands_train_layers_and_predict_with_them(tmp_path: Path, weights: str) -> None:
    """`ppvfl client` and `ppvfl predict` from file to file; predictions are those of the model and the clients' layers.
    With secret weights no server has the model, and all predict with their shares of it."""
    federation = LiveFederation(tmp_path, weights=f'"{weights}"', **WEAK_NOISE)
    file = tmp_path / "federation.toml"
    file.write_text(file.read_text().replace("127.0.0.1:7101", f"127.0.0.1:{free_ports(1)[0]}"))
    federation.start_all(predictions=True)
    words: dict[str, list[str]] = {}
    for name in CLIENTS:
        own = federation.own(name)
        labels = own.table.labels or ()
        with (tmp_path / f"{name}.csv").open("w", newline="") as table:
            names = ["id", *(f"x{i}" for i in range(own.outputs.shape[1]))]
            writer = csv.writer(table)
            writer.writerow([*names, "label"] if name == "card" else names)
            for i, row in enumerate(own.outputs):
                writer.writerow([f"p{i}", *row, labels[i]] if name == "card" else [f"p{i}", *row])
        words[name] = ["--as", name, "--config", str(file), "--log", str(tmp_path / f"{name}.log"), "--scaled"]
        words[name] += ["--columns", str(tmp_path / f"{name}.csv")]
    model = {name: str(tmp_path / f"model-{name}.npz") for name in CLIENTS}
    train = {name: ["client", *words[name], "--model-out", model[name]] for name in CLIENTS}
    assert together({name: lambda name=name: main(train[name]) for name in CLIENTS}) == {"bank": 0, "card": 0}
    lines = (tmp_path / "card.csv").read_text().splitlines()
    (tmp_path / "card.csv").write_text("\n".join(line.rpartition(",")[0] for line in lines))  # new rows have no labels
    out = ["--output", "logits", "--out", str(tmp_path / "out.csv")]
    predict = {name: ["predict", *words[name], "--model", model[name], *out] for name in CLIENTS}
    assert together({name: lambda name=name: main(predict[name]) for name in CLIENTS}) == {"bank": 0, "card": 0}
    parts = []
    for name in CLIENTS:
        own = federation.own(name)
        found = read_model(Path(model[name]))
        up, down, (layer,) = found.local["up_0"], found.local["down_0"], found.layers
        assert "differentially private for features and labels" in found.claim
        unit = own.outputs / np.linalg.norm(own.outputs, axis=1, keepdims=True)
        parts.append(bound_rows(own.outputs + unit @ down.T @ up.T, own.bound.norm, "clip"))
    expected = np.column_stack([*parts, np.ones(ROWS)]) @ layer
    with (tmp_path / "out.csv").open() as table:
        got = {row["id"]: [float(row["0"]), float(row["1"])] for row in csv.DictReader(table)}
    np.testing.assert_allclose([got[f"p{i}"] for i in range(ROWS)], expected, atol=1e-3)
    right = expected.argmax(axis=1) == np.array([int(label) for label in own.table.labels or ()])
    assert right.mean() > 0.75
    federation.stop()
    kept = sorted(file.parts[-4] for file in tmp_path.glob("server-*/state/**/model.npz"))
    assert len(kept) == (3 if weights == "open" else 0)
    receivers = {
        r["receiver"]
        for file in tmp_path.glob("server-*/state/**/ledger.json")
        for r in json.loads(file.read_text())["releases"]
        if r["name"] == "global model"
    }
    assert receivers == {"client 'bank'", "client 'card'"}
