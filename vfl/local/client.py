"""What happens at a client: bounded embeddings, labels, LoRA factors, and the two local updates of GL-BMF.

``released`` (default): the client applies nothing but the released, noised gradients of its LoRA layers. That
is post-processing, so the claim of the mechanism covers it.
``estimated``: the paper's update. The client estimates per-sample gradients from one released layer gradient
and back-propagates them through all adapters with its raw inputs. One record then moves the client's later
embeddings in batches where the record is absent, so only the *labels* stay covered (proofs §8.1).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from accel.validate import require, require_choice, require_integer, require_real
from vfl.data.scaling import RowBound
from vfl.gradients import Adapter, AdapterFactors, split_layer
from vfl.local.estimate import ErrorBound, error_bound, estimate_per_sample_gradients, regulariser
from vfl.local.lora import LoraLayer, ParallelLora

__all__ = ["Client", "EstimateRecord", "LocalUpdate", "concatenate", "initial_layers", "make_clients"]

Floats = npt.NDArray[np.floating]


@dataclass(frozen=True)
class LocalUpdate:
    """How a client treats what it receives. Public configuration."""

    kind: str = "released"
    learning_rate: float = 0.001
    momentum: float = 0.0
    weight_decay: float = 1.0
    estimator: str = "ridge"
    regularisation: str | float = "noise"
    shared_layer: int = -1
    parts: str = "UV"

    def __post_init__(self) -> None:
        require_choice("local_update", self.kind, ("released", "estimated"))
        require_real("local learning_rate", self.learning_rate, 0.0)
        require_real("local momentum", self.momentum, 0.0, 1.0, open_high=True)
        require_real("local weight_decay", self.weight_decay, 0.0, 1.0, open_low=True)
        require_choice("estimator", self.estimator, ("ls", "ridge", "mmse"))
        require_choice("parts", self.parts, ("U", "UV"))


@dataclass(frozen=True)
class EstimateRecord:
    """One step of the estimation log: the noise, λ, and the error to be expected (see ``ErrorBound``)."""

    step: int
    noise_std: float
    regularisation: float
    error: ErrorBound


@dataclass
class Client:
    """One client of the federation; ``columns`` are its columns in the concatenated embedding.

    ``embeddings`` are the outputs of its frozen local model (M×d_i), ``block_outputs`` the pooled outputs of
    its blocks (each M×m_l), needed when ``lora`` is given. Rows leave the client only through
    ``embedding_rows`` and ``lora_factors``, bounded by ``row_bound``.
    """

    name: str
    embeddings: Floats
    row_bound: RowBound
    columns: slice
    labels: npt.NDArray[np.int64] | None = None
    block_outputs: Sequence[Floats] = ()
    lora: ParallelLora | None = None
    update: LocalUpdate = field(default_factory=LocalUpdate)
    estimate_log: list[EstimateRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        width = self.columns.stop - self.columns.start
        require(
            self.embeddings.ndim == 2 and self.embeddings.shape[1] == width,
            f"{self.name}: embeddings",
            self.embeddings.shape,
            f"(rows, {width})",
        )
        require(
            bool(np.isfinite(self.embeddings).all()),
            f"{self.name}: embeddings",
            "inf or nan",
            "finite numbers",
        )
        if self.labels is not None:
            require(len(self.labels) == self.num_samples, f"{self.name}: labels", len(self.labels), "one per row")
        if self.lora is not None:
            require(
                len(self.block_outputs) == len(self.lora.layers),
                f"{self.name}: block_outputs",
                len(self.block_outputs),
                f"one array per LoRA layer ({len(self.lora.layers)})",
            )
            last = len(self.lora.layers)
            require_integer("shared_layer", self.update.shared_layer, -last, last - 1)
        self._velocity: list[tuple[Floats, Floats]] | None = None
        # Frozen rows never change: bound them once.
        self._frozen = self.row_bound.apply(self.embeddings) if self.lora is None else None

    @property
    def num_samples(self) -> int:
        return len(self.embeddings)

    @property
    def shared_parameters(self) -> int:
        """Coordinates of the gradient that the servers release to this client."""
        assert self.lora is not None
        layers = [self.lora.layers[index] for index in self.shared_layers]
        return sum(l.up.size + (l.down.size if self.update.parts == "UV" else 0) for l in layers)

    @property
    def jacobian_bound(self) -> float | None:
        """The public bound on ‖∂H_j/∂φ‖, for layers without factors; those with factors have a bound on each."""
        return None

    @property
    def is_trainable(self) -> bool:
        """Whether the servers compute gradients for this client's layers."""
        return self.lora is not None

    def fixed_columns(self, count: int) -> list[Floats]:
        """What training never changes here, of the first ``count`` rows: a resumed run must find it as it was."""
        return [self.embeddings[:count], *(x[:count] for x in self.block_outputs)]

    def adapters(self, rows: npt.ArrayLike | slice) -> list[Adapter]:
        """What the servers need about the shared layers for these rows: factors here, Jacobians elsewhere."""
        return list(self.lora_factors(rows))

    def fresh(self) -> Client:
        """A copy whose layers can be trained without touching this one; data arrays are shared."""
        twin = copy.copy(self)
        twin.lora, twin.estimate_log, twin._velocity = copy.deepcopy(self.lora), [], None
        return twin

    def subset(self, rows: npt.NDArray[np.int64]) -> Client:
        """A fresh client that holds these rows only, in that order."""
        twin = self.fresh()
        twin.embeddings = self.embeddings[rows]
        twin.block_outputs = [x[rows] for x in self.block_outputs]
        twin.labels = None if self.labels is None else self.labels[rows]
        twin._frozen = None if self._frozen is None else self._frozen[rows]
        return twin

    @property
    def width(self) -> int:
        return self.columns.stop - self.columns.start

    @property
    def is_label_client(self) -> bool:
        return self.labels is not None

    @property
    def shared_layers(self) -> list[int]:
        """The LoRA layers whose gradients the servers release: all under ``released``, one under
        ``estimated``.
        """
        if self.lora is None:
            return []
        if self.update.kind == "released":
            return list(range(len(self.lora.layers)))
        return [self.update.shared_layer % len(self.lora.layers)]

    def embedding_rows(self, rows: npt.ArrayLike | slice = slice(None)) -> Floats:
        """H of these rows, each within the row bound: what the client shares."""
        if self._frozen is not None:
            return self._frozen[rows]  # type: ignore[index]
        return self.row_bound.apply(self._unbounded(rows))

    def label_rows(self, rows: npt.ArrayLike | slice = slice(None)) -> npt.NDArray[np.int64]:
        require(self.labels is not None, f"{self.name}: labels", None, "held by the label client only")
        assert self.labels is not None
        return self.labels[rows]  # type: ignore[index]

    def one_hot_rows(self, rows: npt.ArrayLike | slice, classes: int) -> npt.NDArray[np.int64]:
        """Labels as one-hot rows: what the label client secret-shares."""
        return np.eye(classes, dtype=np.int64)[self.label_rows(rows)]

    def row_factors(self, rows: npt.ArrayLike | slice) -> Floats:
        """By how much the row bound multiplies each of these rows, with the adapters as they are now."""
        return self.row_bound.factors(self._unbounded(rows))

    def share(self, rows: npt.ArrayLike | slice) -> tuple[Floats, list[Adapter]]:
        """``embedding_rows`` and ``adapters`` of one batch, from a single pass through the layers."""
        if self.lora is None:
            return self.embedding_rows(rows), self.adapters(rows)
        unbounded = self._unbounded(rows)
        inputs = self._shrunk_inputs(rows, self.row_bound.factors(unbounded))
        return self.row_bound.apply(unbounded), list(self._factors(inputs))

    def lora_factors(self, rows: npt.ArrayLike | slice) -> list[AdapterFactors]:
        """A, X, U of every shared layer for these rows.

        A row that the row bound shrinks by a factor has its A and X shrunk by the same factor: the exact
        Jacobian up to the projection along the row, which has no factored form.
        """
        require(self.lora is not None, f"{self.name}: lora", None, "a ParallelLora", "build the client with lora")
        return self._factors(self._scaled_inputs(rows))

    def _factors(self, inputs: list[Floats]) -> list[AdapterFactors]:
        assert self.lora is not None
        projected = self.lora.project(inputs)
        return [
            AdapterFactors(
                self.columns,
                projected[l],
                inputs[l],
                self.lora.layers[l].up,
                self.lora.scale,
                self.update.parts,
            )
            for l in self.shared_layers
        ]

    def layer_jacobian(self, rows: npt.ArrayLike | slice, layer: int | None = None) -> Floats:
        """∂H_j/∂φ of one layer, (B, d_i, n_L), as the paper uploads it; reference for small layers."""
        require(self.lora is not None, f"{self.name}: lora", None, "a ParallelLora")
        assert self.lora is not None
        index = self.shared_layers[0] if layer is None else layer
        return self.lora.jacobian(index, self._scaled_inputs(rows)[index])

    def jacobians(self, rows: npt.ArrayLike | slice) -> Floats:
        """∂H_j/∂φ of all shared layers, (B, d_i, n), in the flat layout of ``vfl.gradients``: what ``explicit``
        shares."""
        parts = []
        for index in self.shared_layers:
            assert self.lora is not None
            up = self.lora.layers[index].up.size
            parts.append(self.layer_jacobian(rows, index)[:, :, : None if self.update.parts == "UV" else up])
        return np.concatenate(parts, axis=2)

    def receive_gradient(
        self,
        rows: npt.ArrayLike | slice,
        released: Floats,
        *,
        step: int,
        learning_rate_factor: float = 1.0,
        noise_std: float = 0.0,
        noise_row_norm: float = 1.0,
        clip_norm: float = 1.0,
    ) -> None:
        """Apply the released mean gradient of the shared layers (flat layout of ``vfl.gradients``).

        ``rows`` is the batch it belongs to; ``noise_std`` the deviation of the noise in it (σ_t/B, all of
        it), used by ``estimated`` only.
        """
        assert self.lora is not None
        expected = self.shared_parameters
        require(released.shape == (expected,), f"{self.name}: released", released.shape, f"of shape ({expected},)")
        parts = self._split(released)
        if self.update.kind == "released":
            gradients = [
                (up, np.zeros_like(layer.down) if down is None else down)
                for (up, down), layer in zip(parts, self.lora.layers, strict=True)
            ]
        else:
            gradients = self._estimated_gradients(rows, *parts[0], step, noise_std, noise_row_norm, clip_norm)
        self._apply(gradients, learning_rate_factor)

    def _split(self, released: Floats) -> list[tuple[Floats, Floats | None]]:
        """The released vector as gradients of (U, V) of each shared layer; None where V is not shared."""
        assert self.lora is not None
        parts, start = [], 0
        for index in self.shared_layers:
            layer = self.lora.layers[index]
            end = start + layer.up.size + (layer.down.size if self.update.parts == "UV" else 0)
            parts.append(split_layer(released[start:end], layer.up.shape, layer.down.shape, self.update.parts))
            start = end
        return parts

    def _estimated_gradients(
        self,
        rows: npt.ArrayLike | slice,
        up: Floats,
        down: Floats | None,
        step: int,
        noise_std: float,
        noise_row_norm: float,
        clip_norm: float,
    ) -> list[tuple[Floats, Floats]]:
        assert self.lora is not None
        inputs = self._scaled_inputs(rows)
        factor = self._factors(inputs)[0]
        batch = len(factor.inputs)
        if batch == 0:  # an empty Poisson sample carries no gradient
            return [(np.zeros_like(l.up), np.zeros_like(l.down)) for l in self.lora.layers]
        # Prior of one entry of Ĝ/B: a clipped row of norm γ spread over d_i entries. Public numbers only.
        prior = (clip_norm / batch) ** 2 / self.width
        rule = "mmse" if self.update.estimator == "mmse" else self.update.regularisation
        lam = regulariser(rule, noise_std=noise_std, noise_row_norm=noise_row_norm, prior_variance=prior)
        estimate = estimate_per_sample_gradients(
            up,
            down,
            factor.projected,
            factor.inputs,
            factor.up,
            factor.scale,
            estimator=self.update.estimator,
            regularisation=lam,
        )
        bound = error_bound(
            factor.projected,
            factor.inputs,
            factor.up,
            factor.scale,
            with_down=down is not None,
            noise_std=noise_std,
            regularisation=lam,
            clip_norm=clip_norm,
            signal_bound=clip_norm / batch**0.5,
        )
        self.estimate_log.append(EstimateRecord(step, noise_std, lam, bound))
        return self.lora.gradients(inputs, estimate)

    def apply_gradient_at_embedding(
        self, rows: npt.ArrayLike | slice, at_embedding: Floats, learning_rate_factor: float = 1.0
    ) -> None:
        """Ordinary back-propagation of ∂L/∂H (mean over the batch): Plain and the LDP baselines."""
        assert self.lora is not None
        self._apply(self.lora.gradients(self._scaled_inputs(rows), at_embedding), learning_rate_factor)

    def _apply(self, gradients: Sequence[tuple[Floats, Floats]], learning_rate_factor: float) -> None:
        assert self.lora is not None
        step = self.update.learning_rate * learning_rate_factor
        beta, alpha = self.update.momentum, self.update.weight_decay
        if self._velocity is None:
            self._velocity = [(np.zeros_like(l.up), np.zeros_like(l.down)) for l in self.lora.layers]
        for layer, velocity, gradient in zip(self.lora.layers, self._velocity, gradients, strict=True):
            for value, speed, slope in zip((layer.up, layer.down), velocity, gradient, strict=True):
                speed *= beta
                speed += slope
                value *= alpha
                value -= step * speed

    def adapter_state(self) -> dict[str, Floats]:
        """All that training has changed here, by name: adapters and their momentum. For checkpoints."""
        assert self.lora is not None
        state: dict[str, Floats] = {}
        for index, layer in enumerate(self.lora.layers):
            state |= {f"up_{index}": layer.up, f"down_{index}": layer.down}
        for index, (up, down) in enumerate(self._velocity or ()):
            state |= {f"up_velocity_{index}": up, f"down_velocity_{index}": down}
        return state

    def load_adapter_state(self, state: Mapping[str, Floats]) -> None:
        """The inverse of ``adapter_state``."""
        assert self.lora is not None
        layers = range(len(self.lora.layers))
        for index in layers:
            self.lora.layers[index] = LoraLayer(state[f"up_{index}"], state[f"down_{index}"])
        if "up_velocity_0" in state:
            self._velocity = [(state[f"up_velocity_{index}"], state[f"down_velocity_{index}"]) for index in layers]

    def _unbounded(self, rows: npt.ArrayLike | slice) -> Floats:
        assert self.lora is not None
        blocks = [x[rows] for x in self.block_outputs]  # type: ignore[index]
        return self.embeddings[rows] + self.lora.output(blocks)  # type: ignore[index]

    def _scaled_inputs(self, rows: npt.ArrayLike | slice) -> list[Floats]:
        return self._shrunk_inputs(rows, self.row_factors(rows))

    def _shrunk_inputs(self, rows: npt.ArrayLike | slice, factors: Floats) -> list[Floats]:
        if (factors == 1).all():  # a bound that does not act, as the paper's
            return [x[rows] for x in self.block_outputs]  # type: ignore[index]
        return [(x[rows] * factors[:, None]).astype(x.dtype) for x in self.block_outputs]  # type: ignore[index]

    def embed_other_rows(self, embeddings: Floats, block_outputs: Sequence[Floats] = ()) -> Floats:
        """Bounded embeddings of rows that do not train (test rows), with the adapters as they are now."""
        rows = embeddings if self.lora is None else embeddings + self.lora.output(block_outputs)
        return self.row_bound.apply(rows)


def concatenate(clients: Sequence[Client], rows: npt.ArrayLike | slice = slice(None)) -> Floats:
    """The clients' bounded embeddings side by side, in the order of the clients."""
    return np.concatenate([c.embedding_rows(rows) for c in clients], axis=1)


def initial_layers(
    block_widths: Sequence[int],
    width: int,
    place: int,
    *,
    rank: int,
    alpha: float,
    seed: int,
    dtype: npt.DTypeLike = np.float64,
) -> ParallelLora:
    """The LoRA layers that the client at ``place`` (0 is the first) begins with: public, from sizes and a public
    seed."""
    return ParallelLora.initial(
        block_widths, width, rank=rank, alpha=alpha, seed=[seed, 0x6C6F7261, place], dtype=dtype
    )


def make_clients(
    embeddings: Sequence[Floats],
    labels: npt.NDArray[np.int64],
    row_bounds: Sequence[RowBound],
    *,
    block_outputs: Sequence[Sequence[Floats]] | None = None,
    rank: int = 8,
    alpha: float = 1.0,
    update: LocalUpdate | None = None,
    seed: int = 0,
    dtype: npt.DTypeLike = np.float64,
) -> list[Client]:
    """One client per array; the last one holds the labels. With ``block_outputs`` every client gets LoRA
    layers.
    """
    require(len(embeddings) >= 1, "embeddings", len(embeddings), "at least one client")
    require(len(row_bounds) == len(embeddings), "row_bounds", len(row_bounds), f"{len(embeddings)} bounds")
    clients, start = [], 0
    for i, rows in enumerate(embeddings):
        width = rows.shape[1]
        lora = None
        if block_outputs is not None:
            widths = [x.shape[1] for x in block_outputs[i]]
            lora = initial_layers(widths, width, i, rank=rank, alpha=alpha, seed=seed, dtype=dtype)
        clients.append(
            Client(
                name=f"client {i + 1}",
                embeddings=np.asarray(rows, dtype=dtype),
                row_bound=row_bounds[i],
                columns=slice(start, start + width),
                labels=labels if i == len(embeddings) - 1 else None,
                block_outputs=[np.asarray(x, dtype=dtype) for x in block_outputs[i]] if block_outputs else (),
                lora=lora,
                update=update or LocalUpdate(),
            )
        )
        start += width
    return clients
