"""Clients with each other: alignment kept, lost and repeated, predictions in the clear; files that do not fit."""

from __future__ import annotations

import csv
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from accel.errors import InvalidArgument
from ppvfl import VerticalClassifier
from protocols.cli import main, make_parser
from protocols.cli.init import initialise
from protocols.cli.predict import read_own_model
from protocols.client.align import Aligner
from protocols.client.columns import read_columns
from protocols.client.take_part import released
from protocols.federation.public_plan import plan_for
from protocols.federation.read import ClientEntry, FederationConfig, load
from protocols.federation.template import federation_text
from protocols.log import Log
from protocols.net.credentials import load_credentials
from protocols.net.wire import Identity
from protocols.state.model_file import write_model
from refmpc.core.errors import HandshakeError
from tests.not_none import not_none
from tests.protocols.client.meetings import together
from tests.protocols.run.hosts.federations import CLIENTS, free_ports, make_federation
from vfl.alignment.link import Hub

WIDTHS = {name: width for name, width, _ in CLIENTS}


@pytest.fixture
def config(tmp_path: Path) -> FederationConfig:
    make_federation(tmp_path)
    file = tmp_path / "federation.toml"
    text = file.read_text()
    (address,) = [address for _, _, address in CLIENTS if address]  # the label client's
    file.write_text(text.replace(address, f"127.0.0.1:{free_ports(1)[0]}"))
    return load(file)


def aligner(config: FederationConfig, directory: Path, name: str, ids: list[str], pad_to: int | None = None) -> Aligner:
    identity = Identity(config, name, load_credentials(config, name))
    log = Log(name, directory / f"{name}.log")
    return Aligner(identity, "training", ids, directory / name, log, listen_on=None, pad_to=pad_to)


def agree(config: FederationConfig, directory: Path, ids: dict[str, list[str]], **options: Any) -> dict[str, Any]:
    def work(name: str) -> Any:
        with aligner(config, directory, name, ids[name]).open() as mine:
            return mine.agree(lambda count: None, **options)

    return together({name: lambda name=name: work(name) for name in ids})


def test_clients_align_once_and_remember_it(config: FederationConfig, tmp_path: Path) -> None:
    ids = {"bank": [f"p{i}" for i in range(30)], "card": [f"p{i}" for i in range(40, 10, -1)]}
    first = agree(config, tmp_path, ids)
    common = [[ids[name][row] for row in first[name].rows] for name in ids]
    assert common[0] == common[1] and sorted(common[0]) == sorted(set(ids["bank"]) & set(ids["card"]))
    assert first["bank"].session == first["card"].session
    again = agree(config, tmp_path, ids)
    assert all(again[name].from_disk and again[name].session == first["bank"].session for name in ids)
    anew = agree(config, tmp_path, ids, again=True)
    assert anew["bank"].session == anew["card"].session != first["bank"].session
    assert (tmp_path / "bank" / "alignment-training.npz").stat().st_mode & 0o077 == 0


def test_a_client_that_lost_its_alignment_is_told_what_to_do(config: FederationConfig, tmp_path: Path) -> None:
    ids = {name: [f"p{i}" for i in range(5)] for name in WIDTHS}
    agree(config, tmp_path, ids)
    (tmp_path / "bank" / "alignment-training.npz").unlink()
    with aligner(config, tmp_path, "card", ids["card"]).open() as card:
        assert card.agree(lambda count: None).from_disk
        with (
            aligner(config, tmp_path, "bank", ids["bank"]).open() as bank,
            pytest.raises(HandshakeError, match="start all clients with --align-again"),
        ):
            bank.agree(lambda count: None)


def test_a_client_that_comes_back_too_late_is_not_left_waiting(config: FederationConfig, tmp_path: Path) -> None:
    """It is killed when all are matched, and calls again before the label client has noticed: it sat there for ten
    minutes, and no line said so."""
    ids = {name: [f"p{i}" for i in range(5)] for name in WIDTHS}
    met, back = threading.Event(), threading.Event()

    def matched(name: str) -> Any:
        mine = aligner(config, tmp_path, name, ids[name])
        if name == "bank":  # it dies with what it was told: nothing is kept
            mine._save = lambda agreed: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
        else:
            announce = mine._announce

            def slowly(agreed: Any) -> None:
                met.set()
                announce(agreed)
                assert back.wait(10)

            mine._announce = slowly  # type: ignore[method-assign]
        with mine.open():
            if name == "card":
                mine.agree(lambda count: None)
                assert not mine._arrived
                return over.wait(20)
            with pytest.raises(KeyboardInterrupt):
                mine.agree(lambda count: None)
        again, arrived = aligner(config, tmp_path, "bank", ids["bank"]), threading.Timer(1.0, back.set)
        assert met.wait(10)
        arrived.start()
        begun = time.monotonic()
        try:
            with again.open(), pytest.raises(HandshakeError, match="start all clients with --align-again"):
                again.agree(lambda count: None)
        finally:
            over.set()
        return time.monotonic() - begun

    over = threading.Event()
    found = together({name: lambda name=name: matched(name) for name in ids})
    assert found["card"] is True and 0.5 < found["bank"] < 10


class Killed(BaseException):
    """As by the system: nothing is said, and nothing kept."""


@pytest.mark.parametrize(("name", "message"), [*(("bank", i) for i in range(5)), *(("card", i) for i in range(6))])
def test_a_client_that_is_killed_at_any_message_aligns_when_it_is_back_or_is_told_why_not(
    config: FederationConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: int
) -> None:
    """And the other goes on meanwhile. Keys are those of one attempt (``tests/security``)."""
    ids = {"bank": [f"p{i}" for i in range(9)], "card": [f"p{i}" for i in range(4, 12)]}
    said, send = 0, Hub.send

    def until(hub: Hub, to: int, kind: bytes, payload: bytes | memoryview) -> None:
        nonlocal said
        if hub.name == name:
            said += 1
            if said == message + 1:
                hub.cut()
                raise Killed
        send(hub, to, kind, payload)

    monkeypatch.setattr(Hub, "send", until)
    over = threading.Event()

    def work(me: str) -> Any:
        try:
            with aligner(config, tmp_path, me, ids[me]).open() as mine:
                return mine.agree(lambda count: None), me == "card" and over.wait(60)
        except Killed:
            with aligner(config, tmp_path, me, ids[me]).open() as mine:
                return mine.agree(lambda count: None), me == "card" and over.wait(60)
        finally:
            if me == "bank":
                over.set()

    found = together({me: lambda me=me: work(me) for me in ids})
    assert said > message
    (card, _), bank = found["card"], found["bank"]
    common = [ids["card"][row] for row in card.rows]
    assert sorted(common) == [f"p{i}" for i in range(4, 9)]
    if isinstance(bank, HandshakeError):  # the label client had its rows before
        assert "start all clients with --align-again" in str(bank)
    else:
        assert [ids["bank"][row] for row in bank[0].rows] == common and bank[0].session == card.session


def test_how_often_a_training_is_aligned_is_counted_and_bounded(config: FederationConfig, tmp_path: Path) -> None:
    """Each time with another list is an answer about other ids."""
    ids = {"bank": ["p1", "p2"], "card": ["p2", "p3"]}
    agree(config, tmp_path, ids)
    agree(config, tmp_path, ids)  # from disk
    agree(config, tmp_path, ids, again=True)
    events = [json.loads(line) for line in (tmp_path / "bank.log").read_text().splitlines()]
    assert [line["alignment"] for line in events if line["event"] == "aligns"] == [1, 2]
    identity = Identity(config, "bank", load_credentials(config, "bank"))
    log = Log("bank", tmp_path / "bank.log")
    bank = Aligner(identity, "training", ids["bank"], tmp_path / "bank", log, listen_on=None, most=2)
    with pytest.raises(InvalidArgument, match="alignments for training = 3: must be at most 2; each with another list"):
        bank.agree(lambda count: None, again=True)


def test_fewer_common_ids_than_a_client_asks_for_end_it_at_all_before_they_are_named(
    config: FederationConfig, tmp_path: Path
) -> None:
    ids = {"bank": [f"p{i}" for i in range(9)], "card": [f"p{i}" for i in range(4, 12)]}

    def work(name: str, minimum: int) -> Any:
        identity, log = Identity(config, name, load_credentials(config, name)), Log(name, tmp_path / f"{name}.log")
        mine = Aligner(identity, "training", ids[name], tmp_path / name, log, listen_on=None, minimum=minimum)
        with mine.open():
            return mine.agree(lambda count: None)

    found = together({"bank": lambda: work("bank", 6), "card": lambda: work("card", 0)})
    for error in found.values():
        assert isinstance(error, InvalidArgument) and "5 ids are common, and one client asks for at least 6" in str(
            error
        )
    found = together({"bank": lambda: work("bank", 5), "card": lambda: work("card", 0)})
    assert all(len(each.rows) == 5 for each in found.values())


def test_of_three_clients_those_who_are_early_say_whom_they_wait_for(tmp_path: Path) -> None:
    """The first to call the label client sat there without a line until the other had come, and gave up after five
    times ten minutes. It may also go away meanwhile."""
    servers, meeting = [("127.0.0.1", port) for port in free_ports(3)], f"127.0.0.1:{free_ports(1)[0]}"
    clients = [("bank", 4, ""), ("shop", 2, ""), ("card", 3, meeting)]
    config = initialise(federation_text("test", servers, clients, 2), tmp_path, keys="certificates")
    ids = [f"p{i}" for i in range(9)]

    def agreed(name: str) -> Any:
        if name == "shop":
            other = aligner(config, tmp_path / "before", "bank", ids)  # it has called, and is killed
            other._call_leader().close()
            until = time.monotonic() + 60
            while not any(line["event"] == "waiting" and line["peer"] == "shop" for line in events("bank")):
                assert time.monotonic() < until
                time.sleep(0.05)
        with aligner(config, tmp_path, name, ids).open() as mine:
            return mine.agree(lambda count: None)

    def events(name: str) -> list[dict[str, Any]]:
        log = tmp_path / f"{name}.log"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    found = together({name: lambda name=name: agreed(name) for name in ("bank", "card", "shop")})
    assert {len(each.rows) for each in found.values()} == {9} and len({each.session for each in found.values()}) == 1


def test_the_number_of_rows_is_hidden_only_if_all_agree_to_it(config: FederationConfig, tmp_path: Path) -> None:
    ids = {"bank": ["p1", "p2", "p3"], "card": ["p2", "p4"]}
    with aligner(config, tmp_path, "card", ids["card"], pad_to=16).open() as card:
        with (
            aligner(config, tmp_path, "bank", ids["bank"]).open() as careless,
            pytest.raises(HandshakeError, match="bank has --pad-to None, card has 16: they must agree"),
        ):
            careless.agree(lambda count: None)
        with aligner(config, tmp_path, "bank", ids["bank"], pad_to=16).open() as bank:
            work = {"card": lambda: card.agree(lambda n: None), "bank": lambda: bank.agree(lambda n: None)}
            found = together(work)
    assert [ids[name][int(found[name].rows[0])] for name in ids] == ["p2", "p2"]


def test_predictions_in_the_clear_are_those_of_the_model(config: FederationConfig, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    layer = random.normal(size=(sum(WIDTHS.values()) + 1, 2))
    values = {name: random.uniform(size=(12, width)) for name, width in WIDTHS.items()}
    work = {}
    for name, width in WIDTHS.items():
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["id", *(f"x{i}" for i in range(width))])
            writer.writerows([f"p{i}", *row] for i, row in enumerate(values[name]))
        write_model(tmp_path / f"{name}.npz", released(config, plan_for(config, 200), [layer]))
        words = ["predict", "--as", name, "--config", config.source, "--columns", str(tmp_path / f"{name}.csv")]
        words += ["--value-range", "0,1", "--model", str(tmp_path / f"{name}.npz"), "--clear", "--output", "logits"]
        words += ["--out", str(tmp_path / f"{name}-out.csv"), "--log", str(tmp_path / "log")]
        work[name] = lambda words=words: main(words)
    assert together(work) == {"bank": 0, "card": 0}
    assert not (tmp_path / "bank-out.csv").exists()  # only the receiver gets predictions
    assert (tmp_path / "card-out.csv").stat().st_mode & 0o077 == 0
    with (tmp_path / "card-out.csv").open() as file:
        found = {row["id"]: [float(row["0"]), float(row["1"])] for row in csv.DictReader(file)}
    parts = list(values.values())  # within the row bound
    expected = np.column_stack([*parts, np.ones(12)]) @ layer
    np.testing.assert_allclose([found[f"p{i}"] for i in range(12)], expected, atol=1e-5)


def test_files_that_the_python_api_saved_predict_in_a_federation(config: FederationConfig, tmp_path: Path) -> None:
    """Without servers, which have not trained this model; each client with its own file and its raw table, in any order
    of columns."""
    random = np.random.default_rng(5)
    tables = {}
    for name, width in WIDTHS.items():
        columns = {f"x{i}": 100 + 20 * random.normal(size=300) for i in range(width)}
        tables[name] = pandas.DataFrame({"id": [f"p{i}" for i in range(300)], **columns})
    labels = np.where(tables["bank"]["x0"] + tables["card"]["x0"] > 200, "1", "0")
    public = {name: table.assign(id=[f"q{i}" for i in range(300)]) for name, table in tables.items()}
    model = VerticalClassifier(backend="twin", public=public, id_column="id", epsilon=8.0)
    model.fit({"bank": tables["bank"], "card": tables["card"].assign(label=labels)}, y="label")
    model.save(tmp_path / "kept")
    work = {}
    for name, table in tables.items():
        table[table.columns[::-1]].head(20).to_csv(tmp_path / f"{name}.csv", index=False)
        words = ["predict", "--as", name, "--config", config.source, "--columns", str(tmp_path / f"{name}.csv")]
        words += ["--clear", "--output", "probabilities", "--log", str(tmp_path / "log")]
        words += ["--model", str(tmp_path / "kept" / f"model-{name}.npz"), "--out", str(tmp_path / "out.csv")]
        work[name] = lambda words=words: main(words)
    assert together(work) == {"bank": 0, "card": 0}
    found = pandas.read_csv(tmp_path / "out.csv")
    expected = not_none(model.predict_proba({name: table.head(20) for name, table in tables.items()}))
    np.testing.assert_allclose(found[["0", "1"]].to_numpy(), expected, atol=1e-5)
    with pytest.raises(ValueError, match="--model = '.*the file of card': must be that of bank"):
        read_own_model(tmp_path / "kept" / "model-card.npz", "bank", config, Log("bank", tmp_path / "log"))


def test_what_is_opened_is_agreed_before_anything_is_shared(config: FederationConfig, tmp_path: Path) -> None:
    """With two different --output the receiver waited without a line."""
    ids = [f"p{i}" for i in range(5)]

    def with_output(name: str, output: str) -> Aligner:
        identity = Identity(config, name, load_credentials(config, name))
        log, terms = Log(name, tmp_path / f"{name}.log"), {"--output": output}
        return Aligner(identity, "prediction", ids, tmp_path / name, log, listen_on=None, terms=terms)

    with with_output("card", "label").open() as card:
        with (
            with_output("bank", "logits").open() as careless,
            pytest.raises(HandshakeError, match="bank has --output logits, card has label: they must agree"),
        ):
            careless.agree(lambda count: None)
        with with_output("bank", "label").open() as bank:
            together({"card": lambda: card.agree(lambda n: None), "bank": lambda: bank.agree(lambda n: None)})
    assert "card has label" in (tmp_path / "card.log").read_text()  # the receiver is told, too
    with with_output(
        "bank", "logits"
    ).open() as careless:  # what was aligned for another output is not taken for this one
        assert careless._load() is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "--public FILE, --value-range LOW,HIGH or --scaled"),
        (["--value-range", "zero"], "--value-range 'zero' must be two numbers"),
        (["--value-range", "0,1", "--id", "person"], "the id column 'person' is missing"),
        (["--value-range", "0,1", "--label-column", "x0"], "card holds the labels"),
        (["--value-range", "0,1"], "columns after scaling and the local model = 2: must be 4, the width of bank"),
    ],
)
def test_files_that_do_not_fit_are_refused_in_a_sentence(
    config: FederationConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    (tmp_path / "bank.csv").write_text("id,x0,x1\np1,0.5,0.25\np2,0.5,0.75\n")
    command = ["client", "--as", "bank", "--config", config.source, "--columns", str(tmp_path / "bank.csv")]
    assert main([*command, "--log", str(tmp_path / "log"), *words]) == 2
    assert sentence in capsys.readouterr().err.replace("\n", " ")


def test_a_port_that_is_taken_is_named(config: FederationConfig, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(config.addresses[0]):
        assert main(["server", "--as", "server-0", "--config", config.source]) == 1
    assert "Address already in use" in capsys.readouterr().err


def test_ids_of_different_forms_are_refused_before_they_are_matched(config: FederationConfig, tmp_path: Path) -> None:
    identity = Identity(config, "bank", load_credentials(config, "bank"))
    log = Log("bank", tmp_path / "bank.log")
    verbatim = Aligner(identity, "training", ["007"], tmp_path / "bank", log, listen_on=None, id_form="verbatim")
    with (
        aligner(config, tmp_path, "card", ["7"]).open(),
        verbatim.open() as bank,
        pytest.raises(HandshakeError, match="bank writes ids in verbatim form, card in canonical form.*at all "
                                            "clients or at none"),
    ):  # fmt: skip
        bank.agree(lambda count: None)


def test_no_common_person_is_said_in_a_sentence_and_not_remembered(config: FederationConfig, tmp_path: Path) -> None:
    ids = {"bank": ["p1", "p2"], "card": ["1", "2", "3"]}
    said = {}

    def work(name: str) -> None:
        with aligner(config, tmp_path, name, ids[name]).open() as mine, pytest.raises(InvalidArgument) as error:
            mine.agree(lambda count: None)
        said[name] = str(error.value)

    together({name: lambda name=name: work(name) for name in ids})
    assert "no person is in every client's file: none of the 2 ids (text, 2 characters)" in said["bank"]
    assert (
        "3 ids (whole numbers, 1 characters)" in said["card"] and "all files write ids in the same way" in said["card"]
    )
    assert not list(tmp_path.glob("*/alignment-training.npz"))  # other files may have rows in common


def test_held_out_rows_are_evaluated_at_the_label_client_alone(config: FederationConfig, tmp_path: Path) -> None:
    """In the clear, without servers: the rows at the end of the training's order, and no others."""
    file = Path(config.source)
    file.write_text(file.read_text().replace("held_out = 0.0", "held_out = 0.25"))
    config = load(file)
    random, count = np.random.default_rng(3), 40
    layer = random.normal(size=(sum(WIDTHS.values()) + 1, 1))  # two classes are one logit
    values = {name: random.uniform(size=(count, width)) for name, width in WIDTHS.items()}
    layer[-1] = -np.median(np.column_stack(list(values.values())) @ layer[:-1])
    labels = (np.column_stack([*values.values(), np.ones(count)]) @ layer)[:, 0] > 0
    words = {}
    for name, width in WIDTHS.items():
        with (tmp_path / f"{name}.csv").open("w", newline="") as table:
            writer = csv.writer(table)
            writer.writerow(["id", *(f"x{i}" for i in range(width)), *(["label"] if name == "card" else [])])
            for i, row in enumerate(values[name]):
                writer.writerow([f"p{i}", *row, *([int(labels[i])] if name == "card" else [])])
        entry = config.participant(name)
        assert isinstance(entry, ClientEntry)
        columns = str(tmp_path / f"{name}.csv")
        arguments = make_parser().parse_args(["check", columns, "--value-range", "0,1"])
        own = read_columns(config, entry, columns, arguments)
        write_model(tmp_path / f"{name}.npz", released(config, plan_for(config, count), [layer], columns=own))
        words[name] = ["predict", "--as", name, "--config", str(file), "--columns", columns, "--held-out", "--clear"]
        words[name] += ["--model", str(tmp_path / f"{name}.npz"), "--log", str(tmp_path / "log")]
        words[name] += ["--state", str(tmp_path / "state" / name), "--report", str(tmp_path / f"{name}.html")]
        words[name] += ["--out", str(tmp_path / f"{name}-out.csv")]
    assert main(words["bank"]) == 2  # nothing was aligned for a training yet
    identities = {name: Identity(config, name, load_credentials(config, name)) for name in WIDTHS}
    state = {name: identity.kept_in(tmp_path / "state" / name) for name, identity in identities.items()}
    ids = [f"p{i}" for i in range(count)]

    def train(name: str) -> Any:
        identity = Identity(config, name, load_credentials(config, name))
        mine = Aligner(identity, "training", ids, state[name], Log(name, tmp_path / "log"), listen_on=None)
        with mine.open() as opened:
            return opened.agree(lambda n: None)

    agreed = together({name: lambda name=name: train(name) for name in WIDTHS})
    assert together({name: lambda name=name: main(words[name]) for name in WIDTHS}) == {"bank": 0, "card": 0}
    assert (tmp_path / "card.html").exists() and not (tmp_path / "bank.html").exists()
    with (tmp_path / "card-out.csv").open() as table:
        found = [row["id"] for row in csv.DictReader(table)]
    assert sorted(found) == sorted(ids[row] for row in agreed["card"].rows[30:])
    assert "accuracy</th><td>1.000" in (tmp_path / "card.html").read_text()  # labels are the model's own
