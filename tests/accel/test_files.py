"""A file is there whole or not at all, with the mode it should have, and only one module writes that way."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest

import accel.files
from accel.files import private_folder, read_arrays, whole_file, write_arrays, write_bytes, write_text

ROOT = Path(accel.files.__file__).parent.parent


def test_what_is_written_is_read_back(tmp_path):
    write_text(tmp_path / "claim.txt", "ε = 3\n")
    assert (tmp_path / "claim.txt").read_text(encoding="utf-8") == "ε = 3\n"
    write_bytes(tmp_path / "words", b"one", bytearray(b"two"))
    assert (tmp_path / "words").read_bytes() == b"onetwo"
    write_arrays(tmp_path / "model.npz", {"layer_1": np.arange(3)})
    assert np.array_equal(read_arrays(tmp_path / "model.npz")["layer_1"], np.arange(3))
    assert len(list(tmp_path.iterdir())) == 3


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    file = tmp_path / "ledger.json"
    write_text(file, "old")
    with pytest.raises(RuntimeError, match="power"), whole_file(file) as handle:
        handle.write(b"half of the new")
        assert file.read_text() == "old"
        raise RuntimeError("power")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_a_private_folder_is_private_with_all_that_is_made_above_it(tmp_path):
    """``mkdir(parents=True, mode=0o700)`` gives the mode to the last one only: keys lay in folders open to
    everybody."""
    (tmp_path / "there").mkdir(mode=0o755)
    earlier = os.umask(0)
    try:
        made = private_folder(tmp_path / "there" / "federation" / "server-0" / "state")
    finally:
        os.umask(earlier)
    for _ in range(3):
        assert made.stat().st_mode & 0o777 == 0o700
        made = made.parent
    assert made.stat().st_mode & 0o777 == 0o755
    written = [
        f"{file.relative_to(ROOT)}: {line}"
        for package in ("accel", "refmpc", "vfl", "protocols", "bench")
        for file in sorted((ROOT / package).rglob("*.py"))
        for line in re.findall(r".*mkdir\(.*parents=True.*mode=.*", file.read_text(encoding="utf-8"))
        if file.name != "files.py"
    ]
    assert written == []


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_modes(tmp_path):
    private, shared = tmp_path / "noise.key", tmp_path / "federation.toml"
    with whole_file(private, private=True):
        (temporary,) = tmp_path.iterdir()
        assert temporary.stat().st_mode & 0o777 == 0o600  # from the first byte on
    write_text(shared, "a")
    shared.chmod(0o640)
    write_text(shared, "b")
    assert private.stat().st_mode & 0o777 == 0o600 and shared.stat().st_mode & 0o777 == 0o640
    write_text(shared, "c", private=True)
    assert shared.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.name != "posix", reason="folders are synced on POSIX only")
def test_the_content_is_synced_before_the_name_and_the_name_after(tmp_path, monkeypatch):
    file, order, sync = tmp_path / "checkpoint.npz", [], os.fsync

    def watching(descriptor: int) -> None:
        order.append(("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file", file.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watching)
    write_bytes(file, b"shares")
    assert order == [("file", False), ("folder", True)]


def test_writers_at_the_same_time_do_not_mix(tmp_path):
    file, pieces = tmp_path / "result.json", [bytes([65 + i]) * 100_000 for i in range(8)]
    writers = [threading.Thread(target=write_bytes, args=(file, piece)) for piece in pieces]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert file.read_bytes() in pieces and list(tmp_path.iterdir()) == [file]


def test_no_other_module_writes_that_way():
    """The audit log and the log of opened sums append and sync their own records, a trial syncs a file that it throws
    away; the peers' compiler moves a folder."""
    homes = {
        "accel/files.py",
        "protocols/state/audit_log.py",
        "protocols/run/timing_run.py",
        "protocols/state/step_log.py",
    }
    wanted = re.compile(r"mkstemp|os\.replace|\.fsync\(|\.part\"")
    users = {
        str(file.relative_to(ROOT))
        for package in ("accel", "bench", "protocols", "refmpc", "vfl")
        for file in (ROOT / package).rglob("*.py")
        if wanted.search(file.read_text(encoding="utf-8"))
    }
    assert users == homes
