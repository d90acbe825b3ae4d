"""The training run of one server with open weights: every step opens its noised gradient sums to all three servers.

A run that keeps checkpoints keeps every step (``protocols.state.step_log``), for one more round a step. A run that
keeps none cannot be resumed, because nobody would know what it has opened; when it is finished, its model can be handed
over again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

import refmpc
from accel import kernels
from protocols.plan.plausibility import require_possible_model, require_possible_sums
from protocols.plan.run_plan import SUMS_RELEASE, Plan
from protocols.server.averaging import Iterates
from protocols.server.joint_noise import MOST_ROWS
from protocols.server.training import ServerJob, TrainingRun, release_model
from protocols.state.checkpoint import confirm_on_disk
from protocols.state.step_log import OpenedSteps, agree_on_opened
from protocols.step.hidden_step import hidden_weights
from protocols.step.open_step import step_words
from protocols.step.public_weights import Head, PublicLayer, moved, public_start, rounded_head
from protocols.step.secret_step import SharedRows
from refmpc import ArithmeticTensor, Party, Words
from refmpc.core.words import seal, unseal
from refmpc.primitives.opening import unbiased_addend, word_type
from vfl.hidden import WEIGHT_BITS, HiddenClip

__all__ = ["PUBLIC_ROWS", "STATE_EVERY", "OpenTrainingRun", "durability", "own_addend", "public_inputs", "training_run"]

PUBLIC_ROWS = "public rows"  # the phase of reports about them
STATE_EVERY = 100  # steps after which the state is written anew, where nobody says otherwise


def training_run(party: Party, job: ServerJob) -> TrainingRun:
    """The run that the plan asks for."""
    return OpenTrainingRun(party, job) if job.plan.opens_sums else TrainingRun(party, job)


def durability(plan: Plan, checkpoint_every: int, synced: bool) -> str:
    """What a run with open weights survives, for the text that is kept with it; empty for secret weights."""
    if not plan.opens_sums:
        return ""
    if checkpoint_every == 0:
        return (
            "What a server is about to open is not kept: if a server dies, the run cannot be resumed, because no "
            "step may be "
            "opened with two values."
        )
    survived = "a power failure (fsync)" if synced else "the end of its process (kill -9), not a power failure"
    return (
        "All three servers have written what they are about to open before any of them sends it, so no step is "
        "opened with "
        f"two values; written means that it survives {survived}."
    )


def public_inputs(party: Party, model: Sequence[PublicLayer], plan: Plan) -> Head:
    """What a step takes of the public weights. Weights that the run has no ranges for end it before anything is
    computed with them."""
    _require_possible(plan, model)
    scales, public = plan.scales, party.machine.public
    if scales.smooth is not None:
        used = hidden_weights(model, scales.weight_bits, scales.smooth)
        return Head(public(used.others[-1]), WEIGHT_BITS, 0.0, hidden=used.at(party))
    assert not isinstance(scales.bounded, HiddenClip)
    head = rounded_head(model[-1].values, scales.weight_bits, scales.layers[-1].reach, scales.bounded)
    return replace(head, words=public(head.words))


def _require_possible(plan: Plan, model: Sequence[PublicLayer]) -> None:
    require_possible_model(plan, [layer.values * 2.0**-plan.scales.weight_bits for layer in model])


def own_addend(party: Party, noise: np.ndarray, plan: Plan) -> np.ndarray:
    """What this server adds to its summands: its noise at the gradients' scale, and what makes the cut of the global
    sums unbiased (a client adds that itself)."""
    lifted = np.empty(noise.shape, dtype=np.uint64)
    constant = int(unbiased_addend(party, plan.scales.truncated_bits))
    kernels.lifted(noise, plan.scales.noise_shift, constant, plan.global_parameters, lifted)
    return lifted


class OpenTrainingRun(TrainingRun):
    """State of the training at one server. ``model`` is public and the same at all three."""

    def __init__(self, party: Party, job: ServerJob):
        plan = job.plan
        kind = word_type(plan.scales.truncated_bits)
        self._opened = OpenedSteps(job.directory, kind, plan.parameters, synced=job.synced)
        self._last_sums: np.ndarray | None = None  # what the step before has opened
        self.model: list[PublicLayer] = []
        self.iterates = Iterates(plan)
        self._done = 0  # steps whose sums are in the model
        try:
            super().__init__(party, job, keeps_releases=job.checkpoint_every > 0)
        except BaseException:
            self._opened.close()
            raise
        self._recorded_words = party.recorded(self._secret_words)

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._opened.close()

    # going on ------------------------------------------------------------------------------------

    def _is_finished(self) -> bool:
        return self._opened.finished

    def _agree(self) -> int:
        plan = self.plan
        self.model = public_start(plan.start, plan.scales, plan.training)
        position, have_state = agree_on_opened(self.party, self.directory, self._opened, plan.schedule.num_steps)
        if position == 0:
            self._opened.discard()
            return 0
        kept = self._opened.resume(position, from_state=have_state)
        self._restore(kept.state)
        self._done = kept.step
        for step, sums in enumerate(kept.sums, kept.step):
            self._move(step, sums)
        if kept.words is not None:  # all three have theirs on disk: sent again, word for word
            self._opened.mark(position - 1)
            self.party.step = position - 1
            with self.party.phase("opened again"):
                self._move(position - 1, self.party.complete(self._open(kept.words)))
        return position

    def _flat(self) -> np.ndarray:
        columns = zip(*((layer.values, *layer.memory) for layer in self.model), strict=True)
        parts = [part for column in columns for part in column]
        return np.concatenate([*(part.reshape(-1) for part in parts), self.iterates.flat()])

    def _restore(self, flat: np.ndarray) -> None:
        flat, rest = np.split(flat, [len(flat) - self.iterates.size])
        self.iterates.restore(rest)
        columns = [self.plan.unflatten(part) for part in flat.reshape(-1, self.plan.global_parameters)]
        self.model = [PublicLayer(values, tuple(memory)) for values, *memory in zip(*columns, strict=True)]
        _require_possible(self.plan, self.model)

    # one step ------------------------------------------------------------------------------------

    async def gradient_step(self, rows: SharedRows) -> None:
        """One noised step of SGD on these rows; its sums are opened."""
        noise, plan, step = await self.noise_row(), self.plan, self.party.step
        with self.party.phase("training"):
            head = public_inputs(self.party, self.model, plan)
            parts = await self._recorded_words(rows, head, own_addend(self.party, noise, plan))
            words = np.concatenate([unseal(part).reshape(-1) for part in parts])
        await self._keep_and_open(step, words)

    async def _keep_and_open(self, step: int, words: np.ndarray) -> None:
        if self._every:
            with self.party.phase("checkpoint"):
                await self._keep(step, words)
        with self.party.phase("training"):
            self._move(step, await self._open(words))

    async def _secret_words(self, rows: SharedRows, head: Head, addend: np.ndarray) -> list[Words]:
        return await step_words(rows, head, addend, self.plan.training, self.plan.scales)

    async def _keep(self, step: int, words: np.ndarray) -> None:
        """All three have written their words when this returns, and this server has marked it. 1 round."""
        if step == 0:
            self._opened.keep_state(0, self._flat())
        self._opened.write(step, words, self._last_sums)
        await confirm_on_disk("the words are written")
        self._opened.mark(step)

    async def _open(self, words: np.ndarray) -> np.ndarray:
        """The sums of the global model, of all that this server has words of."""
        own = seal(words[: self.plan.global_parameters])
        return await refmpc.open_words(self.party, own, self.plan.scales.truncated_bits, SUMS_RELEASE)

    def _move(self, step: int, sums: np.ndarray) -> None:
        plan = self.plan
        require_possible_sums(plan, step, sums)
        word = plan.scales.rate_word(plan.learning_rate(step))
        noise = plan.noise_square(step)
        self.model = moved(self.model, plan.unflatten(sums), word, plan.training, step, noise)
        self._last_sums = sums
        self._done = step + 1
        known = len(self.iterates.curve)
        self.iterates.note(step, self.model)
        if len(self.iterates.curve) > known:
            self._report_curve()

    def _report_curve(self) -> None:
        """The learning curve on public rows, as it is now."""
        if self.iterates.curve:
            curve = [[point.epoch, point.accuracy, point.loss] for point in self.iterates.curve]
            found = {"done": len(curve), "total": self.plan.schedule.epochs, "curve": curve}
            self.party.report({"phase": PUBLIC_ROWS, **found, "best": self.iterates.best_epoch})

    @property
    def has_stopped(self) -> bool:
        """Whether the public rows say that going on is of no use."""
        return self.iterates.has_stopped

    def _checkpoint(self, step: int) -> int:
        return self._opened.keep_state_later(step, self._flat())

    # the end -------------------------------------------------------------------------------------

    async def release(self) -> list[np.ndarray]:
        """Hand the model over to the clients; the servers have it."""
        last, bits = self.plan.schedule.num_steps, self.plan.scales.weight_bits
        self._opened.finish(self._done, self._flat())
        self._report_curve()
        self._shuffled.discard()
        if self._joint is not None:
            self._joint.forget_before(last + self.plan.factorisation.bands + MOST_ROWS)
        layers = self.iterates.released(self.model)
        released = [layer * 2.0**-bits for layer in layers]
        require_possible_model(self.plan, released)
        flat = np.concatenate([layer.reshape(-1) for layer in layers])
        zeros = ArithmeticTensor(self.party, np.zeros((2, len(flat)), dtype=np.uint64), 0)
        release_model(self.party, self.plan, (zeros + flat).reinterpret(bits))
        return released
