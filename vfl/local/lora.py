"""Parallel LoRA as in the paper: one adapter per block of the frozen local model.

    H = H_frozen + s · Σ_l (x_l V_lᵀ) U_lᵀ,      s = α_LoRA / r,

where x_l is the pooled output of block l. The adapters are added to the *final* output, so the block outputs
never change while training: they are computed once, with the frozen embeddings, and everything here is plain
linear algebra.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from accel.validate import require, require_integer, require_real

__all__ = ["ALL_LAYERS", "LoraLayer", "ParallelLora", "choose_layers"]

Floats = npt.NDArray[np.floating]

ALL_LAYERS = "all"


def choose_layers(choice: str, count: int, whose: str = "the local model") -> tuple[int, ...]:
    """The blocks (from 0) that LoRA reads, of ``count``: ``all``, ``first``, ``last``, or numbers from 1 with commas
    between them. Blocks keep their order, the first one being nearest to the input. Public configuration; ``whose`` is
    for the error.
    """
    by_name = {ALL_LAYERS: tuple(range(count)), "first": (0,), "last": (count - 1,)}
    if choice in by_name:
        return by_name[choice]
    words = [word.strip() for word in choice.split(",")]
    numbers = {int(word) for word in words if word.isascii() and word.isdigit()}
    require(
        len(numbers) == len(words) and numbers <= set(range(1, count + 1)),
        "lora_layers",
        choice,
        f"all, first, last, or different numbers from 1 to {count} with commas between them",
        f"{whose} has {count} block{'s' if count > 1 else ''}",
    )
    return tuple(sorted(number - 1 for number in numbers))


@dataclass
class LoraLayer:
    """U (d_i×r), zero at the start, and V (r×m)."""

    up: Floats
    down: Floats

    @property
    def num_parameters(self) -> int:
        return self.up.size + self.down.size


@dataclass
class ParallelLora:
    """All adapters of one client."""

    layers: list[LoraLayer]
    scale: float

    @classmethod
    def initial(
        cls,
        block_widths: Sequence[int],
        output_width: int,
        *,
        rank: int = 8,
        alpha: float = 1.0,
        seed: int | Sequence[int] = 0,
        dtype: npt.DTypeLike = np.float64,
    ) -> ParallelLora:
        """U = 0; V uniform in ±1/√m, LoRA's usual start. Public: it depends on widths and seed only."""
        require(len(block_widths) >= 1, "block_widths", list(block_widths), "at least one block")
        require_integer("rank", rank, 1)
        require_integer("output_width", output_width, 1)
        require_real("alpha", alpha, 0.0, open_low=True)
        random = np.random.default_rng(seed)
        layers = []
        for width in block_widths:
            require_integer("block width", width, 1)
            down = random.uniform(-1.0, 1.0, (rank, width)) / width**0.5
            layers.append(LoraLayer(np.zeros((output_width, rank), dtype), down.astype(dtype)))
        return cls(layers, alpha / rank)

    def project(self, block_outputs: Sequence[Floats]) -> list[Floats]:
        """A_l = X_l V_lᵀ for every layer."""
        return [x @ layer.down.T for x, layer in zip(block_outputs, self.layers, strict=True)]

    def output(self, block_outputs: Sequence[Floats]) -> Floats:
        """What the adapters add to the embeddings, (B, d_i)."""
        projected = np.concatenate(self.project(block_outputs), axis=1)
        return self.scale * (projected @ np.concatenate([layer.up for layer in self.layers], axis=1).T)

    def gradients(self, block_outputs: Sequence[Floats], at_embedding: Floats) -> list[tuple[Floats, Floats]]:
        """(∂/∂U_l, ∂/∂V_l) of Σ_j ⟨at_embedding_j, H_j⟩: back-propagation through all adapters."""
        # thin products side by side in one wide one: several times faster than a product for each layer
        cuts = np.cumsum([layer.up.shape[1] for layer in self.layers])[:-1]
        up = at_embedding.T @ np.concatenate(self.project(block_outputs), axis=1)
        through = at_embedding @ np.concatenate([layer.up for layer in self.layers], axis=1)
        return [
            (self.scale * mine, self.scale * (back.T @ x))
            for mine, back, x in zip(
                np.split(up, cuts, axis=1), np.split(through, cuts, axis=1), block_outputs, strict=True
            )
        ]

    def jacobian(self, layer_index: int, block_output: Floats) -> Floats:
        """∂H_j/∂(U, V) of one layer as (B, d_i, n_L): the paper's upload, and the reference of the factors.

        Costs B·d_i·r·(d_i + m) numbers; for layers of real size use the factors.
        """
        layer = self.layers[layer_index]
        width, rank = layer.up.shape
        batch, m = block_output.shape
        a = block_output @ layer.down.T
        up = np.einsum("de,jr->jder", np.eye(width), a).reshape(batch, width, width * rank)
        down = np.einsum("dr,jm->jdrm", layer.up, block_output).reshape(batch, width, rank * m)
        return self.scale * np.concatenate([up, down], axis=2)
