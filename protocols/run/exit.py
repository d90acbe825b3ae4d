"""How a command on this machine ends when something is wrong."""

from __future__ import annotations

import sys

from accel.errors import InvalidArgument, PpvflError
from refmpc import PartyFailed

__all__ = ["leaving"]


def leaving(command: str, error: PpvflError) -> SystemExit:
    """One of our own errors as a sentence. A party that failed for any other reason has met a bug of ours: its
    traceback is shown too, or nobody could find it."""
    text = error.summary
    if isinstance(error, PartyFailed) and not isinstance(error.__cause__, PpvflError):
        text = f"{text}\n\n{error.root_traceback}"
    print(f"{command}: {text}", file=sys.stderr)
    left = SystemExit(f"{command}: {text}")
    left.code = 2 if isinstance(error, InvalidArgument) else 1  # as every command of ``ppvfl``
    return left
