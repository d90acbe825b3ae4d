"""Scales and bounds of GL-BMF, and γ', the sensitivity of what really runs.

Per sample j the servers clip, over everything together, the gradient

    g_j = ( [h_j 1] ⊗ δ_j,   for each client i:  W̃_i δ_j a_ijᵀ,   and for each of its layers l:  t_ilj x_ilj ᵀ ),

with a = s·V x and U already multiplied by s at the client (so s never enters the ring), W̃ the weights cut to
``block_bits``, and t_ilj = K_il·φ_ij·δ_j, K_il = (sU_l)ᵀW̃_i, φ_ij the factor by which the client's row bound
multiplied row j. W̃, U and K depend on earlier releases and on masks only, never on the rows of the step: rounding them
changes which function is clipped, not the bound. t is rounded once, and the same rounded t goes into the norm and into
the gradient.

**The clip factor is never too large.** Write δ, t, a, x, h for the integers the servers hold.

* ‖[h 1]‖²‖δ‖²/γ²: as in G-BMF, exact squares, rounded up.
* ‖W̃δ‖²‖a‖²/γ²: M = W̃ᵀW̃ is cut to ``gram_bits``, entries off by at most 2^-g. For any δ, |δᵀEδ| ≤ ‖δ‖₁²·2^-g ≤
  S‖δ‖²·2^-g, so M̂ = M_cut + S·2^-g·1 satisfies δᵀM̂δ ≥ δᵀMδ. M̂δ is cut to 4 bits more than e = δᵀ(M̂δ), which loses
  at most ‖δ‖₁·2^-(e_bits+4) < 2^-e_bits/2 there and 2^-e_bits in its own cut: two units are added. ‖a‖²/γ² is rounded
  up, the product too.
* Σ_l ‖t_l‖²‖x_l‖²/γ²: exact squares; each cut is followed by one unit.

Hence q_j ≥ ‖g_j‖²/γ² for every way the truncations may round, and c_j ≤ 1/sqrt(max(1, q_j)) by ``refmpc.clip_factor``.

**γ'.** What is added up is not c_j·g_j but

* u_j = cut(c_j δ_j) and T_ij = cut(c_j t_ij), each entry off by at most 2^-32: the contribution of j moves by at most
  2^-32·sqrt(S(R²+1) + Σ_i S·ω²α_i² + Σ_i Σ_l r·ξ²), where ω ≥ ‖W̃_i‖, α_i ≥ ‖a_i‖, ξ ≥ ‖x‖.
* P_i = cut(uᵀA_i) at ``product_bits``, the one rounding that sees the whole batch, before W̃_i P_i. With the same
  masks, a record more or less changes ⌊(uᵀA + s)/2^m⌋ by its own u_j a_jᵀ and less than one unit an entry. That unit
  reaches the sum as W̃_i E, so its norm is below ω·sqrt(S·r·L_i)·2^-product_bits, and sqrt(Σ_i ...) for all clients.

γ' = γ + both, and for layers without factors nothing (below). All other roundings between clip and noise do not exist:
[H 1]ᵀu, TᵀX and W̃P are exact at 46 bits.

**Layers without factors**, and ``explicit`` gradients: the client shares J_j = ∂H_j/∂φ (d_i×n) itself, of spectral norm
within a public bound. v_j = cut(W̃_i δ_j), g_j = cut(J_jᵀ v_j), and the norm is that of the rounded g_j, exactly; Σ_j
c_j g_j is exact at 46 bits. So nothing is added to γ here. With ``explicit`` the global gradient [h_j 1] ⊗ δ_j is
written out and cut likewise.

**Ranges.** In GL-BMF the rows answer to released gradients, so they may lean towards the noise in W: a logit is bounded
by ‖[h 1]‖·‖W‖ and ‖W‖ by drift + dev·(√(d+1) + √S + 12), the norm of a Gaussian matrix but for e^-72 a step (Davidson &
Szarek 2001). Factors a, x, U, φ are brought within public bounds by the clients, row by row (U: as a whole, a function
of releases only), so they need no probability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from accel.validate import require, require_real
from protocols.plan.gl_shapes import AdapterShape, JacobianShape, LayerFacts
from protocols.plan.scales import (
    EMBEDDING_BITS,
    EXPLICIT_BITS,
    GRADIENT_BITS,
    NOISE_DEVIATIONS,
    PROBABILITY_BITS,
    UPDATE_BITS,
    Scales,
    plan_scales,
)
from protocols.plan.squared_norm_ratio import ERROR_NORM, MOST_CLIP_BOUND, ROOM, OverClip, most_fraction_bits
from refmpc.mathematics.normalise import MANTISSA_BITS
from vfl.dp import Factorisation
from vfl.training import Schedule, TrainingConfig

__all__ = ["AdapterScales", "FactorBounds", "plan_layer_scales"]

ROUND_UP = 4  # further bits of M̂δ, so that its rounding stays below half a unit of e
JACOBIAN_BITS = 16


@dataclass(frozen=True)
class FactorBounds:
    """Public bounds that every client enforces on what it shares about its layers.

    ``block``: ‖x‖ of each pooled block output; ``row_factor``: φ, how much the row bound may enlarge a row (1 if it
    only clips); ``projected``: ‖s·a‖ over all layers of the client; ``up``: ‖s·U‖ (Frobenius) over all its layers;
    ``jacobian``: ‖∂H_j/∂φ‖ (spectral) where that is shared instead of factors.
    """

    block: float
    row_factor: float
    projected: float
    up: float
    jacobian: float = 1.0

    def __post_init__(self) -> None:
        for name in ("block", "row_factor", "projected", "up", "jacobian"):
            require_real(f"factor bound {name}", getattr(self, name), 0, open_low=True)


@dataclass(frozen=True)
class AdapterScales:
    """Scales of everything that GL-BMF adds to a step, and the bounds they were chosen from."""

    bounds: FactorBounds
    weight_bound: float  # ω
    layer_bound: float  # of ‖t‖
    clip_bound: float  # of q
    block_bits: int  # W̃
    gram_bits: int  # M̂
    curvature_bits: int  # e = δᵀM̂δ
    projected_norms: OverClip  # ‖s·a‖²/γ²
    up_bits: int  # s·U
    up_weights_bits: int  # K
    layer_bits: int  # t
    layer_norm_bits: int  # ‖t‖²
    block_norms: OverClip  # ‖x‖²/γ²
    signal_bits: int  # v = W̃δ, where a Jacobian follows
    sample_norms: OverClip  # ‖g_j‖²/γ² of g_j = Jᵀv
    clip_rounding: float  # γ' − γ
    overflow_probability: float

    @property
    def projected_bits(self) -> int:
        """s·a."""
        return self.projected_norms.fraction_bits

    @property
    def projected_norm_bits(self) -> int:
        return self.projected_norms.bits

    @property
    def block_norm_bits(self) -> int:
        return self.block_norms.bits

    @property
    def sample_bits(self) -> int:
        """g_j = Jᵀv."""
        return self.sample_norms.fraction_bits

    @property
    def product_bits(self) -> int:
        """P = uᵀA, such that W̃P is at the scale of the noise."""
        return GRADIENT_BITS - self.block_bits

    @property
    def row_factor_bits(self) -> int:
        return EMBEDDING_BITS

    @property
    def jacobian_bits(self) -> int:
        return JACOBIAN_BITS


def _log2(value: float) -> float:
    return math.log2(max(value, 2.0**-20))


def _default_bounds(
    training: TrainingConfig, factorisation: Factorisation, facts: LayerFacts, noise_std: float
) -> FactorBounds:
    """Bounds from public numbers: twice what V starts with; for U the noise it will have gathered, doubled, and one.

    A client whose factors outgrow them shares them scaled down: less exact gradients, the same claim.
    """
    update = facts.update
    row_factor = 1.0 if {client.row_rule for client in facts.clients} == {"clip"} else 4.0
    lora = [(client.lora, client.scale) for client in facts.clients if client.lora is not None]
    scale = max((scale for _, scale in lora), default=1.0)
    layers = max((len(shape.block_widths) for shape, _ in lora), default=1)
    error = factorisation.workload_error("final", weight_decay=update.weight_decay, momentum=update.momentum)
    deviation = update.learning_rate / training.batch_size * noise_std * error
    entries = max((shape.width * shape.stacked_rank for shape, _ in lora), default=1)
    projected = 2.0 * scale * row_factor * math.sqrt(layers)
    up = 1.0 + 2.0 * scale * deviation * math.sqrt(entries)
    jacobian = max([client.jacobian_bound or math.hypot(projected, up * row_factor) for client in facts.clients])
    return FactorBounds(1.0, row_factor, projected, up, jacobian)


def plan_layer_scales(
    training: TrainingConfig,
    schedule: Schedule,
    factorisation: Factorisation,
    facts: LayerFacts,
    shapes: Sequence[AdapterShape | JacobianShape],
    bounds: FactorBounds | None,
    noise_std: float,
) -> tuple[Scales, AdapterScales]:
    """Scales of the global layer and of the adapters, for noise of ``noise_std``."""
    classes, steps, gamma = facts.classes, schedule.num_steps, training.clip_norm
    limits = bounds or _default_bounds(training, factorisation, facts, noise_std)
    # the norm of a Gaussian matrix instead of one of its coordinates: rows may lean towards the noise
    matrix = math.sqrt(facts.width + 1) + math.sqrt(classes) + NOISE_DEVIATIONS
    scales = plan_scales(
        training,
        schedule,
        factorisation,
        row_bound=facts.row_bound,
        width=facts.width,
        outputs=classes,
        noise_std=noise_std * matrix / NOISE_DEVIATIONS,
    )
    reach = math.hypot(scales.row_bound, 1.0)
    entries = (facts.width + 1) * classes
    weight_bound = max(1.0, scales.logit_bound / reach)
    block_bits = min(16, math.floor((ROOM - 2 * _log2(weight_bound)) / 2))
    weight_bound += math.sqrt(entries) * 2.0**-block_bits

    # scales: as fine as the ring allows, from bounds with room; then the bounds again, with these scales' roundings
    factored = [shape for shape in shapes if isinstance(shape, AdapterShape)]
    widest = max((max(shape.block_widths) for shape in factored), default=1)
    block_bound = limits.block + math.sqrt(widest) * 2.0**-EMBEDDING_BITS
    layer_bound = 1.1 * ERROR_NORM * limits.row_factor * limits.up * weight_bound + 1.0
    up_squares = 2.5 * weight_bound**2 * limits.projected**2 / gamma**2
    down_squares = 1.25 * layer_bound**2 * block_bound**2 / gamma**2
    curvature_bits = min(16, math.floor(ROOM - PROBABILITY_BITS - ROUND_UP - _log2(2.2 * weight_bound**2)))
    gram_bits = min(2 * block_bits - 1, math.floor(ROOM - PROBABILITY_BITS - _log2(1.5 * weight_bound**2 + classes)))
    projected_norm_bits = min(24, math.floor(ROOM - curvature_bits - _log2(up_squares + 1)))
    products_room = math.floor(ROOM - UPDATE_BITS - _log2(1.5 * training.batch_size * limits.projected))
    projected_bits = min(20, products_room, most_fraction_bits(gamma, limits.projected + 0.1))
    up_bits = min(24, math.floor(ROOM - block_bits - _log2(1.1 * limits.up * weight_bound)))
    up_weights_bits = min(24, up_bits + block_bits - 1, math.floor(ROOM - PROBABILITY_BITS - _log2(layer_bound)))
    layer_bits = min(18, math.floor(ROOM / 2 - _log2(layer_bound)))
    layer_norm_bits = min(20, 2 * layer_bits - 1)
    block_norm_bits = min(18, math.floor(ROOM - layer_norm_bits - _log2(down_squares + 1)))
    stacked = max((shape.stacked_rank for shape in factored), default=1)
    projected_bound = limits.projected + math.sqrt(stacked) * 2.0**-projected_bits
    sample_bound = 1.1 * ERROR_NORM * weight_bound * limits.jacobian + 1.0
    signal_bits = min(20, PROBABILITY_BITS + block_bits - 1, math.floor(ROOM - JACOBIAN_BITS - _log2(sample_bound)))
    sample_bits = min(EXPLICIT_BITS, signal_bits + JACOBIAN_BITS - 1, most_fraction_bits(gamma, sample_bound))
    too_far = "lower the learning rate, the epochs or the noise (larger epsilon), or raise the clip norm"
    require(
        block_bits >= 8
        and curvature_bits >= 8
        and gram_bits >= 8
        and projected_bits >= 12
        and up_bits >= 14
        and up_weights_bits >= 10
        and layer_bits >= 10
        and signal_bits >= 10
        and sample_bits >= (10 if len(factored) < len(shapes) else 0)
        and curvature_bits + projected_norm_bits > MANTISSA_BITS
        and layer_norm_bits + block_norm_bits > MANTISSA_BITS,
        "learning_rate",
        training.learning_rate,
        f"small enough that weights of norm up to {weight_bound:.3g} leave room for the layers",
        too_far,
    )
    projected_norms = OverClip(gamma, projected_bound, projected_bits, projected_norm_bits)
    block_norms = OverClip(gamma, block_bound, EMBEDDING_BITS, block_norm_bits)
    sample_norms = OverClip(gamma, sample_bound, sample_bits, MANTISSA_BITS)
    if factored:
        projected_norms.require_fine("factor bound projected", limits.projected, "lower the clip norm and the factors")
        block_norms.require_fine("factor bound block", limits.block, "lower the clip norm and the block outputs")
    if len(factored) < len(shapes):
        sample_norms.require_fine("jacobian_bound", limits.jacobian, too_far)
    unit = 2 * 2.0**-MANTISSA_BITS  # added to each piece
    curvature = ERROR_NORM**2 * (weight_bound**2 + 2 * classes * 2.0**-gram_bits) + 4 * 2.0**-curvature_bits
    layers = max((len(shape.block_widths) for shape in factored), default=0)
    layer_norm = layer_bound**2 + 2 * layers * 2.0**-layer_norm_bits
    up_squares = curvature * projected_norms.largest + unit
    down_squares = layer_norm * block_norms.largest + unit
    clip_bound = 1.0 + scales.clip_bound + len(factored) * (up_squares + down_squares)
    clip_bound += (len(shapes) - len(factored)) * sample_norms.largest
    require(
        clip_bound <= MOST_CLIP_BOUND
        and up_squares < 2.0 ** (ROOM + 0.9 - curvature_bits - projected_norm_bits)
        and down_squares < 2.0 ** (ROOM + 0.9 - layer_norm_bits - block_norm_bits),
        "learning_rate",
        training.learning_rate,
        f"small enough that squared gradient norms up to {clip_bound:.3g}·γ² fit the ring",
        too_far,
    )
    entry = 2.0**-UPDATE_BITS
    rounded_updates = classes * reach**2 if training.gradients == "factored" else 0.0
    rounded_products = 0.0
    for shape in factored:
        rounded_updates += classes * weight_bound**2 * projected_bound**2
        rounded_updates += shape.stacked_rank * block_bound**2 if shape.with_down else 0.0
        rounded_products += weight_bound**2 * classes * shape.stacked_rank
    product_unit = 2.0 ** -(GRADIENT_BITS - block_bits)
    return scales, AdapterScales(
        bounds=limits,
        weight_bound=weight_bound,
        layer_bound=layer_bound,
        clip_bound=clip_bound,
        block_bits=block_bits,
        gram_bits=gram_bits,
        curvature_bits=curvature_bits,
        projected_norms=projected_norms,
        up_bits=up_bits,
        up_weights_bits=up_weights_bits,
        layer_bits=layer_bits,
        layer_norm_bits=layer_norm_bits,
        block_norms=block_norms,
        signal_bits=signal_bits,
        sample_norms=sample_norms,
        clip_rounding=entry * math.sqrt(rounded_updates) + product_unit * math.sqrt(rounded_products),
        overflow_probability=min(1.0, scales.overflow_probability + steps * math.exp(-(NOISE_DEVIATIONS**2) / 2)),
    )
