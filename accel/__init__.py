"""Kernels on 64-bit words: plain numpy (the reference) and numba, behind one interface.

``accel.kernels`` is the backend in use: numba when it is installed, unless the environment variable
``REFMPC_ACCEL=numpy|numba`` says otherwise. ``accel.backend(name)`` gives either one, which is how the tests run every
kernel twice. This package imports nothing else of ours, and every other package may import it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from accel.errors import InvalidArgument

__all__ = ["backend", "is_compiled", "kept_in", "kernels"]

_PACKAGES = {"numpy": "accel.reference", "numba": "accel.compiled"}
_FAMILIES = (
    "additive",
    "allocation",
    "bits",
    "calls",
    "comparison",
    "counters",
    "exponential",
    "frames",
    "two_holder",
    "local",
    "noise",
    "open_weights",
    "oprf",
    "order",
    "pieces",
    "projection",
    "ring",
    "series",
    "truncation",
)


def backend(name: str | None = None) -> Any:
    """The kernels called ``name``; without a name, those of ``REFMPC_ACCEL`` or the fastest installed."""
    if name is None:
        name = os.environ.get("REFMPC_ACCEL") or ("numba" if importlib.util.find_spec("numba") else "numpy")
    if name not in _PACKAGES:
        raise InvalidArgument(
            f"REFMPC_ACCEL = {name!r}: must be one of {', '.join(_PACKAGES)}; unset it for the default"
        )
    return _collected(_PACKAGES[name])


@functools.cache
def _collected(package: str) -> ModuleType:
    """All kernels of a package's families in one namespace."""
    together = ModuleType(package, f"All kernels of {package}.")
    names: list[str] = []
    for family in _FAMILIES:
        module = importlib.import_module(f"{package}.{family}")
        for name in module.__all__:
            if hasattr(together, name):
                raise InvalidArgument(f"two kernels of {package} are called {name!r}; the second is in {family!r}")
            setattr(together, name, getattr(module, name))
        names += module.__all__
    together.__all__ = sorted(names)  # type: ignore[attr-defined]
    return together


kernels = backend()


def kept_in() -> str:
    """Where this process keeps compiled kernels; empty if it compiles none."""
    if kernels.__name__ != _PACKAGES["numba"]:
        return ""
    from numba.core import config

    return str(config.CACHE_DIR)  # type: ignore[attr-defined]


def is_compiled() -> bool:
    """Whether compiled kernels lie on this machine from an earlier run, so that a start need not compile them."""
    if kernels.__name__ != _PACKAGES["numba"]:
        return True  # nothing to compile
    from accel.compiled.tiles import by_rows

    return any(Path(str(by_rows.stats.cache_path)).glob("tiles.by_rows*.nbc"))
