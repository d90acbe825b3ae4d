"""Kernels on 64-bit words: plain numpy (the reference) and numba, behind one interface.

``accel.kernels`` is the backend in use: numba when it is installed, unless the environment variable
``REFMPC_ACCEL=numpy|numba`` says otherwise. ``accel.backend(name)`` gives either one, which is how the tests
run every kernel twice. This package imports nothing else of ours, and every other package may import it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType

__all__ = ["backend", "kernels"]

_MODULES = {"numpy": "accel.reference", "numba": "accel.compiled"}


def backend(name: str | None = None) -> ModuleType:
    """The kernels called ``name``; without a name, those of ``REFMPC_ACCEL`` or the fastest installed."""
    if name is None:
        name = os.environ.get("REFMPC_ACCEL") or ("numba" if importlib.util.find_spec("numba") else "numpy")
    if name not in _MODULES:
        raise ValueError(f"REFMPC_ACCEL = {name!r}: must be one of {', '.join(_MODULES)}; unset it for the default")
    return importlib.import_module(_MODULES[name])


kernels = backend()
