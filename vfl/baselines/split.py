"""Split learning and FedBCD: embeddings up, gradients down.

Split learning (Vepakomma et al. 2018): one client step per received gradient. FedBCD-p (Liu et al. 2022): the
clients make Q steps between communications, re-using the received gradient ∂L/∂h on freshly computed
embeddings; the server makes one step per communication, as in the code of Xie et al. Split learning is Q = 1.
With ``epsilon=None`` split learning is Plain with full local training: the paper's upper bound.
"""

from __future__ import annotations

import time

import torch

from vfl.baselines.release import BaselineConfig, BaselineResult, Parties
from vfl.data.sets import VerticalData
from vfl.local.config import LocalModelConfig
from vfl.progress import progress_bar

__all__ = ["train_fedbcd", "train_split_learning"]


def train_split_learning(
    data: VerticalData,
    config: BaselineConfig | None = None,
    local_model: LocalModelConfig | None = None,
    *,
    progress: bool = False,
) -> BaselineResult:
    """Split learning with per-row clipping and noise at the cut layer."""
    name = "Split Learning" if (config or BaselineConfig()).epsilon is not None else "Plain (full local training)"
    return _train(name, data, config, local_model, 1, progress)


def train_fedbcd(
    data: VerticalData,
    config: BaselineConfig | None = None,
    local_model: LocalModelConfig | None = None,
    *,
    progress: bool = False,
) -> BaselineResult:
    """FedBCD-p with ``config.local_steps`` local steps per communication."""
    config = config or BaselineConfig()
    return _train(f"FedBCD (Q = {config.local_steps})", data, config, local_model, config.local_steps, progress)


def _train(
    method: str,
    data: VerticalData,
    config: BaselineConfig | None,
    local_model: LocalModelConfig | None,
    local_steps: int,
    progress: bool,
) -> BaselineResult:
    started = time.perf_counter()
    config = config or BaselineConfig()
    # Steps along a stale gradient have no minimum: without a bound on the rows they diverge, private or not.
    parties = Parties(data, local_model or LocalModelConfig("mlp"), config, always_clip=local_steps > 1)
    head = parties.server_head()
    server = torch.optim.SGD(head.parameters(), lr=config.server_learning_rate)
    optimisers = parties.optimisers()
    with progress_bar(method, config.epochs * parties.num_batches, progress) as advance:
        for _ in range(config.epochs):
            for rows in parties.batches():
                clean = [parties.embed(i, rows) for i in range(parties.num_clients)]
                # The release: the only thing that leaves a client.
                sent = [(h + parties.noise(h)).detach().requires_grad_() for h in clean]
                loss = torch.nn.functional.cross_entropy(head(torch.cat(sent, dim=1)), parties.labels[rows])
                gradients = torch.autograd.grad(loss, [*sent, *head.parameters()])
                returned = gradients[: parties.num_clients]
                for parameter, gradient in zip(head.parameters(), gradients[parties.num_clients :], strict=True):
                    parameter.grad = gradient
                server.step()
                for i, optimiser in enumerate(optimisers):
                    embedding = clean[i]
                    for step in range(local_steps):
                        optimiser.zero_grad()
                        if step:
                            embedding = parties.embed(i, rows)
                        embedding.backward(returned[i])
                        optimiser.step()
                advance(1)
    with torch.no_grad():
        logits = head(torch.cat(parties.test_embeddings(), dim=1))
    seconds = time.perf_counter() - started
    return BaselineResult(
        method, parties.accuracy(logits), seconds, config, parties.claim(), [parties.sentence], logits.numpy()
    )
