"""Rules of the house that no linter knows: private names stay in their room."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = ("accel", "refmpc", "vfl", "protocols", "bench", "tests")


def private_imports(room: str, text: str) -> Iterator[str]:
    """Private names that a module of the package ``room`` takes from another one of ours."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or not node.module or node.module.split(".")[0] not in OURS:
            continue
        if node.module.rpartition(".")[0] == room:
            continue  # a neighbour in the same room
        parts = [*node.module.split("."), *(alias.name for alias in node.names)]
        yield from (f"{node.module}: {name}" for name in parts if name.startswith("_") and not name.endswith("__"))


def test_no_module_takes_private_names_from_another_room():
    found = {
        str(path.relative_to(ROOT)): names
        for package in OURS
        for path in sorted((ROOT / package).rglob("*.py"))
        if (names := list(private_imports(".".join(path.relative_to(ROOT).parent.parts), path.read_text("utf-8"))))
    }
    assert not found


def test_a_private_name_of_another_room_is_seen():
    assert list(private_imports("vfl.dp", "from vfl.dp.slack import _room\nfrom math import _pi")) == []
    assert list(private_imports("vfl.twins", "def f():\n    from vfl.dp.slack import _room, good")) == [
        "vfl.dp.slack: _room"
    ]


NAMES_OF_METHODS = {"g_bmf", "g_shuff", "gl_bmf", "gl_sub"}
MAY_NAME_METHODS = ("protocols/methods/", "vfl/methods.py")


def named_methods(text: str) -> list[str]:
    """Literals that are a method's name: whoever wants to know something of a method asks for what it can do
    (``vfl.methods``)."""
    return [
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NAMES_OF_METHODS
    ]


def test_methods_are_named_in_methods_only():
    found = {
        str(path): names
        for package in ("protocols", "vfl")
        for path in sorted((ROOT / package).rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(MAY_NAME_METHODS)
        and (names := named_methods(path.read_text("utf-8")))
    }
    assert not found and named_methods('if plan.protocol == "g_shuff": pass') == ["g_shuff"]
