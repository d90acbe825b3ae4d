"""A server that is warm loads no kernel when it trains: in a process of its own, because kernels stay where they are
loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from protocols.run.warm_up import forget_earlier

pytest.importorskip("numba")

FILTERS = {
    "_add_first",
    "_into_ring",
}  # of noise, which is made by a thread of its own: which one depends on how much it is
SCRIPT = """
import json, sys
from pathlib import Path
from numba.core.dispatcher import Dispatcher
from protocols.methods import g_bmf
from protocols.run.warm_up import warm_up
from tests.protocols.state.test_stored_rows import make_plan, train

def loaded():
    modules = [module for name, module in sys.modules.items() if name.startswith("accel.") and module is not None]
    values = (value for module in modules for value in vars(module).values())
    kernels = {id(kernel): kernel for kernel in values if isinstance(kernel, Dispatcher)}
    return {kernel.py_func.__qualname__: len(kernel.overloads) for kernel in kernels.values()}

weights, task, classes, warm = json.loads(sys.argv[2])
plan = make_plan(64, classes=classes, weights=weights, task=task)
folder = Path(sys.argv[1])
if warm:
    warm_up(plan.training, classes, folder)
left, before = sorted(file.name for file in folder.iterdir()), loaded()
train(plan, folder, g_bmf.servers, every=1)
after = loaded()
print(json.dumps([left, sorted(name for name in after if after[name] > before.get(name, 0))]))
"""


def loaded_late(directory: Path, *words: object) -> tuple[list[str], list[str]]:
    """What warming up leaves on the disk, and the kernels that a training loads after it."""
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", SCRIPT, str(directory), json.dumps(words)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=300)
    left, late = json.loads(done.stdout.splitlines()[-1])
    return left, late


@pytest.mark.parametrize(
    "kind", [("open", "classification", 3), ("secret", "classification", 3), ("open", "binary", 2)]
)
def test_a_training_finds_its_kernels_loaded(tmp_path: Path, kind: tuple[str, str, int]) -> None:
    left, late = loaded_late(tmp_path, *kind, True)
    assert left == [] and set(late) <= FILTERS


def test_what_a_killed_process_has_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in ("warm-up-old", "warm-up-new", "9a3f"))
    for folder in (old, new, other):
        (folder / "server-0").mkdir(parents=True)
    for folder in (old, other):
        os.utime(folder, (1e9, 1e9))
    forget_earlier(tmp_path)
    assert not old.exists() and new.exists() and other.exists()


def test_a_cold_one_loads_them_itself(tmp_path: Path) -> None:
    _, late = loaded_late(tmp_path, "open", "binary", 2, False)
    assert len(late) > 10
