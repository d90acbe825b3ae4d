"""Shares in files: the same training as in memory, to the word; a step that costs the same however many rows there
are."""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refmpc
from protocols.client.upload import ClientJob, client_program
from protocols.methods import g_bmf, g_shuff
from protocols.plan.run_plan import Plan, PublicClient, PublicFederation, plan_run
from protocols.server.intake import receive_rows, shares_of_rows
from protocols.server.open_training import training_run
from protocols.server.training import ServerJob
from protocols.state import stored_rows
from protocols.state.stored_rows import RowFolder, StoredRows
from refmpc import ArithmeticTensor, Party
from tests.protocols.secure_runs import released, small_training

WIDTHS = (3, 5)


def make_plan(rows: int = 200, protocol: str = "g_bmf", classes: int = 3, **changes: Any) -> Plan:
    clients = tuple(PublicClient(name, width) for name, width in zip(("bank", "card"), WIDTHS, strict=True))
    return plan_run(protocol, PublicFederation(clients, rows, classes, 1.0, ()), small_training(**changes))


def train(plan: Plan, directory: Path, servers: Any, every: int = 0, **options: Any) -> Any:
    random = np.random.default_rng(7)
    jobs = {}
    for name, width in zip(plan.client_names, plan.client_widths, strict=True):
        rows = random.normal(size=(plan.schedule.num_samples, width))
        rows /= 2 * np.linalg.norm(rows, axis=1, keepdims=True)
        labels = random.integers(0, plan.classes, len(rows)) if name == plan.client_names[-1] else None
        jobs[name] = client_program, ClientJob(plan, rows, None if labels is None else plan.labels_to_share(labels))
    own = [ServerJob(plan, directory / f"server-{i}", every) for i in range(3)]
    for job in own:  # the same noise in every run: only the way of the rows differs
        job.directory.mkdir(parents=True)
    return refmpc.run(servers, own, clients=jobs, releases=plan.releases, timeout=60, **options)


def costs(result: Any) -> list[dict[str, tuple[int, int]]]:
    return [{name: (p.rounds, p.bytes_sent) for name, p in ledger.phases.items()} for ledger in result.ledgers]


@pytest.mark.filterwarnings("ignore:insecure_seed")
@pytest.mark.parametrize(
    ("module", "changes"),
    [
        (g_bmf, {}),
        (g_bmf, {"weights": "secret"}),
        (g_bmf, {"task": "binary", "classes": 2}),
        (g_shuff, {"protocol": "g_shuff", "epochs": 2}),
        (g_bmf, {"order": "secret", "delta": 1e-3}),
    ],
)
@pytest.mark.parametrize("chunk", [1 << 22, 512])  # the second: two columns at a time
def test_files_give_the_same_model_at_the_same_cost(
    module: Any, changes: dict[str, Any], chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(**changes)
    monkeypatch.setattr(sys.modules["refmpc.primitives.shuffle"], "CHUNK", chunk)
    monkeypatch.setattr("os.urandom", lambda count: bytes(count))  # noise keys, and nothing else of a seeded run
    in_memory = train(plan, tmp_path / "memory", module.servers, insecure_seed=5)
    monkeypatch.setattr(RowFolder, "keeps", lambda folder, size: True)
    in_files = train(plan, tmp_path / "files", module.servers, insecure_seed=5)
    for ours, theirs in zip(released(in_files), released(in_memory), strict=True):
        assert np.array_equal(ours, theirs) and np.any(ours)
    assert costs(in_files) == costs(in_memory)
    assert not list(tmp_path.glob("**/*.shares"))  # removed at the end


def test_a_step_reads_its_own_rows_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes read from files in every step, for two numbers of rows: the same, and those of one batch."""
    monkeypatch.setattr(sys.modules["refmpc.primitives.shuffle"], "CHUNK", 512)
    batch = 32 * 16 * (sum(WIDTHS) + 1 + 3 + 1)
    for rows in (96, 960):
        plan = make_plan(rows)

        async def servers(party: Party, job: ServerJob) -> list[int]:
            with training_run(party, job) as run, RowFolder(run.directory.path, in_memory=0) as folder:
                held = await receive_rows(party, job.plan, folder, run.directory)
                assert isinstance(held, StoredRows)
                assert len(held.embeddings._chunks) == 1  # never shuffled
                files = list(run.directory.path.glob("*.shares"))
                assert sum(file.stat().st_size for file in files) == shares_of_rows(job.plan)
                assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
                read = []
                for step in run.steps():
                    before = sum(t.bytes_read for t in vars(held).values())
                    await run.gradient_step(held.batch(job.plan.schedule.rows(step)))
                    read.append(sum(t.bytes_read for t in vars(held).values()) - before)
                await run.release()
                return read

        found = train(plan, tmp_path / str(rows), servers).outputs
        assert found == [[batch] * (rows // 32)] * 3


def test_what_is_written_is_read_back_sealed(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    words = random.integers(0, 2**64, size=(2, 10, 3), dtype=np.uint64)

    async def program(party: Party, own: Any) -> None:
        directory = tmp_path / str(party.id)
        directory.mkdir()
        with RowFolder(directory) as folder:
            held = folder.tensor(party, "x", (10, 3), 7)
            assert not refmpc.unseal(held[:].shares).any()
            held.write(slice(0, 4), refmpc.seal(words[:, :4]))
            held.write(slice(4, 10), refmpc.seal(words[:, 4:]))
            for rows in (slice(None), slice(3, 7), slice(8, 99), slice(5, 5)):
                cut = held[rows]
                assert isinstance(cut.shares, refmpc.Words) and cut.fraction_bits == 7
                assert np.array_equal(refmpc.unseal(cut.shares), words[:, rows])
            in_memory = ArithmeticTensor(party, words, 7)
            stored = folder.store(party, "y", in_memory)
            assert np.array_equal(refmpc.unseal(stored[:].shares), words)
            with pytest.raises(ValueError, match="shape of the shares"):
                held.write(slice(0, 4), refmpc.seal(words))
            with pytest.raises(ValueError, match="step of the rows"):
                held[::2]
            with pytest.raises(ValueError, match="name = 'x'"):
                folder.tensor(party, "x", (1,), 0)
            (directory / "rows-x.shares").write_bytes(b"")  # cut short behind its back
            with pytest.raises(OSError, match="shorter than it was made.*rows-x.shares"):
                held[:]

    refmpc.run(program, [None] * 3)
    assert not list(tmp_path.glob("**/*.shares"))


def test_rows_that_are_not_shuffled_lie_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of columns, a row of a million was read in 26 pieces a share, and its tests took twice as long a
    row."""
    monkeypatch.setattr(sys.modules["refmpc.primitives.shuffle"], "CHUNK", 20)  # two columns of ten rows
    reads: list[int] = []
    read = os.preadv

    def counted(*words: Any) -> int:
        reads.append(1)
        return read(*words)

    monkeypatch.setattr("os.preadv", counted)
    words = np.random.default_rng(3).integers(0, 2**64, size=(2, 10, 5), dtype=np.uint64)

    async def program(party: Party, own: Any) -> None:
        if party.id:
            return
        with RowFolder(tmp_path) as folder:
            for shuffled, pieces in ((True, 6), (False, 2)):
                held = folder.tensor(party, f"x-{shuffled}", (10, 5), 7, shuffled=shuffled)
                held.write(slice(0, 10), refmpc.seal(words))
                reads.clear()
                assert np.array_equal(refmpc.unseal(held[2:9].shares), words[:, 2:9])
                assert len(reads) == pieces
            with pytest.raises(ValueError, match="a chunk of a tensor that is to be shuffled"):
                held.read_columns(slice(0, 2))

    refmpc.run(program, [None] * 3)


def test_the_disk_gets_rows_while_they_are_taken_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 2·AHEAD bytes of a file wait for it, and none when all are there."""
    monkeypatch.setattr(stored_rows, "AHEAD", 400)
    synced: list[tuple[str, int]] = []

    def sync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        synced.append((name, threading.get_ident()))

    monkeypatch.setattr(stored_rows, "_to_disk", sync)

    async def program(party: Party, own: Any) -> None:
        with RowFolder(tmp_path) as folder:
            held = folder.tensor(party, f"x-{party.id}", (100, 3), 0)
            for start in range(0, 95, 5):  # 240 bytes each
                held.write(slice(start, start + 5), refmpc.seal(np.ones((2, 5, 3), dtype=np.uint64)))
            held.finish()
            own = [thread for name, thread in synced if name == f"rows-x-{party.id}.shares"]
            assert (
                len(own) == 10 and own.index(threading.get_ident()) == 9
            )  # of 480 bytes each in another thread, and the rest
            held.finish()  # nothing new
            assert len([name for name, _ in synced if name == f"rows-x-{party.id}.shares"]) == 10

    refmpc.run(program, [None] * 3)


def test_rows_wait_for_a_disk_that_is_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes in goes on until as much waits as is under way, and its file stays open until the disk has it."""
    monkeypatch.setattr(stored_rows, "AHEAD", 200)
    go_on, open_then = threading.Event(), list[bool]()

    def slow(descriptor: int) -> None:
        assert go_on.wait(30)
        open_then.append(Path(f"/proc/self/fd/{descriptor}").exists())

    monkeypatch.setattr(stored_rows, "_to_disk", slow)

    async def program(party: Party, own: Any) -> None:
        if party.id:
            return
        with RowFolder(tmp_path) as folder:
            held, rows = folder.tensor(party, "x", (100, 3), 0), []

            def take_in() -> None:
                for start in range(0, 100, 5):  # 240 bytes each
                    held.write(slice(start, start + 5), refmpc.seal(np.ones((2, 5, 3), dtype=np.uint64)))
                    rows.append(start)

            thread = threading.Thread(target=take_in)
            thread.start()
            thread.join(0.5)
            assert thread.is_alive() and rows == [0]  # the second piece has been written, and waits
            go_on.set()
            thread.join(30)
            assert not thread.is_alive()
            go_on.clear()
            threading.Timer(0.2, go_on.set).start()  # the last piece is under way when the folder is left
        assert len(open_then) == 20 and all(open_then)

    refmpc.run(program, [None] * 3)


def test_what_the_disk_says_of_rows_is_raised_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells of a write that failed once, to whoever syncs; whoever only reads may get what was never
    there."""
    monkeypatch.setattr(stored_rows, "AHEAD", 100)

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(stored_rows, "_to_disk", broken)

    async def program(party: Party, own: Any) -> None:
        with RowFolder(tmp_path) as folder:
            held = folder.tensor(party, f"x-{party.id}", (10, 3), 0)
            held.write(slice(0, 10), refmpc.seal(np.ones((2, 10, 3), dtype=np.uint64)))
            with pytest.raises(OSError, match=r"Input/output error.*rows-x-\d.shares"):
                held.finish()

    refmpc.run(program, [None] * 3)
    plan = make_plan()
    monkeypatch.setattr(RowFolder, "keeps", lambda folder, size: True)
    with pytest.raises(refmpc.PartyFailed, match="Input/output error.*rows-embeddings.shares"):
        train(plan, tmp_path / "run", g_bmf.servers)


def test_a_disk_without_room_is_noticed_when_the_file_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)

    async def program(party: Party, own: Any) -> None:
        with RowFolder(tmp_path) as folder:
            folder.tensor(party, f"x-{party.id}", (10, 3), 0)

    with pytest.raises(refmpc.PartyFailed, match=r"No space left on device.*rows-x-\d.shares"):
        refmpc.run(program, [None] * 3)
