"""Every ppvfl command in the documentation and in deploy/ is one that the command line understands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from protocols.deploy.cli import COMMANDS, main, make_parser

ROOT = Path(__file__).resolve().parents[4]
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
