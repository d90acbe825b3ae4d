"""A server's shares of the rows of a training, in files: memory holds what a step touches, however many rows there are.

Files and not maps of files: where a disk fails, reading raises an error that names the file, and a map would end the process.
Room for the whole is taken when a file is made, so a full disk shows then.

Who sees what: a file holds this server's own two shares of each value, uniform without the two others, mode 0600, in the
server's own directory. What is read is sealed like every share (``refmpc.core.words``). Nothing here must survive a crash: the
servers keep what clients sent (or clients send it again), and the next attempt writes these files anew.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from accel.validate import require
from protocols.step.global_step import SharedRows
from refmpc import ArithmeticTensor, Party, Words, seal, unseal

__all__ = ["IN_MEMORY", "CutByRows", "RowFolder", "StoredRows", "StoredTensor"]

IN_MEMORY = 128 << 20  # bytes of a run's shares that a server keeps in memory; more lie in files
_WORD = 8


class StoredTensor:
    """A secret tensor of many rows whose shares lie in a file: cut by rows, it is an ``ArithmeticTensor`` in memory.

    Two shares one after the other, each row by row, in words of the machine. Made by ``RowFolder.tensor``, with zeros.
    """

    def __init__(self, party: Party, file: Path, descriptor: int, shape: tuple[int, ...], fraction_bits: int):
        self.party, self.shape, self.fraction_bits = party, shape, fraction_bits
        self._file, self._descriptor = file, descriptor
        self._row = _WORD * int(np.prod(shape[1:]))
        # a view of nothing, which knows the history that a cut of a tensor in memory has
        nothing = np.broadcast_to(np.zeros((), dtype=np.uint64), (2, *shape))
        self._like = ArithmeticTensor(party, nothing, fraction_bits)
        self.bytes_read = 0

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> ArithmeticTensor:
        """These rows, read into fresh memory."""
        like = self._like[rows]
        start, stop = self._bounds(rows)
        words = np.empty((2, stop - start, *self.shape[1:]), dtype=np.uint64)
        for share, part in enumerate(words):
            self._transfer(os.preadv, part, share, start)
        self.bytes_read += words.nbytes
        return ArithmeticTensor(self.party, words, self.fraction_bits, like.history)

    def write(self, rows: slice, words: Words) -> None:
        """These rows' shares (2, rows, …), sealed."""
        start, stop = self._bounds(rows)
        expected = (2, stop - start, *self.shape[1:])
        require(words.shape == expected, "shape of the shares", words.shape, f"{expected}, that of these rows")
        for share, part in enumerate(unseal(words)):
            self._transfer(os.pwritev, np.ascontiguousarray(part), share, start)

    def whole(self) -> ArithmeticTensor:
        """All rows in memory."""
        return self[:]

    def _bounds(self, rows: slice) -> tuple[int, int]:
        start, stop, step = rows.indices(len(self))
        require(step == 1, "step of the rows", step, "1: rows that lie together")
        return start, max(start, stop)

    def _transfer(self, move: object, part: np.ndarray, share: int, start: int) -> None:
        view = part.reshape(-1).view(np.uint8).data
        at = (share * len(self) + start) * self._row
        while len(view):
            count = move(self._descriptor, [view], at)  # type: ignore[operator]
            if not count:
                raise OSError(errno.EIO, "the file is shorter than it was made", str(self._file))
            view, at = view[count:], at + count


class CutByRows(Protocol):
    """Rows in memory or in a file: cut, they are a tensor in memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> ArithmeticTensor: ...


@dataclass
class StoredRows:
    """``SharedRows`` of a whole training, in files."""

    embeddings: StoredTensor
    labels: StoredTensor
    norms: StoredTensor

    def batch(self, rows: slice) -> SharedRows:
        """The rows of one step, read into memory: what a step costs does not depend on how many rows there are."""
        return SharedRows(self.embeddings[rows], self.labels[rows], self.norms[rows])

    def in_memory(self) -> SharedRows:
        """All of them."""
        return SharedRows(self.embeddings.whole(), self.labels.whole(), self.norms.whole())


class RowFolder:
    """Makes the files of one attempt, and removes them at its end; use as a context manager."""

    def __init__(self, directory: Path, in_memory: int = IN_MEMORY):
        """``in_memory``: bytes of shares up to which ``keeps`` says no."""
        self._directory, self._in_memory = directory, in_memory
        self._open: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file, descriptor in self._open.items():
            os.close(descriptor)
            file.unlink(missing_ok=True)
        self._open.clear()

    def keeps(self, size: int) -> bool:
        """Whether shares of ``size`` bytes in all belong into files."""
        return size > self._in_memory

    def tensor(self, party: Party, name: str, shape: tuple[int, ...], fraction_bits: int) -> StoredTensor:
        """Zeros of this shape in a fresh file; what an attempt that died has left there is overwritten."""
        file = self._directory / f"rows-{name}.shares"
        require(file not in self._open, "name", name, "that of a new tensor")
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._open[file] = descriptor
        size = 2 * _WORD * int(np.prod(shape))
        try:
            if size:
                os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file)) from error
        return StoredTensor(party, file, descriptor, shape, fraction_bits)

    def store(self, party: Party, name: str, x: ArithmeticTensor) -> StoredTensor:
        """A tensor in memory, moved into a file."""
        stored = self.tensor(party, name, x.shape, x.fraction_bits)
        stored.write(slice(None), seal(x.shares))
        return stored
