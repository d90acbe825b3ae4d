"""What a server takes in: all clients' columns side by side, in memory or in files, tested before use."""

from __future__ import annotations

import numpy as np

import refmpc
from protocols.plan.run_plan import CHUNK_ROWS, Plan
from protocols.plan.scales import EMBEDDING_BITS
from protocols.server.verification import verify_uploads
from protocols.state.checkpoint import ServerDirectory
from protocols.state.commitment import check_columns
from protocols.state.stored_rows import RowFolder, StoredRows, StoredTensor
from protocols.step.clip import norms_of_squares, squared_norms
from protocols.step.secret_step import SharedRows
from refmpc import ArithmeticTensor, Party, Words

__all__ = ["receive_rows", "shares_of_rows", "with_ones_column"]


async def receive_rows(
    party: Party, plan: Plan, folder: RowFolder | None = None, directory: ServerDirectory | None = None
) -> SharedRows | StoredRows:
    """Take in all clients' columns side by side, test them (``protocols.server.verification``), append the column of
    ones, and compute the row norms.

    Many rows go into files of ``folder``, and memory stays at a few chunks; without it, or if they are few, all stay in
    memory, one copy and a chunk. ``directory`` keeps what tells a resumed run that a client's columns are still the
    same; None if the servers have kept the shares themselves (``protocols.deploy``). Dummies of a secret order come
    last: zero in every column, that of the ones included, so that whatever is multiplied by them is zero exactly.
    """
    if directory is not None:
        check_columns(party, directory, plan.client_names)
    held = _Table(party, plan, folder)
    with party.phase("upload"):
        for chunk in plan.chunks:
            _receive_chunk(party, plan, chunk, held)
            party.report({"phase": "upload", "done": chunk.stop, "total": plan.schedule.num_samples})
        held.write_dummies(ones=True)
        held.finish()
    squares = None
    if plan.row_tests:
        with party.phase("verification"):
            squares = await verify_uploads(party, plan, held.embeddings, held.labels)
    with party.phase("norms"):
        if squares is None:
            norms = await squared_norms(held.embeddings, plan.scales, held.labels)
        else:
            norms = await norms_of_squares(squares, plan.scales, held.labels)
        # of dummies those of [0 1]: within the domain of every step
    held.write_dummies(ones=False)
    return held.rows(norms)


def _receive_chunk(party: Party, plan: Plan, chunk: slice, held: _Table) -> None:
    """The clients' columns of some rows, and their labels."""
    count, *_, last = chunk.stop - chunk.start, *plan.client_names
    embeddings = np.zeros((2, count, plan.width + 1), dtype=np.uint64)
    start = 0
    for name, width in zip(plan.client_names, plan.client_widths, strict=True):
        part = refmpc.unseal(refmpc.input_from_client(party, name, (count, width), EMBEDDING_BITS).shares)
        embeddings[:, :, start : start + width] = part
        start += width
    own = refmpc.input_from_client(party, last, (count, plan.outputs), plan.label_bits)
    _set_ones(party, embeddings)
    held.write(chunk, refmpc.seal(embeddings), own.shares)


class _Table:
    """Embeddings and labels of all rows, in memory or in files."""

    def __init__(self, party: Party, plan: Plan, folder: RowFolder | None):
        self._party, self._plan = party, plan
        rows, columns = plan.schedule.num_rows, plan.width + 1
        self._folder = folder if folder is not None and folder.keeps(shares_of_rows(plan)) else None
        self.embeddings = self._made("embeddings", (rows, columns), EMBEDDING_BITS)
        self.labels = self._made("labels", (rows, plan.outputs), plan.label_bits)

    def _made(self, name: str, shape: tuple[int, int], bits: int) -> ArithmeticTensor | StoredTensor:
        if self._folder is not None:
            shuffled = self._plan.shuffles > 0
            return self._folder.tensor(self._party, name, shape, bits, shuffled=shuffled)
        return ArithmeticTensor(self._party, np.zeros((2, *shape), dtype=np.uint64), bits)

    def write(self, rows: slice, embeddings: Words, labels: Words | None = None) -> None:
        for held, words in ((self.embeddings, embeddings), (self.labels, labels)):
            if words is None:
                continue
            if isinstance(held, StoredTensor):
                held.write(rows, words)
            else:
                refmpc.unseal(held.shares)[:, rows] = refmpc.unseal(words)

    def finish(self) -> None:
        """Files are on the disk when this returns, so that what comes next has the disk to itself."""
        for held in (self.embeddings, self.labels):
            if isinstance(held, StoredTensor):
                held.finish()

    def write_dummies(self, *, ones: bool) -> None:
        """Zeros in every column; with ``ones``, as long as norms are computed, in all but the last."""
        first, end = self._plan.schedule.num_samples, self._plan.schedule.num_rows
        for start in range(first, end, CHUNK_ROWS):
            part = slice(start, min(end, start + CHUNK_ROWS))
            words = np.zeros((2, part.stop - part.start, self._plan.width + 1), dtype=np.uint64)
            if ones:
                _set_ones(self._party, words)
            self.write(part, refmpc.seal(words))

    def rows(self, norms: ArithmeticTensor) -> SharedRows | StoredRows:
        """With the norms: what a training takes."""
        if isinstance(self.embeddings, StoredTensor) and isinstance(self.labels, StoredTensor):
            assert self._folder is not None
            return StoredRows(self.embeddings, self.labels, self._folder.store(self._party, "norms", norms))
        assert isinstance(self.embeddings, ArithmeticTensor) and isinstance(self.labels, ArithmeticTensor)
        return SharedRows(self.embeddings, self.labels, norms)


def shares_of_rows(plan: Plan) -> int:
    """Bytes of one server's shares of all rows: [H 1], labels and norms."""
    return 16 * plan.schedule.num_rows * (plan.width + 1 + plan.outputs + 1)


def _set_ones(party: Party, shares: np.ndarray) -> None:
    """The last column, which is still zero, becomes the public one: it is the share x_0."""
    ones = {0: 0, 2: 1}.get(party.id)
    if ones is not None:
        shares[ones, :, -1] = 1 << EMBEDDING_BITS


def with_ones_column(party: Party, shares: np.ndarray) -> ArithmeticTensor:
    """[H 1] from shares whose last column is still zero."""
    _set_ones(party, shares)
    return ArithmeticTensor(party, shares, EMBEDDING_BITS)
