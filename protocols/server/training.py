"""The training run of one server: state, noise, checkpoints, progress. The protocols fill in the order of the rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

import refmpc
from protocols.plan.run_plan import MODEL_RELEASE, Plan
from protocols.plan.scales import RELEASE_BITS
from protocols.server.joint_noise import MOST_ROWS, JointNoise
from protocols.server.server_noise import NoiseAhead
from protocols.state.checkpoint import ServerDirectory
from protocols.state.releases import Releases, agree_on_step
from protocols.state.run_identity import begin, bind_noise_key
from protocols.state.shuffled_rows import ShuffledRows
from protocols.state.stored_rows import StoredRows
from protocols.step.secret_step import SharedRows, Weights, gradient_step, rate_input
from refmpc import ArithmeticTensor, Party, Words

__all__ = ["ServerJob", "TrainingRun", "release_model"]


@dataclass(frozen=True)
class ServerJob:
    """What a server gets: the public plan, and its own private directory."""

    plan: Plan
    directory: Path
    checkpoint_every: int
    synced: bool = True  # open weights: whether what must be written survives a power failure too (fsync in every step)


def release_model(party: Party, plan: Plan, weights: ArithmeticTensor) -> None:
    """Server-client phase: open the global model to every client, and to nobody else.

    One corrupted server receives no message here, so its view is the same for every model.
    """
    with party.phase("release"):
        for name in plan.client_names:
            refmpc.reveal_to_client(weights, name, MODEL_RELEASE)


class TrainingRun:
    """State of the training at one server; use as a context manager around the loop over ``steps()``.

    Made before clients share anything: a run that may not go on is refused first. ``keeps_releases``: whether every
    release is on disk before it is sent.
    """

    report_every = 0.2  # seconds between progress messages

    def __init__(self, party: Party, job: ServerJob, *, keeps_releases: bool = True):
        self.party = party
        self.plan = job.plan
        self.directory = ServerDirectory(job.directory)
        self._shuffled = ShuffledRows(job.directory, job.plan.fingerprint)
        self._every = job.checkpoint_every
        self._releases = Releases(self.directory)
        begin(self.directory, job.plan, keeps_releases=keeps_releases, finished=self._is_finished())
        last = job.plan.schedule.num_steps
        self.first_step = self._agree()
        self._recorded_step = party.recorded(self._secret_step)
        self._joint = None
        if job.plan.training.noise == "joint":
            self._joint = JointNoise(party, job.plan, self.directory, self.first_step, keep=self._every > 0)
        self._noise = None  # and no key is drawn, when everything is computed
        if self.first_step < last:
            bind_noise_key(self.directory)
            stream = self.directory.noise_stream(job.plan.fingerprint)
            self._noise = NoiseAhead(job.plan, stream, self.first_step)

    def _is_finished(self) -> bool:
        """Whether this server needs nothing of the others any more to hand over the model."""
        return False

    def _agree(self) -> int:
        """The step at which all three servers go on, and the state before it."""
        step = agree_on_step(self.party, self.directory, self._releases, self.plan.schedule.num_steps)
        self.first_step = step
        self.layers = self._start()
        return step

    def _start(self) -> list[Weights]:
        plan, bits = self.plan, self.plan.scales.weight_bits
        if self.first_step:
            return self.directory.load(self.party, self.first_step, bits, RELEASE_BITS)
        layers = []
        for start in plan.start:
            zeros = np.zeros((2, *start.shape), dtype=np.uint64)
            velocity = ArithmeticTensor(self.party, zeros, RELEASE_BITS) if plan.training.momentum else None
            layers.append(Weights(ArithmeticTensor(self.party, zeros, bits) + start, velocity))
        return layers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.directory.close()
        if self._noise is not None:
            self._noise.close()

    def steps(self) -> Iterator[int]:
        """All steps that are left; reports progress and writes checkpoints between them."""
        total, reported = self.plan.schedule.num_steps, 0.0
        for step in range(self.first_step, total):
            if self._every and step % self._every == 0 and step > self.first_step:
                oldest = self._checkpoint(step)
                if self._joint is not None:
                    self._joint.forget_before(oldest)
            self.directory.check()
            if self.has_stopped:
                return
            self.party.step = step
            yield step
            now = time.monotonic()
            if now - reported > self.report_every or step + 1 == total:
                reported = now
                sent = self.party.ledger.total().bytes_sent
                self.party.report({"phase": "training", "done": step + 1, "total": total, "bytes": sent})

    @property
    def has_stopped(self) -> bool:
        """Whether the run ends before its last step: only one with open weights may."""
        return False

    def _checkpoint(self, step: int) -> int:
        """Keep the state before ``step``, in the background: nothing is released on its account. Returns the oldest
        step from which the run may have to go on."""
        self.directory.save_later(step, *self.layers)
        everywhere = [kept for kept in self.directory.steps() if kept <= step - 2 * self._every]  # see KEEP
        return max(everywhere, default=0)

    async def _secret_step(
        self, rows: SharedRows, layers: Sequence[Weights], noise: np.ndarray, rate: Words
    ) -> list[Weights]:
        return await gradient_step(rows, layers, noise, rate, self.plan.training, self.plan.scales)

    def own_noise(self) -> np.ndarray:
        """This server's own noise of the present step."""
        assert self._noise is not None
        return self._noise.next_row()

    async def noise_row(self) -> np.ndarray:
        """All noise that this server adds in the present step: its own, and its share of joint noise."""
        noise = self.own_noise()
        if self._joint is not None:
            await self._joint.prepare()
            noise = noise + self._joint.next_row()
        return noise

    async def gradient_step(self, rows: SharedRows) -> None:
        """One noised step of SGD on these rows."""
        noise = await self.noise_row()
        with self.party.phase("training"):
            rate = rate_input(self.party, self.plan.learning_rate(self.party.step), self.plan.scales)
            self.layers = await self._recorded_step(rows, self.layers, noise, rate)

    def keep_shuffled(self, epoch: int, rows: SharedRows | StoredRows) -> None:
        """The rows in an order that nobody knows, before the first step with them is computed.

        With secret weights, epochs that are shuffled anew (G-Shuff) need not be kept: nothing is opened within one, and
        checkpoints lie between them.
        """
        if self._every and (self.plan.opens_sums or not self.plan.shuffles_epochs):
            self._shuffled.save(epoch, vars(rows))

    def kept_shuffled(self, epoch: int, rows: SharedRows | StoredRows) -> SharedRows | StoredRows:
        """The rows in the order that was drawn for ``epoch``: it is drawn once. They take the place of ``rows`` if
        these lie in files."""
        if isinstance(rows, StoredRows):
            return StoredRows(**self._shuffled.load(self.party, epoch, vars(rows)))  # type: ignore[arg-type]
        return SharedRows(**self._shuffled.load(self.party, epoch))  # type: ignore[arg-type]

    async def release(self) -> list[np.ndarray]:
        """Open the model, all layers, to the clients: its shares lie on all three disks before, and all three know that
        it is released. Returns the layers that servers may know: none, where the weights are secret."""
        last = self.plan.schedule.num_steps
        if self.first_step < last:
            self.directory.save(last, *self.layers)
        with self.party.phase("release"):
            # one honest server's message opens it to a client that has the shares of a corrupted one
            await self._releases.confirm(last, everywhere=True)
        if self._joint is not None:
            self._joint.forget_before(self.plan.schedule.num_steps + self.plan.factorisation.bands + MOST_ROWS)
        self._shuffled.discard()
        release_model(self.party, self.plan, refmpc.concatenate([layer.values.reshape(-1) for layer in self.layers]))
        return []
