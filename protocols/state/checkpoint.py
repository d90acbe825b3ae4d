"""What a server keeps on disk: its noise key, and its own shares of the training state, atomically and mode 0600.

Noise is keyed by (run, plan, step) and never redrawn; masks are keyed by the attempt, so a resumed run uses fresh ones.
Steps of which nothing was released may simply be computed again. What is about to be released, and how the servers
agree on where to go on, is the matter of ``protocols.state.releases``; how a run was begun, of
``protocols.state.run_identity``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from accel.errors import InvalidArgument
from accel.files import Damaged, private_folder, read_arrays, read_bytes, write_arrays, write_bytes
from accel.prg import KEY_BYTES, Stream
from protocols.state.background import Background
from protocols.step.secret_step import Weights
from refmpc import ArithmeticTensor, Party, unseal
from refmpc.core.rounds import Round

__all__ = [
    "KEEP",
    "CannotResume",
    "ServerDirectory",
    "agree_on_count",
    "confirm_on_disk",
    "exchanged",
]

# A server that begins a checkpoint has finished the one before, so that at worst one server has just finished
# checkpoint k, and another only k - 2: three are kept, and all servers have one of them.
KEEP = 3


class CannotResume(InvalidArgument):
    """Going on would release something twice with two values, or under noise or a claim that it was not made for."""


class ServerDirectory:
    """One server's private directory of a run."""

    def __init__(self, path: Path):
        self.path = path
        private_folder(path)
        path.chmod(0o700)
        (path / "pid").write_text(f"{os.getpid()}\n")
        self._background = Background()

    @property
    def has_noise(self) -> bool:
        """Whether a run has already drawn its noise key here."""
        return (self.path / "noise.key").exists()

    def noise_stream(self, plan_fingerprint: str) -> Callable[[int], Stream]:
        """The stream of this server's noise for each step: from a key drawn once per run, and from the plan, so that
        the same noise never covers two different trainings (somebody may edit a configuration and resume)."""
        derived = self._derived(f"noise of {plan_fingerprint}")
        return lambda step: Stream(derived, step.to_bytes(8, "little"))

    def forget_noise(self) -> None:
        """The run is finished: without its key nobody can repeat the noise."""
        (self.path / "noise.key").unlink(missing_ok=True)

    def noise_check(self) -> str:
        """What tells this noise key from any other, and nothing else about it."""
        return self._derived("key check value").hex()

    def _derived(self, info: str) -> bytes:
        file = self.path / "noise.key"
        if not file.exists():
            write_bytes(file, os.urandom(KEY_BYTES), private=True, sealed=True)
        key = read_bytes(file)
        if len(key) != KEY_BYTES:
            raise Damaged(file, f"it has {len(key)} bytes, expected {KEY_BYTES}")
        return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=info.encode()).derive(key)

    def save(self, step: int, *layers: Weights) -> None:
        """Keep the state before ``step``, layer by layer, on disk when this returns; only the last ``KEEP`` stay."""
        self._background.wait()
        self._write(step, _arrays(layers))

    def save_later(self, step: int, *layers: Weights) -> None:
        """``save`` while training goes on, for a state that no release depends on: a copy of the layers is held until
        it is written. Waits for the one before; an error is raised by ``check``, or by the next one."""
        arrays = {name: array.copy() for name, array in _arrays(layers).items()}  # the next step may reuse them
        self._background.start(lambda: self._write(step, arrays))

    def check(self) -> None:
        """Raise what a checkpoint in the background has failed of."""
        self._background.check()

    def close(self) -> None:
        """Nothing is written any more when this returns."""
        self._background.close()

    def _write(self, step: int, arrays: Mapping[str, np.ndarray]) -> None:
        write_arrays(self.path / f"checkpoint-{step:08d}.npz", arrays, private=True, sealed=True)
        for old in self.steps()[:-KEEP]:
            (self.path / f"checkpoint-{old:08d}.npz").unlink()

    def steps(self) -> list[int]:
        """Steps with a checkpoint, in order."""
        return sorted(int(file.stem.split("-")[1]) for file in self.path.glob("checkpoint-*.npz"))

    def discard_after(self, step: int) -> None:
        """Remove checkpoints later than ``step``: they belong to an attempt that the others did not keep up with, and
        the next attempt will reach the same steps with other shares."""
        for late in self.steps():
            if late > step:
                (self.path / f"checkpoint-{late:08d}.npz").unlink()

    def load(self, party: Party, step: int, weight_bits: int, velocity_bits: int) -> list[Weights]:
        """The layers before ``step``."""
        layers: list[Weights] = []
        shares = read_arrays(self.path / f"checkpoint-{step:08d}.npz")
        while (name := f"values-{len(layers)}") in shares:
            values = ArithmeticTensor(party, shares[name], weight_bits)
            name = f"velocity-{len(layers)}"
            velocity = ArithmeticTensor(party, shares[name], velocity_bits) if name in shares else None
            layers.append(Weights(values, velocity))
        return layers


def _arrays(layers: Sequence[Weights]) -> dict[str, np.ndarray]:
    arrays = {}
    for index, weights in enumerate(layers):
        arrays[f"values-{index}"] = unseal(weights.values.shares)
        if weights.velocity is not None:
            arrays[f"velocity-{index}"] = unseal(weights.velocity.shares)
    return arrays


def agree_on_count(party: Party, count: int) -> int:
    """The smallest of the three servers' counts. 1 round."""
    mine = np.array([count], dtype=np.int64)
    return min(count, *(int(other[0]) for other in exchanged(party, mine, "agree on count")))


def exchanged(party: Party, mine: np.ndarray, operation: str) -> tuple[np.ndarray, np.ndarray]:
    """What the next and the previous server have to say on something public. 1 round."""
    round_ = Round(operation)
    round_.send_next(mine)
    round_.send_previous(mine)
    others = round_.expect_next(mine.shape, mine.dtype), round_.expect_previous(mine.shape, mine.dtype)
    party.deliver(round_)
    return others


async def confirm_on_disk(operation: str) -> None:
    """Go on when all three servers have come this far: what they wrote before is on all disks. 1 round."""
    round_ = Round(operation)
    token = np.zeros(1, dtype=np.uint8)
    for send, expect in ((round_.send_next, round_.expect_next), (round_.send_previous, round_.expect_previous)):
        send(token)
        expect(1, np.uint8)
    await round_
