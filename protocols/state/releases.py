"""Releases that are written before they are sent: whatever dies, nothing is ever opened with two values (proofs §6.7).

Noise is keyed by the step, roundings are not. A step that is computed again has the same noise and other roundings, so
two openings of it differ by data that no noise covers. Hence this order, at every server, for every release:

1. write what is about to be sent, and the state after it (file and name synced);
2. tell the two others so, and hear the same of both (one round);
3. mark the release as made;
4. only now send.

Who has sent has heard that all three have written. After a crash the servers compare what they have
(``agree_on_step``): if all have written a release it is sent again, word for word; if one has not, nobody has sent, and
the step is computed anew. A marker of any server forbids going behind it, so a server that comes back with an older
disk ends the run with a sentence.

Where all three servers' words are needed to read a release, this is enough: a corrupted server that has read it has the
words of both others, who have marked it, and one of them may lose its disk. A *shared* value is different: one message
of one neighbour opens it to a server. Such a release takes ``everywhere=True``, one round more, in which all three say
that they have marked it: any one disk that is left knows.

"Written" means synced, so it survives a power failure. What is not covered: two servers that both come back with old
disks while the third died between writing and marking; and all three. Nothing on their disks tells that from a new run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from accel.files import Damaged, read_arrays, read_json, sync_folder, write_arrays, write_json
from protocols.state.checkpoint import KEEP, CannotResume, ServerDirectory, confirm_on_disk, exchanged
from protocols.step.secret_step import Weights
from refmpc import Party
from refmpc.net.framing import listed, name_of

__all__ = ["Releases", "agree_on_step", "require_nothing_lost"]

MARKER = "released"
WAY_OUT = "restore its newest directory and start all servers again, or start a new run: every release spends its own ε"


class Releases:
    """What one server has released in a run, or is about to. A release is named by its position: the steps before
    it."""

    def __init__(self, directory: ServerDirectory):
        self._directory = directory

    async def write(self, position: int, words: Mapping[str, np.ndarray], *state: Weights) -> None:
        """Steps 1 to 3 for ``words``, with the state after ``position`` steps; they may be sent when this returns. 1
        round."""
        write_arrays(self._file(position), words, private=True, sealed=True)
        self._directory.save(position, *state)
        self._file(position - KEEP).unlink(missing_ok=True)
        await self.confirm(position)

    async def confirm(self, position: int, *, everywhere: bool = False) -> None:
        """Steps 2 and 3 for what this server has written; ``everywhere``: all have marked it when this returns. 1 or 2
        rounds."""
        await confirm_on_disk("the release is written")
        self.mark(position)
        if everywhere:
            await confirm_on_disk("the release is marked")

    def mark(self, position: int) -> None:
        """From now on, nothing before ``position`` is computed again. All three servers must have written it."""
        if position > self.released:
            write_json(self._directory.path / MARKER, position)

    def words(self, position: int) -> dict[str, np.ndarray]:
        """The words of a release that all three servers have written, to be sent again."""
        file = self._file(position)
        if not file.exists():
            raise CannotResume(f"{file} is missing, which this server may have sent: bring it back, or start a new run")
        return read_arrays(file)

    @property
    def released(self) -> int:
        """The latest position that is marked, 0 if there is none."""
        file = self._directory.path / MARKER
        found = read_json(file) if file.exists() else 0
        if not isinstance(found, int):
            raise Damaged(file, "it is no position")
        return found

    def discard_after(self, position: int) -> None:
        """Remove words that not all three have written, so that nobody has sent them."""
        for file in self._directory.path.glob("release-*.npz"):
            if int(file.stem.split("-")[1]) > position:
                file.unlink()

    def _file(self, position: int) -> Path:
        return self._directory.path / f"release-{position:08d}.npz"


def agree_on_step(party: Party, directory: ServerDirectory, releases: Releases, last: int) -> int:
    """The latest step that all three servers have a checkpoint of, 0 if there is none; refused if something was
    released after it. Later checkpoints and words are removed: nobody has sent them. 1 round.

    ``last``: the number of steps. Behind it nothing is computed, so the noise key is not needed any more.
    """
    mine = np.zeros(2 + KEEP, dtype=np.int64)
    steps = directory.steps()[-KEEP:]
    mine[:2] = directory.has_noise, releases.released
    mine[2 : 2 + len(steps)] = steps
    next_, previous = exchanged(party, mine, "agree on checkpoint")
    by_server = {party.id: mine, party.next: next_, party.previous: previous}
    kept = {server: {0, *by_server[server][2:].tolist()} for server in range(3)}
    step: int = max(kept[0] & kept[1] & kept[2])
    released = max(int(record[1]) for record in by_server.values())
    last_kept = {server: max(kept[server]) for server in range(3)}
    require_nothing_lost(step, released, last_kept, [bool(by_server[server][0]) for server in range(3)], last)
    directory.discard_after(step)
    releases.discard_after(step)
    sync_folder(directory.path)  # what is gone must not come back: the next attempt has other shares of the same steps
    return step


def require_nothing_lost(
    step: int, released: int, last_kept: Mapping[int, int], has_key: Sequence[bool], last: int
) -> None:
    """Refuse to go on from ``step`` if something was released after it, or if a server has lost the key of its noise.

    ``last_kept``: the latest state of each server.
    """
    if step < released:
        behind = [name_of(server) for server, kept in last_kept.items() if kept < released]
        raise CannotResume(
            f"{listed(behind or ['one of the servers'])} no longer has the state after step {released}, which was "
            f"released. Computing it again would release other values under the same noise; {WAY_OUT}"
        )
    keyless = [name_of(server) for server in range(3) if not has_key[server]]
    if keyless and step < last and any(last_kept.values()):
        raise CannotResume(
            f"{listed(keyless)} has lost its noise key (noise.key), and later steps need the same key as earlier ones; "
            f"{WAY_OUT}"
        )
