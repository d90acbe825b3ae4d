"""Secure and private vertical federated learning: the federated side and the DP engine (no MPC code).

What a study in the clear needs is here; the estimators, which also train between servers, are in ``protocols``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vfl.data.sets import load_data
    from vfl.federation import Federation, build_federation
    from vfl.training import TrainingConfig
    from vfl.twins import train_g_bmf, train_g_shuff, train_plain

__all__ = [
    "Federation",
    "TrainingConfig",
    "build_federation",
    "load_data",
    "train_g_bmf",
    "train_g_shuff",
    "train_plain",
]

_HOMES = {
    "Federation": "vfl.federation",
    "TrainingConfig": "vfl.training",
    "build_federation": "vfl.federation",
    "load_data": "vfl.data.sets",
    "train_g_bmf": "vfl.twins",
    "train_g_shuff": "vfl.twins",
    "train_plain": "vfl.twins",
}


def __getattr__(name: str) -> Any:
    """Imported when it is used: a command that needs none of it starts faster."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'vfl' has no attribute {name!r}; estimators are in `protocols`")
