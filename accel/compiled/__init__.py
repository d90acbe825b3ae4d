"""The kernels in numba: the same names and results as ``accel.reference``.

Compiled code is kept, so that the second start compiles nothing: beside the source, or in the user's cache directory, or (a package
installed by root, run by a service without a home) in a directory of this user alone under the system's temporary one. numba
looks only at the file of a function itself, not at what it calls in others, so after a change elsewhere old machine code would run
without a word. Therefore the directory has the name of everything that is compiled here.

Machine code is linked by names, and numba makes a name of module, function, argument types and the function's number in its process. Two
processes that compile in another order give one number to two functions; if both are made by one factory, their names are the same, and a third
process, which finds what both have kept, runs one in place of the other (numba issue 10486). So functions have random numbers here,
and what is made by a factory has a name of its own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from numba.core import config
from numba.core.bytecode import FunctionIdentity

__all__: list[str] = []


class _UnlikeOthers:
    """Numbers of functions, none of which another process has given, nor a fork of this one will."""

    def __next__(self) -> int:
        return int.from_bytes(os.urandom(8))


FunctionIdentity._unique_ids = _UnlikeOthers()  # type: ignore[assignment]


def _is_own(directory: Path) -> bool:
    """Whether nobody else can put code there: ours, a real directory, and closed to others."""
    about = directory.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077


def _can_write(directory: Path) -> bool:
    """Whether files can be made in ``directory``, or in what would become it."""
    while not directory.exists():
        directory = directory.parent
    return os.access(directory, os.W_OK | os.X_OK)


def _name() -> str:
    """A new one whenever a source of this package changes."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"ppvfl-kernels-{digest.hexdigest()[:16]}"


def _cache_directory() -> str:
    """Where numba shall keep compiled code."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~"), ".cache"))
    chosen, beside = str(getattr(config, "CACHE_DIR", "")), Path(__file__).parent / "__pycache__"
    for place in (Path(chosen),) if chosen else (beside, home):
        if _can_write(place):
            return str(place / _name())
    directory = Path(tempfile.gettempdir(), f"ppvfl-kernels-{os.getuid()}")
    directory.mkdir(mode=0o700, exist_ok=True)
    own = directory if _is_own(directory) else Path(tempfile.mkdtemp(prefix="ppvfl-kernels-"))
    return str(own / _name())


def _remove_old(directory: Path) -> None:
    """What earlier versions of this package have left beside the source."""
    for other in Path(__file__).parent.glob("__pycache__/ppvfl-kernels-*"):
        if other.name != directory.name:
            shutil.rmtree(other, ignore_errors=True)


config.CACHE_DIR = _cache_directory()  # type: ignore[attr-defined]
_remove_old(Path(config.CACHE_DIR))  # type: ignore[attr-defined]
