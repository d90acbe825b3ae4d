"""Float twins of the protocols: oracles of the MPC tests, and the fast engine of utility studies.

Numpy only (no torch). Every twin takes a ``Federation`` and a ``TrainingConfig``; the DP ones also take noise
from outside, so that a secure run and its twin can be compared with the same batches, clipping and noise.
"""

from vfl.twins.engine import TwinResult
from vfl.twins.g_bmf import train_g_bmf
from vfl.twins.g_shuff import epoch_order, train_g_shuff
from vfl.twins.gl_bmf import release_size, train_gl_bmf, train_gl_sub
from vfl.twins.ldp import train_ldp_g, train_ldp_gl
from vfl.twins.mechanisms import (
    NoisePlan,
    plan_matrix_factorisation,
    plan_shuffled,
    plan_subsampled,
)
from vfl.twins.plain import train_plain

__all__ = [
    "NoisePlan",
    "TwinResult",
    "epoch_order",
    "plan_matrix_factorisation",
    "plan_shuffled",
    "plan_subsampled",
    "release_size",
    "train_g_bmf",
    "train_g_shuff",
    "train_gl_bmf",
    "train_gl_sub",
    "train_ldp_g",
    "train_ldp_gl",
    "train_plain",
]
