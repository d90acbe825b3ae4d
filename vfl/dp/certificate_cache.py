"""Results that take long, kept in the user's cache directory under a hash of everything they depend on.

``PPVFL_CACHE`` names another directory, and ``PPVFL_CACHE=off`` none. A file that cannot be read or says something else counts as
none; whoever can write there can change a σ, as whoever can write to the program can.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from accel.files import write_bytes

__all__ = ["cached"]

VERSION = 1
_memory: dict[str, Any] = {}

Result = TypeVar("Result")


def cached(kind: str, name: tuple[object, ...], find: Callable[[], Result], result: type[Result]) -> Result:
    """``find()``, a dataclass of numbers, from memory or disk if it was found before."""
    said = repr((VERSION, kind, *name))
    key = hashlib.sha256(said.encode()).hexdigest()
    if key not in _memory:
        directory = _directory()
        file = None if directory is None else directory / f"{kind}-{key[:40]}.json"
        _memory[key] = _read(file, said, result) or _found(file, said, find)
    kept: Result = _memory[key]
    return kept


def _directory() -> Path | None:
    chosen = os.environ.get("PPVFL_CACHE")
    if chosen == "off":
        return None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(chosen or Path(home, "ppvfl"))


def _read(file: Path | None, said: str, result: type[Result]) -> Result | None:
    if file is None or not file.exists():
        return None
    try:
        content = json.loads(file.read_text())
        return result(**content["result"]) if content["about"] == said else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _found(file: Path | None, said: str, find: Callable[[], Result]) -> Result:
    result = find()
    if file is not None:
        content = {"about": said, "result": dataclasses.asdict(result)}  # type: ignore[call-overload]
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_bytes(file, json.dumps(content, indent=1).encode(), private=True)
        except OSError:
            pass  # not kept: found again next time
    return result
