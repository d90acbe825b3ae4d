"""The secret shuffle that G-Shuff does at the start of an epoch, at full size: ``python -m bench.epoch_shuffle``.

Three processes hold random shares of all rows (embeddings with their column of ones, labels, norms) and shuffle them
once. Column sums, opened before and after, show that every row is still there; memory is the peak of a server's process
beside its share of the data. ``--files``: the rows lie in files, as those of a large training do.
"""

from __future__ import annotations

import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

import refmpc
from accel.validate import require_integer
from bench.harness import benchmark
from protocols.plan.scales import EMBEDDING_BITS
from protocols.state.shuffled_rows import shuffle_rows
from protocols.state.stored_rows import RowFolder, StoredRows
from protocols.step.secret_step import SharedRows
from refmpc import ArithmeticTensor, Party, unseal

__all__ = ["EpochShuffle", "measure"]

SUMS = "sums of columns"
_PIECE = 4096  # rows at a time


@dataclass(frozen=True)
class EpochShuffle:
    """What one shuffle takes. Memory is of one server, in bytes: its shares of the rows, and the process's peak."""

    rows: int
    columns: int
    classes: int
    seconds: float
    rounds: int
    bytes: int
    share_of_the_data: int
    peak_memory: int


def _random_rows(party: Party, rows: int, width: int, bits: int) -> ArithmeticTensor:
    """Random shares: each is drawn alike by the two servers that hold it."""
    operation = party.operation("random rows")
    shares = np.empty((2, rows, width), dtype=np.uint64)
    for index, stream in enumerate((operation.stream("previous"), operation.stream("next"))):
        for row in range(0, rows, 1024):
            piece = shares[index, row : row + 1024]
            piece[:] = stream.words(piece.size).reshape(piece.shape)
    return ArithmeticTensor(party, shares, bits)


def _stored(party: Party, folder: RowFolder, rows: int, columns: int, classes: int) -> StoredRows:
    """The same in files, made a piece at a time."""
    found = []
    for name, width, bits in (("embeddings", columns + 1, EMBEDDING_BITS), ("labels", classes, 0), ("norms", 1, 0)):
        tensor = folder.tensor(party, name, (rows,) if name == "norms" else (rows, width), bits)
        for start in range(0, rows, _PIECE):
            piece = _random_rows(party, min(_PIECE, rows - start), width, bits)
            tensor.write(slice(start, start + len(piece)), piece.reshape(len(piece), *tensor.shape[1:]).shares)
        found.append(tensor)
    return StoredRows(*found)


async def _sums(rows: SharedRows | StoredRows) -> np.ndarray:
    """Sums of all columns, opened; rows in files a piece at a time."""
    total, count = None, len(rows.norms)
    for start in range(0, count, _PIECE):
        piece = rows.batch(slice(start, min(count, start + _PIECE)))
        parts = [tensor.sum(axis=0).reshape(-1).reinterpret(0) for tensor in vars(piece).values()]
        opened = await refmpc.reveal(refmpc.concatenate(parts), release=SUMS)
        assert opened is not None
        total = opened if total is None else total + opened
    assert total is not None
    return total


async def _program(party: Party, sizes: tuple[int, int, int, str | None]) -> tuple[float, int, int, int, int]:
    count, columns, classes, directory = sizes
    if directory is not None:
        folder = Path(directory) / f"server-{party.id}"
        folder.mkdir()
        with RowFolder(folder) as files:
            return await _measured(party, _stored(party, files, count, columns, classes))
    norms = _random_rows(party, count, 1, 0).reshape(count)
    rows = SharedRows(
        _random_rows(party, count, columns + 1, EMBEDDING_BITS), _random_rows(party, count, classes, 0), norms
    )
    return await _measured(party, rows)


async def _measured(party: Party, rows: SharedRows | StoredRows) -> tuple[float, int, int, int, int]:
    first = unseal(rows.norms[:100].first).copy()
    held = sum(16 * int(np.prod(tensor.shape)) for tensor in vars(rows).values())
    sums = await _sums(rows)
    opened = party.ledger.total()
    begun = time.perf_counter()
    rows = await shuffle_rows(rows)
    seconds = time.perf_counter() - begun
    after = party.ledger.total()
    if (await _sums(rows) != sums).any() or (unseal(rows.norms[:100].first) == first).all():
        raise AssertionError("the shuffle lost or kept rows")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return seconds, after.rounds - opened.rounds, after.bytes_sent - opened.bytes_sent, held, peak


def measure(rows: int = 50_000, columns: int = 2000, classes: int = 10, files: bool = False) -> EpochShuffle:
    """Shuffle once; ``files``: rows in files instead of memory."""
    sizes = (
        require_integer("rows", rows, 2),
        require_integer("columns", columns, 1),
        require_integer("classes", classes, 2),
    )
    releases = {SUMS: "random words of a benchmark, nothing private"}
    with tempfile.TemporaryDirectory(prefix="shuffle-") as directory:
        job = (*sizes, directory if files else None)
        found = refmpc.run(_program, [job] * 3, parties="processes", releases=releases, timeout=600).outputs
    return EpochShuffle(
        *sizes,
        seconds=max(each[0] for each in found),
        rounds=found[0][1],
        bytes=sum(each[2] for each in found),
        share_of_the_data=found[0][3],
        peak_memory=max(each[4] for each in found),
    )


def table(found: EpochShuffle) -> Table:
    """One line for people."""
    view = Table(
        title=f"One secret shuffle of {found.rows:,} rows of {found.columns:,} columns, {found.classes} classes"
    )
    for name in ("time", "rounds", "bytes, all servers", "a server's share of the data", "peak memory of a server"):
        view.add_column(name, justify="right")
    view.add_row(
        f"{found.seconds:.2f} s",
        str(found.rounds),
        f"{found.bytes / 1e9:.3g} GB",
        f"{found.share_of_the_data / 1e9:.3g} GB",
        f"{found.peak_memory / 1e9:.3g} GB ({found.peak_memory / found.share_of_the_data:.1f}×)",
    )
    return view


main = benchmark(
    measure,
    table,
    rows="of all people",
    columns="embedding columns of all clients together",
    classes="columns of labels",
    files="rows in files, not in memory",
)

if __name__ == "__main__":
    main()
