"""The servers' part of GL-BMF: one step on shares over the global layer and all clients' LoRA layers.

Who sees what: the servers hold shares of H, labels, A, X, U and W and open nothing here. ``joint_step`` returns the new
weights (shared) and, for each client, this server's words of that client's noised, truncated layer gradient; whoever
calls it decides when to send them, and each client gets its own only.

Formulas (DESIGN §5), for client i with W̃_i its rows of W, and a, U already multiplied by s:

    ‖g_j‖² = (‖h_j‖²+1)‖δ_j‖² + Σ_i δ_jᵀ(W̃_iᵀW̃_i)δ_j·‖a_ij‖² + Σ_i Σ_l ‖t_ilj‖²·‖x_ilj‖²,   t_ilj = (U_lᵀW̃_i)·φ_ij·δ_j
    Σ_j c_j g_j = [H 1]ᵀu,   W̃_i(uᵀA_i),   T_ilᵀX_il        with u_j = c_jδ_j and T_ilj = c_j t_ilj

Which rounding costs what is in ``protocols.gl_plan``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

import refmpc
from protocols.gl_plan import ROUND_UP, AdapterScales, AdapterShape, JointPlan, inverse_clip_bits
from protocols.scales import EMBEDDING_BITS, GRADIENT_BITS, PROBABILITY_BITS, RELEASE_BITS, UPDATE_BITS
from protocols.step import SharedRows, Weights, logit_errors, squared_norms
from refmpc import ArithmeticTensor, Cost
from refmpc.normalise import MANTISSA_BITS

__all__ = [
    "BlockOutputs",
    "ClientFactors",
    "WeightProducts",
    "block_norms",
    "clip_factors",
    "joint_step",
    "joint_step_cost",
    "weight_products",
]


@dataclass
class BlockOutputs:
    """What never changes about a batch of one client: X of every shared layer (B×m_l) and ‖x_j‖²/γ² (B×L), rounded up."""

    inputs: list[ArithmeticTensor]
    norms: ArithmeticTensor


@dataclass
class ClientFactors:
    """What one client shares in one step: A (B×Lr) and U (d_i×Lr) of its layers side by side, both times s, and φ (B)."""

    shape: AdapterShape
    projected: ArithmeticTensor
    up: ArithmeticTensor
    row_factors: ArithmeticTensor
    blocks: BlockOutputs | None  # None when ∂L/∂V is not asked for


@dataclass
class WeightProducts:
    """W-only products of one client: W̃ (d_i×S), M̂ (S×S), K (Lr×S), and ‖a_j‖²/γ² (B)."""

    block: ArithmeticTensor
    gram: ArithmeticTensor
    up_weights: ArithmeticTensor | None
    projected_norms: ArithmeticTensor


async def _norms_over_clip(rows: ArithmeticTensor, clip_norm: float, bound: float, bits: int) -> ArithmeticTensor:
    """‖row‖²/γ² at ``bits``, never below the true value, for rows of norm at most ``bound``. 2 rounds."""
    inverse_bits = inverse_clip_bits(rows.fraction_bits, clip_norm, bound)
    squares = await refmpc.dot(rows, rows)
    inverse = math.ceil(2.0**inverse_bits / clip_norm**2)
    scaled = squares.scale_by_integers(inverse).reinterpret(2 * rows.fraction_bits + inverse_bits)
    return await refmpc.truncate(scaled, scaled.fraction_bits - bits) + 2.0**-bits


async def block_norms(inputs: list[ArithmeticTensor], plan: JointPlan) -> ArithmeticTensor:
    """‖x_lj‖²/γ² for every layer, (B×L): once per batch, when its X arrives."""
    scales = plan.adapters
    limits = plan.training.clip_norm, scales.bounds.block, scales.block_norm_bits
    return refmpc.stack(await refmpc.gather(*(_norms_over_clip(x, *limits) for x in inputs)), axis=1)


async def weight_products(
    client: ClientFactors, weights: ArithmeticTensor, clip_norm: float, scales: AdapterScales
) -> WeightProducts:
    """Everything that needs no δ: runs under the rounds of the softmax."""

    async def products() -> tuple[ArithmeticTensor, ArithmeticTensor, ArithmeticTensor | None]:
        rows = weights[client.shape.columns]
        block = await refmpc.truncate(rows, rows.fraction_bits - scales.block_bits)
        wanted = [refmpc.matmul_truncate(block.T, block, 2 * scales.block_bits - scales.gram_bits)]
        if client.blocks is not None:
            cut = scales.up_bits + scales.block_bits - scales.up_weights_bits
            wanted.append(refmpc.matmul_truncate(client.up.T, block, cut))
        gram, *rest = await refmpc.gather(*wanted)
        classes = gram.shape[0]
        # δᵀM̂δ ≥ δᵀMδ: each entry of the cut matrix is off by at most one unit
        return block, gram + classes * 2.0**-scales.gram_bits * np.eye(classes), (rest[0] if rest else None)

    (block, gram, up_weights), norms = await refmpc.gather(
        products(),
        _norms_over_clip(client.projected, clip_norm, scales.bounds.projected, scales.projected_norm_bits),
    )
    return WeightProducts(block, gram, up_weights, norms)


async def _up_norms(
    errors: ArithmeticTensor, products: WeightProducts, scales: AdapterScales
) -> tuple[ArithmeticTensor, None]:
    """‖W̃δ_j‖²‖a_j‖²/γ², rounded up. 6 rounds."""
    fine = scales.curvature_bits + ROUND_UP
    turned = await refmpc.matmul_truncate(errors, products.gram, PROBABILITY_BITS + scales.gram_bits - fine)
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


async def clip_factors(
    errors: ArithmeticTensor,
    norms: ArithmeticTensor,
    clients: list[ClientFactors],
    products: list[WeightProducts],
    scales: AdapterScales,
) -> tuple[ArithmeticTensor, dict[int, ArithmeticTensor]]:
    """c_j ≤ 1/max(1, ‖g_j‖/γ) as a column, and t of every client whose ∂L/∂V is asked for. 25 rounds."""
    down = [index for index, client in enumerate(clients) if client.blocks is not None]
    pieces = await refmpc.gather(
        _global_norms(errors, norms),
        *(_up_norms(errors, product, scales) for product in products),
        *(_down_norms(errors, clients[index], products[index], scales) for index in down),
    )
    q = pieces[0][0]
    for piece, _ in pieces[1:]:
        q = q + piece
    factor = await refmpc.clip_factor(q, scales.clip_bound)
    at_layers = dict(zip(down, (piece[1] for piece in pieces[1 + len(clients) :]), strict=True))
    return factor.reshape(-1, 1), at_layers


async def joint_step(
    embeddings: ArithmeticTensor,
    labels: ArithmeticTensor,
    clients: list[ClientFactors],
    weights: Weights,
    noise: np.ndarray,
    learning_rate: float,
    plan: JointPlan,
) -> tuple[Weights, list[np.ndarray]]:
    """One step of SGD on the global layer, and each client's layer gradient ready to be opened to it alone.

    ``noise`` is this server's own row of filtered integer noise at 46 bits, in the flat layout of ``vfl.gradients``.
    """
    training, scales, layers = plan.training, plan.scales, plan.adapters

    # forward; products of W alone and row norms share the rounds of the softmax
    rows = SharedRows(embeddings, labels, labels)
    errors, norms, *products = await refmpc.gather(
        logit_errors(rows, weights.values, scales),
        squared_norms(embeddings, training.clip_norm, scales),
        *(weight_products(client, weights.values, training.clip_norm, layers) for client in clients),
    )

    # clip, over the global layer and all clients' layers together
    factor, at_layers = await clip_factors(errors, norms, clients, products, layers)
    cut = MANTISSA_BITS + layers.layer_bits - UPDATE_BITS
    updates, *clipped = await refmpc.gather(
        refmpc.multiply_truncate(factor, errors, MANTISSA_BITS + PROBABILITY_BITS - UPDATE_BITS),
        *(refmpc.multiply_truncate(factor, t, cut) for t in at_layers.values()),
    )
    clipped_layers = dict(zip(at_layers, clipped, strict=True))

    # backward, with each server's own noise
    addend = noise[: plan.global_parameters].reshape(weights.values.shape).view(np.uint64)
    if weights.velocity is not None:
        beta = np.uint64(round(training.momentum * 2.0 ** (GRADIENT_BITS - RELEASE_BITS)))
        addend = np.add(addend, weights.velocity.first * beta)
    cut = UPDATE_BITS + layers.projected_bits - layers.product_bits
    velocity, *sums = await refmpc.gather(
        refmpc.matmul_truncate(embeddings.T, updates, scales.truncated_bits, addend=addend),
        *(refmpc.matmul_truncate(updates.T, client.projected, cut) for client in clients),
    )
    openings = [
        _layer_opening(client, products[i].block, sums[i], clipped_layers.get(i), noise[part], scales.truncated_bits)
        for i, (client, part) in enumerate(zip(clients, plan.noise_slices(), strict=True))
    ]

    # update, local unless weights decay
    values = weights.values
    if training.weight_decay != 1.0:
        bits = 16
        decayed = values.scale_by_integers(round(training.weight_decay * 2**bits))
        values = await refmpc.truncate(decayed.reinterpret(scales.weight_bits + bits), bits)
    change = velocity.scale_by_integers(scales.rate_word(learning_rate)).reinterpret(scales.weight_bits)
    return Weights(values - change, velocity if weights.velocity is not None else None), openings


def _layer_opening(
    client: ClientFactors,
    block: ArithmeticTensor,
    sums: ArithmeticTensor,
    clipped: ArithmeticTensor | None,
    noise: np.ndarray,
    bits: int,
) -> np.ndarray:
    """This server's words of W̃(uᵀA) and TᵀX of every layer, noised and cut, in the flat layout: nothing is sent."""
    rank, width = client.shape.rank, client.shape.width
    ups, downs, start = [], [], 0
    for block_width in client.shape.block_widths:
        ups.append(noise[start : start + width * rank].reshape(width, rank))
        start += width * rank
        if client.shape.with_down:
            downs.append(noise[start : start + rank * block_width].reshape(rank, block_width))
            start += rank * block_width
    up = refmpc.matmul_opening(block, sums, bits, addend=np.concatenate(ups, axis=1))
    found = []
    for layer in range(len(client.shape.block_widths)):
        here = slice(layer * rank, (layer + 1) * rank)
        found.append(up[:, here].reshape(-1))
        if client.shape.with_down:
            assert clipped is not None and client.blocks is not None
            inputs = client.blocks.inputs[layer]
            found.append(refmpc.matmul_opening(clipped[:, here].T, inputs, bits, addend=downs[layer]).reshape(-1))
    return np.concatenate(found)


# cost --------------------------------------------------------------------------------------------


def _shaped(*shape: int, bits: int) -> ArithmeticTensor:
    return ArithmeticTensor(None, np.broadcast_to(np.uint64(0), (2, *shape)), bits)  # type: ignore[arg-type]


def _beside(costs: list[Cost]) -> Cost:
    total = Cost(0, 0)
    for cost in costs:
        total = total.beside(cost)
    return total


def _norm_cost(rows: int, fraction_bits: int, clip_norm: float, bound: float, bits: int) -> Cost:
    column = _shaped(rows, bits=MANTISSA_BITS)
    cut = 2 * fraction_bits + inverse_clip_bits(fraction_bits, clip_norm, bound) - bits
    return Cost(1, 24 * rows) + refmpc.truncate.cost(column, cut)


def joint_step_cost(plan: JointPlan) -> Cost:
    """The declared cost of ``joint_step`` between the servers; nothing runs. Uploads and openings come on top."""
    training, scales, layers = plan.training, plan.scales, plan.adapters
    batch, width, classes, gamma = training.batch_size, plan.width, plan.classes, training.clip_norm
    rows = _shaped(batch, width + 1, bits=EMBEDDING_BITS)
    weights = _shaped(width + 1, classes, bits=scales.weight_bits)
    errors = _shaped(batch, classes, bits=PROBABILITY_BITS)
    column = _shaped(batch, bits=MANTISSA_BITS)
    product, multiply, truncate = refmpc.matmul_truncate.cost, refmpc.multiply_truncate.cost, refmpc.truncate.cost

    forward = product(rows, weights, EMBEDDING_BITS + scales.weight_bits - 16)
    forward += refmpc.softmax.cost(_shaped(batch, classes, bits=16), PROBABILITY_BITS, scales.logit_high_bit)
    spare = min(20, math.floor(61 - 2 * EMBEDDING_BITS - math.log2(max(1.0, scales.norm_bound))))
    norms = refmpc.dot.cost(rows, rows) + truncate(column, 2 * EMBEDDING_BITS + spare - scales.norm_bits)
    under, clip, tails, sums = [forward, norms], [], [], []
    q_cut = 2 * PROBABILITY_BITS + scales.norm_bits - MANTISSA_BITS
    clip.append(refmpc.dot.cost(errors, errors) + multiply(column, column, q_cut))
    tails.append(multiply(column.reshape(-1, 1), errors, MANTISSA_BITS + PROBABILITY_BITS - UPDATE_BITS))
    sums.append(product(rows.T, _shaped(batch, classes, bits=UPDATE_BITS), scales.truncated_bits))
    for shape in plan.shapes:
        stacked = shape.stacked_rank
        block = _shaped(shape.width, classes, bits=layers.block_bits)
        up = _shaped(shape.width, stacked, bits=layers.up_bits)
        wanted = product(block.T, block, 2 * layers.block_bits - layers.gram_bits)
        if shape.with_down:
            wanted = wanted.beside(product(up.T, block, layers.up_bits + layers.block_bits - layers.up_weights_bits))
        cut = scales.weight_bits - layers.block_bits
        under.append(truncate(_shaped(shape.width, classes, bits=scales.weight_bits), cut) + wanted)
        bounds = gamma, layers.bounds.projected, layers.projected_norm_bits
        under.append(_norm_cost(batch, layers.projected_bits, *bounds))
        fine = layers.curvature_bits + ROUND_UP
        gram = _shaped(classes, classes, bits=layers.gram_bits)
        piece = product(errors, gram, PROBABILITY_BITS + layers.gram_bits - fine)
        turned = _shaped(batch, classes, bits=fine)
        piece += refmpc.dot_truncate.cost(errors, turned, PROBABILITY_BITS + fine - layers.curvature_bits)
        piece += multiply(column, column, layers.curvature_bits + layers.projected_norm_bits - MANTISSA_BITS)
        clip.append(piece)
        projected = _shaped(batch, stacked, bits=layers.projected_bits)
        cut = UPDATE_BITS + layers.projected_bits - layers.product_bits
        sums.append(product(_shaped(classes, batch, bits=UPDATE_BITS), projected, cut))
        if shape.with_down:
            depth = len(shape.block_widths)
            up_weights = _shaped(classes, stacked, bits=layers.up_weights_bits)
            piece = multiply(column.reshape(-1, 1), errors, layers.row_factor_bits)
            piece += product(errors, up_weights, PROBABILITY_BITS + layers.up_weights_bits - layers.layer_bits)
            squares = _shaped(batch, depth, bits=2 * layers.layer_bits)
            piece += Cost(1, 24 * batch * depth)
            piece += truncate(squares, 2 * layers.layer_bits - layers.layer_norm_bits)
            cut = layers.layer_norm_bits + layers.block_norm_bits - MANTISSA_BITS
            piece += refmpc.dot_truncate.cost(squares, squares, cut)
            clip.append(piece)
            at_layers = _shaped(batch, stacked, bits=layers.layer_bits)
            tails.append(multiply(column.reshape(-1, 1), at_layers, MANTISSA_BITS + layers.layer_bits - UPDATE_BITS))
    total = _beside(under) + _beside(clip) + refmpc.clip_factor.cost(column, layers.clip_bound)
    total += _beside(tails) + _beside(sums)
    if training.weight_decay != 1.0:
        total += truncate(weights, 16)
    return total
