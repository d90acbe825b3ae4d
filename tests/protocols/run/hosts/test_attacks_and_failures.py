"""What did not hold when operators and attackers tried, and the test that shows that it holds now.

Under each sentence: the tests, as file::test below tests/ ("here" is this file).
``test_every_test_of_the_list_is_there`` reads it.

A server's host crashes, and clients that wait for the model sit in ``recv`` for good.
    protocols/run/hosts/test_operators.py::test_a_client_that_waits_notices_a_server_that_fell_silent
    protocols/run/hosts/test_host_crash.py::test_a_crashed_host_and_an_unplugged_link_are_outlived_by_everybody (heavy)
    protocols/net/test_listener.py::test_both_ends_of_a_call_notice_a_host_that_is_gone
120 s without a link: the same.
    protocols/run/hosts/test_two_minutes.py::test_two_minutes_without_a_link_and_two_without_a_host (heavy)
Servers that are there say of each other "has gone again".
    protocols/run/hosts/test_operators.py::test_servers_wait_for_the_one_that_is_missing_and_for_nobody_else
``predict`` with different --output at two clients: the receiver hangs without a line.
    protocols/client/test_clients.py::test_what_is_opened_is_agreed_before_anything_is_shared
An upload that is a column short is accepted, fails without end, and nobody is named.
    protocols/run/hosts/test_operators.py::test_an_upload_that_is_a_column_short_is_refused_by_name
A full disk is an "OSError" without errno and path, and clients send again and again.
    protocols/run/hosts/test_operators.py::test_a_full_disk_is_a_pause_and_a_sentence
    protocols/run/hosts/test_operators.py::test_a_server_survives_its_own_full_disk
    protocols/run/hosts/test_two_minutes.py::test_a_full_disk_before_and_in_the_middle_of_the_training (heavy)
A full disk, and doctor is all green.
    protocols/net/test_doctor.py::test_a_disk_without_room_is_found
One ``upload`` call with rows = 10^9 holds the lock of a training for 110 s.
    protocols/run/hosts/test_operators.py::test_nobody_waits_for_the_plan_of_a_strangers_numbers
A client that shares rows × 1000 voids the other's guarantee.
    protocols/run/hosts/test_operators.py::test_a_client_that_voids_the_others_guarantee_is_refused_by_name
Servers started as in §5 of the guide end before §7.
    here::test_servers_started_as_in_the_guide_stay_for_predictions
    protocols/run/hosts/test_end_to_end.py::test_a_federation_from_init_to_predictions
Lost state of a server is only "no such session here".
    protocols/run/hosts/test_operators.py::test_lost_state_is_told_with_the_way_out
``key --csr --force`` replaces the key before the new certificate exists.
    protocols/cli/test_init_and_pin.py::test_a_new_key_waits_until_its_certificate_is_there
An expired own certificate starts without a warning.
    protocols/cli/test_init_and_pin.py::test_an_own_certificate_that_expired_is_told_at_the_start
Predictions are written 0644.
    here::test_predictions_are_for_the_eyes_of_their_owner
Input errors print private cells.
    here::test_no_command_shows_a_private_cell
    here::test_labels_that_are_no_class_are_counted_and_not_shown
    vfl/tables/test_schema.py::test_refusals_never_show_a_cell
``ppvfl --help`` takes 2.5 s.
    here::test_help_loads_nothing_that_takes_time
``ppvfl run`` shows no progress.
    protocols/cli/test_documented_commands.py::test_a_local_run_shows_what_happens
    here::test_a_local_run_prints_its_progress (heavy)
``checkpoint_every`` is 0 by default.
    here::test_checkpoints_are_kept_by_default
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from accel.errors import InvalidArgument
from protocols.cli import main, make_parser, predict
from protocols.client.align import Agreed
from protocols.client.columns import OwnColumns
from protocols.federation.read import load
from protocols.state.model_file import ReleasedModel
from tests.protocols.run.hosts.commands_at_hosts import init, write_data
from tests.protocols.run.hosts.federations import make_federation
from tests.protocols.run.hosts.hosts import loopback
from vfl.data.columns import ClientTable
from vfl.data.scaling import RowBound
from vfl.tables import Ids

TESTS = Path(__file__).resolve().parents[3]
ROOT = TESTS.parent
FACTS = 18  # sentences of the list above


def listed() -> list[tuple[str, str, bool]]:
    """File, test, and whether it is said to be heavy."""
    found = re.findall(r"(?m)^    (here|[a-z_/]+\.py)::(test_\w+)( \(heavy\))?$", str(__doc__))
    own = Path(__file__).relative_to(TESTS).as_posix()
    return [(own if file == "here" else file, test, bool(heavy)) for file, test, heavy in found]


def test_every_test_of_the_list_is_there() -> None:
    sentences = re.findall(r"(?m)^\S.*\n    (?:here|[a-z_/]+\.py)::", str(__doc__))
    assert len(sentences) == FACTS
    for file, name, heavy in listed():
        source = (TESTS / file).read_text()
        (function,) = [
            node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name
        ]
        marks = "".join(ast.unparse(mark) for mark in function.decorator_list)
        assert heavy == ("mark.heavy" in marks or "pytestmark = [\n    pytest.mark.heavy" in source), name


def test_servers_started_as_in_the_guide_stay_for_predictions() -> None:
    guide = (ROOT / "docs" / "deployment.md").read_text()
    train = guide.split("\n## 5. ")[1].split("\n## ")[0]
    (command,) = re.findall(r"(?m)^    ppvfl (server .*)$", train)
    assert not make_parser("server").parse_args(shlex.split(command)).until_trained


def test_predictions_are_for_the_eyes_of_their_owner(tmp_path: Path) -> None:
    """Also where a file that everybody could read is replaced."""
    file = tmp_path / "predictions.csv"
    file.write_text("old")
    file.chmod(0o644)
    words = ["--as", "card", "--columns", "card.csv", "--out", str(file), "--output", "label"]
    table = ClientTable("card.csv", Ids(("p0", "p1")), (), np.empty((2, 0), np.float32), None)
    own = OwnColumns(table, np.zeros((2, 1)), RowBound(1.0, "clip"), "a test")
    earlier = os.umask(0o022)
    try:
        predict._write(
            make_parser("predict").parse_args(["predict", *words]),
            own,
            Agreed(np.array([1, 0]), "session"),
            np.array([0, 1]),
            ReleasedModel([np.zeros((2, 1))], classes=("no", "yes")),
        )
    finally:
        os.umask(earlier)
    assert file.read_text().splitlines() == ["id,prediction", "p0,yes", "p1,no"]
    assert file.stat().st_mode & 0o777 == 0o600


SECRET = "sëcret-zq7"


@pytest.mark.parametrize("place", ["id", "x1", "a cell too many", "not UTF-8"])
@pytest.mark.parametrize("command", ["client", "check"])
def test_no_command_shows_a_private_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, place: str
) -> None:
    """Neither in what it prints nor in its log, wherever the cell is."""
    config = make_federation(tmp_path)
    cells = {"id": "7", "x0": "0.5", "x1": "0.25", "x2": "0.5", "label": "1"}
    bad = {**cells, "id": "8", **({place: SECRET} if place in cells else {})}
    row = ",".join(bad.values()).encode()
    row += {"a cell too many": f",{SECRET}".encode(), "not UTF-8": b"\xff" + SECRET.encode()}.get(place, b"")
    file = tmp_path / "card.csv"
    file.write_bytes(",".join(cells).encode() + b"\n" + ",".join(cells.values()).encode() + b"\n" + row + b"\n")
    log = tmp_path / "log"
    own = ["--as", "card", "--config", config.source, "--value-range", "0,1", "--id-rule", "integer"]
    more = ["--columns", str(file), "--log", str(log)] if command == "client" else [str(file)]
    assert main([command, *own, *more]) != 0
    shown = capsys.readouterr()
    said = shown.out + shown.err + (log.read_text() if log.exists() else "")
    assert "card.csv" in said and SECRET not in said and SECRET[2:] not in said


def test_labels_that_are_no_class_are_counted_and_not_shown(tmp_path: Path) -> None:
    table = ClientTable("card.csv", Ids(("p0", "p1")), (), np.empty((2, 0), np.float32), ("1", SECRET))
    own = OwnColumns(table, np.zeros((2, 1)), RowBound(1.0, "clip"), "a test")
    with pytest.raises(InvalidArgument, match="card.csv: labels = '?1 ") as refused:
        own.labels_of(np.arange(2), make_federation(tmp_path).run)
    assert SECRET not in str(refused.value)


def test_help_loads_nothing_that_takes_time() -> None:
    words = "import sys; sys.argv = ['ppvfl', '--help']; from protocols.cli import main\n"
    words += "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0\n"
    words += "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    found = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, cwd=ROOT, check=True)
    shown, loaded = found.stdout.rstrip("\n").rsplit("\n", 1)
    assert "audit-log" in shown
    ours_and_heavy = {"accel", "refmpc", "vfl", "numpy", "numba", "scipy", "rich", "cryptography", "pandas", "pyarrow"}
    assert not ours_and_heavy & set(loaded.split())


def test_checkpoints_are_kept_by_default(tmp_path: Path) -> None:
    """In the file that ``init`` writes, and where the key is left out."""
    config = make_federation(tmp_path)
    assert config.run.checkpoint_every > 0
    file = tmp_path / "federation.toml"
    text, count = re.subn(r"(?m)^(?:# )?checkpoint_every = .*\n", "", file.read_text())
    assert count == 1
    file.write_text(text)
    assert load(file).run.checkpoint_every > 0


@pytest.mark.heavy
def test_a_local_run_prints_its_progress(tmp_path: Path) -> None:
    write_data(tmp_path)
    init(loopback(["server-0", "server-1", "server-2", "bank", "card"]), tmp_path, 20000 + os.getpid() % 12000)
    words = [sys.executable, "-m", "protocols.deploy", "run", "--config", "federation/federation.toml"]
    words += ["--columns", "bank=bank.csv,card=card.parquet", "--id", "customer_id", "--value-range", "0,1"]
    words += ["--label-column", "defaulted", "--timeout", "120"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True, env=environment)
    shown = " ".join(found.stdout.split())
    for said in ("bank: rows aligned: common 300", "all servers agree", "computed and released"):
        assert said in shown, said
    assert re.search(r"server-0: [a-z ]+ \d+ of \d+ ", shown), shown
