"""Every file that a run leaves on disk, damaged in every way: the resumed run names it, or ends with the very same
model.

The files are those that the run leaves, not a list.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from protocols.methods import g_bmf, g_shuff
from protocols.plan.run_plan import plan_run
from refmpc.core.errors import PartyFailed
from tests.protocols.conftest import small_federation
from tests.protocols.gl_runs import Crash, crash_once, make
from tests.protocols.gl_runs import run_secure as run_gl
from tests.protocols.secure_runs import released, run_secure, small_training
from tests.protocols.server.crashes import run_until_crash

pytestmark = pytest.mark.filterwarnings("ignore:insecure_seed")
SEED = 3  # of the servers' masks; the clients' differ, which moves roundings by less than
ROUNDINGS = 1e-3
VICTIM = "server-1"


def with_a_flipped_bit(content: bytes) -> bytes:
    at = 2 * len(content) // 5
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": with_a_flipped_bit,
    "cut off": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
}


def g_bmf_run(directory: Path, patch: pytest.MonkeyPatch | None, **changes) -> list[np.ndarray]:
    """G-BMF or G-Shuff, until server 1 crashes if there is a ``patch``, else resumed."""
    federation = small_federation(96, (4, 3), 3)
    name = changes.pop("protocol", "g_bmf")
    servers = {"g_bmf": g_bmf.servers, "g_shuff": g_shuff.servers}[name]
    plan = plan_run(name, federation, small_training(epochs=2, learning_rate=0.2, **changes))
    if patch is not None:
        run_until_crash(plan, federation, directory, patch, plan.schedule.num_batches + 1, servers)
        return []
    return released(run_secure(plan, federation, directory, servers, every=2, insecure_seed=SEED))


def gl_bmf_run(directory: Path, patch: pytest.MonkeyPatch | None, **changes) -> list[np.ndarray]:
    federation, plan = make(**changes)
    if patch is not None:
        with patch.context() as once:
            crash_once(once, "after sending", 1, 3)
            with pytest.raises(PartyFailed, match=Crash.__name__):
                run_gl(plan, federation, directory, keep=True)
        return []
    return released(run_gl(plan, federation, directory, keep=True, insecure_seed=SEED))


RUNS = {
    "order": (g_bmf_run, {"weights": "open", "protocol": "g_shuff"}),
    "joint noise": (g_bmf_run, {"weights": "secret", "noise": "joint"}),
    "layers": (gl_bmf_run, {"weights": "open"}),
    "layers, secret weights": (gl_bmf_run, {"weights": "secret"}),
}
NEVER_READ = {"pid"}


def kinds(names: Iterable[str]) -> set[str]:
    """``checkpoint`` of ``checkpoint-00000002.npz``: an older one may be damaged without a word, the newest may not."""
    return {re.split(r"[-.]", name)[0] for name in names}


@pytest.mark.parametrize("kind", RUNS)
def test_whatever_is_damaged_is_named_or_does_not_matter(kind, tmp_path, monkeypatch):
    run, changes = RUNS[kind]
    kept, whole, copy = (tmp_path / name for name in ("kept", "whole", "copy"))
    kept.mkdir()
    run(kept, monkeypatch, **dict(changes))
    shutil.copytree(kept, whole)
    expected = run(whole, None, **dict(changes))
    files = [file.relative_to(kept) for file in sorted(kept.rglob("*")) if file.is_file()]
    victims = [file for file in files if not file.parts[0].startswith("server") or file.parts[0] == VICTIM]
    named = set[str]()
    for file in victims:
        for damage, change in DAMAGES.items():
            shutil.copytree(kept, copy)
            (copy / file).write_bytes(change((kept / file).read_bytes()))
            try:
                found = run(copy, None, **dict(changes))
            except PartyFailed as error:
                said = str(error).partition("Traceback")[0]
                assert f"{file.name} is damaged" in said or f"{file.name} is cut off or damaged" in said, (damage, said)
                named.add(file.name)
            else:
                off = max(np.abs(a - b).max() for a, b in zip(found, expected, strict=True))
                assert off <= ROUNDINGS, (file, damage, off)
            shutil.rmtree(copy)
    assert kinds(named) == kinds(file.name for file in victims) - NEVER_READ


def test_a_noise_key_of_another_run_is_refused(tmp_path, monkeypatch):
    """It has a checksum that fits, and would cover the steps that are left with other noise."""
    for run in ("one", "other"):
        (tmp_path / run).mkdir()
        g_bmf_run(tmp_path / run, monkeypatch)
    shutil.copy(tmp_path / "other" / VICTIM / "noise.key", tmp_path / "one" / VICTIM / "noise.key")
    with pytest.raises(PartyFailed, match="noise.key is not the key with which this run was begun"):
        g_bmf_run(tmp_path / "one", None)
