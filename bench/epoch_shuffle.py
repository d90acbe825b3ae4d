"""The secret shuffle that G-Shuff does at the start of an epoch, at full size: ``python -m bench.epoch_shuffle``.

Three processes hold random shares of all rows (embeddings with their column of ones, labels, norms) and shuffle them once.
Column sums, opened before and after, show that every row is still there; memory is the peak of a server's process beside
its share of the data.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

import refmpc
from accel.validate import require_integer
from bench.systems import machine
from protocols.plan.scales import EMBEDDING_BITS
from protocols.server.shuffled_rows import shuffle_rows
from protocols.step.global_step import SharedRows
from refmpc import ArithmeticTensor, Party, unseal

__all__ = ["EpochShuffle", "measure"]

SUMS = "sums of columns"


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


async def _sums(rows: SharedRows) -> np.ndarray:
    sums = [tensor.sum(axis=0).reshape(-1).reinterpret(0) for tensor in (rows.embeddings, rows.labels, rows.norms)]
    opened = await refmpc.reveal(refmpc.concatenate(sums), release=SUMS)
    assert opened is not None
    return opened


async def _program(party: Party, sizes: tuple[int, int, int]) -> tuple[float, int, int, int, int]:
    count, columns, classes = sizes
    norms = _random_rows(party, count, 1, 0).reshape(count)
    rows = SharedRows(
        _random_rows(party, count, columns + 1, EMBEDDING_BITS), _random_rows(party, count, classes, 0), norms
    )
    first = unseal(rows.norms.first[:100]).copy()
    held = sum(tensor.shares.nbytes for tensor in (rows.embeddings, rows.labels, rows.norms))
    sums = await _sums(rows)
    opened = party.ledger.total()
    begun = time.perf_counter()
    rows = await shuffle_rows(rows)
    seconds = time.perf_counter() - begun
    after = party.ledger.total()
    if (await _sums(rows) != sums).any() or (unseal(rows.norms.first[:100]) == first).all():
        raise AssertionError("the shuffle lost or kept rows")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return seconds, after.rounds - opened.rounds, after.bytes_sent - opened.bytes_sent, held, peak


def measure(rows: int = 50_000, columns: int = 2000, classes: int = 10) -> EpochShuffle:
    """Shuffle once."""
    sizes = (
        require_integer("rows", rows, 2),
        require_integer("columns", columns, 1),
        require_integer("classes", classes, 2),
    )
    releases = {SUMS: "random words of a benchmark, nothing private"}
    found = refmpc.run(_program, [sizes] * 3, parties="processes", releases=releases, timeout=600).outputs
    return EpochShuffle(
        *sizes,
        seconds=max(each[0] for each in found),
        rounds=found[0][1],
        bytes=sum(each[2] for each in found),
        share_of_the_data=found[0][3],
        peak_memory=max(each[4] for each in found),
    )


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.epoch_shuffle", description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--columns", type=int, default=2000, help="embedding columns of all clients together")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    found = measure(options.rows, options.columns, options.classes)
    if options.json:
        print(json.dumps({**asdict(found), "machine": machine()}, indent=2))
        return
    table = Table(
        title=f"One secret shuffle of {found.rows:,} rows of {found.columns:,} columns, {found.classes} classes"
    )
    for name in ("time", "rounds", "bytes, all servers", "a server's share of the data", "peak memory of a server"):
        table.add_column(name, justify="right")
    table.add_row(
        f"{found.seconds:.2f} s",
        str(found.rounds),
        f"{found.bytes / 1e9:.3g} GB",
        f"{found.share_of_the_data / 1e9:.3g} GB",
        f"{found.peak_memory / 1e9:.3g} GB ({found.peak_memory / found.share_of_the_data:.1f}×)",
    )
    console = Console()
    console.print(table)
    console.print(machine(), style="dim")


if __name__ == "__main__":
    main()
