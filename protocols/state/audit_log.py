"""``audit.jsonl``: what a server did, one record a line, each bound to all before it by a hash chain.

Changing, removing or inserting a record breaks every hash after it. What a chain alone cannot show is that its owner
cut the end off, or wrote the whole file anew. For that, servers exchange the heads of their logs and each notes those
of the others (``witness``): ``compare`` finds a log that no longer contains a head that somebody else has noted.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import hashlib
import json
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.errors import InvalidArgument
from accel.files import private_folder
from accel.validate import require

__all__ = ["WITNESS", "AuditError", "AuditLog", "Record", "compare", "read_log"]

START = "0" * 64  # what the first record follows
WITNESS = "witness"  # facts: peer (its participant name), head, count
_MAX_RECORD = 1 << 14
_TORN = "a torn record was removed"


class AuditError(InvalidArgument):
    """A log that is not what was written; the message names file and line."""


@dataclass(frozen=True)
class Record:
    """One line."""

    index: int
    time: str
    event: str
    facts: Mapping[str, Any]
    previous: str
    hash: str


class AuditLog:
    """Appends to one log, from any thread; one process at a time. A log that was changed is not written to."""

    def __init__(self, path: str | Path):
        self._path = Path(path)
        private_folder(self._path.parent)
        self._lock = threading.Lock()
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o640)
        try:
            self._take()
        except BaseException:
            os.close(self._file)
            raise

    def _take(self) -> None:
        """Lock the file, mend its end, and check all of it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise AuditError(
                f"{self._path} is open in another process: two servers must not share one directory"
            ) from None
        torn = self._cut_torn_line()
        records = read_log(self._path)
        self._head, self._count = (records[-1].hash if records else START), len(records)
        if torn:
            self.append(_TORN, bytes=torn)

    @property
    def head(self) -> str:
        """Hash of the last record: stands for the whole log so far."""
        return self._head

    @property
    def count(self) -> int:
        return self._count

    def append(self, event: str, **public_facts: Any) -> Record:
        """Write one record and bring it to the disk. Facts are public: names, counts, hashes, addresses; never
        values."""
        require(0 < len(event) <= 100 and event.isprintable(), "event", event, "a short line of text")
        _require_plain(public_facts)
        with self._lock:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            body = {"index": self._count, "time": now, "event": event, "facts": public_facts, "previous": self._head}
            line = json.dumps({**body, "hash": _digest(body)}, sort_keys=True).encode() + b"\n"
            require(len(line) <= _MAX_RECORD, "size of a record", len(line), f"at most {_MAX_RECORD} bytes")
            self._write(line)
            record = _parse(line, self._count, self._head, str(self._path))
            self._head, self._count = record.hash, self._count + 1
        return record

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> AuditLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, line: bytes) -> None:
        """All of the line, or nothing."""
        before = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            os.fsync(self._file)
            if written < len(line):
                raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes were written", str(self._path))
        except OSError as error:
            error.filename = error.filename or str(self._path)
            os.ftruncate(self._file, before)
            raise

    def _cut_torn_line(self) -> int:
        """Remove what a crash in the middle of a write left behind; returns its size."""
        content = self._path.read_bytes()
        keep = content.rfind(b"\n") + 1
        if keep < len(content):
            os.ftruncate(self._file, keep)
        return len(content) - keep


def read_log(path: str | Path) -> list[Record]:
    """All records, after checking the chain from its first line to its last."""
    records: list[Record] = []
    previous = START
    with open(path, "rb") as file:
        for index, line in enumerate(file):
            records.append(_parse(line, index, previous, str(path)))
            previous = records[-1].hash
    return records


def compare(logs: Mapping[str, list[Record]]) -> list[str]:
    """Sentences on logs that do not contain what others have witnessed of them; ``logs`` by participant name."""
    wrong = []
    for observer, records in logs.items():
        for record in records:
            peer = str(record.facts.get("peer"))
            if record.event != WITNESS or peer not in logs:
                continue
            head, count = record.facts.get("head"), record.facts.get("count")
            if _hash_at(count, logs[peer]) != head:
                wrong.append(
                    f"{observer} noted at {record.time} that the log of {peer} had {count} records and the head "
                    f"{str(head)[:16]}…, which it does not contain: the log of {peer} was cut or rewritten since, or "
                    f"{observer} noted something else than it saw"
                )
    return wrong


def _hash_at(count: Any, records: list[Record]) -> str | None:
    """The head of a log when it had ``count`` records; None if it never had."""
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= len(records):
        return None
    return records[count - 1].hash if count else START


def _parse(line: bytes, index: int, previous: str, source: str) -> Record:
    where = f"{source}, line {index + 1}"
    try:
        found = json.loads(line)
        record = Record(**found)
    except (ValueError, TypeError, RecursionError):
        raise AuditError(f"{where} is not a record: the log was damaged or changed from here on") from None
    body = {name: found[name] for name in ("index", "time", "event", "facts", "previous")}
    if record.index != index or record.previous != previous or record.hash != _digest(body) or not line.endswith(b"\n"):
        raise AuditError(
            f"{where} does not follow from the lines before it: a record was changed, removed or inserted here; "
            "keep the file as evidence, and start with a new one"
        )
    return record


def _digest(body: Mapping[str, Any]) -> str:
    words = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(words.encode()).hexdigest()


def _require_plain(value: Any, name: str = "facts", depth: int = 0) -> None:
    """Only text, numbers, and small lists or tables of them: an array of values does not get into a log by accident."""
    if isinstance(value, dict | list | tuple) and depth < 4:
        require(len(value) <= 64, name, f"{len(value)} entries", "at most 64 entries")
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            require(not isinstance(value, dict) or isinstance(key, str), name, key, "named by text")
            _require_plain(item, f"{name}.{key}", depth + 1)
        return
    good = value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))
    require(good, name, type(value).__name__, "text, a finite number, true, false or a short list of these")
