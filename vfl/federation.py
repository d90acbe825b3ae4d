"""From data and local models to clients: everything a protocol, twin or baseline starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from accel.validate import require, require_choice
from vfl.data.embeddings import ClientEmbeddings, embed
from vfl.data.scaling import RowBound, bound_rows, row_bound_from_public, split_row_bound
from vfl.data.sets import VerticalData
from vfl.local.client import Client, LocalUpdate, concatenate, make_clients
from vfl.local.config import LocalModelConfig
from vfl.local.lora import ALL_LAYERS, choose_layers

__all__ = ["Federation", "build_federation"]

Floats = npt.NDArray[np.floating]


@dataclass
class Federation:
    """Clients with bounded embeddings, and test rows to measure on (never trained on).

    ``row_bound`` is R, which every concatenated row obeys: part of the DP claim. ``public_inputs`` lists
    what was taken as public (scaling, local models), for the claim. ``public``: bounded embeddings and labels of rows
    that are public, to measure a run on while it trains.
    """

    clients: list[Client]
    classes: int
    test_labels: npt.NDArray[np.int64]
    test_embeddings: list[Floats]
    test_blocks: list[list[Floats]]
    row_bound: float
    public_inputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    public: tuple[Floats, npt.NDArray[np.int64]] | None = None

    @property
    def num_samples(self) -> int:
        return self.clients[0].num_samples

    @property
    def num_clients(self) -> int:
        return len(self.clients)

    @property
    def width(self) -> int:
        return self.clients[-1].columns.stop

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        return self.clients[-1].label_rows()

    def rows(self, rows: npt.ArrayLike | slice = slice(None)) -> Floats:
        """Concatenated, bounded embeddings of training rows."""
        return concatenate(self.clients, rows)

    def test_rows(self) -> Floats:
        """Concatenated, bounded embeddings of the test rows, with the clients' adapters as they are now."""
        blocks = self.test_blocks or [[] for _ in self.clients]
        parts = [c.embed_other_rows(e, b) for c, e, b in zip(self.clients, self.test_embeddings, blocks, strict=True)]
        return np.concatenate(parts, axis=1)

    def fresh(self) -> Federation:
        """A copy whose adapters can be trained without touching this one; the data arrays are shared."""
        clients = [c.fresh() for c in self.clients]
        return Federation(
            clients,
            self.classes,
            self.test_labels,
            self.test_embeddings,
            self.test_blocks,
            self.row_bound,
            self.public_inputs,
            self.notes,
            self.public,
        )

    def subset(self, rows: npt.NDArray[np.int64]) -> Federation:
        """A fresh federation that trains on these rows only, in that order (shadow models, audits)."""
        twin = self.fresh()
        twin.clients = [c.subset(rows) for c in self.clients]
        return twin


def build_federation(
    data: VerticalData,
    config: LocalModelConfig | Sequence[LocalModelConfig] | None = None,
    *,
    embeddings: Sequence[ClientEmbeddings] | None = None,
    row_bound: float | str = 1.0,
    row_rule: str = "normalise",
    lora: bool = False,
    rank: int = 8,
    lora_alpha: float = 1.0,
    lora_layers: str = ALL_LAYERS,
    update: LocalUpdate | None = None,
    seed: int = 0,
    dtype: npt.DTypeLike = np.float64,
    progress: bool = True,
) -> Federation:
    """Embed, bound and hand out.

    Row bound: each client brings its block to R_i (``row_rule`` clip or normalise) with R_i = R/√N, so
    that the concatenated row obeys R. ``row_bound="public"`` takes R_i as the
    95 % quantile of the client's own *public* embeddings. With ``lora``, each row of a pooled block output is
    normalised to 1: a public number that sizes the fixed-point ranges of the shared factors. ``lora_layers`` are the
    blocks of each local model that its LoRA layers read (``choose_layers``).
    """
    parts = list(embeddings) if embeddings is not None else embed(
        data, config or LocalModelConfig(), keep_blocks=lora, progress=progress
    )  # fmt: skip
    require(len(parts) == data.num_clients, "embeddings", len(parts), f"one per client ({data.num_clients})")
    if isinstance(row_bound, str):
        require_choice("row_bound", row_bound, ("public",), way_out="or give a number")
        norms = []
        for i, part in enumerate(parts):
            require(
                part.public is not None,
                f"client {i + 1}: public rows",
                None,
                "present for row_bound='public'",
                "state the row bound as a number",
            )
            assert part.public is not None
            norms.append(row_bound_from_public(part.public))
        bounds = tuple(norms)
    else:
        bounds = split_row_bound(row_bound, len(parts))
    total = float(np.sqrt(sum(b**2 for b in bounds))) if isinstance(row_bound, str) else float(row_bound)
    blocks: list[list[Floats]] | None = None
    test_blocks: list[list[Floats]] = []
    if lora:
        require(
            all(p.train_blocks for p in parts),
            "block outputs",
            "none",
            "present for LoRA",
            "embed with keep_blocks",
        )
        chosen = [choose_layers(lora_layers, len(p.train_blocks), f"client {i + 1}") for i, p in enumerate(parts)]
        blocks = [
            [bound_rows(p.train_blocks[l], 1.0, "normalise") for l in own] for p, own in zip(parts, chosen, strict=True)
        ]
        test_blocks = [
            [bound_rows(p.test_blocks[l], 1.0, "normalise").astype(dtype) for l in own]
            for p, own in zip(parts, chosen, strict=True)
        ]
    clients = make_clients(
        [p.train for p in parts],
        data.train_labels,
        [RowBound(b, row_rule) for b in bounds],
        block_outputs=blocks,
        rank=rank,
        alpha=lora_alpha,
        update=update,
        seed=seed,
        dtype=dtype,
    )
    notes = [*data.notes]
    if lora and lora_layers != ALL_LAYERS:
        counts = dict.fromkeys(len(p.train_blocks) for p in parts)
        notes.append(f"LoRA reads of the local models' blocks: {lora_layers} of {' and '.join(map(str, counts))}")
    bound_note = f"row bound R = {total:g} ({row_rule}; per client {', '.join(f'{b:.4g}' for b in bounds)})"
    return Federation(
        clients,
        data.classes,
        data.test_labels,
        [p.test.astype(dtype) for p in parts],
        test_blocks,
        total,
        tuple(dict.fromkeys(p.source for p in parts)),
        (*notes, bound_note),
    )
