"""What the embedding-releasing baselines share: local torch models, and the DP treatment of a released row.

Example-level DP, so that the comparison with the protocols is fair: each row is clipped on its own, every
row is released once per epoch by every client, and all of these releases concern one person. With row clip C
and noise N(0, (σC)²) that is one Gaussian mechanism of sensitivity √(clients·epochs)·C (zero-out), if the
local models are held fixed. They are not: clients train on raw rows, so a record moves later releases of other
rows too, and the claim says that its ε is not proven for the run. The
published codes clip the norm of a whole batch and count one client only; see proofs §9.5.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from accel.validate import require_choice, require_integer, require_real
from vfl.data.embeddings import input_scaling
from vfl.data.sets import VerticalData, usable_rows
from vfl.dp import Claim, any_order_sigma, example_level, ldp_claim, with_delta_checked
from vfl.local.config import LocalModelConfig
from vfl.local.models import LocalModel, build_local_model, to_tensor

__all__ = ["BaselineConfig", "BaselineResult", "Parties", "bound_tensor_rows", "example_level_claim"]


@dataclass(frozen=True)
class BaselineConfig:
    """Options of a baseline run; ``epsilon=None`` trains without noise.

    ``local_steps`` is Q (FedBCD, ADMM), ``penalty`` is ρ of ADMM; the paper fixes them at 5 and 0.5.
    ``row_rule``: "clip" as published, or "normalise" (default): same sensitivity, but short rows use the
    whole bound, which the baselines need at example-level noise.
    """

    epochs: int = 20
    batch_size: int = 128
    learning_rate: float = 0.5
    server_learning_rate: float = 0.05
    clip_norm: float = 1.0
    epsilon: float | None = 8.0
    delta: float = 1e-5
    local_steps: int = 5
    penalty: float = 0.5
    row_rule: str = "normalise"
    seed: int = 0

    def __post_init__(self) -> None:
        require_integer("epochs", self.epochs, 1)
        require_integer("batch_size", self.batch_size, 1)
        require_integer("local_steps", self.local_steps, 1)
        for name in ("learning_rate", "server_learning_rate", "clip_norm", "penalty"):
            require_real(name, getattr(self, name), 0.0, open_low=True)
        if self.epsilon is not None:
            require_real("epsilon", self.epsilon, 0.0, open_low=True)
        require_real("delta", self.delta, 0.0, 1.0, open_low=True, open_high=True)
        require_choice("row_rule", self.row_rule, ("clip", "normalise"))


@dataclass
class BaselineResult:
    """Accuracy, time, claim (None without privacy) and remarks of one run; logits of the test rows where kept."""

    method: str
    test_accuracy: float
    seconds: float
    config: BaselineConfig
    claim: Claim | None
    notes: list[str] = field(default_factory=list)
    test_logits: npt.NDArray[np.float32] | None = field(default=None, repr=False)

    def summary(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "epsilon": self.config.epsilon,
            "test_accuracy": self.test_accuracy,
            "seconds": self.seconds,
            "notes": self.notes,
            "claim": None if self.claim is None else json.loads(self.claim.as_simulation().to_json()),
        }


def bound_tensor_rows(
    rows: torch.Tensor, clip_norm: float, rule: str = "clip", weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Each row to norm ≤ C (``clip``) or = C (``normalise``), in ‖h ⊘ weights‖ if given; gradients flow
    through.
    """
    measured = rows if weights is None else rows / weights
    norms = measured.norm(dim=1, keepdim=True)
    return rows * (clip_norm / norms.clamp_min(clip_norm if rule == "clip" else 1e-9))


def example_level_claim(sigma: float, config: BaselineConfig, num_clients: int, releases: int, note: str = "") -> Claim:
    """The claim about one person: all clients, all epochs; labels stay with the server un-noised.

    Not proven: the local models train on raw rows, and carry a record into the releases of others.
    """
    rows = ldp_claim(sigma, config.delta, config.clip_norm, releases, num_clients, frozen=False)
    claim = example_level(rows, num_clients)
    return dataclasses.replace(
        claim,
        caveats=(
            *claim.caveats,
            "The server holds the labels, and the clients' trained local models stay with them: neither is "
            "covered, as in the published method",
            *([note] if note else []),
        ),
    )


class Parties:
    """Clients' torch models and rows, and the noisy release of their embeddings."""

    def __init__(
        self,
        data: VerticalData,
        local_model: LocalModelConfig,
        config: BaselineConfig,
        *,
        always_clip: bool = False,
    ) -> None:
        self.config = config
        self._clips = always_clip or config.epsilon is not None
        self.num_clients, self.classes = data.num_clients, data.classes
        used, self.sentence = usable_rows(data.num_samples, config.batch_size)
        self.num_samples, self.num_batches = used, used // config.batch_size
        self.labels = torch.from_numpy(data.train_labels[:used])
        self.test_labels = torch.from_numpy(data.test_labels)
        self.models: list[LocalModel] = []
        self.train: list[torch.Tensor] = []
        self.test: list[torch.Tensor] = []
        self.public: list[torch.Tensor] = []
        for i in range(data.num_clients):
            choice = dataclasses.replace(local_model, seed=local_model.seed + 1000 * config.seed + i)
            self.models.append(build_local_model(choice, data.train[i].shape[1:]))
            scale = None if data.train[i].dtype == np.uint8 else input_scaling(data, i)
            for into, rows in ((self.train, data.train[i][:used]), (self.test, data.test[i])):
                into.append(to_tensor(_scaled(rows, scale), choice))
            if data.public is not None:
                self.public.append(to_tensor(_scaled(data.public[i], scale), choice))
        self.generator = torch.Generator().manual_seed(config.seed)
        self.order_random = np.random.default_rng([config.seed, 0x626C])
        releases = self.num_clients * config.epochs
        self.sigma = 0.0 if config.epsilon is None else any_order_sigma(config.epsilon, config.delta, releases)

    @property
    def width(self) -> int:
        return sum(m.output_width for m in self.models)

    def batches(self) -> list[torch.Tensor]:
        """One epoch's batches in a fresh public order: every row exactly once (the claim counts on it)."""
        order = torch.from_numpy(self.order_random.permutation(self.num_samples))
        return list(order.split(self.config.batch_size))

    def embed(self, client: int, rows: torch.Tensor) -> torch.Tensor:
        """Clean embeddings of a batch (clipped when private), with gradients."""
        output = self.models[client](self.train[client][rows])
        return bound_tensor_rows(output, self.config.clip_norm, self.config.row_rule) if self._clips else output

    def noise(self, like: torch.Tensor, sigma: float | None = None, clip_norm: float | None = None) -> torch.Tensor:
        """σ·C·N(0, 1) in the shape of ``like``; zero without privacy."""
        bound = self.config.clip_norm if clip_norm is None else clip_norm
        std = (self.sigma if sigma is None else sigma) * bound
        return std * torch.randn(like.shape, generator=self.generator) if std else torch.zeros_like(like)

    def optimisers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(m.parameters(), lr=self.config.learning_rate) for m in self.models]

    def server_head(self) -> nn.Linear:
        """The server's linear head on the concatenated embeddings, zero at the start."""
        head = nn.Linear(self.width, self.classes)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return head

    def test_embeddings(self) -> list[torch.Tensor]:
        with torch.no_grad():
            parts = [m(x) for m, x in zip(self.models, self.test, strict=True)]
            return (
                [bound_tensor_rows(p, self.config.clip_norm, self.config.row_rule) for p in parts]
                if self._clips
                else parts
            )

    def accuracy(self, logits: torch.Tensor) -> float:
        return float((logits.argmax(dim=1) == self.test_labels).double().mean())

    def claim(self, note: str = "") -> Claim | None:
        if self.config.epsilon is None:
            return None
        claim = example_level_claim(self.sigma, self.config, self.num_clients, self.config.epochs, note)
        return with_delta_checked(claim, self.num_samples)


def _scaled(rows: npt.NDArray[Any], scaling: Any) -> npt.NDArray[Any]:
    if scaling is None:
        return rows
    return scaling.apply(rows.reshape(len(rows), -1)).reshape(rows.shape).astype(np.float32)


def zcdp_share(sigma: float, share: float) -> float:
    """σ of a mechanism that may spend only ``share`` of the zCDP budget that ``sigma`` spends."""
    return sigma / math.sqrt(share)
