"""The kernels in numba: the same names and results as ``accel.reference``.

Compiled code is kept, so that the second start compiles nothing. numba keeps it beside the source or in the user's cache
directory, and refuses to start where it can write to neither (a package installed by root, run by a service without a
home). There it goes to a directory of this user alone under the system's temporary one.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from numba.core import config

__all__: list[str] = []


def _is_own(directory: Path) -> bool:
    """Whether nobody else can put code there: ours, a real directory, and closed to others."""
    about = directory.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077


def _can_write(directory: Path) -> bool:
    """Whether files can be made in ``directory``, or in what would become it."""
    while not directory.exists():
        directory = directory.parent
    return os.access(directory, os.W_OK | os.X_OK)


def _cache_directory() -> str:
    """Where numba shall keep compiled code; empty if it finds a place by itself."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~"), ".cache"))
    chosen = str(getattr(config, "CACHE_DIR", ""))
    if chosen or _can_write(Path(__file__).parent) or _can_write(home):
        return chosen
    directory = Path(tempfile.gettempdir(), f"ppvfl-kernels-{os.getuid()}")
    directory.mkdir(mode=0o700, exist_ok=True)
    return str(directory) if _is_own(directory) else tempfile.mkdtemp(prefix="ppvfl-kernels-")


config.CACHE_DIR = _cache_directory()  # type: ignore[attr-defined]
