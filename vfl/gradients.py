"""Per-sample clipped gradients of the global model and of the clients' LoRA layers, two ways.

``factored`` never builds a per-sample gradient: for a dense layer g_j = [a_j; 1] ⊗ δ_j, so that norms are
products of norms and the clipped sum is one matrix product (proofs §4.1). ``explicit`` builds them all, as the
paper does; it is the reference. Both give the same vector up to rounding, in one fixed layout:

    for each global layer its matrix [W; b] of shape (fan_in + 1, fan_out), row by row,
    then for each adapter ∂L/∂U of shape (d_i, r) and ∂L/∂V of shape (r, m), row by row.

The noise of a step and the secure protocols use the same layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.validate import require, require_choice, require_integer, require_real
from vfl.bounded_softmax import BoundedSoftmax
from vfl.hidden import HiddenClip, activated, wave_slope
from vfl.losses import (
    WEIGHT_BITS,
    OneOutput,
    errors_and_losses,
    relative_weights,
    score,
    softmax,
)

__all__ = [
    "Adapter",
    "AdapterFactors",
    "AdapterJacobian",
    "ClippedGradient",
    "GlobalModel",
    "clipped_gradient",
    "per_sample_gradients",
    "softmax",
    "split_layer",
    "with_ones",
]

Floats = npt.NDArray[np.floating]


def with_ones(rows: Floats) -> Floats:
    """[rows 1]: the column that makes the bias a row of the weight matrix."""
    out = np.empty((rows.shape[0], rows.shape[1] + 1), dtype=rows.dtype)
    out[:, :-1], out[:, -1] = rows, 1
    return out


@dataclass
class GlobalModel:
    """One dense layer, or an MLP with a bounded wave for tanh (``vfl.hidden``), or ReLU; ``layers[l]`` is [W; b] of
    shape (fan_in + 1, fan_out)."""

    layers: list[Floats]
    activation: str = "relu"

    @classmethod
    def initial(
        cls,
        input_width: int,
        outputs: int,
        hidden: Sequence[int] = (),
        *,
        seed: int = 0,
        dtype: npt.DTypeLike = np.float64,
        activation: str = "relu",
        deviation: float = 1.0,
    ) -> GlobalModel:
        """The public starting point: zero for the last layer (and so for a single one), He-normal before it; with waves
        of this ``deviation`` in the first layer, and of 1/√fan_in behind it.
        """
        require_integer("input_width", input_width, 1)
        require_integer("outputs", outputs, 1)
        for width in hidden:
            require_integer("hidden", width, 1)
        sizes = [input_width, *hidden, outputs]
        random = np.random.default_rng([seed, 0x6C61796572])
        layers: list[Floats] = []
        for depth, (fan_in, fan_out) in enumerate(pairwise(sizes)):
            layer = np.zeros((fan_in + 1, fan_out), dtype=dtype)
            if depth < len(hidden):
                spread = (2.0 / fan_in) ** 0.5 if activation == "relu" else deviation if depth == 0 else fan_in**-0.5
                layer[:-1] = random.standard_normal((fan_in, fan_out)) * spread
            layers.append(layer)
        return cls(layers, activation)

    @property
    def num_parameters(self) -> int:
        return sum(layer.size for layer in self.layers)

    @property
    def weights(self) -> list[Floats]:
        return [layer[:-1] for layer in self.layers]

    def flatten(self) -> Floats:
        return np.concatenate([layer.ravel() for layer in self.layers])

    def unflatten(self, flat: Floats) -> list[Floats]:
        """Views of ``flat`` in the shapes of the layers."""
        out, start = [], 0
        for layer in self.layers:
            out.append(flat[start : start + layer.size].reshape(layer.shape))
            start += layer.size
        return out

    def copy(self) -> GlobalModel:
        return GlobalModel([layer.copy() for layer in self.layers], self.activation)

    def forward(self, rows_with_one: Floats) -> tuple[list[Floats], Floats]:
        """(inputs of each layer, with their column of ones; logits)."""
        inputs = [rows_with_one]
        for layer in self.layers[:-1]:
            sums = inputs[-1] @ layer
            inputs.append(with_ones(activated(sums, self.activation)))
        return inputs, inputs[-1] @ self.layers[-1]

    def backward(self, inputs: list[Floats], delta: Floats) -> list[Floats]:
        """δ_l at the output of each layer, first layer first."""
        deltas = [delta]
        for depth in range(len(self.layers) - 1, 0, -1):
            slopes: npt.NDArray[Any] = inputs[depth][:, :-1] > 0
            if self.activation != "relu":
                slopes = wave_slope(inputs[depth - 1] @ self.layers[depth - 1])
            deltas.append((deltas[-1] @ self.layers[depth][:-1].T) * slopes)
        return deltas[::-1]

    def logits(self, rows: Floats) -> Floats:
        return self.forward(with_ones(rows))[1]

    def accuracy(self, rows: Floats, labels: npt.NDArray[Any], task: str = "classification") -> float:
        """Share of rows with the right class; R² of a regression."""
        return score(task, self.logits(rows), labels)


@dataclass(frozen=True)
class AdapterFactors:
    """What a client shares about one LoRA layer for one batch: A = X Vᵀ (B×r), X (B×m), U (d_i×r).

    ``columns`` are the client's columns in the concatenated embedding, ``scale`` is α_LoRA/r. ``parts`` is
    ``"UV"``, or ``"U"`` when only U's gradient is asked for.
    """

    columns: slice
    projected: Floats
    inputs: Floats
    up: Floats
    scale: float
    parts: str = "UV"

    def __post_init__(self) -> None:
        require_choice("parts", self.parts, ("U", "UV"))
        width = self.columns.stop - self.columns.start
        require(self.up.shape == (width, self.projected.shape[1]), "up", self.up.shape, "of shape (d_i, r)")

    @property
    def num_parameters(self) -> int:
        down = self.projected.shape[1] * self.inputs.shape[1]
        return self.up.size + (down if self.parts == "UV" else 0)

    def split(self, flat: Floats) -> tuple[Floats, Floats | None]:
        """(∂L/∂U, ∂L/∂V) out of this adapter's part of the flat vector."""
        return split_layer(flat, self.up.shape, (self.projected.shape[1], self.inputs.shape[1]), self.parts)


def split_layer(
    flat: Floats, up_shape: tuple[int, ...], down_shape: tuple[int, ...], parts: str
) -> tuple[Floats, Floats | None]:
    """Views of U's and V's gradients in a layer's part of the flat vector; None for V where U alone is shared."""
    up_size = math.prod(up_shape)
    return flat[:up_size].reshape(up_shape), None if parts == "U" else flat[up_size:].reshape(down_shape)


@dataclass(frozen=True)
class AdapterJacobian:
    """∂H_j/∂φ of any layer of a client, written out as (B, d_i, n_L): the paper's upload, for layers
    without factors.
    """

    columns: slice
    jacobian: Floats

    def __post_init__(self) -> None:
        width = self.columns.stop - self.columns.start
        require(
            self.jacobian.ndim == 3 and self.jacobian.shape[1] == width,
            "jacobian",
            self.jacobian.shape,
            f"of shape (B, {width}, n_L)",
        )

    @property
    def num_parameters(self) -> int:
        return self.jacobian.shape[2]

    def per_sample(self, at_embedding: Floats) -> Floats:
        """g_φ,j = ∂L_j/∂H_j · ∂H_j/∂φ for every sample, (B, n_L)."""
        return np.matmul(at_embedding[:, None, :], self.jacobian)[:, 0, :]


Adapter = AdapterFactors | AdapterJacobian


@dataclass(frozen=True)
class ClippedGradient:
    """Σ_j c_j g_j in the flat layout, with the clip factors c_j and the per-sample losses."""

    total: Floats
    clip_factors: Floats
    losses: Floats
    logit_deltas: Floats


def clipped_gradient(
    model: GlobalModel,
    rows_with_one: Floats,
    labels: npt.NDArray[Any],
    clip_norm: float | None,
    *,
    adapters: Sequence[Adapter] = (),
    method: str = "factored",
    input_squared_norms: Floats | None = None,
    norm_limit: float | None = None,
    task: str = "classification",
    class_weights: Sequence[float] = (),
    bounded: OneOutput | BoundedSoftmax | HiddenClip | None = None,
) -> ClippedGradient:
    """Clip every sample's gradient (all layers and adapters together) to ``clip_norm`` and add up.

    ``clip_norm=None`` does not clip. ``input_squared_norms`` (‖h_j‖²+1) may be given when the embeddings are
    frozen, so that it is computed once. ``rows_with_one`` must be of shape (B, d + 1), its last column one.
    ``norm_limit``: a sample with hidden activations or errors of a larger norm contributes nothing, as in the secure
    protocols, whose fixed-point ranges need it. ``task``, ``class_weights``, ``bounded``: see ``vfl.losses``.
    """
    require_choice("gradients", method, ("factored", "explicit"))
    if clip_norm is not None:
        require_real("clip_norm", clip_norm, 0.0, open_low=True)
    inputs, logits = model.forward(rows_with_one)
    delta, losses = errors_and_losses(task, logits, labels, class_weights)
    if isinstance(bounded, HiddenClip):
        if task != "classification" or bounded.softmax is not None:
            delta = bounded.errors(logits, labels, model.layers[-1])
    elif bounded is not None and clip_norm is not None:
        (weights,) = model.layers
        if isinstance(bounded, BoundedSoftmax):
            errors = bounded.errors(logits, labels, weights)
            update, size, limit = bounded.updates(errors), np.sqrt(_row_squares(errors)), float(bounded.threshold)
        else:
            squares = _row_squares(rows_with_one) if input_squared_norms is None else input_squared_norms
            error = bounded.error(logits[:, 0], labels, weights)
            if class_weights:
                error = error * relative_weights(class_weights)[labels] * 2.0**-WEIGHT_BITS
            update = (clip_norm * error / np.sqrt(squares)).reshape(-1, 1)
            size, limit = np.abs(delta[:, 0]), bounded.threshold
        total = rows_with_one.T @ update.astype(rows_with_one.dtype)
        factors = np.minimum(1.0, limit / np.maximum(size, np.finfo(delta.dtype).tiny))
        return ClippedGradient(total.reshape(-1), factors, losses, delta)
    deltas = model.backward(inputs, delta)
    if method == "explicit":
        gradients = _explicit(model, inputs, deltas, adapters)
        factors = _clip_factors(np.einsum("jn,jn->j", gradients, gradients), clip_norm)
        return ClippedGradient(factors @ gradients, factors, losses, delta)
    if isinstance(bounded, HiddenClip) and clip_norm is not None:
        factors = bounded.factor(model.layers[1:], deltas).astype(rows_with_one.dtype)
    else:
        factors = _clip_factors(_squared_norms(model, inputs, deltas, adapters, input_squared_norms), clip_norm)
    if norm_limit is not None:
        for hidden in (*(rows[:, :-1] for rows in inputs[1:]), *deltas[:-1]):
            factors = factors * (_row_squares(hidden) <= norm_limit**2)
    scaled = [factors[:, None] * d for d in deltas]
    total = np.empty(model.num_parameters + sum(a.num_parameters for a in adapters), dtype=rows_with_one.dtype)
    for out, a, d in zip(model.unflatten(total), inputs, scaled, strict=True):
        np.matmul(a.T, d, out=out)
    start = model.num_parameters
    for adapter in adapters:
        block = model.layers[0][adapter.columns]
        if isinstance(adapter, AdapterJacobian):
            total[start : start + adapter.num_parameters] = factors @ adapter.per_sample(deltas[0] @ block.T)
            start += adapter.num_parameters
            continue
        up, down = adapter.split(total[start : start + adapter.num_parameters])
        up[...] = adapter.scale * (block @ (scaled[0].T @ adapter.projected))
        if down is not None:
            down[...] = adapter.scale * ((adapter.up.T @ block) @ (scaled[0].T @ adapter.inputs))
        start += adapter.num_parameters
    return ClippedGradient(total, factors, losses, delta)


def per_sample_gradients(
    model: GlobalModel,
    rows_with_one: Floats,
    labels: npt.NDArray[Any],
    adapters: Sequence[Adapter] = (),
    task: str = "classification",
) -> Floats:
    """All per-sample gradients, unclipped, as a (B, n) matrix in the flat layout: the reference."""
    inputs, logits = model.forward(rows_with_one)
    delta, _ = errors_and_losses(task, logits, labels)
    return _explicit(model, inputs, model.backward(inputs, delta), adapters)


def _clip_factors(squared_norms: Floats, clip_norm: float | None) -> Floats:
    if clip_norm is None:
        return np.ones_like(squared_norms)
    return 1 / np.sqrt(np.maximum(1, squared_norms / clip_norm**2))


def _squared_norms(
    model: GlobalModel,
    inputs: list[Floats],
    deltas: list[Floats],
    adapters: Sequence[Adapter],
    first: Floats | None,
) -> Floats:
    total = np.zeros(len(deltas[0]), dtype=deltas[0].dtype)
    for depth, (a, d) in enumerate(zip(inputs, deltas, strict=True)):
        rows = first if depth == 0 and first is not None else np.einsum("ji,ji->j", a, a)
        total += rows * np.einsum("js,js->j", d, d)
    for adapter in adapters:
        block = model.layers[0][adapter.columns]
        if isinstance(adapter, AdapterJacobian):
            total += _row_squares(adapter.per_sample(deltas[0] @ block.T))
            continue
        through_up = deltas[0] @ (block.T @ block)
        part = np.einsum("js,js->j", through_up, deltas[0]) * _row_squares(adapter.projected)
        if adapter.parts == "UV":
            part = part + _row_squares(deltas[0] @ (adapter.up.T @ block).T) * _row_squares(adapter.inputs)
        total += adapter.scale**2 * part
    return total


def _row_squares(rows: Floats) -> Floats:
    return np.einsum("ji,ji->j", rows, rows)


def _explicit(model: GlobalModel, inputs: list[Floats], deltas: list[Floats], adapters: Sequence[Adapter]) -> Floats:
    batch = len(deltas[0])
    parts = [np.einsum("ji,js->jis", a, d).reshape(batch, -1) for a, d in zip(inputs, deltas, strict=True)]
    for adapter in adapters:
        at_embedding = deltas[0] @ model.layers[0][adapter.columns].T  # ∂L/∂H of this client, (B, d_i)
        if isinstance(adapter, AdapterJacobian):
            parts.append(adapter.per_sample(at_embedding))
            continue
        up = adapter.scale * np.einsum("jd,jr->jdr", at_embedding, adapter.projected)
        parts.append(up.reshape(batch, -1))
        if adapter.parts == "UV":
            down = adapter.scale * np.einsum("jr,jm->jrm", at_embedding @ adapter.up, adapter.inputs)
            parts.append(down.reshape(batch, -1))
    return np.concatenate(parts, axis=1)
