"""A client that trains one layer of a torch local model which has no low-rank factors (proofs §4.6, the
generic path).

It shares the Jacobians ∂H_j/∂φ_L of the chosen layer, as the paper does: B·d_i·n_L numbers per batch, so
this is for small layers and for reference; LoRA layers share factors instead (``vfl.local.client``).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from accel.validate import require, require_real
from vfl.data.embeddings import input_scaling, scale_rows
from vfl.data.scaling import RowBound, bound_jacobians, split_row_bound
from vfl.data.sets import VerticalData
from vfl.federation import Federation
from vfl.gradients import Adapter, AdapterJacobian
from vfl.local.client import Client, EstimateRecord, LocalUpdate
from vfl.local.config import LocalModelConfig
from vfl.local.estimate import ErrorBound, estimate_from_jacobian, regulariser
from vfl.local.models import LocalModel, build_local_model, embed_rows, to_tensor

__all__ = ["LayerClient", "build_layer_federation"]

Floats = npt.NDArray[np.floating]


@dataclass
class LayerClient(Client):
    """``model`` runs on ``rows`` (already scaled, this client's columns); ``layer`` names the trained
    parameters.

    ``layer`` is a prefix of parameter names ("last" for the MLP's output layer). ``released`` updates touch
    that layer only; ``estimated`` ones back-propagate the estimate through the whole model, as in the paper.
    ``embeddings`` must be the model's output at the start; it only fixes the shapes. ``largest_jacobian`` is a
    public bound on the spectral norm of ∂H_j/∂φ: fixed-point ranges need it, and a longer one is shrunk to it.
    """

    model: LocalModel | None = None
    rows: np.ndarray = field(default_factory=lambda: np.empty((0, 0), dtype=np.float32))
    layer: str = "last"
    config: LocalModelConfig = field(default_factory=lambda: LocalModelConfig("mlp"))
    largest_jacobian: float = 16.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.model is not None, f"{self.name}: model", None, "a local model")
        require(
            len(self.rows) == self.num_samples,
            f"{self.name}: rows",
            len(self.rows),
            f"{self.num_samples} rows",
        )
        require_real("largest_jacobian", self.largest_jacobian, 0.0, open_low=True)
        names = [n for n, _ in self._named()]
        known = sorted({n.split(".")[0] for n, _ in self._model.named_parameters()})
        require(bool(names), "layer", self.layer, f"one of {', '.join(known)}")
        self._frozen = None
        self._speed: dict[str, torch.Tensor] = {}

    @property
    def _model(self) -> LocalModel:
        assert self.model is not None
        return self.model

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        return [(n, p) for n, p in self._model.named_parameters() if n.startswith(self.layer + ".")]

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def shared_layers(self) -> list[int]:
        return [0]

    @property
    def shared_parameters(self) -> int:
        return sum(parameter.numel() for _, parameter in self._named())

    @property
    def jacobian_bound(self) -> float:
        return self.largest_jacobian

    def fixed_columns(self, count: int) -> list[Floats]:
        rows = self.rows[:count]
        return [rows.reshape(len(rows), -1)]

    def fresh(self) -> LayerClient:
        twin = copy.copy(self)
        twin.model, twin.estimate_log, twin._speed = copy.deepcopy(self.model), [], {}
        return twin

    def subset(self, rows: npt.NDArray[np.int64]) -> LayerClient:
        twin = self.fresh()
        twin.embeddings, twin.rows = self.embeddings[rows], self.rows[rows]
        twin.labels = None if self.labels is None else self.labels[rows]
        return twin

    def embedding_rows(self, rows: npt.ArrayLike | slice = slice(None)) -> Floats:
        return self.row_bound.apply(self._unbounded(rows))

    def embed_other_rows(self, embeddings: Floats, block_outputs: object = ()) -> Floats:
        """Bounded embeddings of test rows; ``embeddings`` are here the *input rows* of the local model."""
        output, _ = embed_rows(self._model, self.config, np.asarray(embeddings))
        return self.row_bound.apply(output.astype(self.embeddings.dtype))

    def _unbounded(self, rows: npt.ArrayLike | slice) -> Floats:
        output, _ = embed_rows(self._model, self.config, self.rows[rows])  # type: ignore[index]
        return output.astype(self.embeddings.dtype)

    def adapters(self, rows: npt.ArrayLike | slice) -> list[Adapter]:
        return [AdapterJacobian(self.columns, self.layer_jacobian(rows))]

    def layer_jacobian(self, rows: npt.ArrayLike | slice, layer: int | None = None) -> Floats:
        """∂H_j/∂φ_L for these rows, (B, d_i, n_L), rows shrunk by the row bound included, each within its bound."""
        inputs = to_tensor(self.rows[rows], self.config)  # type: ignore[index]
        named = dict(self._named())

        def output(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(self._model, parameters, (row[None],))[0]

        jacobians = torch.func.vmap(torch.func.jacrev(output), in_dims=(None, 0))(named, inputs)
        parts = [j.reshape(j.shape[0], j.shape[1], -1) for j in jacobians.values()]
        whole = torch.cat(parts, dim=2).detach().numpy().astype(self.embeddings.dtype)
        whole *= self.row_bound.factors(self._unbounded(rows))[:, None, None]
        return bound_jacobians(whole, self.largest_jacobian)

    def jacobians(self, rows: npt.ArrayLike | slice) -> Floats:
        return self.layer_jacobian(rows)

    def adapter_state(self) -> dict[str, Floats]:
        state = {n: p.detach().numpy().copy() for n, p in self._model.named_parameters()}
        return state | {f"velocity {n}": speed.numpy().copy() for n, speed in self._speed.items()}

    def load_adapter_state(self, state: Mapping[str, Floats]) -> None:
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(torch.from_numpy(np.array(state[name])))
                if f"velocity {name}" in state:
                    self._speed[name] = torch.from_numpy(np.array(state[f"velocity {name}"]))

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
        """Apply the released mean gradient of the layer (``released``) or its estimate (``estimated``)."""
        expected = self.shared_parameters
        require(released.shape == (expected,), f"{self.name}: released", released.shape, f"of shape ({expected},)")
        if self.update.kind == "released":
            gradients, start = {}, 0
            for name, parameter in self._named():
                part = released[start : start + parameter.numel()]
                gradients[name] = torch.from_numpy(np.array(part)).to(parameter.dtype).reshape(parameter.shape)
                start += parameter.numel()
        else:
            gradients = self._back_propagated(rows, released, step, noise_std, noise_row_norm, clip_norm)
        size = self.update.learning_rate * learning_rate_factor
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if name not in gradients:
                    continue
                speed = self.update.momentum * self._speed.get(name, 0.0) + gradients[name]
                self._speed[name] = speed
                parameter.mul_(self.update.weight_decay).sub_(size * speed)

    def _back_propagated(
        self,
        rows: npt.ArrayLike | slice,
        released: Floats,
        step: int,
        noise_std: float,
        noise_row_norm: float,
        clip_norm: float,
    ) -> dict[str, torch.Tensor]:
        jacobian = self.layer_jacobian(rows)
        batch = len(jacobian)
        prior = (clip_norm / max(1, batch)) ** 2 / self.width
        rule = "mmse" if self.update.estimator == "mmse" else self.update.regularisation
        lam = regulariser(rule, noise_std=noise_std, noise_row_norm=noise_row_norm, prior_variance=prior)
        estimate = estimate_from_jacobian(released, jacobian, estimator=self.update.estimator, regularisation=lam)
        values = np.linalg.svd(jacobian.reshape(batch * self.width, -1), compute_uv=False) ** 2
        variance = noise_std**2 * float(np.sum(values / (values + max(lam, 1e-300)) ** 2))
        smallest = float(values[-1]) if len(values) == batch * self.width else 0.0
        bias = (lam / (smallest + lam)) ** 2 * clip_norm**2 / batch if lam else 0.0
        self.estimate_log.append(
            EstimateRecord(step, noise_std, lam, ErrorBound(float("nan"), bias, variance, float(values[0])))
        )
        names = [n for n, _ in self._model.named_parameters()]
        output = self._model(to_tensor(self.rows[rows], self.config))  # type: ignore[index]
        shrunk = estimate * self.row_bound.factors(self._unbounded(rows))[:, None]
        found = torch.autograd.grad(
            output,
            list(self._model.parameters()),
            torch.from_numpy(shrunk).to(output.dtype),
            allow_unused=True,
        )
        return {n: g for n, g in zip(names, found, strict=True) if g is not None}


def build_layer_federation(
    data: VerticalData,
    config: LocalModelConfig,
    layer: str,
    *,
    update: LocalUpdate,
    row_bound: float = 1.0,
    row_rule: str = "normalise",
    largest_jacobian: float = 16.0,
) -> Federation:
    """Every client trains ``layer`` of its own copy of the local model; the rest of the model stays as it is.

    Row bounds as in ``build_federation``: each client gets R/√N.
    """
    require(config.kind != "identity", "local_model", config.kind, "a network", "choose mlp, cnn or resnet18")
    clients: list[Client] = []
    tests: list[Any] = []  # input rows of the local model, which embeds them as it is by then
    sources, start = [], 0
    bounds = split_row_bound(row_bound, data.num_clients)
    for index in range(data.num_clients):
        images = data.train[index].dtype == np.uint8  # they have the model's own public pixel constants
        scaling = None if images else input_scaling(data, index)
        train, test = (rows if images else scale_rows(rows, scaling) for rows in (data.train[index], data.test[index]))
        model = build_local_model(config, train.shape[1:])
        last = index == data.num_clients - 1
        clients.append(
            LayerClient(
                name=f"client {index + 1}",
                embeddings=np.zeros(
                    (len(train), model.output_width)
                ),  # a place: the model, as trained by then, fills it
                row_bound=RowBound(bounds[index], row_rule),
                columns=slice(start, start + model.output_width),
                labels=data.train_labels if last else None,
                update=update,
                model=model,
                rows=train,
                layer=layer,
                config=config,
                largest_jacobian=largest_jacobian,
            )
        )
        tests.append(test)
        sources.append(f"{config.describe()}, but for its layer {layer}" + (f"; {scaling.source}" if scaling else ""))
        start += model.output_width
    note = f"row bound R = {row_bound:g} ({row_rule}; per client {', '.join(f'{b:.4g}' for b in bounds)})"
    public = tuple(dict.fromkeys(sources))
    return Federation(clients, data.classes, data.test_labels, tests, [], row_bound, public, (*data.notes, note))
