"""Every ppvfl command in the documentation and in deploy/ is one that the command line understands."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from protocols.cli import COMMANDS, main, make_parser
from protocols.cli.run import Watch
from protocols.log import Log
from protocols.settings import declared

ROOT = Path(__file__).resolve().parents[3]
FILES = ["README.md", "docs/deployment.md", "deploy/ppvfl-server@.service", "deploy/compose.yaml"]


def documented() -> list[tuple[str, list[str]]]:
    found = []
    for name in FILES:
        text = (ROOT / name).read_text()
        lines = re.findall(r"(?m)^(?:    |ExecStart=/opt/ppvfl/bin/)?(ppvfl [a-z].*)$", text)
        lines += re.findall(r"`(ppvfl [a-z-]+ --[^`…]*)`", text)
        lines += [f"ppvfl {line}" for line in re.findall(r"(?m)^ +command: (.*)$", text)]
        for line in lines:
            words = shlex.split(line.split("   #")[0].replace("${PPVFL_NAME}", "server-0").replace("%i", "server-0"))
            found.append((f"{name}: {line.split(' #')[0].strip()}", words[1:]))
    return found


def test_there_are_commands_to_check():
    assert len(documented()) >= 15
    assert {words[0] for _, words in documented()} >= {"init", "key", "pin", "doctor", "server", "client", "audit-log"}


@pytest.mark.parametrize(("where", "words"), documented(), ids=[where for where, _ in documented()])
def test_documented_commands_are_understood(where, words):
    assert make_parser().parse_args(words).command == words[0]


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in COMMANDS)


def test_help_is_quick_because_it_loads_nothing():
    words = "from protocols.cli import make_parser; make_parser('none').format_help(); import sys; "
    words += "print(sorted({'numpy', 'numba', 'rich', 'scipy', 'cryptography'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.strip() == "[]"


def test_help_says_of_each_command_what_its_module_says():
    (commands,) = [a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    assert {action.dest: action.help for action in commands._choices_actions} == COMMANDS


def test_a_server_stays_for_predictions_and_checkpoints_are_kept_by_default():
    assert not make_parser("server").parse_args(["server", "--as", "server-0"]).until_trained
    assert {each.name: each.at("file") for each in declared("file")}["checkpoint_every"] > 0


def test_a_local_run_shows_what_happens(tmp_path, capsys):
    """From the logs of the participants: progress, waits, and what went wrong; not every line."""
    watch = Watch(tmp_path, ["server-0", "bank"], Console())
    server, bank = Log("server-0", tmp_path / "server-0.log"), Log("bank", tmp_path / "bank.log")
    with watch:
        bank.info("rows aligned", common=7)
        server.info("progress", phase="training", done=3, total=9)
        watch.look()
        server.warning("waiting", peer="card", since="now", reason="its upload is not complete")
        server.info("upload begins", client="bank")
    shown = capsys.readouterr().out
    for words in ("bank: rows aligned: common 7", "server-0: training 3 of 9", "waiting: peer card, since now"):
        assert words in shown
    assert "upload begins" not in shown
