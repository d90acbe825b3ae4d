"""Free space on a participant's disk, checked before and during writes: a full disk is a pause with a message, not a
crash."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from accel.errors import PpvflError

__all__ = ["RESERVE", "NoRoom", "explain", "free_bytes", "require_room"]

RESERVE = 64 << 20  # bytes that stay free for logs, checkpoints and others on the same disk


class NoRoom(PpvflError, OSError):
    """The disk is almost full. Nothing was written; it may work later."""

    def __init__(self, directory: Path, free: int, needed: int):
        text = (
            f"{free / 1e6:,.0f} MB are free, {needed / 1e6:,.0f} MB and a reserve of {RESERVE / 1e6:,.0f} MB are needed"
        )
        super().__init__(errno.ENOSPC, text, str(directory))


def free_bytes(directory: Path) -> int:
    """What an ordinary user may still write where ``directory`` is, or will be."""
    there = directory.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def require_room(directory: Path, needed: int) -> None:
    """Raise ``NoRoom`` unless ``needed`` bytes fit and the reserve stays."""
    free = free_bytes(directory)
    if free < needed + RESERVE:
        raise NoRoom(directory, free, needed)


def explain(error: OSError) -> dict[str, str]:
    """For a log: what the system said, its number and the path."""
    number = errno.errorcode.get(error.errno or 0, "") if error.errno else ""
    words = {"reason": error.strerror or os.strerror(error.errno) if error.errno else str(error), "errno": number}
    path = error.filename2 or error.filename
    return words | ({"path": str(path)} if path else {})
