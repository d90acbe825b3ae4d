"""The run of GL-BMF at one server: what clients share in every step, the step, and what each client is told of it."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import refmpc
from protocols.plan.gl_plan import EMBEDDINGS, PROJECTED, ROW_FACTORS, UP, LayerPlan, block, layer_release
from protocols.plan.gl_shapes import AdapterShape, JacobianShape
from protocols.plan.row_test import NormTest
from protocols.plan.scales import EMBEDDING_BITS
from protocols.server.intake import with_ones_column
from protocols.server.open_training import STATE_EVERY, OpenTrainingRun, own_addend, public_inputs
from protocols.server.step_verification import verify_labels, verify_step
from protocols.server.training import ServerJob, TrainingRun
from protocols.state.commitment import check_columns
from protocols.step.gl_step import BlockOutputs, ClientFactors, block_norms, layer_step
from protocols.step.jacobians import ClientJacobian
from protocols.step.open_gl_step import PublicBlock, open_layer_step, public_block
from protocols.step.secret_step import rate_input
from refmpc import ArithmeticTensor, Party

__all__ = ["GREETING", "LayerRun", "LayerServerJob", "OpenLayerRun", "SecretLayerRun", "layer_run"]

GREETING = "greeting"  # the phase in which clients learn where training begins


@dataclass(frozen=True)
class LayerServerJob:
    """What a server gets: the public plan, and its own private directory. ``keep``: write every release to disk;
    ``synced``: with open weights, so that it survives a power failure too (with secret ones it always does)."""

    plan: LayerPlan
    directory: Path
    keep: bool = False
    synced: bool = True


class LayerRun(TrainingRun):
    """What a run of GL-BMF does with its clients, whether its weights are open or secret; use as a context manager
    around the loop over ``steps()``."""

    plan: LayerPlan
    report_every = 0.0  # after every step: each talks to the clients, so a message more does not matter

    # client-server phase -------------------------------------------------------------------------

    def greet_clients(self) -> None:
        """Make sure that every client has the columns it began with, and tell it where training begins; after a crash,
        send the last release again."""
        self._blocks: dict[tuple[int, int], BlockOutputs] = {}  # by (client, batch): shared once
        check_columns(self.party, self.directory, self.plan.client_names)
        self.party.report({"phase": GREETING, "done": self.first_step, "total": self.plan.schedule.num_steps})
        with self.party.phase(GREETING):
            for name in self.plan.client_names:
                self.party.send("first step", name, [np.array([self.first_step], dtype=np.int64)])
            if self.first_step:  # all three have it on disk, or they would not have agreed on this step
                self._send_to_clients(self._last_words())

    @abstractmethod
    def _last_words(self) -> list[np.ndarray]:
        """This server's words for each client of the last step that was released."""

    def _send_to_clients(self, openings: Sequence[np.ndarray]) -> None:
        for name, words in zip(self.plan.client_names, openings, strict=True):
            refmpc.open_to_client(self.party, words, name, layer_release(name))

    @abstractmethod
    async def step(
        self, embeddings: ArithmeticTensor, labels: ArithmeticTensor, clients: list[ClientFactors | ClientJacobian]
    ) -> list[refmpc.Words]:
        """One noised step; returns this server's words of all that it is about to release."""

    @abstractmethod
    async def release_gradients(self, step: int, openings: list[refmpc.Words]) -> None:
        """Open each client's gradient to it, when all three servers have written what they are about to send."""

    async def receive_labels(self) -> ArithmeticTensor:
        """One-hot labels of all rows, from the label client."""
        shape = self.plan.schedule.num_samples, self.plan.classes
        with self.party.phase("upload"):
            labels = refmpc.input_from_client(self.party, self.plan.client_names[-1], shape, 0)
        if self.plan.tests_steps:
            with self.party.phase("verification"):
                await verify_labels(self.party, self.plan, labels)
        return labels

    async def receive_batch(self, step: int) -> tuple[ArithmeticTensor, list[ClientFactors | ClientJacobian]]:
        """[H 1] of this step's rows and every client's factors (X when the batch comes up for the first time), or
        Jacobians; all tested (``protocols.server.step_verification``)."""
        plan, batch = self.plan, step % self.plan.schedule.num_batches
        shares = np.zeros((2, plan.schedule.batch_size, plan.width + 1), dtype=np.uint64)
        clients: list[ClientFactors | ClientJacobian] = []
        tested: dict[str, list[tuple[ArithmeticTensor, NormTest]]] = {}
        for index, (name, shape) in enumerate(zip(plan.client_names, plan.shapes, strict=True)):
            client: ClientFactors | ClientJacobian
            new: dict[str, ArithmeticTensor] = {}
            if isinstance(shape, JacobianShape):
                embeddings, client = self._receive_jacobian(name, shape)
            else:
                if shape.with_down and (index, batch) not in self._blocks:
                    blocks = self._blocks[index, batch] = await self._receive_blocks(name, shape)
                    new = {block(layer): inputs for layer, inputs in enumerate(blocks.inputs)}
                embeddings, client = self._receive_factors(name, shape)
                client.blocks = self._blocks.get((index, batch))
                up = client.up.reshape(1, -1)
                new |= {PROJECTED: client.projected, UP: up, ROW_FACTORS: client.row_factors.reshape(-1, 1)}
            tests = plan.step_tests(index)
            tested[name] = [(x, test) for what, x in {EMBEDDINGS: embeddings, **new}.items() if (test := tests[what])]
            shares[:, :, shape.columns] = refmpc.unseal(embeddings.shares)
            clients.append(client)
        if plan.tests_steps:
            with self.party.phase("verification"):
                await verify_step(self.party, tested)
        return with_ones_column(self.party, shares), clients

    def _receive_factors(self, name: str, shape: AdapterShape) -> tuple[ArithmeticTensor, ClientFactors]:
        scales, rows = self.plan.adapters, self.plan.schedule.batch_size
        embeddings, projected, up, row_factors = self._receive_parts(
            name,
            ((rows, shape.width), EMBEDDING_BITS),
            ((rows, shape.stacked_rank), scales.projected_bits),
            ((shape.width, shape.stacked_rank), scales.up_bits),
            ((rows,), scales.row_factor_bits),
        )
        return embeddings, ClientFactors(shape, projected, up, row_factors, None)

    def _receive_jacobian(self, name: str, shape: JacobianShape) -> tuple[ArithmeticTensor, ClientJacobian]:
        rows = self.plan.schedule.batch_size
        embeddings, jacobian = self._receive_parts(
            name,
            ((rows, shape.width), EMBEDDING_BITS),
            ((rows, shape.width, shape.parameters), self.plan.adapters.jacobian_bits),
        )
        return embeddings, ClientJacobian(shape, jacobian)

    def _receive_parts(self, name: str, *parts: tuple[tuple[int, ...], int]) -> list[ArithmeticTensor]:
        """One message of a client, divided into tensors of these shapes and scales."""
        sizes = [int(np.prod(shape)) for shape, _ in parts]
        with self.party.phase("upload"):
            words = refmpc.input_from_client(self.party, name, (sum(sizes),), 0)
        ends = np.cumsum(sizes).tolist()
        return [
            words[end - size : end].reshape(*shape).reinterpret(bits)
            for (shape, bits), size, end in zip(parts, sizes, ends, strict=True)
        ]

    async def _receive_blocks(self, name: str, shape: AdapterShape) -> BlockOutputs:
        rows = self.plan.schedule.batch_size
        inputs = self._receive_parts(name, *(((rows, width), EMBEDDING_BITS) for width in shape.block_widths))
        with self.party.phase("norms"):
            return BlockOutputs(inputs, await block_norms(inputs, self.plan))


class SecretLayerRun(LayerRun):
    """GL-BMF with secret weights.

    With ``keep`` all three servers have written a release, and said so, before any of them sends its words
    (``protocols.state.releases``): a server that dies with words of the others in hand finds the same words on all
    disks, and they are sent again, never computed again. Without, a run is begun once and cannot be resumed.
    """

    def __init__(self, party: Party, job: LayerServerJob):
        # every step is written by release_gradients
        super().__init__(party, ServerJob(job.plan, job.directory, 0), keeps_releases=job.keep)
        self._keep = job.keep
        self._recorded_layer_step = party.recorded(functools.partial(layer_step, plan=job.plan))

    def _last_words(self) -> list[np.ndarray]:
        words = self._releases.words(self.first_step)
        self._releases.mark(self.first_step)
        return [words[str(index)] for index in range(len(self.plan.client_names))]

    async def step(
        self, embeddings: ArithmeticTensor, labels: ArithmeticTensor, clients: list[ClientFactors | ClientJacobian]
    ) -> list[refmpc.Words]:
        """One noised step; returns this server's words of each client's layer gradient."""
        rate = rate_input(self.party, self.plan.learning_rate(self.party.step), self.plan.scales)
        with self.party.phase("training"):
            openings: list[refmpc.Words]
            self.layers[0], openings = await self._recorded_layer_step(
                embeddings, labels, clients, self.layers[0], self.own_noise(), rate
            )
        return openings

    async def release_gradients(self, step: int, openings: list[refmpc.Words]) -> None:
        """Open each client's gradient to it, when all three servers have written what they are about to send."""
        if self._keep:
            with self.party.phase("checkpoint"):
                by_client = {str(index): refmpc.unseal(words) for index, words in enumerate(openings)}
                await self._releases.write(step + 1, by_client, *self.layers)
        with self.party.phase("layer gradients"):
            self._send_to_clients(openings)


class OpenLayerRun(LayerRun, OpenTrainingRun):
    """GL-BMF with open weights: a step's words, of the global layer and of all clients' layers, are one record that all
    three have written before any of them is sent, to the servers or to a client (``protocols.state.step_log``)."""

    def __init__(self, party: Party, job: LayerServerJob):
        every = STATE_EVERY if job.keep else 0
        OpenTrainingRun.__init__(self, party, ServerJob(job.plan, job.directory, every, job.synced))
        self._recorded_layer_step = party.recorded(functools.partial(open_layer_step, plan=job.plan))

    def _is_finished(self) -> bool:
        return self._every > 0 and super()._is_finished()  # clients are sent their last gradient again

    def _last_words(self) -> list[np.ndarray]:
        return self._by_client(self._opened.words(self.first_step - 1))

    def _by_client(self, words: np.ndarray) -> list[np.ndarray]:
        return [words[part] for part in self.plan.noise_slices()]

    async def step(
        self, embeddings: ArithmeticTensor, labels: ArithmeticTensor, clients: list[ClientFactors | ClientJacobian]
    ) -> list[refmpc.Words]:
        """One noised step; returns this server's words of the global sums, then of each client's layer gradient."""
        plan, party = self.plan, self.party
        with party.phase("training"):
            head = public_inputs(party, self.model, plan)
            blocks = [self._public_block(shape.columns) for shape in plan.shapes]
            addend = own_addend(party, self.own_noise(), plan)
            words: list[refmpc.Words] = await self._recorded_layer_step(
                embeddings, labels, clients, head, blocks, addend
            )
        return words

    def _public_block(self, columns: slice) -> PublicBlock:
        (layer,), public = self.model, self.party.machine.public
        found = public_block(layer.values[columns], self.plan.scales.weight_bits, self.plan.adapters)
        return PublicBlock(*(replace(matrix, words=public(matrix.words)) for matrix in (found.block, found.gram)))

    async def release_gradients(self, step: int, openings: list[refmpc.Words]) -> None:
        """Open the global sums to the servers and each client's gradient to it, when all three have written their
        words."""
        words = np.concatenate([refmpc.unseal(part).reshape(-1) for part in openings])
        await self._keep_and_open(step, words)
        with self.party.phase("layer gradients"):
            self._send_to_clients(self._by_client(words))


def layer_run(party: Party, job: LayerServerJob) -> LayerRun:
    """The run that the plan asks for."""
    return OpenLayerRun(party, job) if job.plan.opens_sums else SecretLayerRun(party, job)
