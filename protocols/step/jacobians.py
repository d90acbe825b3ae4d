"""Per-sample gradients written out on shares: clients' layers without factors, and everything under ``explicit``.

As in the paper: a client shares J_j = ∂H_j/∂φ, the servers compute g_j = J_jᵀ(W̃_i δ_j), its norm and its clipped sum.
That is 16·B·d_i·n bytes of upload a step, for small layers and as the reference of ``protocols.step.gl_step``. The norm
that is clipped is that of the rounded g_j itself, so the clip needs no slack (``protocols.plan.gl_scales``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import refmpc
from protocols.plan.gl_plan import LayerPlan
from protocols.plan.gl_shapes import JacobianShape
from protocols.plan.scales import EXPLICIT_BITS, PROBABILITY_BITS
from protocols.plan.squared_norm_ratio import norms_over_clip
from protocols.step.public_weights import PublicMatrix, times_weights
from protocols.step.secret_step import written_out
from refmpc import ArithmeticTensor

__all__ = [
    "ClientJacobian",
    "Samples",
    "clipped_sum",
    "global_samples",
    "layer_samples",
    "sample_opening",
]


@dataclass
class ClientJacobian:
    """What one client shares in one step besides H: ∂H_j/∂φ, (B×d_i×n)."""

    shape: JacobianShape
    jacobian: ArithmeticTensor


@dataclass
class Samples:
    """Per-sample gradients (B×n) at 20 bits, and ‖g_j‖²/γ² rounded up."""

    gradients: ArithmeticTensor
    norms: ArithmeticTensor


async def layer_samples(
    errors: ArithmeticTensor, block: ArithmeticTensor | PublicMatrix, client: ClientJacobian, plan: LayerPlan
) -> Samples:
    """g_j = J_jᵀ(W̃δ_j). 6 rounds, 5 if W̃ is public."""
    scales, batch = plan.adapters, len(errors)
    cut = PROBABILITY_BITS + scales.block_bits - scales.signal_bits
    signal = await times_weights(errors, block.T, cut)
    cut = scales.signal_bits + scales.jacobian_bits - scales.sample_bits
    found = await refmpc.matmul_truncate(signal.reshape(batch, 1, client.shape.width), client.jacobian, cut)
    found = found.reshape(batch, client.shape.parameters)
    norms = await norms_over_clip(found, scales.sample_norms)
    # exact: a coarser grid, written with the bits that the noise asks for
    return Samples(found.scale_by_integers(1 << (EXPLICIT_BITS - scales.sample_bits)).reinterpret(EXPLICIT_BITS), norms)


async def global_samples(embeddings: ArithmeticTensor, errors: ArithmeticTensor, plan: LayerPlan) -> Samples:
    """[h_j 1] ⊗ δ_j, all B·(d+1)·S entries. 4 rounds."""
    found = await written_out(embeddings, errors)
    assert plan.scales.written_out is not None
    return Samples(found, await norms_over_clip(found, plan.scales.written_out))


async def clipped_sum(
    factor: ArithmeticTensor, samples: Samples, bits: int, addend: np.ndarray, shape: tuple[int, ...]
) -> ArithmeticTensor:
    """Σ_j c_j g_j + all servers' addends, truncated, still shared. 2 rounds."""
    total = await refmpc.matmul_truncate(factor.T, samples.gradients, bits, addend=addend.reshape(1, -1))
    return total.reshape(*shape)


def sample_opening(factor: ArithmeticTensor, samples: Samples, noise: np.ndarray, bits: int) -> refmpc.Words:
    """This server's words of Σ_j c_j g_j of one client, noised and cut: nothing is sent."""
    return refmpc.matmul_opening(factor.T, samples.gradients, bits, addend=noise.reshape(1, -1)).reshape(-1)
