"""A server's shares of the rows of a training, in files: memory holds what a step touches, however many rows there are.

The files are not memory-mapped: if a disk fails, a read raises an error that names the file, while a map would end the
process. The whole size is allocated when a file is made, so a full disk shows then.

A thread writes to the disk what is taken in, and the upload waits for a slower disk: the kernel never holds more than
2·AHEAD bytes of a file that are not on disk. Otherwise it would begin to write when gigabytes wait, during the tests
and the first steps, and delay every sync; and no caller would receive an error of the disk.

Who sees what: a file holds this server's own two shares of each value, uniform without the two others, mode 0600, in
the server's own directory. What is read is sealed like every share (``refmpc.core.words``). Nothing here must survive a
crash: the servers keep what clients sent (or clients send it again), and the next attempt writes these files anew.
"""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

import refmpc
from accel.files import naming
from accel.validate import require
from protocols.state.background import Background
from protocols.step.secret_step import SharedRows
from refmpc import ArithmeticTensor, Party, Words, seal, unseal

__all__ = ["IN_MEMORY", "RowFolder", "StoredRows", "StoredTensor"]

IN_MEMORY = 128 << 20  # bytes of a run's shares that a server keeps in memory; more lie in files
_WORD = 8
_PIECE = 1 << 24  # bytes that are copied at a time
AHEAD = 1 << 26  # bytes of a file that are given to the disk at a time
_to_disk = getattr(os, "fdatasync", os.fsync)  # macOS has the one only


class _WriteBack:
    """Gives what is written to a file to the disk, AHEAD bytes at a time, while more is written."""

    def __init__(self, file: Path, descriptor: int):
        self._file, self._descriptor = file, descriptor
        self._waiting = 0  # bytes that nobody has given to the disk
        self._background = Background()

    def wrote(self, count: int) -> None:
        """So many bytes more; waits until the disk has what it was given before, if there are enough of them."""
        self._waiting += count
        if self._waiting >= AHEAD:
            self._waiting = 0
            self._background.start(self._sync)

    def finish(self) -> None:
        """The disk has everything when this returns; raises what it says of it."""
        self._background.wait()
        if self._waiting:
            self._waiting = 0
            self._sync()

    def close(self) -> None:
        """Nothing is under way any more: the descriptor may be closed, and its number given to another file."""
        self._background.close()

    def _sync(self) -> None:
        with naming(self._file):
            _to_disk(self._descriptor)


class StoredTensor:
    """A secret tensor of many rows whose shares lie in a file: cut by rows, it is an ``ArithmeticTensor`` in memory.

    Two shares one after the other, each row by row. What is to be shuffled lies in chunks of columns
    (``refmpc.column_chunks``), each row by row: so the columns that are shuffled at a time are read in long pieces, and
    some rows in many short ones, the shorter the more rows there are. Made by ``RowFolder.tensor``, with zeros.
    """

    def __init__(
        self,
        party: Party,
        file: Path,
        descriptor: int,
        shape: tuple[int, ...],
        fraction_bits: int,
        write_back: _WriteBack,
        *,
        shuffled: bool,
    ):
        self.party, self.shape, self.fraction_bits = party, shape, fraction_bits
        self._file, self._descriptor, self._write_back = file, descriptor, write_back
        self._width = int(np.prod(shape[1:]))
        self._chunks = refmpc.column_chunks(shape) if shuffled else [slice(0, self._width)]
        self.like = self._view(None)
        self.bytes_read = 0

    def _view(self, history: int | None) -> ArithmeticTensor:
        """A view of nothing, which knows the history that a cut of a tensor in memory has."""
        nothing = np.broadcast_to(np.zeros((), dtype=np.uint64), (2, *self.shape))
        return ArithmeticTensor(self.party, nothing, self.fraction_bits, history)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> ArithmeticTensor:
        """These rows, read into fresh memory."""
        like = self.like[rows]
        start, stop = self._bounds(rows)
        words = np.empty((2, stop - start, self._width), dtype=np.uint64)
        for share, columns in product(range(2), self._chunks):
            if len(self._chunks) == 1:
                self._transfer(os.preadv, words[share], share, columns, start)
            else:
                words[share, :, columns] = self._read(share, columns, start, stop)
        self.bytes_read += words.nbytes
        return ArithmeticTensor(self.party, words.reshape(2, -1, *self.shape[1:]), self.fraction_bits, like.history)

    def write(self, rows: slice, words: Words) -> None:
        """These rows' shares (2, rows, …), sealed; when all are there, call ``finish``."""
        start, stop = self._bounds(rows)
        expected = (2, stop - start, *self.shape[1:])
        require(words.shape == expected, "shape of the shares", words.shape, f"{expected}, that of these rows")
        flat = unseal(words).reshape(2, stop - start, self._width)
        for share, columns in product(range(2), self._chunks):
            self._transfer(os.pwritev, np.ascontiguousarray(flat[share, :, columns]), share, columns, start)
        self._write_back.wrote(flat.nbytes)

    def finish(self) -> None:
        """The disk has all that ``write`` was given: nothing is written under what comes next. Raises what the disk
        says of it."""
        self._write_back.finish()

    # by columns: refmpc.ColumnStore ----------------------------------------------------------------

    def read_columns(self, columns: slice) -> Words:
        """Both shares of one chunk of columns, all rows, flat: (2, rows, columns), sealed. Only of what is to be
        shuffled."""
        self._require_chunk(columns)
        return seal(np.stack([self._read(share, columns, 0, len(self)) for share in range(2)]))

    def write_columns(self, columns: slice, words: Words) -> None:
        """Replace them."""
        self._require_chunk(columns)
        for share, part in enumerate(unseal(words)):
            self._transfer(os.pwritev, np.ascontiguousarray(part), share, columns, 0)

    def _require_chunk(self, columns: slice) -> None:
        require(columns in self._chunks, "columns", columns, "a chunk of a tensor that is to be shuffled")

    def replaced(self, history: int) -> None:
        """All rows hold something else now."""
        self.like = self._view(history)

    # in and out, whole -----------------------------------------------------------------------------

    def copy_to(self, file: BinaryIO) -> bytes:
        """All shares, a piece at a time; returns their SHA-256."""
        digest = hashlib.sha256()
        for at in range(0, self._size, _PIECE):
            piece = np.empty(min(_PIECE, self._size - at), dtype=np.uint8)
            self._transfer_at(os.preadv, piece, at)
            file.write(piece.data)
            digest.update(piece.data)
        return digest.digest()

    def copy_from(self, file: BinaryIO) -> bytes:
        """What ``copy_to`` wrote, into this tensor, as one that came from outside; returns its SHA-256. Shorter, it
        raises EOFError."""
        digest = hashlib.sha256()
        for at in range(0, self._size, _PIECE):
            piece = np.frombuffer(file.read(min(_PIECE, self._size - at)), dtype=np.uint8)
            if len(piece) < min(_PIECE, self._size - at):
                raise EOFError("it is too short")
            self._transfer_at(os.pwritev, piece, at)
            digest.update(piece.data)
        self.like = self._view(None)
        return digest.digest()

    @property
    def _size(self) -> int:
        return 2 * _WORD * len(self) * self._width

    def _bounds(self, rows: slice) -> tuple[int, int]:
        start, stop, step = rows.indices(len(self))
        require(step == 1, "step of the rows", step, "1: rows that lie together")
        return start, max(start, stop)

    def _read(self, share: int, columns: slice, start: int, stop: int) -> np.ndarray:
        part = np.empty((stop - start, columns.stop - columns.start), dtype=np.uint64)
        self._transfer(os.preadv, part, share, columns, start)
        return part

    def _transfer(self, move: object, part: np.ndarray, share: int, columns: slice, start: int) -> None:
        before = (share * self._width + columns.start) * len(self)  # words of other chunks
        self._transfer_at(move, part, _WORD * (before + start * (columns.stop - columns.start)))

    def _transfer_at(self, move: object, part: np.ndarray, at: int) -> None:
        view = part.reshape(-1).view(np.uint8).data
        while len(view):
            with naming(self._file):
                count = move(self._descriptor, [view], at)  # type: ignore[operator]
            if not count:
                raise OSError(errno.EIO, "the file is shorter than it was made", str(self._file))
            view, at = view[count:], at + count


@dataclass
class StoredRows:
    """``SharedRows`` of a whole training, in files."""

    embeddings: StoredTensor
    labels: StoredTensor
    norms: StoredTensor

    def batch(self, rows: slice) -> SharedRows:
        """The rows of one step, read into memory: what a step costs does not depend on how many rows there are."""
        return SharedRows(self.embeddings[rows], self.labels[rows], self.norms[rows])


class RowFolder:
    """Makes the files of one attempt, and removes them at its end; use as a context manager."""

    def __init__(self, directory: Path, in_memory: int = IN_MEMORY):
        """``in_memory``: bytes of shares up to which ``keeps`` says no."""
        self._directory, self._in_memory = directory, in_memory
        self._open: dict[Path, tuple[int, _WriteBack]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for file, (descriptor, write_back) in self._open.items():
            write_back.close()
            os.close(descriptor)
            file.unlink(missing_ok=True)
        self._open.clear()

    def keeps(self, size: int) -> bool:
        """Whether shares of ``size`` bytes in all belong into files."""
        return size > self._in_memory

    def tensor(
        self, party: Party, name: str, shape: tuple[int, ...], fraction_bits: int, *, shuffled: bool = True
    ) -> StoredTensor:
        """Zeros of this shape in a fresh file; what an attempt that died has left there is overwritten. ``shuffled``:
        it may be, and takes longer to read by rows."""
        file = self._directory / f"rows-{name}.shares"
        require(file not in self._open, "name", name, "that of a new tensor")
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        write_back = _WriteBack(file, descriptor)
        self._open[file] = descriptor, write_back
        size = 2 * _WORD * int(np.prod(shape))
        try:
            if size:
                os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file)) from error
        return StoredTensor(party, file, descriptor, shape, fraction_bits, write_back, shuffled=shuffled)

    def store(self, party: Party, name: str, x: ArithmeticTensor) -> StoredTensor:
        """A tensor in memory, moved into a file."""
        stored = self.tensor(party, name, x.shape, x.fraction_bits)
        stored.write(slice(None), seal(x.shares))
        stored.finish()
        return stored
