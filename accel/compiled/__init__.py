"""The kernels in numba: the same names and results as ``accel.reference``.

Compiled code is kept, so that the second start compiles nothing: beside the source, or in the user's cache directory,
or (a package installed by root, run by a service without a home) in a directory of this user alone under the system's
temporary one. numba looks only at the file of a function itself, not at what it calls in others, so after a change
elsewhere old machine code would run unnoticed. Therefore the directory has the name of everything that is compiled
here.

Machine code is linked by names, and numba makes a name of module, function, argument types and the function's number in
its process. Two processes that compile in another order give one number to two functions; if both are made by one
factory, their names are the same, and a third process, which finds what both have kept, runs one in place of the other
(numba issue 10486). So functions have random numbers here, and what is made by a factory has a name of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
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
    places = (Path(chosen),) if chosen else (beside, home)
    own = next((place for place in places if _can_write(place)), None)
    if own is None:
        directory = Path(tempfile.gettempdir(), f"ppvfl-kernels-{os.getuid()}")
        directory.mkdir(mode=0o700, exist_ok=True)
        own = directory if _is_own(directory) else Path(tempfile.mkdtemp(prefix="ppvfl-kernels-"))
    _take_over(own / _name(), (*places, beside))
    return str(own / _name())


def _take_over(directory: Path, places: Iterable[Path]) -> None:
    """What was compiled at the installation, where this process cannot write (a read-only image), is used all the same:
    numba reads only where it can write, so this is a copy. It is trusted as the source is, which lies no safer."""
    kept = next((place / directory.name for place in places if (place / directory.name).is_dir()), directory)
    if kept == directory or directory.exists():
        return
    with contextlib.suppress(OSError):  # no room: kernels are compiled when they are used
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=directory.parent))
        shutil.copytree(kept, part, dirs_exist_ok=True)
        part.chmod(0o700)
        part.rename(directory)  # fails if another process was faster, whose copy is as good


def _remove_old(directory: Path) -> None:
    """What earlier versions of this package have left beside the source."""
    for other in Path(__file__).parent.glob("__pycache__/ppvfl-kernels-*"):
        if other.name != directory.name:
            shutil.rmtree(other, ignore_errors=True)


config.CACHE_DIR = _cache_directory()  # type: ignore[attr-defined]
_remove_old(Path(config.CACHE_DIR))  # type: ignore[attr-defined]
