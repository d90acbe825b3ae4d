"""The paper's baselines (torch), each with example-level DP: ADMM, FedBCD, split learning, Ada-VFed."""

from vfl.baselines.ada_vfed import train_ada_vfed
from vfl.baselines.admm import train_admm
from vfl.baselines.release import BaselineConfig, BaselineResult
from vfl.baselines.split import train_fedbcd, train_split_learning

__all__ = [
    "BaselineConfig",
    "BaselineResult",
    "train_ada_vfed",
    "train_admm",
    "train_fedbcd",
    "train_split_learning",
]
