"""VIMADMM (Xie et al., SaTML 2024): multiple heads, coordinated by ADMM.

State per sample: z_j and the dual λ_j in R^S; per client k a head W_k. Per batch: clients release h_k; the
server updates z (strongly convex, vectorised Newton), λ ← λ + ρ(s − z) with s = Σ h_k W_k, and takes a step
on each head; then each client makes ``local_steps`` steps on

    L_k = [Σ_j Q_kj·λ_j + ρ/2·‖s_{−k,j} + Q_kj − z_j‖²] / B,      Q_k = h_k W_k,

with its own clean embeddings. Written from the paper's description.

Heads start so small that released rows, most of which is noise, have logits near zero, as they have in the published
code (rows of norm 0.01). Heads that start at a size of their own give every row the logits of its noise; the clients
are asked to follow these, and at twenty epochs' noise nothing is learned.
"""

from __future__ import annotations

import time

import torch

from vfl.baselines.release import BaselineConfig, BaselineResult, Parties
from vfl.data.sets import VerticalData
from vfl.local.config import LocalModelConfig
from vfl.progress import progress_bar

__all__ = ["solve_auxiliary", "train_admm"]

_START = 0.1  # deviation of the logits that a client's first released rows have under its first head


def solve_auxiliary(
    sums: torch.Tensor, duals: torch.Tensor, one_hot: torch.Tensor, penalty: float, iterations: int = 12
) -> torch.Tensor:
    """argmin_z logsumexp(z) − y·z − λ·z + ρ/2·‖s − z‖², row by row, by damped Newton.

    The Hessian diag(p) − ppᵀ + ρI is a diagonal minus rank one, so a step costs O(S) per row. Gradient norm
    below 1e-5 after 12 iterations for ρ ≥ 0.05.
    """
    z = sums.clone()
    for _ in range(iterations):
        p = torch.softmax(z, dim=1)
        gradient = p - one_hot - duals + penalty * (z - sums)
        diagonal = p + penalty
        scaled, thin = gradient / diagonal, p / diagonal
        rank_one = (p * scaled).sum(1, keepdim=True) / (1 - (p * thin).sum(1, keepdim=True))
        step = scaled + thin * rank_one
        # Far from the optimum a full step can overshoot; its length in z is what matters for the softmax.
        z = z - step * (4.0 / step.norm(dim=1, keepdim=True).clamp_min(4.0))
    return z


def _first_head(released: torch.Tensor, classes: int, seed: int) -> torch.Tensor:
    """Random, and scaled to what the server received: logits of these rows deviate by ``_START``."""
    length = float(released.square().sum(1).mean()) ** 0.5
    head = torch.empty(released.shape[1], classes).normal_(generator=torch.Generator().manual_seed(seed))
    return head * (_START / max(length, 1e-9))


def train_admm(
    data: VerticalData,
    config: BaselineConfig | None = None,
    local_model: LocalModelConfig | None = None,
    *,
    progress: bool = False,
) -> BaselineResult:
    """VIMADMM with example-level DP on the released embeddings."""
    started = time.perf_counter()
    config = config or BaselineConfig()
    parties = Parties(data, local_model or LocalModelConfig("mlp"), config)
    rho, classes = config.penalty, parties.classes
    heads: list[torch.Tensor] = []
    duals = torch.zeros(parties.num_samples, classes)
    optimisers = parties.optimisers()
    eye = torch.eye(classes)
    with progress_bar("ADMM", config.epochs * parties.num_batches, progress) as advance:
        for _ in range(config.epochs):
            for rows in parties.batches():
                with torch.no_grad():
                    sent = []
                    for i in range(parties.num_clients):
                        clean = parties.embed(i, rows)
                        sent.append(clean + parties.noise(clean))
                    heads = heads or [_first_head(h, classes, config.seed * 100 + i) for i, h in enumerate(sent)]
                    outputs = [h @ w for h, w in zip(sent, heads, strict=True)]
                    total = torch.stack(outputs).sum(0)
                    z = solve_auxiliary(total, duals[rows], eye[parties.labels[rows]], rho)
                    duals[rows] += rho * (total - z)
                    residuals = [total - q - z for q in outputs]
                    batch = len(rows)
                    for i, (h, w) in enumerate(zip(sent, heads, strict=True)):
                        slope = h.T @ (duals[rows] + rho * (residuals[i] + h @ w)) / batch
                        # Noised rows are long; a step scaled to their size keeps the head's update a descent.
                        size = rho * float(h.square().sum(1).mean()) / h.shape[1] + 1.0
                        heads[i] = w - config.server_learning_rate / size * slope
                for i, optimiser in enumerate(optimisers):
                    for _ in range(config.local_steps):
                        optimiser.zero_grad()
                        q = parties.embed(i, rows) @ heads[i]
                        loss = (q * duals[rows]).sum() + rho / 2 * (residuals[i] + q).square().sum()
                        (loss / len(rows)).backward()
                        optimiser.step()
                advance(1)
    with torch.no_grad():
        parts = [h @ w for h, w in zip(parties.test_embeddings(), heads, strict=True)]
        accuracy = parties.accuracy(torch.stack(parts).sum(0))
    return BaselineResult(
        f"ADMM (Q = {config.local_steps}, ρ = {rho:g})",
        accuracy,
        time.perf_counter() - started,
        config,
        parties.claim(),
        [parties.sentence],
    )
