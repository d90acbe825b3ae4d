"""Files of our own: written all at once, so that a crash leaves the old file or the new one, never half, and read back.

It lives in ``accel`` because that is the one package that every other may import.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

__all__ = [
    "naming",
    "private_folder",
    "read_arrays",
    "sync_folder",
    "whole_file",
    "write_arrays",
    "write_bytes",
    "write_text",
]


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
    """An error of the system inside says which file it is about: those of ``write`` and ``fsync`` do not by themselves."""
    try:
        yield
    except OSError as error:
        if (
            error.filename is None and error.errno is not None
        ):  # without a number it is not the system's, and says itself what it is
            error.filename = str(file)
        raise


@contextlib.contextmanager
def whole_file(file: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """What is written becomes ``file`` all at once, and is on disk afterwards, its name too: a rename alone may be lost with
    the power.

    ``private``: mode 0600 from the first byte on. Otherwise a file that is there keeps its mode. Several may write the
    same file at the same time: one of them is the last, and it is whole.
    """
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    try:
        with naming(file), os.fdopen(descriptor, "wb") as handle:
            if not private and file.exists():
                temporary.chmod(file.stat().st_mode & 0o777)
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(file.parent)


def write_bytes(file: Path, *pieces: bytes | bytearray, private: bool = False) -> None:
    """``whole_file`` of these pieces."""
    with whole_file(file, private=private) as handle:
        handle.writelines(pieces)


def write_text(file: Path, text: str, *, private: bool = False) -> None:
    """``whole_file`` of a text, in UTF-8."""
    write_bytes(file, text.encode(), private=private)


def write_arrays(file: Path, arrays: Mapping[str, np.ndarray], *, private: bool = False) -> None:
    """``whole_file`` of named arrays, as ``np.load`` reads them."""
    with whole_file(file, private=private) as handle:
        np.savez(handle, **arrays)  # type: ignore[arg-type]


_ONE_HEADER_AT_A_TIME = threading.Lock()


def read_arrays(file: Path) -> dict[str, np.ndarray]:
    """What ``write_arrays`` wrote. One thread at a time: numpy reads an array's header with ``ast``, and CPython 3.11 counts
    its depth for all threads together ("AST constructor recursion depth mismatch", now and then, in whoever comes second)."""
    with _ONE_HEADER_AT_A_TIME, np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def sync_folder(folder: Path) -> None:
    """Names that were made, changed or removed in this folder are so on disk when this returns."""
    if os.name != "posix":  # Windows has no way to sync a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
