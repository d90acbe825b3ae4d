"""The servers' part of GL-BMF: one step on shares over the global layer and all clients' LoRA layers.

Who sees what: the servers hold shares of H, labels, A, X, U and W and open nothing here. ``layer_step`` returns the new
weights (shared) and, for each client, this server's words of that client's noised, truncated layer gradient; whoever
calls it decides when to send them, and each client gets its own only.

Formulas (proofs §4.6), for client i with W̃_i its rows of W, and a, U already multiplied by s:

    ‖g_j‖² = (‖h_j‖²+1)‖δ_j‖² + Σ_i δ_jᵀ(W̃_iᵀW̃_i)δ_j·‖a_ij‖² + Σ_i Σ_l ‖t_ilj‖²·‖x_ilj‖²,   t_ilj =
    (U_lᵀW̃_i)·φ_ij·δ_j Σ_j c_j g_j = [H 1]ᵀu,   W̃_i(uᵀA_i),   T_ilᵀX_il        with u_j = c_jδ_j and T_ilj = c_j t_ilj

Layers without factors, and everything under ``explicit``, are written out sample by sample
(``protocols.step.jacobians``) and join the same clip. Which rounding costs what is in ``protocols.plan.gl_scales``.

With open weights the products with W are public matrices here: ``protocols.step.open_gl_step``.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import refmpc
from protocols.plan.gl_plan import LayerPlan
from protocols.plan.gl_scales import ROUND_UP, AdapterScales
from protocols.plan.gl_shapes import AdapterShape
from protocols.plan.scales import PROBABILITY_BITS, UPDATE_BITS
from protocols.plan.squared_norm_ratio import norms_over_clip
from protocols.step.clip import clipped_updates
from protocols.step.jacobians import (
    ClientJacobian,
    Samples,
    clipped_sum,
    global_samples,
    layer_samples,
    sample_opening,
)
from protocols.step.public_weights import PublicMatrix, times_weights
from protocols.step.secret_step import (
    SharedRows,
    Weights,
    logit_errors,
    own_addends,
    squared_norms,
    updated,
)
from refmpc import ArithmeticTensor, Words, seal
from refmpc.mathematics.normalise import MANTISSA_BITS

__all__ = [
    "BlockOutputs",
    "ClientFactors",
    "Clipped",
    "WeightProducts",
    "block_norms",
    "clip_factors",
    "clipped_parts",
    "layer_step",
    "openings",
    "products_with_updates",
    "weight_products",
]


@dataclass
class BlockOutputs:
    """What never changes about a batch of one client: X of every shared layer (B×m_l) and ‖x_j‖²/γ² (B×L), rounded
    up."""

    inputs: list[ArithmeticTensor]
    norms: ArithmeticTensor


@dataclass
class ClientFactors:
    """What one client shares in one step: A (B×Lr) and U (d_i×Lr) of its layers side by side, both times s, and φ
    (B)."""

    shape: AdapterShape
    projected: ArithmeticTensor
    up: ArithmeticTensor
    row_factors: ArithmeticTensor
    blocks: BlockOutputs | None  # None when ∂L/∂V is not asked for


@dataclass
class WeightProducts:
    """W-only products of one client: W̃ (d_i×S), M̂ (S×S), K (Lr×S), and ‖a_j‖²/γ² (B). Jacobians need W̃ alone.
    With open weights W̃ and M̂ are public."""

    block: ArithmeticTensor | PublicMatrix
    gram: ArithmeticTensor | PublicMatrix | None = None
    up_weights: ArithmeticTensor | None = None
    projected_norms: ArithmeticTensor | None = None


async def block_norms(inputs: list[ArithmeticTensor], plan: LayerPlan) -> ArithmeticTensor:
    """‖x_lj‖²/γ² for every layer, (B×L): once per batch, when its X arrives."""
    return refmpc.stack(await refmpc.gather(*(norms_over_clip(x, plan.adapters.block_norms) for x in inputs)), axis=1)


async def weight_products(
    client: ClientFactors | ClientJacobian, weights: ArithmeticTensor, scales: AdapterScales
) -> WeightProducts:
    """Everything that needs no δ: runs under the rounds of the softmax."""
    rows = weights[client.shape.columns]
    cut = rows.fraction_bits - scales.block_bits
    if isinstance(client, ClientJacobian):
        return WeightProducts(await refmpc.truncate(rows, cut))

    async def products() -> WeightProducts:
        block = await refmpc.truncate(rows, cut)
        wanted = [refmpc.matmul_truncate(block.T, block, 2 * scales.block_bits - scales.gram_bits)]
        if client.blocks is not None:
            bits = scales.up_bits + scales.block_bits - scales.up_weights_bits
            wanted.append(refmpc.matmul_truncate(client.up.T, block, bits))
        gram, *rest = await refmpc.gather(*wanted)
        classes = gram.shape[0]
        # δᵀM̂δ ≥ δᵀMδ: each entry of the cut matrix is off by at most one unit
        safe = gram + classes * 2.0**-scales.gram_bits * np.eye(classes)
        return WeightProducts(block, safe, rest[0] if rest else None)

    found, found.projected_norms = await refmpc.gather(
        products(),
        norms_over_clip(client.projected, scales.projected_norms),
    )
    return found


async def _up_norms(
    errors: ArithmeticTensor, products: WeightProducts, scales: AdapterScales
) -> tuple[ArithmeticTensor, None]:
    """‖W̃δ_j‖²‖a_j‖²/γ², rounded up. 6 rounds, 5 if M̂ is public."""
    assert products.gram is not None and products.projected_norms is not None
    fine = scales.curvature_bits + ROUND_UP
    turned = await times_weights(errors, products.gram, PROBABILITY_BITS + scales.gram_bits - fine)
    cut = PROBABILITY_BITS + fine - scales.curvature_bits
    curvature = await refmpc.dot_truncate(errors, turned, cut) + 2 * 2.0**-scales.curvature_bits
    cut = scales.curvature_bits + scales.projected_norm_bits - MANTISSA_BITS
    norms = await refmpc.multiply_truncate(curvature, products.projected_norms, cut)
    return norms + 2.0**-MANTISSA_BITS, None


async def _down_norms(
    errors: ArithmeticTensor, client: ClientFactors, products: WeightProducts, scales: AdapterScales
) -> tuple[ArithmeticTensor, ArithmeticTensor]:
    """Σ_l ‖t_lj‖²‖x_lj‖²/γ², rounded up, and t (B×Lr) itself. 8 rounds."""
    assert client.blocks is not None and products.up_weights is not None
    scaled = await refmpc.multiply_truncate(client.row_factors.reshape(-1, 1), errors, scales.row_factor_bits)
    cut = PROBABILITY_BITS + scales.up_weights_bits - scales.layer_bits
    layers = await refmpc.matmul_truncate(scaled, products.up_weights.T, cut)
    each = layers.reshape(len(errors), -1, client.shape.rank)
    exact = await refmpc.dot(each, each)
    squares = await refmpc.truncate(exact, 2 * scales.layer_bits - scales.layer_norm_bits)
    squares = squares + 2.0**-scales.layer_norm_bits
    cut = scales.layer_norm_bits + scales.block_norm_bits - MANTISSA_BITS
    norms = await refmpc.dot_truncate(squares, client.blocks.norms, cut)
    return norms + 2.0**-MANTISSA_BITS, layers


async def _global_norms(errors: ArithmeticTensor, norms: ArithmeticTensor) -> tuple[ArithmeticTensor, None]:
    """(‖h_j‖²+1)‖δ_j‖²/γ², rounded up. 3 rounds."""
    squares = await refmpc.dot(errors, errors)
    q = await refmpc.multiply_truncate(squares, norms, squares.fraction_bits + norms.fraction_bits - MANTISSA_BITS)
    return q + 2.0**-MANTISSA_BITS, None


async def _written_out(samples: Coroutine[Any, Any, Samples]) -> tuple[ArithmeticTensor, Samples]:
    found = await samples
    return found.norms, found


async def clip_factors(
    errors: ArithmeticTensor,
    norms: ArithmeticTensor | None,
    clients: list[ClientFactors],
    products: list[WeightProducts],
    scales: AdapterScales,
    written_out: Sequence[Coroutine[Any, Any, Samples]] = (),
) -> tuple[ArithmeticTensor, dict[int, ArithmeticTensor], list[Samples]]:
    """c_j ≤ 1/max(1, ‖g_j‖/γ) as a column, t of every client whose ∂L/∂V is asked for, and what was written out.
    25 rounds. ``norms`` None: the global gradient is among ``written_out``."""
    down = [index for index, client in enumerate(clients) if client.blocks is not None]
    pieces = await refmpc.gather(
        *([] if norms is None else [_global_norms(errors, norms)]),
        *(_up_norms(errors, product, scales) for product in products),
        *(_down_norms(errors, clients[index], products[index], scales) for index in down),
        *map(_written_out, written_out),
    )
    q = pieces[0][0]
    for piece, _ in pieces[1:]:
        q = q + piece
    factor = await refmpc.clip_factor(q, scales.clip_bound)
    found = [rest for _, rest in pieces if rest is not None]
    return factor.reshape(-1, 1), dict(zip(down, found[: len(down)], strict=True)), found[len(down) :]


@dataclass
class Clipped:
    """A step when its clip is done: c (B×1), u, and what each client's opening is made of."""

    factor: ArithmeticTensor
    updates: ArithmeticTensor | None  # None with explicit gradients
    layers: dict[int, ArithmeticTensor]  # T, by client
    samples: dict[int, Samples]  # written out, by client
    written_out: Samples | None  # the global gradient, with explicit gradients


async def clipped_parts(
    embeddings: ArithmeticTensor,
    errors: ArithmeticTensor,
    norms: ArithmeticTensor | None,
    clients: Sequence[ClientFactors | ClientJacobian],
    products: Sequence[WeightProducts],
    plan: LayerPlan,
) -> Clipped:
    """The clip, over the global layer and all clients' layers together. ``norms`` None: explicit gradients."""
    factored = {i: client for i, client in enumerate(clients) if isinstance(client, ClientFactors)}
    written = {i: client for i, client in enumerate(clients) if isinstance(client, ClientJacobian)}
    samples = [layer_samples(errors, products[i].block, client, plan) for i, client in written.items()]
    if norms is None:
        samples.append(global_samples(embeddings, errors, plan))
    factor, at_layers, found = await clip_factors(
        errors, norms, list(factored.values()), [products[i] for i in factored], plan.adapters, samples
    )
    wanted = [*at_layers.values(), *([] if norms is None else [errors])]
    clipped = await refmpc.gather(*(clipped_updates(factor, each) for each in wanted))
    updates = None if norms is None else clipped.pop()
    whose = list(factored)
    layers = {whose[place]: layer for place, layer in zip(at_layers, clipped, strict=True)}
    by_client = dict(zip(written, found, strict=False))
    return Clipped(factor, updates, layers, by_client, found[-1] if norms is None else None)


def products_with_updates(
    clipped: Clipped, clients: Sequence[ClientFactors | ClientJacobian], scales: AdapterScales
) -> list[Coroutine[Any, Any, ArithmeticTensor]]:
    """P = uᵀA of every client with factors. 2 rounds."""
    if clipped.updates is None:
        return []
    cut, turned = UPDATE_BITS + scales.projected_bits - scales.product_bits, clipped.updates.T
    return [refmpc.matmul_truncate(turned, c.projected, cut) for c in clients if isinstance(c, ClientFactors)]


def openings(
    clipped: Clipped,
    clients: Sequence[ClientFactors | ClientJacobian],
    products: Sequence[WeightProducts],
    sums: Sequence[ArithmeticTensor],
    noise: np.ndarray,
    plan: LayerPlan,
) -> list[Words]:
    """This server's words of every client's layer gradient: nothing is sent."""
    found, left, bits = [], iter(sums), plan.scales.truncated_bits
    for i, (client, part) in enumerate(zip(clients, plan.noise_slices(), strict=True)):
        if isinstance(client, ClientJacobian):
            found.append(sample_opening(clipped.factor, clipped.samples[i], noise[part], bits))
        else:
            found.append(
                _layer_opening(client, products[i].block, next(left), clipped.layers.get(i), noise[part], bits)
            )
    return found


async def layer_step(
    embeddings: ArithmeticTensor,
    labels: ArithmeticTensor,
    clients: Sequence[ClientFactors | ClientJacobian],
    weights: Weights,
    noise: np.ndarray,
    learning_rate: float | Words,
    plan: LayerPlan,
) -> tuple[Weights, list[Words]]:
    """One step of SGD on the global layer, and each client's layer gradient ready to be opened to it alone.

    ``noise`` is this server's own row of filtered integer noise at 46 bits, in the flat layout of ``vfl.gradients``.
    """
    training, scales, layers = plan.training, plan.scales, plan.adapters
    explicit = training.gradients == "explicit"

    # forward; products of W alone and row norms share the rounds of the softmax
    rows = SharedRows(embeddings, labels, labels)
    errors, *products = await refmpc.gather(
        logit_errors(rows, weights.values, scales),
        *(weight_products(client, weights.values, layers) for client in clients),
        *([] if explicit else [squared_norms(embeddings, scales)]),
    )
    norms = None if explicit else products.pop()
    clipped = await clipped_parts(embeddings, errors, norms, clients, products, plan)

    # backward, with each server's own noise
    (addend,) = own_addends(noise, [weights], training.momentum, scales)
    bits = scales.truncated_bits
    if clipped.updates is None:
        assert clipped.written_out is not None
        total = clipped_sum(clipped.factor, clipped.written_out, bits, addend, weights.values.shape)
    else:
        total = refmpc.matmul_truncate(embeddings.T, clipped.updates, bits, addend=addend)
    velocity, *sums = await refmpc.gather(total, *products_with_updates(clipped, clients, layers))
    words = openings(clipped, clients, products, sums, noise, plan)

    (after,) = await updated([weights], [velocity], learning_rate, training, scales)
    return after, words


def _layer_opening(
    client: ClientFactors,
    block: ArithmeticTensor | PublicMatrix,
    sums: ArithmeticTensor,
    clipped: ArithmeticTensor | None,
    noise: np.ndarray,
    bits: int,
) -> Words:
    """This server's words of W̃(uᵀA) and TᵀX of every layer, noised and cut, in the flat layout: nothing is sent."""
    shape, machine = client.shape, sums.party.machine
    rank, width = shape.rank, shape.width
    own, up_places, start = seal(noise).view(np.uint64), [], 0
    for block_width in shape.block_widths:
        up_places.append(slice(start, start + width * rank))
        start += width * rank + (rank * block_width if shape.with_down else 0)
    columns = [slice(layer * rank, (layer + 1) * rank) for layer in range(len(up_places))]
    addend = machine.memory((width, rank * len(columns)))
    for here, place in zip(columns, up_places, strict=True):
        machine.call("copy", own[place].reshape(width, rank), addend[:, here])
    if isinstance(block, PublicMatrix):
        product = refmpc.matmul_public(sums.T, block.words.transpose()).T
        up = refmpc.tensor_opening(product.reinterpret(sums.fraction_bits + block.bits), bits, addend=addend)
    else:
        up = refmpc.matmul_opening(block, sums, bits, addend=addend)
    found = machine.memory(own.size, up.dtype)
    for layer, (here, place) in enumerate(zip(columns, up_places, strict=True)):
        machine.call("copy", up[:, here], found[place].reshape(width, rank))
        if shape.with_down:
            assert clipped is not None and client.blocks is not None
            inputs = client.blocks.inputs[layer]
            down = slice(place.stop, place.stop + rank * shape.block_widths[layer])
            part = own[down].reshape(rank, -1)
            opening = refmpc.matmul_opening(clipped[:, here].T, inputs, bits, addend=part)
            machine.call("copy", opening, found[down].reshape(rank, -1))
    return found
