"""Shuffled shares that a server keeps: the same secrets come back, for this plan and epoch only, and nobody else reads them."""

from __future__ import annotations

import functools
import stat
from pathlib import Path

import numpy as np
import pytest

import refmpc
from protocols.server.checkpoint import CannotResume
from protocols.server.shuffled_rows import ShuffledRows
from refmpc import Party

ROWS = np.arange(24.0).reshape(8, 3) - 7.5
LABELS = np.eye(8)


async def shuffle_and_save(party: Party, directory: Path, *, epoch: int = 4):
    rows = await refmpc.input_from_party(party, 0, ROWS if party.id == 0 else None, shape=ROWS.shape, fraction_bits=14)
    labels = await refmpc.input_from_party(party, 1, LABELS if party.id == 1 else None, shape=LABELS.shape)
    rows, labels = await refmpc.shuffle([rows, labels])
    ShuffledRows(directory, "plan").save(epoch, {"rows": rows, "labels": labels})
    return [await refmpc.reveal(tensor, release="test") for tensor in (rows, labels)]


async def load_and_open(party: Party, directory: Path, *, fingerprint: str = "plan", epoch: int = 4):
    found = ShuffledRows(directory, fingerprint).load(party, epoch)
    return [await refmpc.reveal(found[name], release="test") for name in ("rows", "labels")]


def run(program, directory: Path, **options) -> list:
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
    with pytest.raises(refmpc.PartyFailed, match="the shuffled rows of epoch 3: bring it back, or start a new run"):
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
    for damaged in (bytes(content), bytes(content[:100]), b""):
        file.write_bytes(damaged)
        with pytest.raises(CannotResume, match="is damaged"):
            ShuffledRows(tmp_path / "server-0", "plan").load(None, 4)
