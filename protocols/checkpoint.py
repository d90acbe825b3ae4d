"""What a server keeps on disk: its noise key, and its own shares of the training state, atomically and mode 0600.

Noise is keyed by (run, step) and never redrawn; masks are keyed by the attempt, so a resumed run uses fresh ones. G-BMF and
G-Shuff open nothing before the end, so steps after the last checkpoint may simply be computed again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from accel.prg import KEY_BYTES, Stream
from protocols.step import Weights
from refmpc import ArithmeticTensor, Party
from refmpc.rounds import Round

__all__ = ["ServerDirectory", "agree_on_step"]

_KEEP = 2  # a crash may leave servers one checkpoint apart


class ServerDirectory:
    """One server's private directory of a run."""

    def __init__(self, path: Path):
        self.path = path
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.chmod(0o700)
        (path / "pid").write_text(f"{os.getpid()}\n")

    def noise_stream(self) -> Callable[[int], Stream]:
        """The stream of this server's noise for each step: from a key drawn once per run."""
        file = self.path / "noise.key"
        if not file.exists():
            self._write(file, os.urandom(KEY_BYTES))
        key = file.read_bytes()
        if len(key) != KEY_BYTES:
            raise ValueError(f"{file} has {len(key)} bytes, expected {KEY_BYTES}: it is damaged; the run cannot resume")
        return lambda step: Stream(key, step.to_bytes(8, "little"))

    def save(self, step: int, weights: Weights) -> None:
        """Keep the state before ``step``; older checkpoints but one are removed."""
        arrays = {"values": weights.values.shares}
        if weights.velocity is not None:
            arrays["velocity"] = weights.velocity.shares
        temporary = self.path / "checkpoint.part"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path / f"checkpoint-{step:08d}.npz")
        for old in self.steps()[:-_KEEP]:
            (self.path / f"checkpoint-{old:08d}.npz").unlink()

    def steps(self) -> list[int]:
        """Steps with a checkpoint, in order."""
        return sorted(int(file.stem.split("-")[1]) for file in self.path.glob("checkpoint-*.npz"))

    def load(self, party: Party, step: int, weight_bits: int, velocity_bits: int) -> Weights:
        """The state before ``step``."""
        with np.load(self.path / f"checkpoint-{step:08d}.npz") as file:
            values = ArithmeticTensor(party, file["values"], weight_bits)
            velocity = ArithmeticTensor(party, file["velocity"], velocity_bits) if "velocity" in file else None
        return Weights(values, velocity)

    def _write(self, file: Path, content: bytes) -> None:
        temporary = file.with_suffix(".part")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(file)


def agree_on_step(party: Party, directory: ServerDirectory) -> int:
    """The latest step that all three servers have a checkpoint of; 0 if there is none. 1 round."""
    mine = np.zeros(_KEEP + 1, dtype=np.int64)
    steps = directory.steps()[-_KEEP:]
    mine[1 : 1 + len(steps)] = steps  # entry 0 stands for the start
    round_ = Round("agree on checkpoint")
    round_.send_next(mine)
    round_.send_previous(mine)
    others = round_.expect_next(mine.shape, np.int64), round_.expect_previous(mine.shape, np.int64)
    party.deliver(round_)
    return max(set(mine.tolist()) & set(others[0].tolist()) & set(others[1].tolist()))
