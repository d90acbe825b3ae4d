"""What a server keeps of a run with open weights: one file that grows by a record a step, begun anew now and then.

Every step opens something, so the order of ``protocols.server.releases`` holds in every step: a server appends its words, hears
that both others have appended theirs, appends a mark, and only then sends. After a crash the last words that all three have
are sent again, and what not all three have was sent by nobody. The file begins with the public state; with a record's words go
the sums that the step before has opened, so the state is that of the beginning moved by what was opened since. Two files are
kept: servers may be one step apart.

``synced``: a record is on disk when it counts as written, which a power failure does not undo. Otherwise it is with the
operating system, which the end of the process (kill -9) does not undo. A record that was cut off counts as not written.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from accel.files import naming, sync_folder
from protocols.server.checkpoint import KEEP, CannotResume, ServerDirectory, exchanged
from protocols.server.releases import require_nothing_lost
from refmpc import Party

__all__ = ["OpenedSteps", "Resumed", "agree_on_opened"]

_HEAD = struct.Struct("<4sQQI")  # kind, step, bytes that follow, their checksum
_STATE, _WORDS, _MARK, _END = b"stat", b"word", b"mark", b"done"
_SIGNED = {np.dtype(np.uint32): np.int32, np.dtype(np.uint64): np.int64}


@dataclass(frozen=True)
class _Record:
    kind: bytes
    step: int
    content: bytes
    start: int


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on: the public state before ``step``, the sums of the steps since, and this server's words of the
    last one, which are to be sent again (None if all servers have the state after it)."""

    step: int
    state: np.ndarray
    sums: list[np.ndarray]
    words: np.ndarray | None


class OpenedSteps:
    """The files of one server. Positions count steps: position p is the state before step p."""

    def __init__(self, directory: Path, word_type: type[np.unsignedinteger], words: int, *, synced: bool):
        """``words``: how many a server sends in a step; what follows them in a record are the opened sums of the one before."""
        self._directory, self._synced = directory, synced
        self._word_type, self._words = np.dtype(word_type), words
        self._handle: BinaryIO | None = None
        self._path = directory  # of the file that is written to
        self.written = self.marked = self.last_state = 0
        self.finished = False  # whether the last state is that of the end
        for position in self._positions():
            for record in self._records(position):
                self.finished = record.kind == _END
                if record.kind == _STATE:
                    self.last_state = position
                    self.written, self.marked = max(self.written, position), max(self.marked, position)
                elif record.kind == _WORDS:
                    self.written = max(self.written, record.step + 1)
                elif record.kind == _MARK:
                    self.marked = max(self.marked, record.step + 1)

    # writing -------------------------------------------------------------------------------------

    def keep_state(self, position: int, state: np.ndarray) -> int:
        """Begin a file with the state before step ``position``; returns the oldest position that is kept."""
        self._open(position, fresh=True)
        self._append(_STATE, position, np.ascontiguousarray(state, dtype="<i8").tobytes())
        self.last_state = self.written = self.marked = position
        for old in self._positions()[:-KEEP]:
            self._file(old).unlink()
        return self._positions()[0]

    def write(self, step: int, words: np.ndarray, previous: np.ndarray | None) -> None:
        """This server's words of ``step``, and what the step before has opened (None right after a state)."""
        content = words.astype(self._word_type).tobytes()
        if previous is not None:
            content += previous.astype(_SIGNED[self._word_type]).tobytes()
        self._append(_WORDS, step, content)
        self.written = step + 1

    def mark(self, step: int) -> None:
        """All three have written their words of ``step``: from now on it is not computed again."""
        if self.marked <= step:
            self._append(_MARK, step, b"")
            self.marked = step + 1

    def finish(self, position: int, state: np.ndarray) -> None:
        """Nothing is computed after ``position``: the state there is what the run gives."""
        if not self.finished:
            if self.last_state < position or self._handle is None:
                self.keep_state(position, state)
            self._append(_END, position, b"")
            self.finished = True

    def close(self) -> None:
        """Nothing more is written."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with naming(self._path):
                handle.close()

    # going on ------------------------------------------------------------------------------------

    def discard(self) -> None:
        """The run begins anew: what this server has written was sent by nobody, and must not be taken for words of the new
        attempt."""
        self.close()
        for file in self._directory.glob("opened-*.log"):
            file.unlink()
        if self._synced:
            sync_folder(self._directory)
        self.written = self.marked = self.last_state = 0
        self.finished = False

    def resume(self, position: int, *, from_state: bool) -> Resumed:
        """Go back to ``position``, which all three have; what this server has beyond was sent by nobody, and is removed.

        ``from_state``: all three have the state before step ``position``, so nothing needs to be sent again.
        """
        known = [start for start in self._positions() if start <= position - (not from_state)]
        if not known:
            raise CannotResume(
                f"{self._directory}: the file with the state before step {position} is missing; bring it back, or start a "
                "new run"
            )
        start = known[-1]
        for later in self._positions():
            if later > start:
                self._file(later).unlink()
        records = list(self._records(start))
        state = np.frombuffer(records[0].content, dtype="<i8")
        kept = [record for record in records[1:] if record.step < position and record.kind == _WORDS]
        gone = [record.start for record in records if record.kind == _WORDS and record.step >= position]
        self._open(start, end=gone[0] if gone else None)
        if from_state:
            return Resumed(start, state, [], None)
        if [record.step for record in kept] != list(range(start, position)):
            raise CannotResume(f"{self._file(start)} lacks steps before {position}; bring it back, or start a new run")
        sums = [self._divided(record)[1] for record in kept if record.step > start]
        return Resumed(start, state, sums, self._divided(kept[-1])[0])

    def words(self, step: int) -> np.ndarray:
        """This server's words of ``step``, one of the last, which all three have written: to be sent again."""
        for position in reversed(self._positions()):
            for record in self._records(position):
                if record.kind == _WORDS and record.step == step:
                    return self._divided(record)[0]
        raise CannotResume(
            f"{self._directory}: the words of step {step} are missing, which this server may have sent: bring its file back, "
            "or start a new run"
        )

    def sent(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Of every step that is still kept and marked, which this server may have sent: the step, its words, and what the
        step before has opened (nothing right after a state)."""
        for position in self._positions():
            last: _Record | None = None
            for record in self._records(position):
                if record.kind == _WORDS:
                    last = record
                elif record.kind == _MARK and last is not None and last.step == record.step:
                    yield (record.step, *self._divided(last))

    def _divided(self, record: _Record) -> tuple[np.ndarray, np.ndarray]:
        both = np.frombuffer(record.content, dtype=self._word_type)
        return both[: self._words], both[self._words :].view(_SIGNED[self._word_type]).astype(np.int64)

    # files ---------------------------------------------------------------------------------------

    def _file(self, position: int) -> Path:
        return self._directory / f"opened-{position:08d}.log"

    def _positions(self) -> list[int]:
        found = sorted(int(file.stem.split("-")[1]) for file in self._directory.glob("opened-*.log"))
        return [position for position in found if any(True for _ in self._records(position))]

    def _records(self, position: int) -> Iterator[_Record]:
        """The whole records of a file; it begins with its state, or counts for nothing."""
        with self._file(position).open("rb") as handle:
            start = 0
            while len(head := handle.read(_HEAD.size)) == _HEAD.size:
                kind, step, size, checksum = _HEAD.unpack(head)
                content = handle.read(size)
                if len(content) != size or zlib.crc32(content) != checksum or (start == 0 and kind != _STATE):
                    return
                yield _Record(kind, step, content, start)
                start += _HEAD.size + size

    def _open(self, position: int, *, fresh: bool = False, end: int | None = None) -> None:
        """Write to this file from now on: from its beginning, from ``end``, or behind its last whole record."""
        self.close()
        file = self._file(position)
        if fresh:
            end = 0
        elif end is None:
            last = list(self._records(position))[-1]
            end = last.start + _HEAD.size + len(last.content)
        self._handle = os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "wb")
        self._path = file
        with naming(file):
            self._handle.truncate(end)
            self._handle.seek(end)
            if self._synced:  # what was cut off must not come back either: it belongs to an attempt that is over
                os.fsync(self._handle.fileno())
                sync_folder(self._directory)

    def _append(self, kind: bytes, step: int, content: bytes) -> None:
        assert self._handle is not None
        with naming(self._path):
            self._handle.write(_HEAD.pack(kind, step, len(content), zlib.crc32(content)) + content)
            self._handle.flush()
            if self._synced:
                os.fsync(self._handle.fileno())


def agree_on_opened(party: Party, directory: ServerDirectory, opened: OpenedSteps, last: int) -> tuple[int, bool]:
    """The position that all three servers have reached, and whether all have its state; refused if something was opened
    after it. 1 round."""
    mine = np.array([directory.has_noise, opened.marked, opened.written, opened.last_state], dtype=np.int64)
    next_, previous = exchanged(party, mine, "agree on what was opened")
    by_server = {party.id: mine, party.next: next_, party.previous: previous}
    written = {server: int(by_server[server][2]) for server in range(3)}
    position, marked = min(written.values()), max(int(record[1]) for record in by_server.values())
    require_nothing_lost(position, marked, written, [bool(by_server[server][0]) for server in range(3)], last)
    return position, all(int(record[3]) == position for record in by_server.values())
