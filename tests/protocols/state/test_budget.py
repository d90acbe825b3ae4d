"""What is spent on the same people over several runs: kept by every server, refused beyond the limit, shown."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accel.errors import InvalidArgument
from accel.files import read_json
from protocols.cli import main
from protocols.client.people import people_tag
from protocols.federation.public_plan import plan_for
from protocols.federation.read import configuration_hash, load
from protocols.net.checks import check_budget
from protocols.state.budget import BUDGET, Budgets
from refmpc.core.errors import HandshakeError
from tests.protocols.run.hosts.federations import make_federation
from tests.protocols.run.hosts.threads import ROWS, Federation
from vfl.dp.budget import BudgetExceededError, composed_epsilon

LIMIT = "\n[budget]\nepsilon = 4.0\ndelta = 1e-5\n"


def train(federation: Federation) -> dict[str, Any]:
    federation.align()
    federation.start_all()
    federation.clients()
    found = federation.wait()
    federation.stop()
    return found


def renamed(federation: Federation, name: str) -> None:
    file = federation.directory / "federation.toml"
    file.write_text(file.read_text().replace(f'name = "{federation.config.name}"', f'name = "{name}"'))
    federation.config = load(file)


def test_a_second_run_beyond_the_budget_is_refused_and_the_first_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    federation = Federation(tmp_path)
    file = tmp_path / "federation.toml"
    file.write_text(file.read_text() + LIMIT)
    federation.config = load(file)
    assert isinstance(train(federation)["bank"], list)
    renamed(federation, "another")  # another configuration, the same people
    refused = train(federation)
    for found in refused.values():
        assert isinstance(found, HandshakeError) and "would bring" in str(found)
    assert len(list(tmp_path.glob("server-*/state/*/training-*/done.json"))) == 3
    for number in range(3):
        spent = Budgets(tmp_path / f"server-{number}" / "state", federation.config).spent()
        assert [(s.client, s.runs) for s in spent] == [("bank", 1), ("card", 1)]
        assert all(2.9 < s.epsilon < 3.1 for s in spent)
        tags = read_json(tmp_path / f"server-{number}" / "state" / BUDGET / "people.json")
        (first,) = tags.values()
        assert set(first) == {"bank", "card"} and len(set(first.values())) == 2
    capsys.readouterr()
    assert main(["audit-log", *(str(tmp_path / f"server-{n}" / "state") for n in range(3))]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "server-2: spent on card-everybody" in shown and "in 1 runs, limit 4" in shown
    (ledger,) = (tmp_path / "server-1" / "state" / BUDGET).glob("bank-*.json")
    content = read_json(ledger)
    ledger.write_text(json.dumps({**content, "runs": []}))
    assert main(["audit-log", *(str(tmp_path / f"server-{n}" / "state") for n in range(3))]) == 1
    assert "differ in the runs charged to bank" in " ".join(capsys.readouterr().out.split())


def test_runs_compose_and_a_run_is_charged_once(tmp_path: Path) -> None:
    make_federation(tmp_path)
    file = tmp_path / "federation.toml"
    file.write_text(file.read_text().replace("batch_size = 128", "batch_size = 32") + LIMIT.replace("4.0", "4.5"))
    config = load(file)
    claim, tags = plan_for(config, ROWS).claim, {"bank": "0" * 64, "card": "1" * 64}
    budgets = Budgets(tmp_path / "state", config)
    for _ in range(3):
        budgets.charge("first", claim, tags)
    budgets.charge("second", claim, tags)
    together = composed_epsilon([claim, claim], 1e-5)
    assert np.isclose(budgets.spent()[0].epsilon, together) and claim.epsilon < together < 2 * claim.epsilon
    assert "would bring" in budgets.objection("third", claim, tags) and budgets.objection("second", claim, tags) == ""
    with pytest.raises(BudgetExceededError, match="would bring"):
        budgets.charge("third", claim, tags)
    assert [spent.runs for spent in budgets.spent()] == [2, 2]
    budgets.refund("second")
    budgets.charge("third", claim, tags)
    with pytest.raises(BudgetExceededError, match="card sent no tag of whose data it is"):
        budgets.charge("second", claim, {"bank": "0" * 64})
    other = replace(claim, neighbouring="others", rows_per_person=2)
    assert "other neighbours than those of earlier runs" in budgets.objection("fourth", other, tags)


WORDS = '\n[budget]\nepsilon = 4.0\ndelta = 1e-5\npeople = "{}"\napart_from = {}\n'
FIRST = {"bank": "a" * 64, "card": "b" * 64}
OTHERS = {"bank": "c" * 64, "card": "d" * 64}


@pytest.mark.parametrize(
    ("way", "people", "apart_from", "tags"),
    [
        ("another word, 999 of 1,000 ids", "of 2026", "[]", OTHERS),
        ("other clients' names", "of 2025", "[]", OTHERS),
        ("a lost people.key", "of 2025", "[]", OTHERS),
        ("the same list, said to be of others", "of 2026", '["of 2025"]', {**OTHERS, "card": "b" * 64}),
        ("said to be apart from others", "of 2026", '["of 2024"]', OTHERS),
    ],
)
def test_what_was_spent_stays_spent_unless_all_state_that_people_are_others(
    tmp_path: Path, way: str, people: str, apart_from: str, tags: dict[str, str]
) -> None:
    make_federation(tmp_path)
    file = tmp_path / "federation.toml"
    text = file.read_text().replace("batch_size = 128", "batch_size = 32")
    file.write_text(text + WORDS.format("of 2025", "[]"))
    config = load(file)
    claim = plan_for(config, ROWS).claim
    Budgets(tmp_path / "state", config).charge("first", claim, FIRST)
    if "names" in way:
        text = re.sub(r"\bcard\b", "club", re.sub(r"\bbank\b", "shop", text))
        tags = {"shop": tags["bank"], "club": tags["card"]}
    file.write_text(text + WORDS.format(people, apart_from))
    again = Budgets(tmp_path / "state", load(file))
    assert "would bring what was spent on these people from ε = " in again.objection("second", claim, tags)
    with pytest.raises(BudgetExceededError, match="would bring"):
        again.charge("second", claim, tags)


def test_people_that_all_state_to_be_others_have_a_budget_of_their_own(tmp_path: Path) -> None:
    make_federation(tmp_path)
    file = tmp_path / "federation.toml"
    text = file.read_text().replace("batch_size = 128", "batch_size = 32")
    file.write_text(text + WORDS.format("of 2025", "[]"))
    config = load(file)
    claim = plan_for(config, ROWS).claim
    Budgets(tmp_path / "state", config).charge("first", claim, FIRST)
    file.write_text(text + WORDS.format("of 2026", '["of 2025"]'))
    stated = load(file)
    assert configuration_hash(stated) != configuration_hash(config)  # who does not state it is refused when it connects
    others = Budgets(tmp_path / "state", stated)
    assert [spent.runs for spent in others.spent()] == [0, 0]
    others.charge("second", claim, OTHERS)
    assert [spent.runs for spent in others.spent()] == [1, 1]
    assert [spent.runs for spent in Budgets(tmp_path / "state", config).spent()] == [2, 2]  # this file states nothing
    file.write_text(text + WORDS.format("of 2026", '["of 2026"]'))
    with pytest.raises(ValueError, match="apart_from = .*must be without 'of 2026'"):
        load(file)


def test_the_tag_is_of_the_people_and_nobody_else_can_make_it(tmp_path: Path) -> None:
    tag = people_tag(tmp_path / "bank", "bank", ["b", "a", "c"])
    assert tag == people_tag(tmp_path / "bank", "bank", ["c", "b", "a"]) and len(tag) == 64
    others = [
        people_tag(tmp_path / "bank", "bank", ["a", "b"]),
        people_tag(tmp_path / "bank", "bank", ["a", "bc"]),
        people_tag(tmp_path / "bank", "card", ["a", "b", "c"]),
        people_tag(tmp_path / "elsewhere", "bank", ["a", "b", "c"]),
    ]
    assert len({tag, *others}) == 5
    assert (tmp_path / "bank" / "people.key").stat().st_mode & 0o777 == 0o600


def test_a_client_names_its_people_once_a_session(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    server = federation.start(0)
    session = server._store.open({"kind": "training", "session": "0" * 32, "rows": ROWS, "output": None}, "bank")
    for nothing in (None, "", "E" * 64, 7):
        with pytest.raises(InvalidArgument, match="people = .*must be the keyed tag of this client's list of ids"):
            session.note_people("bank", nothing)
    session.note_people("bank", "e" * 64)
    session.note_people("bank", "e" * 64)
    with pytest.raises(InvalidArgument, match="whom bank has named in this session before"):
        session.note_people("bank", "f" * 64)
    assert session.people == {"bank": "e" * 64}
    federation.stop()


def test_doctor_shows_what_is_spent_and_warns_before_it_is_too_much() -> None:
    entry = {"client": "bank", "people": "everybody", "epsilon": 3.0, "delta": 1e-5, "limit": 10.0, "runs": 1}
    found = check_budget("server-0", [entry], 3.0)
    assert (found.status, found.found) == ("ok", "bank: ε = 3 of 10 at δ = 1e-05, 1 runs (everybody)")
    assert check_budget("server-0", [{**entry, "limit": 5.0}], 3.0).status == "warning"
    assert check_budget("server-0", [{**entry, "limit": None}], 3.0).found.endswith(
        "no limit at δ = 1e-05, 1 runs (everybody)"
    )
    assert check_budget("server-0", [{}], 3.0).status == "warning"
