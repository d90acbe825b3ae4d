"""What everybody may know of the clients' layers in GL-BMF: their sizes, their rules and how they start; no row.

A plan is made from this alone, so a server that never sees a client's model makes the same one as the client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from accel.validate import require
from protocols.plan.run_plan import digest
from vfl.federation import Federation
from vfl.local.client import Client, LocalUpdate

__all__ = ["AdapterShape", "JacobianShape", "LayerFacts", "PublicLayers", "public_facts", "start_digest"]

START_BITS = 32  # of the layers at the start, when they are compared


@dataclass(frozen=True)
class AdapterShape:
    """Public sizes of one client's shared layers."""

    columns: slice
    block_widths: tuple[int, ...]
    rank: int
    with_down: bool  # whether ∂L/∂V is released besides ∂L/∂U

    @property
    def width(self) -> int:
        return int(self.columns.stop - self.columns.start)

    @property
    def stacked_rank(self) -> int:
        """L·r: columns of A and U with all layers side by side."""
        return self.rank * len(self.block_widths)

    @property
    def parameters(self) -> int:
        """Coordinates of the released layer gradient."""
        down = self.rank * sum(self.block_widths) if self.with_down else 0
        return self.width * self.stacked_rank + down


@dataclass(frozen=True)
class JacobianShape:
    """Public sizes of a client that shares the Jacobians of its layers written out: d_i × ``parameters`` a sample."""

    columns: slice
    parameters: int

    @property
    def width(self) -> int:
        return int(self.columns.stop - self.columns.start)


@dataclass(frozen=True)
class PublicLayers:
    """What everybody knows of one client: its columns, and the layers whose gradient it is told.

    ``lora``: sizes of its LoRA layers, None for a layer without factors; ``scale``: s = α/r; ``parameters``:
    coordinates of the gradient; ``start``: a hash of the layers at the start, which must be public since all later ones
    follow from them and from releases; ``jacobian_bound``: on ‖∂H_j/∂φ‖, where there are no factors with bounds of
    their own; ``bound``: its part of the row bound, None: an equal part.
    """

    name: str
    columns: slice
    row_rule: str
    parameters: int
    lora: AdapterShape | None = None
    scale: float = 1.0
    start: str = ""
    jacobian_bound: float | None = None
    bound: float | None = None

    @property
    def width(self) -> int:
        return int(self.columns.stop - self.columns.start)

    def shape(self, gradients: str) -> AdapterShape | JacobianShape:
        """Factors where there are any, unless everything is to be written out."""
        if self.lora is None or gradients == "explicit":
            return JacobianShape(self.columns, self.parameters)
        return self.lora


@dataclass(frozen=True)
class LayerFacts:
    """The public side of a federation whose clients train layers: all that a plan of GL-BMF depends on."""

    clients: tuple[PublicLayers, ...]
    num_samples: int
    classes: int
    row_bound: float
    update: LocalUpdate
    public_inputs: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        return int(self.clients[-1].columns.stop)


def start_digest(layers: Sequence[tuple[np.ndarray, np.ndarray]]) -> str:
    """A hash of (U, V) of every layer before the first step."""
    return digest([part for layer in layers for part in layer], START_BITS)


def public_facts(federation: Federation) -> LayerFacts:
    """The public side of clients that are all on this machine."""
    updates = {client.update for client in federation.clients}
    require(len(updates) == 1, "local_update", updates, "the same at all clients")
    return LayerFacts(
        clients=tuple(map(_layers_of, federation.clients)),
        num_samples=federation.num_samples,
        classes=federation.classes,
        row_bound=federation.row_bound,
        update=updates.pop(),
        public_inputs=federation.public_inputs,
    )


def _layers_of(client: Client) -> PublicLayers:
    require(client.is_trainable, f"{client.name}: lora", None, "present", "build the federation with lora=True")
    public = PublicLayers(
        client.name,
        client.columns,
        client.row_bound.rule,
        client.shared_parameters,
        jacobian_bound=client.jacobian_bound,
        bound=client.row_bound.norm,
    )
    if client.lora is None:
        return public
    layers = [client.lora.layers[index] for index in client.shared_layers]
    widths = tuple(layer.down.shape[1] for layer in layers)
    shape = AdapterShape(client.columns, widths, layers[0].down.shape[0], client.update.parts == "UV")
    start = start_digest([(layer.up, layer.down) for layer in client.lora.layers])
    return replace(public, lora=shape, scale=client.lora.scale, start=start)
