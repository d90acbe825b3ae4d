"""Client-server phase: clients share their embeddings (and the label client its labels) in chunks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

import refmpc
from protocols.client.commitment import check_columns, commit_to_columns
from protocols.client.verification import ShareDigests, verify_uploads
from protocols.plan.run_plan import MODEL_RELEASE, Plan
from protocols.plan.scales import EMBEDDING_BITS
from protocols.server.checkpoint import ServerDirectory
from protocols.step.clip import norms_of_squares, squared_norms
from protocols.step.global_step import SharedRows
from refmpc import ArithmeticTensor, Client, Party
from refmpc.core.fixed import encode

__all__ = [
    "ClientJob",
    "client_program",
    "receive_model",
    "receive_rows",
    "release_model",
    "share_columns",
    "with_ones_column",
]

CHUNK_ROWS = 4096
PATIENCE = 30 * 24 * 3600.0  # a client waits for the model as long as the training takes


@dataclass(frozen=True)
class ClientJob:
    """One client's own columns; nobody else receives this object. Labels (``vfl.tasks.shared_labels``) only at the label
    client."""

    plan: Plan
    embeddings: np.ndarray = field(repr=False)
    labels: np.ndarray | None = field(repr=False)


def _chunks(plan: Plan) -> list[slice]:
    rows = plan.schedule.num_samples
    return [slice(start, min(rows, start + CHUNK_ROWS)) for start in range(0, rows, CHUNK_ROWS)]


def _columns(job: ClientJob) -> Iterator[np.ndarray]:
    """All that this client is about to share, as ring words, chunk by chunk."""
    for rows in _chunks(job.plan):
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
    for rows in _chunks(job.plan):
        client.share(job.embeddings[rows], EMBEDDING_BITS)
        if job.labels is not None:
            client.share(job.labels[rows], job.plan.label_bits)
        advance(rows.stop - rows.start)


def receive_model(client: Client, plan: Plan) -> list[np.ndarray]:
    """Wait for the released model."""
    return plan.unflatten(client.receive((plan.parameters,), plan.scales.weight_bits, timeout=PATIENCE))


async def receive_rows(party: Party, plan: Plan, directory: ServerDirectory | None = None) -> SharedRows:
    """Take in all clients' columns side by side, test them (``protocols.client.verification``), append the column of ones,
    and compute the row norms.

    ``directory`` keeps what tells a resumed run that a client's columns are still the same; None if the servers have kept
    the shares themselves (``protocols.deploy``). Dummies of a secret order come last: zero in every column, that of the ones
    included, so that whatever is multiplied by them is zero exactly. The shares go straight into their place: memory stays at one copy and a
    chunk.
    """
    rows, padded = plan.schedule.num_samples, plan.schedule.num_rows
    shares = np.zeros((2, padded, plan.width + 1), dtype=np.uint64)
    labels = np.zeros((2, padded, plan.outputs), dtype=np.uint64)
    if directory is not None:
        check_columns(party, directory, plan.client_names)
    digests = ShareDigests(plan.client_names) if plan.row_test is not None else None
    with party.phase("upload"):
        for chunk in _chunks(plan):
            start = 0
            for name, width in zip(plan.client_names, plan.client_widths, strict=True):
                part = refmpc.input_from_client(party, name, (chunk.stop - chunk.start, width), EMBEDDING_BITS)
                shares[:, chunk, start : start + width] = refmpc.unseal(part.shares)
                start += width
                if digests is not None:
                    digests.add(name, refmpc.unseal(part.shares))
            own = refmpc.input_from_client(
                party, plan.client_names[-1], (chunk.stop - chunk.start, plan.outputs), plan.label_bits
            )
            labels[:, chunk] = refmpc.unseal(own.shares)
            if digests is not None:
                digests.add(plan.client_names[-1], refmpc.unseal(own.shares))
            party.report({"phase": "upload", "done": chunk.stop, "total": rows})
    squares = None
    if digests is not None:
        rows_held = ArithmeticTensor(party, shares, EMBEDDING_BITS)  # its last column is still zero
        with party.phase("verification"):
            squares = await verify_uploads(party, plan, rows_held, refmpc.seal(labels[:, :rows]), digests)
    embeddings = with_ones_column(party, shares)
    with party.phase("norms"):
        if squares is None or plan.scales.one_output is not None:
            norms = await squared_norms(embeddings, plan.scales)
        else:
            norms = await norms_of_squares(squares, plan.scales)
        # of dummies those of [0 1]: within the domain of every step
    if padded > rows:
        shares[:, rows:, -1] = 0
        embeddings = ArithmeticTensor(party, shares, EMBEDDING_BITS)
    return SharedRows(embeddings, ArithmeticTensor(party, labels, plan.label_bits), norms)


def with_ones_column(party: Party, shares: np.ndarray) -> ArithmeticTensor:
    """[H 1] from shares whose last column is still zero: the public ones are the share x_0."""
    ones = {0: 0, 2: 1}.get(party.id)
    if ones is not None:
        shares[ones, :, -1] = 1 << EMBEDDING_BITS
    return ArithmeticTensor(party, shares, EMBEDDING_BITS)


async def release_model(party: Party, plan: Plan, weights: ArithmeticTensor) -> np.ndarray:
    """Server-client phase: open the global model to the servers and to every client."""
    with party.phase("release"):
        for name in plan.client_names:
            refmpc.reveal_to_client(weights, name, MODEL_RELEASE)
        opened = await refmpc.reveal(weights, MODEL_RELEASE)
    assert opened is not None
    return opened
