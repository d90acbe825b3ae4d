"""Every command says which software it is."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from protocols import cli, version
from protocols.run import predict
from protocols.run.options import parse_options

COMMANDS: dict[str, Callable[[list[str]], Any]] = {
    "ppvfl": cli.main,
    "predict": partial(predict.main, None),
    **{name: partial(parse_options, name, None) for name in ("g_bmf", "g_shuff", "gl_bmf", "plain", "ldp")},
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_the_version_is_the_release_the_wire_protocol_and_the_commit(command, capsys):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    with pytest.raises(SystemExit) as end:
        command(["--version"])
    assert end.value.code == 0
    shown = capsys.readouterr().out.strip()
    assert re.fullmatch(rf"ppvfl {re.escape(project['version'])}/\d+ \(commit ([0-9a-f]{{12}}|unknown)\)", shown)


def test_the_commit_is_what_pip_noted_else_that_of_the_checkout_else_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(version, "CHECKOUT", tmp_path)
    assert version.software_commit() == "unknown"
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert version.software_commit() == "unknown"  # a repository without a commit
    names = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", "-C", str(tmp_path), *names, "commit", "-qm", "first", "--allow-empty"], check=True)
    head = subprocess.run(["git", "-C", str(tmp_path), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert version.software_commit() == head.stdout[:12]
    installed = tmp_path / "ppvfl-9.0.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: ppvfl\nVersion: 9.0.0\n")
    (installed / "direct_url.json").write_text(json.dumps({"vcs_info": {"vcs": "git", "commit_id": "ab" * 20}}))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert version.version_line().startswith("ppvfl 9.0.0/")
    assert version.version_line().endswith(f"(commit {'ab' * 6})")
