"""The protocols of the paper, joining `refmpc` and `vfl`; and the Python API, which is imported when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from protocols.api import Estimate, VerticalClassifier, VerticalRegressor

__all__ = ["Estimate", "VerticalClassifier", "VerticalRegressor"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from protocols import api

        return getattr(api, name)
    raise AttributeError(f"module 'protocols' has no attribute {name!r}; it exports {', '.join(__all__)}")
