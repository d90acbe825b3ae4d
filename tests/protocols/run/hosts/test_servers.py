"""Three servers and their clients as threads of one process: what happens when one of them fails at a bad moment."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.prg import KEY_BYTES
from protocols.cli.predict import PartialSums
from protocols.client.align import Aligner
from protocols.federation.public_plan import plan_for
from protocols.federation.read import FederationConfig
from protocols.log import Log
from protocols.methods import g_shuff
from protocols.net.wire import (
    ALIGNED,
    ALIGNMENT_CALLS,
    CALLS,
    LEADS,
    SIGNS,
    SUMS,
    UPLOADS,
    Channel,
    Field,
    Refused,
)
from protocols.run.hosts.sessions import Session
from protocols.server.open_training import OpenTrainingRun
from protocols.state.model_file import ReleasedModel, read_model
from protocols.state.shuffled_rows import shuffle_rows
from protocols.step.cost import step_cost
from refmpc.core.errors import HandshakeError, PeerLost
from refmpc.net.tls import parse, receive, secure, send
from tests.protocols.run.hosts.federations import free_ports
from tests.protocols.run.hosts.live_runs import WEAK_NOISE, LiveFederation
from tests.protocols.run.hosts.threads import PATIENCE, ROWS, Federation, _wait, train_until_a_checkpoint
from tests.protocols.run.hosts.wiretap import APPLICATION, HANDSHAKE, Relay, record_types


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    found = Federation(tmp_path)
    yield found
    found.stop()


@pytest.mark.parametrize("weights", ["open", "secret"])
def test_a_server_that_fails_after_the_release_is_helped_by_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    """Two servers have published, the third lost its result: they compute the release again, the same one, for it. With
    secret weights none of them has the model."""
    federation = Federation(tmp_path, weights=f'"{weights}"')
    finish, failed = Session.finish, list[Any]()

    def fail_once(session: Session, attempt: str, outbox: Any) -> None:
        if "server-1" in str(session.directory) and not failed:
            failed.append(attempt)
            time.sleep(1.0)  # the two others are done
            raise PeerLost("the disk was full")
        finish(session, attempt, outbox)

    monkeypatch.setattr(Session, "finish", fail_once)
    federation.start_all()
    layer = federation.train()
    assert failed
    for _, thread in federation.servers.values():
        thread.join(20)
        assert not thread.is_alive()
    for number in range(3):
        models = federation.directory.glob(f"server-{number}/state/*/training-*/model.npz")
        known = [read_model(file).layers for file in models]
        assert np.array_equal(known, [[layer]] if weights == "open" else [])
        assert federation.count(f"server-{number}", "all servers agree") == 2


def test_g_shuff_goes_on_within_an_epoch_in_the_order_that_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = Federation(tmp_path, protocol='"g_shuff"', accounting='"any-order"', epochs=2)
    shuffles, lost = list[Any](), list[Any]()
    assert federation.config.run.training.weights == "open"
    shuffle, move = shuffle_rows, OpenTrainingRun._move

    async def counting(rows: Any) -> Any:
        shuffles.append(rows.embeddings.party.step)
        return await shuffle(rows)

    def lose_one(run: OpenTrainingRun, step: int, sums: np.ndarray) -> None:
        if step == 4 and run.party.id == 1 and not lost:
            lost.append(step)
            raise PeerLost("the connection was cut")
        move(run, step, sums)

    monkeypatch.setattr(g_shuff, "shuffle_rows", counting)
    monkeypatch.setattr(OpenTrainingRun, "_move", lose_one)
    federation.start_all()
    assert np.isfinite(federation.train()).all()
    federation.stop()
    assert lost and sorted(shuffles) == [0, 0, 0, 3, 3, 3]  # once an epoch, at each of three servers


def test_a_server_that_is_stopped_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    federation = train_until_a_checkpoint(tmp_path)
    federation.end(1)
    federation.start(1)
    federation.finish()
    for number in range(3):
        events = federation.events(f"server-{number}")
        attempts = [event["attempt"] for event in events if event["event"] == "all servers agree"]
        (computed,) = [event for event in events if event["event"] == "computed and released"]
        assert len(attempts) == 2
        assert computed["rounds"] < 0.97 * 180 * _rounds_of_a_step(federation.config)  # ten steps at least were there
    said = [event["reason"] for event in federation.events("server-0") if event["level"] == "warning"]
    assert any("this server was asked to stop" in reason for reason in said)
    federation.stop()


def _rounds_of_a_step(config: FederationConfig) -> int:
    plan = plan_for(config, ROWS)
    return step_cost(plan).rounds + plan.opens_sums  # one more to confirm that what is opened is written


def test_an_upload_goes_on_where_its_connection_broke(tmp_path: Path) -> None:
    """Two chunks; the bank's connection to server 1 breaks within the second one, and nothing but TLS crossed it."""
    federation = Federation(tmp_path, batch_size=1500)
    federation.start_all()
    relay = Relay(federation.config.addresses[1], cut_after=140_000)
    federation.seen_by["bank", 1] = {"host": relay.address[0], "port": relay.address[1]}
    rows, width = 4500, 4
    federation.train(rows=rows)
    relay.close()
    interrupted = [e for e in federation.events("bank") if e["event"] == "an upload was interrupted"]
    assert relay.cuts == 1 and [event["kept"] for event in interrupted] in ([0], [1])  # as acknowledged
    (sent,) = [e["bytes_sent"] for e in federation.events("bank") if "bytes_sent" in e]
    assert sent == 2 * 8 * rows * width + 2 * 4 * KEY_BYTES  # every chunk counts once
    begins = [
        e["kept"] for e in federation.events("server-1") if e["event"] == "upload begins" and e["client"] == "bank"
    ]
    assert begins[0] == 0 and begins[-1] >= 1  # 2 if only the acknowledgement was lost
    for stream in relay.streams:
        assert set(record_types(bytes(stream))) <= {20, 21, HANDSHAKE, APPLICATION}
    federation.stop()


def test_a_client_that_stalls_holds_up_nobody_and_may_come_back(federation: Federation) -> None:
    """Half a message, then silence: the server keeps nothing of it, and goes on when the client calls again."""
    federation.start_all()
    channel, answer = federation.call("bank", 2, **federation.hello("bank", session=federation.session))
    with channel:
        head = json.dumps({"message": 0, "operation": "input_from_client", "token": "0" * 32}).encode()
        channel.connection.sendall(struct.pack("<IQ", len(head), 2000) + head + bytes(1000))
        federation.train()
        with pytest.raises(PeerLost):
            channel.receive()
    assert answer["kept"] == 0


def test_a_second_training_of_a_configuration_is_refused(federation: Federation) -> None:
    """Another alignment would be another release, with an ε of its own. So would fewer rows under the same name."""
    federation.start_all()
    federation.client("bank")
    _wait(lambda: federation.count("server-0", "upload complete"))
    federation.client("card", rows=64).join(PATIENCE)
    refused = federation.outcome.pop("card")
    assert isinstance(refused, Refused) and "as another client says" in str(refused)
    federation.client("card")
    _wait(lambda: federation.count("server-0", "all servers agree"))
    with pytest.raises(Refused, match="already trained .run .*Change its name or a parameter"):
        federation.call("bank", 0)[0].close()
    federation.finish()


def test_a_client_with_other_columns_than_it_shared_is_refused(federation: Federation) -> None:
    federation.start_all()
    federation.client("bank")
    federation.wait_until_uploaded()
    for _ in range(2):  # however often it tries
        federation.client("bank", outcome=(changed := dict[str, Any]()), scale=0.5).join(PATIENCE)
        assert isinstance(changed["bank"], HandshakeError) and "the columns are not those shared before" in str(
            changed["bank"]
        )
    federation.train("card")


def test_servers_that_do_not_agree_say_so_and_stay(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """One server would compute with another version of the software: nothing is computed, the clients are told."""
    parameters = Session.parameters

    def differing(session: Session) -> dict[str, Any]:
        found = parameters(session)
        return {**found, "clip_norm": 2.0} if "server-2" in str(session.directory) else found

    monkeypatch.setattr(Session, "parameters", differing)
    federation.start_all()
    federation.clients()
    for found in federation.wait().values():
        assert isinstance(found, HandshakeError) and "clip_norm" in str(found)
    assert all(thread.is_alive() for _, thread in federation.servers.values())
    assert not list(federation.directory.glob("server-*/state/*/training-*/done.json"))


def test_a_state_directory_belongs_to_one_process(federation: Federation) -> None:
    federation.start(0)
    with pytest.raises(ValueError, match="another process"), contextlib.suppress(OSError):
        federation.start(0)


def wrong_values(field: Field, right: Any) -> dict[str, Any]:
    """One wrong value of each kind: by what the field may be, not by what it is for."""
    kinds = {
        "a flag": not field.truth and True,
        "no flag": False,
        "a list": [right],
        "an object": {"value": right},
        "negative": -1,
        "huge": 10**30,
        "a fraction": 0.5,
        "a whole fraction": float(right) if isinstance(right, int) else 1.0,
        "not a number": float("nan"),
        "infinite": float("inf"),
        "empty": "",
        "long": "9" * 5000,
        "other letters": "ÄÖ\n\0",
        "null": None,
    }
    return {kind: value for kind, value in kinds.items() if not field.takes(value)}


def spoilt(fields: Mapping[str, Field], right: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(field, kind, message) for every field of a message that is right otherwise."""
    for name, field in fields.items():
        for kind, value in wrong_values(field, right[name]).items():
            yield name, kind, {**right, name: value}
        if name in ("from", "to", "kind", "output") and isinstance(
            right[name], str | None
        ):  # well formed, and another's
            yield name, "another's name", {**right, name: "bank" if right[name] == "card" else "card"}
        if not field.optional:
            yield name, "missing", {key: value for key, value in right.items() if key != name}
    yield "unheard_of", "extra", {**right, "unheard_of": 1}


LEADING: dict[str, dict[str, Any]] = {
    "missing": {"missing": "bank,shop"},
    "begin": {"begin": True},
    "session": {"session": "5" * 32, "rows": 3},
}
# what refusals call the fields of a greeting
SAID = {
    "from": "name",
    "to": "peer",
    "configuration": "configuration hash",
    "pins": "other pins",
    "purpose": "takes no calls for",
    "output": "--output",
}


def first_message(owner: Federation, receiver: str | int, address: Any, hello: Mapping[str, Any]) -> Channel | str:
    """What the bank hears to this first message: the refusal, or the channel."""
    credentials = owner.identity("bank").credentials
    connection = secure(socket.create_connection(address, timeout=10), credentials, server_side=False)
    connection.settimeout(10)
    send(connection, hello, time.monotonic() + 10)
    answer = parse(receive(connection, str(receiver), time.monotonic() + 10), str(receiver))
    if "refused" not in answer:
        return Channel(connection, receiver, 10)
    connection.close()
    return str(answer["refused"])


def not_named(
    forms: Mapping[str, Mapping[str, Field]], right: Mapping[str, Mapping[str, Any]], opened: Callable[[], Channel]
) -> list[Any]:
    """The wrong messages on a channel whose refusal does not name the field; ``opened`` makes a channel."""
    unnamed = []
    for form, fields in forms.items():
        for name, kind, message in spoilt(fields, right[form]):
            with opened() as channel, pytest.raises(Refused) as refused:
                channel.send(message)
                while True:
                    channel.receive(1 << 20)
            words = "message = " if (name == form and kind == "missing") else f"{name} = "
            if words not in str(refused.value):
                unnamed.append((form, name, kind, str(refused.value)))
    return unnamed


def test_every_field_that_a_client_sends_is_refused_by_name_if_it_is_wrong(
    federation: Federation, tmp_path: Path
) -> None:
    """Generated from the messages' definitions. A wrong word for ``operation`` was kept, and the training then failed
    in every attempt; 0.0 or true for a number was taken, or ended the call without a word."""
    federation.start_all()
    bank, address = federation.identity("bank"), federation.config.addresses[0]
    facts = federation.hello("bank", session=federation.session)
    terms = {"kind": "training", "id_form": "canonical", "pad_to": None, "output": None}
    log, ids = Log("card", tmp_path / "card-aligns.log"), ["a", "b"]
    meeting_place = free_ports(1)[0]
    clients = [replace(c, alignment=f"127.0.0.1:{meeting_place}" if c.label else "") for c in bank.config.clients]
    card = federation.identity("card")
    card = replace(card, config=replace(card.config, clients=tuple(clients)))
    model = ReleasedModel([np.zeros((8, 2))])
    more: dict[str, Any] = {"terms": {"--output": None}, "handlers": {"sums": PartialSums(card, model).take}}
    with Aligner(card, "training", ids, tmp_path / "card", log, listen_on=None, **more).open():
        unnamed = []
        for purpose, fields in {**CALLS, **ALIGNMENT_CALLS}.items():
            to, where = ("card", ("127.0.0.1", meeting_place)) if purpose in ALIGNMENT_CALLS else (0, address)
            given = facts if "session" in fields else terms if "id_form" in fields else {}
            for name, kind, message in spoilt(fields, bank.hello(to, purpose, **given)):
                if kind == "another's name" and name in ("kind", "output") and purpose not in ("upload", "align"):
                    continue  # these calls are about a session that has both already
                said = first_message(federation, to, where, message)
                other = "session" if (name, kind) == ("session", "missing") else name
                good = isinstance(said, str) and any(
                    word in said for word in (f"{other} = ", f"{SAID.get(name, name)} ")
                )
                if not good:
                    unnamed.append((purpose, name, kind, said))
        assert unnamed == []

        def channel_for(to: Any, where: Any, purpose: str, **more: Any) -> Channel:
            found = first_message(federation, to, where, federation.identity("bank").hello(to, purpose, **more))
            assert isinstance(found, Channel), found
            return found

        right: dict[str, dict[str, Any]] = {
            "from": {"from": 0},
            "message": {"message": 0, "operation": "input_from_client", "token": "5" * 32},
            "complete": {"complete": 2, "digest": "5" * 64},
            "waiting": {"waiting": True},
            "takes": {"takes": "5" * 32},
            "session": {"session": "5" * 32},
        }
        assert not_named(UPLOADS, right, lambda: channel_for(0, address, "upload", **facts)) == []
        assert not_named(SIGNS, right, lambda: channel_for(0, address, "result", **facts)) == []
        assert not_named(SUMS, right, lambda: channel_for("card", ("127.0.0.1", meeting_place), "sums")) == []
    live = LiveFederation(tmp_path / "live", **WEAK_NOISE)
    live.start(0)
    staying = {**facts, "people": live.people("bank")}

    def stays() -> Channel:
        hello = live.identity("bank").hello(0, "live", **staying)
        found = first_message(live, 0, live.config.addresses[0], hello)
        assert isinstance(found, Channel), found
        return found

    assert not_named(SIGNS, right, stays) == []
    live.stop()
    for forms, what in (
        (ALIGNED, {"ok": {"ok": True}}),
        (LEADS, LEADING),
    ):  # an alignment, whose ends read them by this function
        for form, fields in forms.items():
            for name, kind, message in spoilt(fields, what[form]):
                here, there = socket.socketpair()
                with Channel(here, "bank", 5) as sender, Channel(there, "card", 5) as receiver:
                    sender.send(message)
                    words = "message = " if (name == form and kind == "missing") else f"{name} = "
                    with pytest.raises(HandshakeError, match=f"card sent something that does not fit: {words}"):
                        receiver.receive_one_of(forms)
    assert np.isfinite(federation.train()).all()  # nothing was lost, and nobody must act
    assert not [event for event in federation.events("server-0") if event["event"] == "a call failed"]
