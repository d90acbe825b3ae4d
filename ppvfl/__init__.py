"""What users import: ``from ppvfl import VerticalClassifier``; ``ppvfl.refmpc`` is the secure computation below it.

Names are imported when they are used, so ``import ppvfl`` costs nothing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import refmpc
    from protocols.api import Estimate, VerticalClassifier, VerticalRegressor

__all__ = ["Estimate", "VerticalClassifier", "VerticalRegressor", "__version__", "refmpc"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("ppvfl")
    if name == "refmpc":
        return importlib.import_module("refmpc")
    if name in __all__:
        return getattr(importlib.import_module("protocols.api"), name)
    raise AttributeError(f"module 'ppvfl' has no attribute {name!r}; it exports {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
