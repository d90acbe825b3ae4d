"""The servers' part of GL-BMF with open weights: one step on shares, with a global layer that everybody knows.

Products with W are local and cost at most their truncation: the logits, M̂ = W̃ᵀW̃ (public altogether), K = UᵀW̃, W̃δ.
The clip, its scales and its bounds are those of ``protocols.step.gl_step``. The sums of the global layer are this
server's words like those of the clients' layers: when they are written, they are opened to the three servers, and to
each client its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import refmpc
from accel.validate import require
from protocols.plan.gl_plan import LayerPlan
from protocols.plan.gl_scales import AdapterScales
from protocols.plan.squared_norm_ratio import norms_over_clip
from protocols.step.gl_step import (
    ClientFactors,
    WeightProducts,
    clipped_parts,
    openings,
    products_with_updates,
)
from protocols.step.jacobians import ClientJacobian, sample_opening
from protocols.step.open_step import errors_from_logits
from protocols.step.public_weights import Head, PublicMatrix, centred, norm_above, rounded, times_weights
from protocols.step.secret_step import squared_norms
from refmpc import ArithmeticTensor, Words, seal

__all__ = ["PublicBlock", "open_layer_step", "public_block"]


@dataclass(frozen=True)
class PublicBlock:
    """W̃ and M̂ of one client, of weights that everybody knows."""

    block: PublicMatrix
    gram: PublicMatrix


def public_block(values: np.ndarray, weight_bits: int, scales: AdapterScales) -> PublicBlock:
    """W̃ and M̂ from a client's rows of the public weights, in integers: M̂ is off by half a unit an entry, and safe as
    above.

    W̃ is centred over the classes, as the logits are: δ adds up to zero but for its rounding, and ‖W̃‖ only gets
    smaller.
    """
    block = centred(values, weight_bits - scales.block_bits)
    limit = scales.weight_bound * 2.0**scales.block_bits
    # a column, which is no longer than that; then no entry of the next product leaves 64 bits
    _require_room((norm_above(block) - 2) / 1.001, scales)
    exact = block.T @ block
    if int(np.abs(exact).sum(axis=1).max()) > limit**2:  # the largest row sum is at least ‖W̃‖²
        _require_room(math.sqrt(float(np.linalg.eigvalsh(exact.astype(np.float64))[-1])), scales)
    gram = rounded(exact, 2 * scales.block_bits - scales.gram_bits) + len(exact) * np.eye(len(exact), dtype=np.int64)
    return PublicBlock(PublicMatrix(block, scales.block_bits), PublicMatrix(gram, scales.gram_bits))


def _require_room(units: float, scales: AdapterScales) -> None:
    """Refuse weights whose norm, in units of W̃, is beyond the bound of the run.

    No singular values of the block itself: a matrix so large is divided among BLAS threads, which wait for each other
    by turning in circles; with three servers on two busy cores that took up to 0.6 s of a step.
    """
    norm = units * 2.0**-scales.block_bits
    require(
        norm <= scales.weight_bound,
        "weights",
        f"of norm {norm:.4g}",
        f"of norm at most {scales.weight_bound:.4g}, for which this run has room",
        "the training diverges: lower the learning rate",
    )


async def _open_products(
    client: ClientFactors | ClientJacobian, public: PublicBlock, scales: AdapterScales
) -> WeightProducts:
    """``weight_products`` of public weights: what is left is K, and ‖a_j‖². 2 rounds, under those of the softmax."""
    if isinstance(client, ClientJacobian):
        return WeightProducts(public.block)
    wanted = [norms_over_clip(client.projected, scales.projected_norms)]
    if client.blocks is not None:
        bits = scales.up_bits + scales.block_bits - scales.up_weights_bits
        wanted.append(times_weights(client.up.T, public.block, bits))
    norms, *rest = await refmpc.gather(*wanted)
    return WeightProducts(public.block, public.gram, rest[0] if rest else None, norms)


async def open_layer_step(
    embeddings: ArithmeticTensor,
    labels: ArithmeticTensor,
    clients: Sequence[ClientFactors | ClientJacobian],
    head: Head,
    blocks: Sequence[PublicBlock],
    addend: np.ndarray,
    plan: LayerPlan,
) -> list[Words]:
    """This server's words of the noised sums of the global layer, then of each client's layers: nothing is opened yet.

    ``head`` is the public layer as logits take it, ``blocks`` its rows of each client. ``addend`` is this server's own
    row of filtered integer noise at 46 bits, and for the global part the constant that makes the cut unbiased.
    """
    explicit = plan.training.gradients == "explicit"
    logits = refmpc.matmul_public(embeddings, head.words).reinterpret(head.logit_bits)
    errors, *products = await refmpc.gather(
        errors_from_logits(logits, labels, head),
        *(_open_products(client, block, plan.adapters) for client, block in zip(clients, blocks, strict=True)),
        *([] if explicit else [squared_norms(embeddings, plan.scales)]),
    )
    norms = None if explicit else products.pop()
    clipped = await clipped_parts(embeddings, errors, norms, clients, products, plan)
    sums = await refmpc.gather(*products_with_updates(clipped, clients, plan.adapters))
    bits, own = plan.scales.truncated_bits, seal(addend).view(np.uint64)[: plan.global_parameters]
    if clipped.updates is None:
        assert clipped.written_out is not None
        words = sample_opening(clipped.factor, clipped.written_out, own, bits)
    else:
        words = refmpc.matmul_opening(embeddings.T, clipped.updates, bits, own.reshape(plan.width + 1, plan.classes))
    return [words.reshape(-1), *openings(clipped, clients, products, sums, addend, plan)]
