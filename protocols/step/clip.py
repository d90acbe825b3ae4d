"""The clip: squared norms of per-sample gradients from norms of their factors, and the factor that is never too large.

q_j = Σ_l n_lj·‖δ_lj‖² with n_lj = ‖[a_{l−1,j} 1]‖²/γ², from exact integers and rounded up in every step, and
c_j ≤ 1/sqrt(max(1, q_j)). Why samples beyond a norm limit get the factor 0 is in ``protocols.plan.scales``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import refmpc
from protocols.plan.scales import UPDATE_BITS, LayerScales, Scales
from protocols.plan.squared_norm_ratio import norms_over_clip, squares_over_clip
from protocols.step.one_output import multipliers
from refmpc import ArithmeticTensor, TwoHolderBits
from refmpc.mathematics.normalise import MANTISSA_BITS

__all__ = ["CutByRows", "clip_factors", "clipped_updates", "norms_of_squares", "squared_norms"]

NORM_CHUNK = 1 << 14  # rows whose norms are computed in one go


class CutByRows(Protocol):
    """Rows in memory or in a file: cut, they are a tensor in memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> ArithmeticTensor: ...


async def squared_norms(embeddings: CutByRows, scales: Scales, labels: CutByRows | None = None) -> ArithmeticTensor:
    """n_j = ‖[h_j 1]‖²/γ² at ``norm_bits``, never below the true value: once, when the embeddings arrive.

    2 rounds a chunk, 24 + 8 + 6·bits/8 bytes a row. With waves nothing: their clip takes the row bound. With one
    output ``multipliers`` instead, of these ``labels``.
    """
    if scales.smooth is not None:
        return ArithmeticTensor.zeros(embeddings[:0].party, (len(embeddings),), scales.row_bits)
    pieces = []
    for start in range(0, len(embeddings), NORM_CHUNK):
        rows = embeddings[start : start + NORM_CHUNK]
        if scales.one_output is None:
            pieces.append(await norms_over_clip(rows, scales.norms))
        else:
            assert labels is not None
            own = labels[start : start + NORM_CHUNK]
            pieces.append(await multipliers(await refmpc.dot(rows, rows), own, scales.one_output))
    return refmpc.concatenate(pieces)


async def norms_of_squares(
    squares: ArithmeticTensor, scales: Scales, labels: CutByRows | None = None
) -> ArithmeticTensor:
    """``squared_norms`` from the exact ‖h_j‖², without the column of ones. 1 round a chunk, 8 + 6·bits/8 bytes a
    row."""
    if scales.smooth is not None:
        return ArithmeticTensor.zeros(squares.party, (len(squares),), scales.row_bits)
    pieces = []
    for start in range(0, len(squares), NORM_CHUNK):
        exact = squares[start : start + NORM_CHUNK] + 1.0
        if scales.one_output is None:
            pieces.append(await squares_over_clip(exact, scales.norms))
        else:
            assert labels is not None
            pieces.append(await multipliers(exact, labels[start : start + NORM_CHUNK], scales.one_output))
    return refmpc.concatenate(pieces)


@dataclass
class _Squares:
    """One layer: its part of q, rounded up, and the exact ‖δ_j‖² and ‖[a_j 1]‖² (None where n_j was given)."""

    part: ArithmeticTensor
    errors: ArithmeticTensor
    inputs: ArithmeticTensor | None


async def _squared_norm(
    errors: ArithmeticTensor,
    inputs: ArithmeticTensor,
    norms: ArithmeticTensor | None,
    layer: LayerScales,
) -> _Squares:
    """n_j·‖δ_j‖², n_j = ‖[a_j 1]‖²/γ² unless it is given. 3 rounds, or 4 if ‖δ‖² has to be cut first or n is
    computed."""

    async def error_squares() -> tuple[ArithmeticTensor, ArithmeticTensor]:
        exact = await refmpc.dot(errors, errors)
        if layer.square_bits == exact.fraction_bits:
            return exact, exact
        cut = await refmpc.truncate(exact, exact.fraction_bits - layer.square_bits)
        return cut + 2.0**-layer.square_bits, exact

    async def input_norms() -> tuple[ArithmeticTensor, ArithmeticTensor]:
        exact = await refmpc.dot(inputs, inputs)
        return await squares_over_clip(exact, layer.norms), exact

    exact_inputs = None
    if norms is None:
        (used, exact), (norms, exact_inputs) = await refmpc.gather(error_squares(), input_norms())
    else:
        used, exact = await error_squares()
    q = await refmpc.multiply_truncate(used, norms, layer.square_bits + layer.norm_bits - MANTISSA_BITS)
    return _Squares(q + 2.0**-MANTISSA_BITS, exact, exact_inputs)


async def _within_limits(squares: Sequence[_Squares], scales: Scales) -> TwoHolderBits:
    """One bit a sample: whether all hidden norms are within the limit, from exact squared norms. 5 rounds."""
    limit = scales.norm_limit
    assert limit is not None
    margins = []
    for layer, here, following in zip(scales.layers, squares, squares[1:], strict=False):
        assert following.inputs is not None  # the outputs of this layer
        margins.append((limit**2 + 1.0 - following.inputs, layer.outputs_range(limit)))
        margins.append((limit**2 - here.errors, layer.errors_range(limit)))
    beyond = await refmpc.gather(*(refmpc.is_negative(margin, *bits) for margin, bits in margins))
    counted = await refmpc.gather(*(refmpc.bit_to_arithmetic(bits) for bits in beyond))
    count = refmpc.stack(counted).sum(axis=0)
    return await refmpc.is_negative(count - 1, 0, _count_bits(len(margins)))


def _count_bits(margins: int) -> int:
    return margins.bit_length() + 1


async def clip_factors(
    errors: Sequence[ArithmeticTensor],
    inputs: Sequence[ArithmeticTensor],
    norms: ArithmeticTensor,
    scales: Scales,
) -> ArithmeticTensor:
    """c_j ≤ 1/max(1, ‖g_j‖/γ) as a column, and 0 if a hidden norm of the sample is beyond the limit. 20 rounds, MLP 23.

    q_j = Σ_l n_lj·‖δ_lj‖² is computed from exact squared norms and rounded up, so the clip factor can only be too
    small. ``inputs`` are [a 1] of all layers, ``norms`` is n of the first.
    """
    given = [norms, *(None for _ in inputs[1:])]
    squares: list[_Squares] = await refmpc.gather(
        *(
            _squared_norm(delta, rows, known, layer)
            for delta, rows, known, layer in zip(errors, inputs, given, scales.layers, strict=True)
        )
    )
    q = squares[0].part
    for layer_squares in squares[1:]:
        q = q + layer_squares.part
    if scales.norm_limit is None:
        return (await refmpc.clip_factor(q, scales.clip_bound)).reshape(-1, 1)
    factor, within = await refmpc.gather(refmpc.clip_factor(q, scales.clip_bound), _within_limits(squares, scales))
    return (await refmpc.select(within, factor)).reshape(-1, 1)


async def clipped_updates(factor: ArithmeticTensor, errors: ArithmeticTensor) -> ArithmeticTensor:
    """u_j = c_j·δ_j at 32 bits. 2 rounds."""
    return await refmpc.multiply_truncate(factor, errors, MANTISSA_BITS + errors.fraction_bits - UPDATE_BITS)
