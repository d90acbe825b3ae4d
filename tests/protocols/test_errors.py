"""A user's mistake is shown as a sentence; a bug of ours is shown with its traceback."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel.errors
import refmpc
from accel.errors import InvalidArgument, PpvflError
from accel.validate import require
from protocols import cli
from protocols.cli import key
from protocols.run import launch
from protocols.run.exit import leaving

PACKAGES = ("accel", "bench", "protocols", "refmpc", "vfl")
ROOT = Path(accel.errors.__file__).parent.parent


def numpy_bug(*ignored: object) -> Any:
    return np.zeros(3) + np.zeros(4)


def mistake(*ignored: object) -> Any:
    require(False, "epsilon", -1, "above 0", "take 1")


def trees() -> list[tuple[Path, ast.Module]]:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 150
    return [(file, ast.parse(file.read_text(encoding="utf-8"))) for file in files]


def test_a_bug_inside_a_local_command_is_not_shown_as_the_users_mistake(monkeypatch):
    monkeypatch.setattr(launch, "make_federation", numpy_bug)
    with pytest.raises(ValueError, match="could not be broadcast") as caught:
        launch.main("g_bmf", None, [])
    assert not isinstance(caught.value, PpvflError)
    monkeypatch.setattr(launch, "make_federation", mistake)
    with pytest.raises(SystemExit, match=r"g_bmf: epsilon = -1: must be above 0; take 1$"):
        launch.main("g_bmf", None, [])


def test_a_bug_inside_a_deployed_command_is_not_shown_as_the_users_mistake(monkeypatch, capsys):
    words = ["key", "--as", "bank"]
    monkeypatch.setattr(key, "run", numpy_bug)
    with pytest.raises(ValueError, match="could not be broadcast"):
        cli.main(words)
    monkeypatch.setattr(key, "run", mistake)
    assert cli.main(words) == 2
    assert capsys.readouterr().err == "ppvfl key: epsilon = -1: must be above 0; take 1\n"


def failing_party(party: refmpc.Party, fault: str) -> None:
    numpy_bug() if fault == "bug" else mistake()


@pytest.mark.parametrize("fault", ["bug", "mistake"])
def test_a_party_that_fails_shows_its_traceback_only_for_a_bug(fault):
    with pytest.raises(refmpc.PartyFailed) as caught:
        refmpc.run(failing_party, [fault] * 3, parties="threads")
    caught.value.add_note("continue with: …")
    text = str(leaving("g_bmf", caught.value))
    assert "continue with: …" in text and "server-0 failed" in text
    assert ("Traceback of server-" in text) == (fault == "bug")
    assert "Traceback" not in caught.value.summary and "Traceback of server-" in str(caught.value)


def test_nothing_of_ours_raises_a_plain_error():
    plain = {"ValueError", "ArithmeticError", "Exception"}
    wrong = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
        and node.exc.func.id in plain
    ]
    assert wrong == []


def test_the_drawn_tree_is_complete():
    ours = {"InvalidArgument", "PpvflError"}
    classes = [node for _, tree in trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for _ in range(5):  # until bases of bases are in
        ours |= {c.name for c in classes if ours & {b.id for b in c.bases if isinstance(b, ast.Name)}}
    errors = {
        c.name
        for c in classes
        if any(isinstance(b, ast.Name) and b.id.endswith(("Error", "Exception")) for b in c.bases)
    }
    assert {name for name in errors - ours if not name.startswith("_")} == set()  # private ones never leave their file
    drawn = accel.errors.__doc__ or ""
    assert [name for name in sorted(ours) if not name.startswith("_") and name not in drawn] == []
    assert issubclass(InvalidArgument, ValueError)
