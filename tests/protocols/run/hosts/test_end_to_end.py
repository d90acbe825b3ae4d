"""A whole federation, each participant a process at its own host: init, doctor, PSI, upload, training, predictions."""

from __future__ import annotations

import contextlib
import csv
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from accel.prg import KEY_BYTES
from protocols.net.spool import Spool
from protocols.state.audit_log import compare, read_log
from protocols.state.model_file import read_model
from tests.protocols.run.hosts.commands_at_hosts import (
    CLIENTS,
    NEW,
    SERVERS,
    WIDTHS,
    columns,
    free_block,
    init,
    write_data,
)
from tests.protocols.run.hosts.hosts import Host, Processes, can_make_namespaces, loopback, namespaces
from tests.protocols.run.hosts.wiretap import APPLICATION, HANDSHAKE, Relay, record_types

SECRETS = (b"person-0", b"salary_zq", b"purchases_zq", b"customer_id", b"defaulted")


@pytest.fixture
def hosts() -> Iterator[dict[str, Host]]:
    """Six namespaces and the bridge between them if this process may make them, loopback addresses otherwise."""
    names = (*SERVERS, *CLIENTS, "outsider")
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(namespaces(names)) if can_make_namespaces() else loopback(names)


@pytest.mark.timeout(240)
def test_a_federation_from_init_to_predictions(hosts: dict[str, Host], tmp_path: Path) -> None:
    new = write_data(tmp_path)
    init(hosts, tmp_path, free_block())
    with Processes(hosts, tmp_path) as run:
        if "hub" in hosts:
            run.start("wiretap", "hub", "wire.json", module="tests.protocols.run.hosts.wiretap")
        for name in SERVERS:
            run.participant("server", name)
        for name in SERVERS:
            run.wait_for(name, "listening")
        stolen = tmp_path / "federation" / "bank"
        run.start(
            "outsider", "outsider", run.config("bank"), stolen, "outside", module="tests.protocols.run.hosts.intruder"
        )
        run.start("doctor", "bank", "doctor", "--as", "bank", "--config", run.config("bank"), "--json")
        for name in CLIENTS:
            label = ["--label-column", "defaulted"] if name == "card" else []
            run.participant("client", name, *columns(name), *label, "--model-out", f"model-{name}.npz")
        for name in CLIENTS:
            run.wait(name, 120)
        findings = json.loads(run.wait("doctor"))["findings"]
        assert {finding["status"] for finding in findings} <= {"ok", "warning"}, findings
        assert {finding["subject"] for finding in findings} >= set(SERVERS)
        _check_outsider(json.loads(run.wait("outsider")), run)
        layer = _check_models(tmp_path)
        for name in CLIENTS:
            out = ["--out", "predictions.csv", "--output", "logits"] if name == "card" else ["--output", "logits"]
            model = ["--model", f"model-{name}.npz"]
            run.participant("predict", name, *columns(name, new=True), *model, *out)
        for name in CLIENTS:
            run.wait(name, 60)
        assert all(run.is_running(name) for name in SERVERS)
        for name in SERVERS:
            run.stop(name)
        for name in SERVERS:
            run.wait(name, 20)
        if "hub" in hosts:
            run.stop("wiretap")
            run.wait("wiretap")
            streams = json.loads((tmp_path / "wire.json").read_text())
            _check_wire({name: bytes.fromhex(text) for name, text in streams.items()}, hosts)
    _check_predictions(tmp_path, new, layer)
    _check_state(tmp_path)
    written = b"".join(file.read_bytes() for pattern in ("*.log", "*.out") for file in tmp_path.glob(pattern))
    assert not [secret for secret in SECRETS if secret in written.replace(b"predictions.csv", b"")]


def _check_outsider(found: dict[str, str], run: Processes) -> None:
    """Every attempt was refused, and the server's log says why."""
    assert found.pop("port scan") == "hung up"
    assert re.match(r"closed after \d+ bytes", found.pop("garbage"))
    assert found and all(text.startswith("refused") for text in found.values()), found
    assert "server-2 has name" not in found["stolen, as a server"]
    assert "bank has name server-2" in found["stolen, as a server"]
    assert "bank has name card" in found["stolen, as another client"]
    assert "configuration hash" in found["another configuration"]
    assert "no business here" in found["stolen, wrong purpose"]
    reasons = [event["reason"] for event in run.events("server-0") if event["event"] == "refused a caller"]
    for words in ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "self-signed", "configuration hash"):
        assert any(words in reason for reason in reasons), (words, reasons)


def _check_models(directory: Path) -> np.ndarray:
    """Both clients and all servers have the same model, and it has learnt something in spite of the noise."""
    bank, card = read_model(directory / "model-bank.npz"), read_model(directory / "model-card.npz")
    (layer,) = bank.layers
    assert np.array_equal(layer, card.layers[0]) and layer.shape == (sum(WIDTHS.values()) + 1, 1)
    assert "differentially private" in card.claim
    for name in SERVERS:
        (file,) = (directory / "federation" / name / "state").glob("*/training-*/model.npz")
        assert np.array_equal(read_model(file).layers, [layer])
    return layer


def _check_predictions(directory: Path, new: dict[str, np.ndarray], layer: np.ndarray) -> None:
    """What the receiver got is what the released model says of the concatenated rows."""
    with (directory / "predictions.csv").open() as file:
        rows = {
            row["customer_id"]: [float(row["yes"])] for row in csv.DictReader(file)
        }  # one logit, of the second class
    assert sorted(rows) == sorted(new["ids"])
    expected = np.column_stack([new["values"], np.ones(NEW)]) @ layer  # all rows are within the bound
    got = np.array([rows[name] for name in new["ids"]])
    assert np.abs(got - expected).max() < 1e-3


def _check_state(directory: Path) -> None:
    """Shares of rows and noise are gone, what is left is private, and the audit logs agree with each other."""
    logs = {}
    for name in SERVERS:
        state = directory / "federation" / name / "state"
        (training,) = state.glob("*/training-*")
        assert not (training / "upload").exists() and not (training / "server" / "noise.key").exists()
        assert training.stat().st_mode & 0o077 == 0
        (file,) = state.glob("*/audit.jsonl")
        logs[name] = read_log(file)
        releases = [r.facts["receiver"] for r in logs[name] if r.event == "release"]
        assert releases == [*["all servers"] * 3, "client 'bank'", "client 'card'", "client 'card'"]
    assert not compare(logs)


def _check_wire(streams: dict[str, bytes], hosts: dict[str, Host]) -> None:
    """Nothing but TLS between participants (the outsider may say what it likes), and nothing readable in it."""
    outside = hosts["outsider"].address
    inside = {flow: stream for flow, stream in streams.items() if outside not in flow.split()}
    kinds: set[int] = set()
    for stream in inside.values():
        kinds |= set(record_types(stream))
        assert not [secret for secret in SECRETS if secret in stream]
    pairs = {tuple(sorted(flow.split()[::2])) for flow in inside}
    assert kinds >= {HANDSHAKE, APPLICATION} and len(pairs) == 3 + 6 + 1  # servers; clients with servers; clients
    assert sum(map(len, inside.values())) > 100_000


@pytest.mark.heavy
@pytest.mark.timeout(240)
def test_everybody_is_interrupted_and_the_run_goes_on(tmp_path: Path) -> None:
    """A client's connection breaks in the middle of its upload, a client and a server die: the model comes all the
    same."""
    hosts = loopback((*SERVERS, *CLIENTS))
    rows = 4500  # two chunks
    write_data(tmp_path, rows)
    port = free_block()
    init(hosts, tmp_path, port, checkpoint_every=10, batch_size=150, epochs=5)
    with contextlib.ExitStack() as stack:
        # the bank reaches server 1 through a relay that breaks connections after 172 kB, in the middle of the second
        # chunk
        relay = Relay((hosts["server-1"].address, port + 1), cut_after=172_000)
        stack.callback(relay.close)
        own = tmp_path / "federation" / "bank" / "federation.toml"
        text = (tmp_path / "federation" / "federation.toml").read_text()
        before, after = f'host = "{hosts["server-1"].address}"\nport = {port + 1}', relay.address
        assert before in text
        own.write_text(text.replace(before, f'host = "{after[0]}"\nport = {after[1]}'))
        run = stack.enter_context(Processes(hosts, tmp_path))
        for name in SERVERS:
            run.participant("server", name, "--until-trained")
        for name in CLIENTS:
            label = ["--label-column", "defaulted"] if name == "card" else []
            credentials = ["--credentials", tmp_path / "federation" / name]
            run.participant("client", name, *columns(name), *label, *credentials, "--model-out", f"model-{name}.npz")
        run.wait_for("bank", "upload complete, all servers have it", 120)
        sent = run.events("bank")[-1]["bytes_sent"]
        run.wait_for("server-1", "all servers agree", 60)
        (state,) = (tmp_path / "federation" / "server-1" / "state").glob("*/training-*")
        _wait_for_file(state / "server", "opened-000000[1-9]0.log")
        run.kill("server-1")
        run.kill("card")
        run.wait_for("server-0", "the attempt failed, the servers will meet again", 60)
        run.participant("server", "server-1", "--until-trained")
        run.participant(
            "client", "card", *columns("card"), "--label-column", "defaulted", "--model-out", "model-card.npz"
        )
        for name in (*CLIENTS, *SERVERS):
            run.wait(name, 120)
        assert relay.cuts >= 1
        interrupted = [event for event in run.events("bank") if event["event"] == "an upload was interrupted"]
        assert interrupted[0]["kept"] in (0, 1)  # 0 if the first acknowledgement was still on its way
        assert sent == 2 * 8 * rows * WIDTHS["bank"] + 2 * 4 * KEY_BYTES  # every chunk counts once
        begins = [event["kept"] for event in run.events("server-1") if event["event"] == "upload begins"]
        assert {1, 2} & set(begins)  # from where it was; 2 if only the acknowledgement was lost
        again = [event for event in run.events("card") if event["event"] == "servers reached, parameters agree"]
        assert [event["already_kept"] for event in again] == [0, 4]
        resumed = [event["resumes"] for event in run.events("server-1") if event["event"] == "listening"]
        assert resumed[0] is None and resumed[1] is not None
        for stream in relay.streams:
            assert not [secret for secret in SECRETS if secret in bytes(stream)]
            assert set(record_types(bytes(stream))) <= {20, 21, HANDSHAKE, APPLICATION}
    _check_models(tmp_path)


def _wait_for_file(directory: Path, pattern: str, timeout: float = 60.0) -> None:
    until = time.monotonic() + timeout
    while not list(directory.glob(pattern)):
        assert time.monotonic() < until, f"no {pattern} in {directory}"
        time.sleep(0.02)


def test_a_spool_is_read_back_as_it_was_kept(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for i in range(3):
        spool.append("input_from_client", f"{i:032x}", bytes([i]) * 16)
    spool.cut(2)
    again = Spool(tmp_path)
    assert again.count == 2 and again.digest == spool.digest != Spool(tmp_path / "other").digest
    part = np.empty(2, dtype=np.uint64)
    again.read(1, "input_from_client", [part])
    assert part.tobytes() == b"\x01" * 16


@pytest.mark.heavy  # ten processes' imports
@pytest.mark.timeout(240)
def test_a_certificate_is_computed_once_and_nobody_waits_in_silence(
    hosts: dict[str, Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Secret order and a fresh cache: of five processes on one machine one computes, and all that needed it say so."""
    monkeypatch.setenv("PPVFL_CACHE", str(tmp_path / "cache"))
    write_data(tmp_path)
    init(hosts, tmp_path, free_block(), order="secret", delta=1e-3)
    with Processes(hosts, tmp_path) as run:
        for name in SERVERS:
            run.participant("server", name, "--until-trained")
        for name in CLIENTS:
            label = ["--label-column", "defaulted"] if name == "card" else []
            run.participant("client", name, *columns(name), *label, "--model-out", f"model-{name}.npz")
        for name in (*CLIENTS, *SERVERS):
            run.wait(name, 120)
        what = "the certificate of the noise"
        computed = [
            name
            for name in (*CLIENTS, *SERVERS)
            for event in run.events(name)
            if event["event"] == f"{what} was computed"
        ]
        assert len(computed) == len(list((tmp_path / "cache").glob("allocation-*.json"))) >= 1
        for name in CLIENTS:  # both need it at about the same time: one computes, the other waits and says for what
            events = [event["event"] for event in run.events(name)]
            assert f"{what} is being computed" in events or f"{what} was read" in events or name not in computed
    _check_models(tmp_path)
