"""What a server keeps of a run with open weights: one file that grows by a record a step, begun anew now and then.

Every step opens something, so the order of ``protocols.state.releases`` holds in every step: a server appends its
words, hears that both others have appended theirs, appends a mark, and only then sends. After a crash the last words
that all three have are sent again, and what not all three have was sent by nobody. The file begins with the public
state; with a record's words go the sums that the step before has opened, so the state is that of the beginning moved by
what was opened since.

A step waits for its words and its mark, and for nothing else: the next file, with a later state, is made in the
background (``protocols.state.background``), and records go on in the present one until it is there. So the records
after a state lie in its own file and in the one before. A file is removed when no server can need it: they may be one
step apart.

``synced``: a record is on disk when it counts as written, which a power failure does not undo. Otherwise it is with the
operating system, which the end of the process (kill -9) does not undo.

Every record carries the SHA-256 of what it is. A last record that does not fit was cut off by a crash and counts as not
written: if another server has marked it, the run is refused. A record before others that does not fit, and a file
without its state, are damage, which no crash leaves.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from accel.files import Damaged, naming, sync_folder
from protocols.state.background import Background
from protocols.state.checkpoint import CannotResume, ServerDirectory, exchanged
from protocols.state.releases import require_nothing_lost
from refmpc import Party

__all__ = ["OpenedSteps", "Resumed", "agree_on_opened"]

_HEAD = struct.Struct("<4sQQ")  # kind, step, bytes that follow the checksum
_SUM = hashlib.sha256().digest_size  # of the checksum behind the head, of head and content
_STATE, _WORDS, _MARK, _END = _KINDS = b"stat", b"word", b"mark", b"done"
_NONE = 1 << 62  # no position
_SIGNED = {np.dtype(np.uint32): np.int32, np.dtype(np.uint64): np.int64}


@dataclass(frozen=True)
class _Record:
    kind: bytes
    step: int
    content: bytes
    start: int

    @property
    def end(self) -> int:
        return self.start + _HEAD.size + _SUM + len(self.content)


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on: the public state before ``step``, the sums of the steps since, and this server's words of
    the last one, which are to be sent again (None if all servers have the state after it)."""

    step: int
    state: np.ndarray
    sums: list[np.ndarray]
    words: np.ndarray | None


class OpenedSteps:
    """The files of one server. Positions count steps: position p is the state before step p."""

    def __init__(self, directory: Path, word_type: type[np.unsignedinteger], words: int, *, synced: bool):
        """``words``: how many a server sends in a step; what follows them in a record are the opened sums of the one
        before."""
        self._directory, self._synced = directory, synced
        self._word_type, self._words = np.dtype(word_type), words
        self._handle: BinaryIO | None = None
        self._path = directory  # of the file that is written to
        self._background, self._coming = Background(), _NONE
        self.written = self.marked = self.last_state = 0
        self.finished = False  # whether the last state is that of the end
        self._ends: dict[int, int] = {}  # by file: the step after the last one that it holds
        self._tidy_at = _NONE  # steps written when files that are no longer needed are removed
        self.cut_off: Path | None = None  # a file whose last record counts as not written
        for position in self._positions():
            self._ends[position] = position
            for record in self._records(position):
                self.finished = record.kind == _END
                if record.kind == _STATE:
                    self.last_state = position
                    self.written, self.marked = max(self.written, position), max(self.marked, position)
                elif record.kind == _WORDS:
                    self.written = max(self.written, record.step + 1)
                    self._ends[position] = record.step + 1
                elif record.kind == _MARK:
                    self.marked = max(self.marked, record.step + 1)

    # writing -------------------------------------------------------------------------------------

    def keep_state(self, position: int, state: np.ndarray) -> None:
        """Begin a file with the state before step ``position``; it is on disk when this returns."""
        self._background.wait()
        self._write_state(position, _state_bytes(state))
        self._go_on_in(position)

    def keep_state_later(self, position: int, state: np.ndarray) -> int:
        """``keep_state`` while training goes on: records go on in the present file until the new one is there. Waits
        for the one before; an error is raised by the next ``write``. Returns the oldest position from which the run may
        have to go on."""
        content = _state_bytes(state)
        self._take_over(wait=True)
        self._background.start(lambda: self._write_state(position, content))
        self._coming = position
        return min(self._ends)

    def _write_state(self, position: int, content: bytes) -> None:
        """A file that holds this state and nothing else, with its name only when it is whole."""
        file = self._file(position)
        part = file.with_suffix(".part")
        with naming(file), os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as handle:
            handle.write(_record_bytes(_STATE, position, content))
            handle.flush()
            if self._synced:
                os.fsync(handle.fileno())
        part.replace(file)
        if self._synced:
            sync_folder(self._directory)

    def _take_over(self, *, wait: bool = False) -> None:
        """Go on in the file that was made in the background, if it is there; raises what kept it from being made."""
        if wait:
            self._background.wait()
        if self._coming != _NONE and not self._background.busy:
            position, self._coming = self._coming, _NONE
            self._background.wait()
            self._go_on_in(position)

    def _go_on_in(self, position: int) -> None:
        self._close_handle()
        self._path = self._file(position)
        with naming(self._path):
            self._handle = self._path.open("ab")
        self.last_state, self._ends[position] = position, position
        self.written, self.marked = max(self.written, position), max(self.marked, position)
        if self._tidy_at == _NONE:
            self._tidy_at = self.written + 2

    def _tidy(self) -> None:
        """Remove files that nobody needs. Another server may have one step less than this one, and its last words are
        sent again: so a run goes on from a state that is at least two steps old."""
        start = max((position for position in self._ends if position <= self.written - 2), default=0)
        for position, end in sorted(self._ends.items())[:-2]:  # two stay for whoever looks at what was sent
            if position < start and end <= start:
                self._file(position).unlink()
                del self._ends[position]
        self._tidy_at = _NONE

    def write(self, step: int, words: np.ndarray, previous: np.ndarray | None) -> None:
        """This server's words of ``step``, and what the step before has opened (None if that is not known, right after
        a state)."""
        self._take_over()
        content = words.astype(self._word_type).tobytes()
        if previous is not None:
            content += previous.astype(_SIGNED[self._word_type]).tobytes()
        self._append(_WORDS, step, content)
        self.written = self._ends[self.last_state] = step + 1
        if self.written >= self._tidy_at:
            self._tidy()

    def mark(self, step: int) -> None:
        """All three have written their words of ``step``: from now on it is not computed again."""
        if self.marked <= step:
            self._append(_MARK, step, b"")
            self.marked = step + 1

    def finish(self, position: int, state: np.ndarray) -> None:
        """Nothing is computed after ``position``: the state there is what the run gives."""
        if not self.finished:
            self._take_over(wait=True)
            if self.last_state < position or self._handle is None:
                self.keep_state(position, state)
            self._append(_END, position, b"")
            self.finished = True

    def close(self) -> None:
        """Nothing more is written."""
        self._background.close()
        self._coming = _NONE
        self._close_handle()

    def _close_handle(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            with naming(self._path):
                handle.close()

    # going on ------------------------------------------------------------------------------------

    def discard(self) -> None:
        """The run begins anew: what this server has written was sent by nobody, and must not be taken for words of the
        new attempt."""
        self.close()
        for file in (*self._directory.glob("opened-*.log"), *self._directory.glob("opened-*.part")):
            file.unlink()
        if self._synced:
            sync_folder(self._directory)
        self.written = self.marked = self.last_state = 0
        self.finished = False
        self._ends.clear()

    def resume(self, position: int, *, from_state: bool) -> Resumed:
        """Go back to ``position``, which all three have; what this server has beyond was sent by nobody, and is
        removed.

        ``from_state``: all three have the state before step ``position``, so nothing needs to be sent again.
        """
        self.close()
        for part in self._directory.glob("opened-*.part"):  # of a server that was killed while it wrote one
            part.unlink()
        known = [start for start in self._positions() if start <= position - (not from_state)]
        if not known:
            raise CannotResume(
                f"{self._directory}: the file with the state before step {position} is missing; restore it, or "
                "start a new run"
            )
        start = known[-1]
        for later in self._positions():
            if later > start:
                self._file(later).unlink()
        state = np.frombuffer(next(self._records(start)).content, dtype="<i8")
        kept: dict[int, _Record] = {}
        self._ends.clear()
        for file in known:
            words = [record for record in self._records(file) if record.kind == _WORDS]
            kept |= {record.step: record for record in words if start <= record.step < position}
            self._ends[file] = max((record.step + 1 for record in words if record.step < position), default=file)
            self._cut(file, next((record.start for record in words if record.step >= position), None))
        self._go_on_in(start)
        self._ends[start] = max(kept, default=start - 1) + 1
        self.written, self.marked = position, min(self.marked, position)
        if from_state:
            return Resumed(start, state, [], None)
        if sorted(kept) != list(range(start, position)):
            raise CannotResume(f"{self._file(start)} lacks steps before {position}; restore it, or start a new run")
        sums = [self._divided(kept[step])[1] for step in range(start + 1, position)]
        return Resumed(start, state, sums, self._divided(kept[position - 1])[0])

    def words(self, step: int) -> np.ndarray:
        """This server's words of ``step``, one of the last, which all three have written: to be sent again."""
        for position in reversed(self._positions()):
            for record in self._records(position):
                if record.kind == _WORDS and record.step == step:
                    return self._divided(record)[0]
        raise CannotResume(
            f"{self._directory}: the words of step {step}, which this server may have sent, are missing: restore "
            "their file, or start a new run"
        )

    def sent(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Every step that is still kept and marked, which this server may have sent: the step, its words, and what
        the step before has opened (nothing where that is not known)."""
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
        return sorted(int(file.stem.split("-")[1]) for file in self._directory.glob("opened-*.log"))

    def _records(self, position: int) -> Iterator[_Record]:
        """The whole records of a file, which begins with its state; ``Damaged`` if it is not what was written."""
        file = self._file(position)
        with file.open("rb") as handle:
            start, length = 0, os.fstat(handle.fileno()).st_size
            while start < length:
                record = _read_record(handle, start, length)
                if record is None or (start == 0 and (record.kind != _STATE or record.step != position)):
                    if start == 0 or not self._ends_at(handle, start, length):
                        raise Damaged(file, f"the record at byte {start} does not fit its checksum")
                    self.cut_off = file
                    return
                yield record
                start = record.end
        if not length:
            raise Damaged(file, "it is empty")

    def _ends_at(self, handle: BinaryIO, start: int, length: int) -> bool:
        """Whether nothing whole follows a record that does not fit: then it may have been cut off while it was
        written."""
        handle.seek(start)
        rest = handle.read()
        return not any(
            _read_record(handle, start + at, length) for at in range(1, len(rest)) if rest[at : at + 4] in _KINDS
        )

    def _cut(self, position: int, end: int | None) -> None:
        """Remove what a file holds from ``end`` on, or behind its last whole record."""
        file = self._file(position)
        if end is None:
            end = list(self._records(position))[-1].end
        with naming(file), file.open("r+b") as handle:
            handle.truncate(end)
            if self._synced:  # what was cut off must not come back either: it belongs to an attempt that is over
                os.fsync(handle.fileno())
                sync_folder(self._directory)

    def _append(self, kind: bytes, step: int, content: bytes) -> None:
        assert self._handle is not None
        with naming(self._path):
            self._handle.write(_record_bytes(kind, step, content))
            self._handle.flush()
            if self._synced:
                os.fsync(self._handle.fileno())


def _record_bytes(kind: bytes, step: int, content: bytes) -> bytes:
    head = _HEAD.pack(kind, step, len(content))
    return head + _checksum(head, content) + content


def _checksum(head: bytes, content: bytes) -> bytes:
    digest = hashlib.sha256(head)
    digest.update(content)
    return digest.digest()


def _read_record(handle: BinaryIO, start: int, length: int) -> _Record | None:
    """The record at ``start``, or None if none of it, or only a part, is what was written."""
    handle.seek(start)
    head, checksum = handle.read(_HEAD.size), handle.read(_SUM)
    if len(checksum) < _SUM:
        return None
    kind, step, size = _HEAD.unpack(head)
    if size > length - start:
        return None
    content = handle.read(size)
    if len(content) != size or _checksum(head, content) != checksum:
        return None
    return _Record(kind, step, content, start)


def _state_bytes(state: np.ndarray) -> bytes:
    return np.ascontiguousarray(state, dtype="<i8").tobytes()


def agree_on_opened(party: Party, directory: ServerDirectory, opened: OpenedSteps, last: int) -> tuple[int, bool]:
    """The position that all three servers have reached, and whether all have its state; refused if something was opened
    after it. 1 round."""
    mine = np.array([directory.has_noise, opened.marked, opened.written, opened.last_state], dtype=np.int64)
    next_, previous = exchanged(party, mine, "agree on what was opened")
    by_server = {party.id: mine, party.next: next_, party.previous: previous}
    written = {server: int(by_server[server][2]) for server in range(3)}
    position, marked = min(written.values()), max(int(record[1]) for record in by_server.values())
    try:
        require_nothing_lost(position, marked, written, [bool(by_server[server][0]) for server in range(3)], last)
    except CannotResume as error:
        if opened.cut_off is None or opened.written > position:
            raise
        raise CannotResume(f"{error} (the last record of {opened.cut_off} is cut off or damaged)") from None
    return position, all(int(record[3]) == position for record in by_server.values())
