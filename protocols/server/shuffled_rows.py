"""A server's own shares of rows whose secret order must survive a crash: written before anything that depends on it is opened.

A record takes part once an epoch. If an epoch that has opened something were shuffled again, a record could take part twice,
and under noise of one participation. So the shuffled shares are kept, and a run that goes on within an epoch reads them
back. Whoever calls this makes sure that all three servers go on with the shares of one and the same shuffle: a server saves
them before it computes the first step with them, so where all three have written a word of that step, all three have them;
where one has not, nobody has opened anything, and all three shuffle again (``save`` replaces what lies there).

Shares only: 16 bytes a value, mode 0600, all at once and synced, bound to the plan and the epoch. What one server keeps is
uniform without the two others, and it knows nothing of the order that it did not know before.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import refmpc
from accel.files import read_arrays, sync_folder, write_arrays
from accel.validate import require_integer
from protocols.server.checkpoint import CannotResume
from protocols.server.stored_rows import StoredRows
from protocols.step.global_step import SharedRows
from refmpc import ArithmeticTensor, Party, unseal

__all__ = ["ShuffledRows", "shuffle_rows"]

_PLAN, _BITS, _SHARES = "plan", "bits of ", "shares of "
WAY_OUT = "bring it back, or start a new run: an order that is opened in part must not be drawn again"


async def shuffle_rows(rows: SharedRows | StoredRows) -> SharedRows:
    """Embeddings, labels and norms under one secret permutation, dummies among them. 2 rounds, 32 bytes an entry."""
    rows = rows.in_memory() if isinstance(rows, StoredRows) else rows
    shuffled = await refmpc.shuffle([rows.embeddings, rows.labels, rows.norms])
    embeddings, labels, norms = (tensor for tensor in shuffled if isinstance(tensor, ArithmeticTensor))
    return SharedRows(embeddings, labels, norms)


class ShuffledRows:
    """The shuffled shares that one server keeps of a run, those of one epoch at a time."""

    def __init__(self, directory: Path, fingerprint: str):
        """``fingerprint`` is the plan's: shares of another plan are refused."""
        self._directory, self._fingerprint = directory, fingerprint

    def save(self, epoch: int, tensors: Mapping[str, ArithmeticTensor]) -> None:
        """Keep these shares as those of ``epoch``; what was kept of others is removed. On disk when this returns."""
        require_integer("epoch", epoch, 0)
        arrays = {_PLAN: np.frombuffer(self._fingerprint.encode(), dtype=np.uint8)}
        for name, tensor in tensors.items():
            arrays[_BITS + name] = np.array(tensor.fraction_bits)
            arrays[_SHARES + name] = unseal(tensor.shares)
        write_arrays(self._file(epoch), arrays, private=True)
        for other in self._kept():
            if other != self._file(epoch):
                other.unlink()

    def load(self, party: Party, epoch: int) -> dict[str, ArithmeticTensor]:
        """The tensors that were saved for ``epoch``, by name; refused if they are lost, damaged or of another plan."""
        file = self._file(epoch)
        if not file.exists():
            raise CannotResume(f"{file} is missing, the shuffled rows of epoch {epoch}: {WAY_OUT}")
        try:
            found = read_arrays(file)
        except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
            raise CannotResume(f"{file} is damaged ({error}): {WAY_OUT}") from None
        if found.pop(_PLAN).tobytes().decode() != self._fingerprint:
            raise CannotResume(f"{file} belongs to another plan: {WAY_OUT}")
        return {
            name.removeprefix(_SHARES): ArithmeticTensor(party, shares, int(found[_BITS + name.removeprefix(_SHARES)]))
            for name, shares in found.items()
            if name.startswith(_SHARES)
        }

    def discard(self) -> None:
        """Remove what is kept: nothing goes on with it any more. Synced, so that it does not come back."""
        for file in self._kept():
            file.unlink()
        sync_folder(self._directory)

    def _kept(self) -> list[Path]:
        return sorted(self._directory.glob("shuffled-*.npz"))

    def _file(self, epoch: int) -> Path:
        return self._directory / f"shuffled-{epoch:08d}.npz"
