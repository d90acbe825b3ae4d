"""A server's own shares of rows whose secret order must survive a crash: written before anything that depends on it is
opened.

A record takes part once an epoch. If an epoch that has opened something were shuffled again, a record could take part
twice, and under noise of one participation. So the shuffled shares are kept, and a run that goes on within an epoch
reads them back. Whoever calls this makes sure that all three servers go on with the shares of the same shuffle:
a server saves them before it computes the first step with them, so where all three have written a word of that step,
all three have them; where one has not, nobody has opened anything, and all three shuffle again (``save`` replaces what
lies there).

Shares only: 16 bytes a value, mode 0600, all at once and synced, bound to the plan and the epoch. Rows that lie in
files are copied piece by piece; what names them and their digests is written last, so that it is there only if they
are. What one server keeps is uniform without the two others, and it knows nothing of the order that it did not know
before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

import refmpc
from accel.files import Damaged, read_arrays, sync_folder, whole_file, write_arrays
from accel.validate import require_integer
from protocols.state.checkpoint import CannotResume
from protocols.state.stored_rows import StoredRows, StoredTensor
from protocols.step.secret_step import SharedRows
from refmpc import ArithmeticTensor, Party, unseal

__all__ = ["ShuffledRows", "shuffle_rows"]

_PLAN, _BITS, _SHARES, _DIGEST = "plan", "bits of ", "shares of ", "digest of "
WAY_OUT = "restore it, or start a new run: an order of which steps were opened must not be drawn again"


async def shuffle_rows(rows: SharedRows | StoredRows) -> SharedRows | StoredRows:
    """Embeddings, labels and norms under one secret permutation, dummies among them. 2 rounds, 32 bytes an entry.

    Rows in memory: one extra copy. Rows in files: in their place, a chunk of columns at a time, however many there are.
    """
    if isinstance(rows, StoredRows):
        await refmpc.shuffle_in_place([rows.embeddings, rows.labels, rows.norms])
        return rows
    shuffled = await refmpc.shuffle([rows.embeddings, rows.labels, rows.norms])
    embeddings, labels, norms = (tensor for tensor in shuffled if isinstance(tensor, ArithmeticTensor))
    return SharedRows(embeddings, labels, norms)


class ShuffledRows:
    """The shuffled shares that one server keeps of a run, those of one epoch at a time."""

    def __init__(self, directory: Path, fingerprint: str):
        """``fingerprint`` is the plan's: shares of another plan are refused."""
        self._directory, self._fingerprint = directory, fingerprint

    def save(self, epoch: int, tensors: Mapping[str, ArithmeticTensor | StoredTensor]) -> None:
        """Keep these shares as those of ``epoch``; what was kept of others is removed. On disk when this returns."""
        require_integer("epoch", epoch, 0)
        arrays = {_PLAN: np.frombuffer(self._fingerprint.encode(), dtype=np.uint8)}
        self._file(epoch).unlink(missing_ok=True)  # or it would name shares that are about to be replaced
        for name, tensor in tensors.items():
            arrays[_BITS + name] = np.array(tensor.fraction_bits)
            if isinstance(tensor, StoredTensor):
                with whole_file(self._shares(epoch, name), private=True) as file:
                    arrays[_DIGEST + name] = np.frombuffer(tensor.copy_to(file), dtype=np.uint8)
            else:
                arrays[_SHARES + name] = unseal(tensor.shares)
        write_arrays(self._file(epoch), arrays, private=True, sealed=True)
        for other in self._kept():
            if not other.name.startswith(self._file(epoch).stem):
                other.unlink()

    def load(
        self, party: Party, epoch: int, into: Mapping[str, StoredTensor] | None = None
    ) -> dict[str, ArithmeticTensor | StoredTensor]:
        """The tensors that were saved for ``epoch``, by name; refused if they are lost, damaged or of another plan.

        What was kept as a file is copied ``into`` the tensors of these names, which lie in files too.
        """
        file = self._file(epoch)
        if not file.exists():
            raise CannotResume(f"{file} is missing, the shuffled rows of epoch {epoch}: {WAY_OUT}")
        found = read_arrays(file)
        if found.pop(_PLAN).tobytes().decode() != self._fingerprint:
            raise CannotResume(f"{file} belongs to another plan: {WAY_OUT}")
        tensors: dict[str, ArithmeticTensor | StoredTensor] = {}
        for key in found:
            name = key.removeprefix(_BITS)
            if not key.startswith(_BITS):
                continue
            if _SHARES + name in found:
                tensors[name] = ArithmeticTensor(party, found[_SHARES + name], int(found[key]))
            else:
                tensors[name] = self._load_file(epoch, name, found[_DIGEST + name].tobytes(), into)
        return tensors

    def _load_file(self, epoch: int, name: str, digest: bytes, into: Mapping[str, StoredTensor] | None) -> StoredTensor:
        shares = self._shares(epoch, name)
        if into is None:
            raise CannotResume(
                f"{shares} belongs to a run that keeps its rows in files, but this run keeps them in memory: {WAY_OUT}"
            )
        try:
            with shares.open("rb") as file:
                same = into[name].copy_from(file) == digest
        except EOFError as error:
            raise Damaged(shares, str(error), WAY_OUT) from None
        except FileNotFoundError:
            raise Damaged(shares, "it is missing", WAY_OUT) from None
        if not same:
            raise Damaged(shares, "its checksum does not fit", WAY_OUT)
        return into[name]

    def discard(self) -> None:
        """Remove what is kept: nothing goes on with it any more. Synced, so that it does not come back."""
        for file in self._kept():
            file.unlink()
        sync_folder(self._directory)

    def _kept(self) -> list[Path]:
        return sorted(self._directory.glob("shuffled-*"))

    def _file(self, epoch: int) -> Path:
        return self._directory / f"shuffled-{epoch:08d}.npz"

    def _shares(self, epoch: int, name: str) -> Path:
        return self._directory / f"{self._file(epoch).stem}-{name}.shares"
