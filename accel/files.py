"""Files of our own: written all at once, so that a crash leaves the old file or the new one, never half, and read back.

What a server or a client must find again as it left it is *sealed*: the file ends with the SHA-256 of its content.
Every reader here checks it and raises ``Damaged``, which names the file. A file without a seal is of an earlier
version, or meant for people: it is read as it is, and must be whole in its own format. So a fault in the seal alone
costs nothing, and a fault in the content is noticed. A seal is no signature: who may write the file may seal it.

It lives in ``accel`` because that is the one package that every other may import.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import threading
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from accel.errors import InvalidArgument

__all__ = [
    "Damaged",
    "naming",
    "private_folder",
    "read_arrays",
    "read_bytes",
    "read_json",
    "sealed_size",
    "sync_folder",
    "whole_file",
    "write_arrays",
    "write_bytes",
    "write_json",
    "write_text",
]

_SEAL = b"\nppvfl sha256 "
_SEAL_BYTES = len(_SEAL) + 64 + 1


class Damaged(InvalidArgument):
    """A file is not what was written: bit rot, a full disk, a copy that was cut off."""

    def __init__(self, file: Path, why: str, way_out: str = "bring it back from a backup, or start a new run"):
        super().__init__(f"{file} is damaged ({why}): {way_out}")
        self.why = why


def private_folder(folder: Path) -> Path:
    """``folder``, made if it is missing, with those above it: each that is made is this user's alone (mode 0700).

    ``Path.mkdir(parents=True, mode=0o700)`` gives the mode to the last one only:
    the others are open to everybody under the usual umask. What is there already keeps its mode.
    """
    if not folder.is_dir():
        private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """An error of the system inside says which file it is about: those of ``write`` and ``fsync`` do not by
    themselves."""
    try:
        yield
    except OSError as error:
        if (
            error.filename is None and error.errno is not None
        ):  # without a number it is not the system's, and says itself what it is
            error.filename = str(file)
        raise


@contextlib.contextmanager
def whole_file(file: Path, *, private: bool = False, sealed: bool = False) -> Iterator[BinaryIO]:
    """What is written becomes ``file`` all at once, and is on disk afterwards, its name too: a rename alone may be lost
    with the power.

    ``private``: mode 0600 from the first byte on. Otherwise a file that is there keeps its mode. Several may write the
    same file at the same time: one of them is the last, and it is whole. ``sealed``: it ends with its seal.
    """
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    try:
        with naming(file), os.fdopen(descriptor, "w+b") as handle:
            if not private and file.exists():
                temporary.chmod(file.stat().st_mode & 0o777)
            yield handle
            if sealed:
                size = handle.seek(0, os.SEEK_END)
                seal = _seal(handle, size)
                handle.seek(size)
                handle.write(seal)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(file.parent)


def write_bytes(file: Path, *pieces: bytes | bytearray, private: bool = False, sealed: bool = False) -> None:
    """``whole_file`` of these pieces."""
    with whole_file(file, private=private, sealed=sealed) as handle:
        handle.writelines(pieces)


def write_text(file: Path, text: str, *, private: bool = False) -> None:
    """``whole_file`` of a text, in UTF-8."""
    write_bytes(file, text.encode(), private=private)


def write_json(file: Path, value: Any) -> None:
    """``whole_file`` of plain values, sealed, mode 0600."""
    write_bytes(file, json.dumps(value, indent=1).encode(), private=True, sealed=True)


def write_arrays(file: Path, arrays: Mapping[str, np.ndarray], *, private: bool = False, sealed: bool = False) -> None:
    """``whole_file`` of named arrays, as ``np.load`` reads them, sealed or not."""
    with whole_file(file, private=private, sealed=sealed) as handle:
        np.savez(handle, **arrays)  # type: ignore[arg-type]


def sealed_size(file: Path, handle: BinaryIO) -> int:
    """Bytes of content before the seal of an open file, if it has one; ``Damaged`` if they are not those that were
    sealed."""
    size = max(0, handle.seek(0, os.SEEK_END) - _SEAL_BYTES)
    handle.seek(size)
    found = handle.read()
    if not found.startswith(_SEAL) or len(found) < _SEAL_BYTES:
        return size + len(found)
    if found != _seal(handle, size):
        raise Damaged(file, "its checksum does not fit")
    return size


def _seal(handle: BinaryIO, size: int) -> bytes:
    digest = hashlib.sha256()
    handle.seek(0)
    while size and (piece := handle.read(min(size, 1 << 20))):
        digest.update(piece)
        size -= len(piece)
    return _SEAL + digest.hexdigest().encode() + b"\n"


def read_bytes(file: Path) -> bytes:
    """The content of a file, without its seal; ``Damaged`` if that does not fit."""
    with naming(file), file.open("rb") as handle:
        size = sealed_size(file, handle)
        handle.seek(0)
        return handle.read(size)


def read_json(file: Path) -> Any:
    """What ``write_json`` wrote; ``Damaged`` if it is not that."""
    try:
        return json.loads(read_bytes(file))
    except (ValueError, RecursionError) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged(file, "it is no JSON" if file.stat().st_size else "it is empty") from None


_ONE_HEADER_AT_A_TIME = threading.Lock()


def read_arrays(file: Path) -> dict[str, np.ndarray]:
    """What ``write_arrays`` wrote; ``Damaged`` if it is not that. One thread at a time: numpy reads an array's header
    with ``ast``, and CPython 3.11 counts its depth for all threads together ("AST constructor recursion depth
    mismatch", now and then, in whoever comes second)."""
    with naming(file), file.open("rb") as handle:
        sealed_size(file, handle)
        handle.seek(0)
        try:
            with _ONE_HEADER_AT_A_TIME, np.load(handle, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        except (
            ValueError,
            TypeError,
            KeyError,
            EOFError,
            NotImplementedError,
            AttributeError,
            zipfile.BadZipFile,
        ) as error:
            raise Damaged(file, f"it is no archive of arrays: {error}") from None


def sync_folder(folder: Path) -> None:
    """Names that were made, changed or removed in this folder are so on disk when this returns."""
    if os.name != "posix":  # Windows has no way to sync a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
