"""Client-server phase: clients share their embeddings (and the label client its labels) in chunks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from protocols.plan.plausibility import require_possible_model
from protocols.plan.run_plan import Plan
from protocols.plan.scales import EMBEDDING_BITS
from protocols.state.commitment import commit_to_columns
from refmpc import Client
from refmpc.core.fixed import encode

__all__ = [
    "ClientJob",
    "Embeddings",
    "chunks_of",
    "client_program",
    "receive_model",
    "share_columns",
]

PATIENCE = 30 * 24 * 3600.0  # a client waits for the model as long as the training takes


class Embeddings(Protocol):
    """Rows of numbers: an array, or something that makes them when they are taken."""

    def __getitem__(self, rows: slice, /) -> np.ndarray: ...


@dataclass(frozen=True)
class ClientJob:
    """One client's own columns; nobody else receives this object. Labels (``vfl.losses.shared_labels``) only at the
    label client."""

    plan: Plan
    embeddings: Embeddings = field(repr=False)
    labels: np.ndarray | None = field(repr=False)


def chunks_of(job: ClientJob) -> Iterator[np.ndarray]:
    """All that this client is about to share, as numbers, chunk by chunk: embeddings, then labels."""
    for rows in job.plan.chunks:
        yield job.embeddings[rows]
    if job.labels is not None:
        yield job.labels


def _columns(job: ClientJob) -> Iterator[np.ndarray]:
    """All that this client is about to share, as ring words, chunk by chunk."""
    for rows in job.plan.chunks:
        yield encode(job.embeddings[rows], EMBEDDING_BITS, name="embeddings")
        if job.labels is not None:
            yield encode(job.labels[rows], job.plan.label_bits, name="labels")


def client_program(client: Client, job: ClientJob) -> list[np.ndarray]:
    """What a client does: commit to its columns, share them, wait, receive the released model, layer by layer."""
    commit_to_columns(client, job.plan.client_names, _columns(job))
    share_columns(client, job)
    return receive_model(client, job.plan)


def share_columns(client: Client, job: ClientJob, advance: Callable[[int], None] = lambda rows: None) -> None:
    """Share all columns, chunk by chunk; ``advance`` is told of the rows that are gone."""
    for rows in job.plan.chunks:
        client.share(job.embeddings[rows], EMBEDDING_BITS)
        if job.labels is not None:
            client.share(job.labels[rows], job.plan.label_bits)
        advance(rows.stop - rows.start)


def receive_model(client: Client, plan: Plan) -> list[np.ndarray]:
    """Wait for the released model. Raises ``SharesDiffer`` if two servers disagree about a share of it, ``Impossible``
    if no training can have led to it: with secret weights only clients can look."""
    model = plan.unflatten(client.receive((plan.parameters,), plan.scales.weight_bits, timeout=PATIENCE))
    require_possible_model(plan, model)
    return model
