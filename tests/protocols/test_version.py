"""Every command says which software it is."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from protocols import cli
from protocols.run import predict
from protocols.run.options import parse_options

COMMANDS: dict[str, Callable[[list[str]], Any]] = {
    "ppvfl": cli.main,
    "predict": partial(predict.main, None),
    **{name: partial(parse_options, name, None) for name in ("g_bmf", "g_shuff", "gl_bmf", "plain", "ldp")},
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_the_version_is_the_release_and_the_wire_protocol(command, capsys):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    with pytest.raises(SystemExit) as end:
        command(["--version"])
    assert end.value.code == 0
    release, _, wire = capsys.readouterr().out.strip().partition("/")
    assert release == f"ppvfl {project['version']}" and wire.isdigit()
