"""Ada-VFed (Gai et al., IEEE TIFS 20, 2025): a **reconstruction from its abstract**; no public code was
found.

What the abstract says, and what is chosen here:
* Gaussian noise on the transmitted embeddings and on the gradients: both are clipped per row and noised, and
  share the zCDP budget (``embedding_share``).
* Regularisation that keeps norms small, so that clipping bites less: μ·mean(max(0, ‖h‖ − C)²) at the client.
* Noise per dimension by importance (the paper at hand names the Laplacian score): weights w with mean
  square 1, small where a dimension matters. Rows are clipped in ‖h ⊘ w‖ and dimension i gets noise σ·C·w_i,
  so the mechanism is a plain Gaussian in h ⊘ w whatever w is. Weights come from *earlier releases* only,
  hence are post-processing and cost no budget.
"""

from __future__ import annotations

import time

import torch

from accel.validate import require_real
from vfl.baselines.release import BaselineConfig, BaselineResult, Parties, bound_tensor_rows, zcdp_share
from vfl.data.sets import VerticalData
from vfl.local.config import LocalModelConfig
from vfl.progress import progress_bar

__all__ = ["importance_weights", "laplacian_scores", "train_ada_vfed"]

_SCORED_ROWS = 512


def laplacian_scores(rows: torch.Tensor, neighbours: int = 5) -> torch.Tensor:
    """Laplacian score of each column (He et al. 2005): small when the column respects the
    nearest-neighbour graph.
    """
    count = len(rows)
    distances = torch.cdist(rows, rows)
    near = distances.topk(min(neighbours + 1, count), largest=False).indices
    graph = torch.zeros(count, count)
    graph.scatter_(1, near, 1.0)
    graph = torch.maximum(graph, graph.T)
    graph.fill_diagonal_(0.0)
    degree = graph.sum(1)
    centred = rows - (degree @ rows / degree.sum())
    spread = (degree[:, None] * centred.square()).sum(0).clamp_min(1e-12)
    smooth = spread - (centred * (graph @ centred)).sum(0)
    return smooth / spread


def importance_weights(rows: torch.Tensor) -> torch.Tensor:
    """Noise weights from rows that are already public or already released: within 1/2..2, mean square 1."""
    scores = laplacian_scores(rows[:_SCORED_ROWS])
    weights = (scores / scores.mean().clamp_min(1e-12)).clamp(0.25, 4.0).sqrt()
    return weights / weights.square().mean().sqrt()


def train_ada_vfed(
    data: VerticalData,
    config: BaselineConfig | None = None,
    local_model: LocalModelConfig | None = None,
    *,
    norm_penalty: float = 0.1,
    gradient_clip: float = 0.01,
    embedding_share: float = 0.5,
    progress: bool = False,
) -> BaselineResult:
    """The reconstruction; ``norm_penalty`` is μ, ``gradient_clip`` bounds each returned per-sample gradient.

    ``embedding_share`` of the zCDP budget goes to the embeddings, the rest to the gradients.
    """
    started = time.perf_counter()
    require_real("norm_penalty", norm_penalty, 0.0)
    require_real("embedding_share", embedding_share, 0.0, 1.0, open_low=True, open_high=True)
    require_real("gradient_clip", gradient_clip, 0.0, open_low=True)
    config = config or BaselineConfig()
    parties = Parties(data, local_model or LocalModelConfig("mlp"), config)
    private = config.epsilon is not None
    for_rows = zcdp_share(parties.sigma, embedding_share) if private else 0.0
    for_gradients = zcdp_share(parties.sigma, 1.0 - embedding_share) if private else 0.0
    head = parties.server_head()
    server = torch.optim.SGD(head.parameters(), lr=config.server_learning_rate)
    optimisers = parties.optimisers()
    weights = [torch.ones(m.output_width) for m in parties.models]
    with progress_bar("Ada-VFed", config.epochs * parties.num_batches, progress) as advance:
        for _ in range(config.epochs):
            released: list[list[torch.Tensor]] = [[] for _ in parties.models]
            for rows in parties.batches():
                raw = [m(x[rows]) for m, x in zip(parties.models, parties.train, strict=True)]
                clean, sent = [], []
                for i, h in enumerate(raw):
                    bounded = bound_tensor_rows(h, config.clip_norm, config.row_rule, weights[i]) if private else h
                    clean.append(bounded)
                    noisy = bounded + weights[i] * parties.noise(bounded, for_rows)
                    sent.append(noisy.detach().requires_grad_())
                    released[i].append(sent[i].detach())
                logits = head(torch.cat(sent, dim=1))
                loss = torch.nn.functional.cross_entropy(logits, parties.labels[rows])
                gradients = torch.autograd.grad(loss, [*sent, *head.parameters()])
                for parameter, gradient in zip(head.parameters(), gradients[parties.num_clients :], strict=True):
                    parameter.grad = gradient
                server.step()
                for i, optimiser in enumerate(optimisers):
                    returned = gradients[i]
                    if private:
                        # Per-sample gradients (undo the mean), clipped and noised like the embeddings.
                        per_row = bound_tensor_rows(returned * len(rows), gradient_clip)
                        returned = (per_row + parties.noise(per_row, for_gradients, gradient_clip)) / len(rows)
                    excess = (raw[i].norm(dim=1) - config.clip_norm).clamp_min(0.0).square().mean()
                    optimiser.zero_grad()
                    ((clean[i] * returned).sum() + norm_penalty * excess).backward()
                    optimiser.step()
                advance(1)
            if private:
                weights = [importance_weights(torch.cat(part)) for part in released]
    with torch.no_grad():
        parts = []
        for i, (model, rows) in enumerate(zip(parties.models, parties.test, strict=True)):
            output = model(rows)
            parts.append(
                bound_tensor_rows(output, config.clip_norm, config.row_rule, weights[i]) if private else output
            )
        accuracy = parties.accuracy(head(torch.cat(parts, dim=1)))
    note = (
        f"{1 - embedding_share:.0%} of the zCDP budget goes to the returned gradients; reconstruction from an abstract"
    )
    return BaselineResult(
        "Ada-VFed (reconstruction)",
        accuracy,
        time.perf_counter() - started,
        config,
        parties.claim(note),
        [parties.sentence, "reconstructed from the abstract of Gai et al. 2025; not the authors' code"],
    )
