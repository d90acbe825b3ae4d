"""New software and new certificates under a training that has begun: what was kept stays, and nothing is lost or
trained twice."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from accel.files import read_json
from protocols.cli import main
from protocols.federation.read import load
from protocols.net.credentials import CERTIFICATE, KEY
from protocols.net.wire import Identity, call
from protocols.run.hosts import server_sync
from protocols.state.budget import BUDGET, Budgets
from protocols.state.run_identity import BEGUN
from refmpc.core.errors import RefmpcError
from tests.protocols.run.hosts.threads import Federation, _wait, train_until_a_checkpoint


def test_servers_go_on_when_all_three_have_the_new_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other: nothing is computed with two versions, the session does not fail, and nobody must act."""
    federation = train_until_a_checkpoint(tmp_path)
    federation.end(0, 1, 2)
    before = federation.count("server-0", "all servers agree")
    federation.start(2)
    monkeypatch.setattr(server_sync, "software_version", lambda: "9.0.0/1")
    for number in (0, 1):
        federation.start(number)
    federation.wait_for_reason("server-0", "server-2 runs ppvfl", "9.0.0/1")
    federation.wait_for_reason("server-2", "runs ppvfl 9.0.0/1")
    time.sleep(1.0)
    assert federation.count("server-0", "all servers agree") == before and not federation.outcome
    federation.end(2)
    federation.start(2)
    federation.finish()
    (computed,) = (event for event in federation.events("server-1") if event["event"] == "computed and released")
    assert federation.count("server-0", "all servers agree") == before + 1 and computed["rows"] == 96
    federation.stop()


def as_an_earlier_version_kept_it(federation: Federation) -> None:
    """Directories named by the certificates, too; no tags of people, and other tags beside the ledgers."""
    for number in range(3):
        identity = federation.identity(f"server-{number}")
        state = federation.directory / f"server-{number}" / "state"
        identity.kept_in(state).rename(state / identity.configuration[:16])
        for tag in state.rglob("people-*.tag"):
            tag.rename(tag.with_name(tag.name.replace("people", "columns")))
        (state / BUDGET / "people.json").rename(state / BUDGET / "columns.json")


def test_the_state_of_an_earlier_version_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    federation = train_until_a_checkpoint(tmp_path)
    federation.end(0, 1, 2)
    as_an_earlier_version_kept_it(federation)
    federation.start_all()
    federation.finish()
    federation.stop()
    for number in range(3):
        state = tmp_path / f"server-{number}" / "state"
        assert [spent.runs for spent in Budgets(state, federation.config).spent()] == [1, 1]
        assert len(list(state.glob("*/audit.jsonl"))) == 1
        begun = read_json(next(state.rglob(BEGUN)))
        assert begun["keeps_releases"]
    assert main(["audit-log", *(str(tmp_path / f"server-{number}" / "state") for number in range(3))]) == 0
    capsys.readouterr()


def new_certificate(federation: Federation, name: str) -> Identity:
    """As the guide says: key, pin, the new file to everybody. Returns who that participant was before."""
    before = federation.identity(name)
    config = str(federation.directory / "federation.toml")
    assert main(["key", "--as", name, "--config", config, "--force"]) == 0
    certificate = federation.directory / name / "certificate.pem"
    assert main(["pin", "--participant", name, "--certificate", str(certificate), "--config", config]) == 0
    federation.config = load(config)
    return before


def test_certificates_are_replaced_in_the_middle_of_a_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The state was named by the certificates: a new one lost the training, and for servers that stay the model."""
    federation = train_until_a_checkpoint(tmp_path)
    federation.end(0, 1, 2)
    old_server, old_client = new_certificate(federation, "server-1"), new_certificate(federation, "bank")
    federation.start_all(predictions=True)
    for name in ("bank", "card"):  # clients with the earlier file are refused in words, and wait for the new one
        federation.wait_for_reason(name, "same federation.toml")
    assert not federation.outcome and all(thread.is_alive() for thread in federation.threads)
    federation.align(federation.session)
    federation.train()
    for old in (old_server, old_client):  # whoever stole an old key comes no further than the handshake
        with pytest.raises(RefmpcError):
            call(old, 0, federation.config.addresses[0], "status", timeout=5.0)
    federation.stop()
    new_certificate(federation, "server-2")
    server = federation.start(2, predictions=True)
    assert server._store.training is not None and server._store.training.done  # its model is there for predictions
    assert len(list(tmp_path.glob("server-2/state/*/training-*/model.npz"))) == 1
    federation.stop()
    federation.align()
    federation.start_all(predictions=True)
    federation.client("bank")
    assert "trained" in str(federation.wait()["bank"])  # once is once, whatever the certificates are
    federation.stop()
    capsys.readouterr()


def test_keys_are_replaced_one_after_the_other_while_both_certificates_are_pinned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server's and a client's, in the middle of a training: no file and no key has to be changed at the same time as
    another."""
    federation = train_until_a_checkpoint(tmp_path)
    federation.end(0, 1, 2)
    earlier, file = federation.config, tmp_path / "federation.toml"
    for name in ("server-1", "bank"):
        words = ["--config", str(file)]
        assert main(["key", "--as", name, "--credentials", str(tmp_path / f"new-{name}"), *words]) == 0
        pin = ["pin", "--participant", name, "--certificate", str(tmp_path / f"new-{name}" / CERTIFICATE), *words]
        assert main([*pin, "--until", "2130-01-31"]) == 0
    widened, agreed = load(file), "all servers agree"
    before = federation.count("server-0", agreed)
    for number, config in ((0, earlier), (1, widened), (2, widened)):  # the file has reached two servers, and no client
        federation.config = config
        federation.start(number)
    _wait(lambda: federation.count("server-0", agreed) > before)
    federation.end(0, 1, 2)
    assert not federation.outcome and all(thread.is_alive() for thread in federation.threads)
    federation.config, before = widened, federation.count("server-0", agreed)
    federation.align(federation.session)
    federation.client("card")  # with the new file; the bank's key is replaced last
    federation.client("bank", outcome={})
    for part in (KEY, CERTIFICATE):
        (tmp_path / "new-server-1" / part).replace(tmp_path / "server-1" / part)
    federation.start_all()
    _wait(lambda: federation.count("server-0", agreed) > before)
    for part in (KEY, CERTIFICATE):
        (tmp_path / "new-bank" / part).replace(tmp_path / "bank" / part)
    federation.train("bank")
    used = [event for event in federation.events("server-0") if "uses its earlier certificate" in event["event"]]
    assert {event["peer"] for event in used} == {"bank"} and "until 2130-01-31" in used[0]["accepted"]
    federation.stop()
    capsys.readouterr()


def test_a_new_file_that_reaches_one_server_later_ends_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A client with the new file was refused by the server that still had the old one, and ended."""
    federation = Federation(tmp_path)
    earlier = federation.config
    new_certificate(federation, "bank")
    federation.config, newer = earlier, federation.config
    federation.start(1)
    federation.config = newer
    for number in (0, 2):
        federation.start(number)
    federation.clients()
    federation.wait_for_reason("bank", "server-1 refused", "certificate of bank")
    federation.wait_for_reason("card", "server-1 refused", "other pins", "for bank")
    assert not federation.outcome
    federation.end(1)
    federation.start(1)
    federation.finish()
    federation.stop()
    capsys.readouterr()
