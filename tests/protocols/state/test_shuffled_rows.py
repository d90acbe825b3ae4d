"""Shuffled shares that a server keeps: the same secrets come back, for this plan and epoch only, and nobody else reads
them."""

from __future__ import annotations

import functools
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refmpc
from accel.files import Damaged
from protocols.methods import g_shuff
from protocols.plan.run_plan import plan_run
from protocols.server.open_training import OpenTrainingRun
from protocols.state.shuffled_rows import ShuffledRows
from protocols.state.stored_rows import RowFolder
from refmpc import Party
from tests.protocols.conftest import small_federation
from tests.protocols.secure_runs import run_secure, small_training
from tests.protocols.server.watch import Watch

ROWS = np.arange(24.0).reshape(8, 3) - 7.5
LABELS = np.eye(8)


async def shuffle_and_save(party: Party, directory: Path, *, epoch: int = 4):
    rows = await refmpc.input_from_party(party, 0, ROWS if party.id == 0 else None, shape=ROWS.shape, fraction_bits=14)
    labels = await refmpc.input_from_party(party, 1, LABELS if party.id == 1 else None, shape=LABELS.shape)
    shuffled: list[Any] = await refmpc.shuffle([rows, labels])
    ShuffledRows(directory, "plan").save(epoch, dict(zip(("rows", "labels"), shuffled, strict=True)))
    return [await refmpc.reveal(tensor, release="test") for tensor in shuffled]


async def load_and_open(party: Party, directory: Path, *, fingerprint: str = "plan", epoch: int = 4):
    found: dict[str, Any] = dict(ShuffledRows(directory, fingerprint).load(party, epoch))
    return [await refmpc.reveal(found[name], release="test") for name in ("rows", "labels")]


def run(program, directory: Path, **options) -> list[Any]:
    folders = [directory / f"server-{i}" for i in range(3)]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    return refmpc.run(functools.partial(program, **options), folders, releases={"test": "a test"}).outputs


def test_what_was_saved_comes_back_in_the_same_order(tmp_path):
    before, after = run(shuffle_and_save, tmp_path), run(load_and_open, tmp_path)
    for (rows, labels), (again, same_labels) in zip(before, after, strict=True):
        assert (again == rows).all() and (same_labels == labels).all()
        assert (np.sort(rows, axis=0) == ROWS).all() and (labels @ ROWS == rows).all()  # one permutation for both
    for server in range(3):
        (file,) = (tmp_path / f"server-{server}").iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_only_the_last_epoch_is_kept_and_a_second_shuffle_replaces_the_first(tmp_path):
    for epoch in (3, 4, 4):
        last = run(shuffle_and_save, tmp_path, epoch=epoch)
    assert [file.name for file in (tmp_path / "server-1").iterdir()] == ["shuffled-00000004.npz"]
    assert (run(load_and_open, tmp_path)[0][0] == last[0][0]).all()
    with pytest.raises(refmpc.PartyFailed, match="the shuffled rows of epoch 3: restore it, or start a new run"):
        run(load_and_open, tmp_path, epoch=3)
    ShuffledRows(tmp_path / "server-1", "plan").discard()
    assert not list((tmp_path / "server-1").iterdir())


def test_another_plan_and_a_damaged_file_are_refused(tmp_path):
    run(shuffle_and_save, tmp_path)
    with pytest.raises(refmpc.PartyFailed, match="belongs to another plan"):
        run(load_and_open, tmp_path, fingerprint="other")
    file = tmp_path / "server-0" / "shuffled-00000004.npz"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    nobody: Any = None
    for damaged in (bytes(content), bytes(content[:100]), b""):
        file.write_bytes(damaged)
        with pytest.raises(Damaged):
            ShuffledRows(tmp_path / "server-0", "plan").load(nobody, 4)


# G-Shuff with open weights -----------------------------------------------------------------------

BATCHES = 3
CRASHES = [  # steps 3 to 5 are the second epoch
    (0, "before word 3"),  # its rows are on disk, nobody has opened anything of it: shuffled again
    (1, "after open_words 3"),
    (2, "before mark 4"),
    (0, "after word 5"),
]


@pytest.mark.parametrize(
    ("server", "point", "files"), [*((*crash, False) for crash in CRASHES), *((*crash, True) for crash in CRASHES[:2])]
)
def test_every_record_takes_part_once_an_epoch_wherever_a_server_dies(tmp_path, monkeypatch, server, point, files):
    monkeypatch.setattr(RowFolder, "keeps", lambda folder, size: files)
    federation = small_federation(96, (5, 4), 4)
    plan = plan_run("g_shuff", federation, small_training(weights="open", epochs=3))
    assert plan.schedule.num_batches == BATCHES
    used: dict[
        tuple[int, int], np.ndarray
    ] = {}  # by server and step: the shares of the rows that the step was opened with
    with pytest.MonkeyPatch.context() as patch:
        watch, real = Watch(patch, tmp_path), OpenTrainingRun.gradient_step

        async def noting(self, rows):
            used[self.party.id, self.party.step] = refmpc.unseal(rows.embeddings.first).copy()
            await real(self, rows)

        patch.setattr(OpenTrainingRun, "gradient_step", noting)
        watch.dies_at = server, point
        with pytest.raises(refmpc.PartyFailed, match=f"Crash: {point}"):
            run_secure(plan, federation, tmp_path, g_shuff.servers, every=2)
        watch.dies_at = None
        result = run_secure(plan, federation, tmp_path, g_shuff.servers, every=2)
    assert watch.two_values() == [] and watch.too_early == []
    wanted = np.rint(federation.rows() * 2.0**14).astype(np.int64)
    orders = []
    for epoch in range(3):
        steps = range(epoch * BATCHES, (epoch + 1) * BATCHES)
        rows = np.concatenate([(used[0, t] + used[1, t] + used[2, t]).view(np.int64)[:, :-1] for t in steps])
        assert sorted(map(tuple, rows)) == sorted(map(tuple, wanted))
        orders.append(rows)
    assert all((orders[epoch] != orders[epoch + 1]).any() for epoch in range(2))
    assert all(
        (output[0] == result.outputs[0][0]).all() for output in (*result.outputs, *result.client_outputs.values())
    )
    assert not list(tmp_path.glob("server-*/shuffled-*"))  # nothing goes on with them


@pytest.mark.parametrize("damage", ["cut", "changed", "lost"])
def test_rows_in_files_that_are_not_what_was_kept_end_the_run(tmp_path, monkeypatch, damage):
    monkeypatch.setattr(RowFolder, "keeps", lambda folder, size: True)
    federation = small_federation(96, (5, 4), 4)
    plan = plan_run("g_shuff", federation, small_training(weights="open", epochs=2))
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch, tmp_path)
        watch.dies_at = 1, "after open_words 4"
        with pytest.raises(refmpc.PartyFailed, match="Crash"):
            run_secure(plan, federation, tmp_path, g_shuff.servers, every=2)
    file = tmp_path / "server-2" / "shuffled-00000001-embeddings.shares"
    content = bytearray(file.read_bytes())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len(content) == 16 * plan.schedule.num_rows * (plan.width + 1)
    content[100] ^= 1
    if damage == "lost":
        file.unlink()
    else:
        file.write_bytes(content if damage == "changed" else content[:-8])
    with pytest.raises(refmpc.PartyFailed, match="embeddings.shares is damaged .* must not be drawn again"):
        run_secure(plan, federation, tmp_path, g_shuff.servers, every=2)


def test_a_server_that_lost_the_order_of_an_epoch_ends_the_run(tmp_path):
    federation = small_federation(96, (5, 4), 4)
    plan = plan_run("g_shuff", federation, small_training(weights="open", epochs=2))
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch, tmp_path)
        watch.dies_at = 1, "after open_words 4"
        with pytest.raises(refmpc.PartyFailed, match="Crash"):
            run_secure(plan, federation, tmp_path, g_shuff.servers, every=2)
    (tmp_path / "server-2" / "shuffled-00000001.npz").unlink()
    with pytest.raises(refmpc.PartyFailed, match="an order of which steps were opened must not be drawn again"):
        run_secure(plan, federation, tmp_path, g_shuff.servers, every=2)
