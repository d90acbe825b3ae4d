"""The workloads on refmpc: three processes, all workloads in one run.

The time of a repetition is that of the slowest party, from a common start. The training step is the whole step of
G-BMF, noise included: the thread of a real run makes each step's share of later noise beside the step, and the step
ends when both are done. A repetition is the mean of several steps in a row, after some that are not counted, because a
run consists of hundreds: the first one records what later ones repeat, and fills caches. For the error the noise, known
here to the measurement alone, is subtracted.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import refmpc
from accel.prg import KEY_BYTES, Stream
from accel.validate import require_choice
from bench.comparison.workloads import Workload
from bench.measure import in_step
from bench.shapes import step_plan
from protocols.plan.run_plan import Plan
from protocols.plan.scales import EMBEDDING_BITS, GRADIENT_BITS
from protocols.server.open_training import own_addend, public_inputs
from protocols.server.server_noise import NoiseAhead
from protocols.step.open_step import step_words
from protocols.step.public_weights import Head, PublicLayer, moved
from protocols.step.secret_step import SharedRows, Weights, gradient_step, rate_input, squared_norms
from refmpc import ArithmeticTensor, Party, Words

__all__ = ["OurResult", "measure_ours"]

RELEASE = "benchmark result"
UNCOUNTED, IN_A_ROW = 3, 5  # steps before a measurement, and of one repetition
HIGH_BIT = 31  # values below 2^15 at 16 bits: the range of MP-SPDZ's sfix

Call = Callable[[], Coroutine[Any, Any, Any]]


@dataclass(frozen=True)
class OurResult:
    """Times of all repetitions (slowest party each), CPU time, exact rounds and bytes of all parties, and what was
    computed."""

    times: list[float]
    cpu: list[float]  # a repetition's mean over the parties
    rounds: int
    bytes: int
    values: np.ndarray


def _share(party: Party, values: np.ndarray, bits: int = 16) -> ArithmeticTensor:
    return party.complete(refmpc.input_from_party(party, 0, values if party.id == 0 else None, values.shape, bits))


def _primitive(party: Party, workload: Workload) -> Call:
    """The protocol call of a primitive; its inputs are shared here, outside the time."""
    shared = [_share(party, values) for values in workload.inputs]
    program = workload.program
    if program == "multiply":
        return lambda: refmpc.multiply_truncate(shared[0], shared[1], 16)
    if program == "matmul":
        return lambda: refmpc.matmul_truncate(shared[0], shared[1], 16)
    if program == "comparison":
        return lambda: refmpc.is_negative(shared[0], 0, HIGH_BIT)
    if program == "relu":
        return lambda: refmpc.relu(shared[0], 0, HIGH_BIT)
    if program == "division":
        return lambda: refmpc.divide(shared[0], shared[1], 0.49, 101.0)
    if program == "reciprocal":
        return lambda: refmpc.reciprocal(shared[0], 2.0**-7, 256.0)
    if program == "clip_factor":
        return lambda: refmpc.clip_factor(shared[0], 512.0)
    if program == "inverse_sqrt":
        return lambda: refmpc.inverse_sqrt(shared[0], 0.09, 1010.0)
    if program == "exp":
        return lambda: refmpc.exp(shared[0], 0.0, high_bit=HIGH_BIT)
    if program == "softmax":
        return lambda: refmpc.softmax(shared[0], 18, HIGH_BIT)
    if program == "gaussian":
        return lambda: refmpc.joint_gaussian(party, workload.arguments)
    require_choice("program", program, ("shuffle",))

    async def shuffle() -> Any:
        return (await refmpc.shuffle(shared))[0]

    return shuffle


class _Step:
    """One training step of G-BMF from the same weights each time, with fresh noise."""

    def __init__(self, party: Party, workload: Workload):
        assert workload.shape is not None
        plan: Plan = step_plan(workload.shape, gradients=workload.arguments[0], weights=workload.weights)
        self.plan, self.training = plan, plan.training
        rows, one_hot, _, _, weights = workload.inputs
        embeddings = _share(party, rows, EMBEDDING_BITS)
        norms = party.complete(squared_norms(embeddings, plan.scales))
        self.rows = SharedRows(embeddings, _share(party, one_hot, 0), norms)
        self.weights = [Weights(_share(party, weights, plan.scales.weight_bits), None)]
        self._rate = rate_input(party, self.training.learning_rate, plan.scales)
        self._party = party
        self._start = [PublicLayer(np.rint(weights * 2.0**plan.scales.weight_bits).astype(np.int64))]
        self._step = party.recorded(self._open_words if plan.opens_sums else self._secret_step)
        self._noise = self._new_noise()
        self.last_noise = self._next_row()

    def _new_noise(self) -> NoiseAhead:
        key = secrets.token_bytes(KEY_BYTES)
        self._steps_left = self.plan.schedule.num_steps - 1
        return NoiseAhead(self.plan, lambda step: Stream(key, step.to_bytes(8, "little")))

    def _next_row(self) -> np.ndarray:
        if self._steps_left == 0:  # a short run: begin the next one
            self._noise.close()
            self._noise = self._new_noise()
        self._steps_left -= 1
        return self._noise.next_row()

    async def _secret_step(
        self, rows: SharedRows, weights: list[Weights], noise: np.ndarray, rate: Words
    ) -> list[Weights]:
        return await gradient_step(rows, weights, noise, rate, self.training, self.plan.scales)

    async def _open_words(self, rows: SharedRows, head: Head, addend: np.ndarray) -> list[Words]:
        return await step_words(rows, head, addend, self.training, self.plan.scales)

    async def _open_step(self) -> np.ndarray:
        """As ``OpenTrainingRun`` does it when it keeps nothing: the weights after the step, in the clear, as
        integers."""
        party, plan = self._party, self.plan
        head = public_inputs(party, self._start, plan)
        (words,) = await self._step(self.rows, head, own_addend(party, self.last_noise, plan))
        sums = await refmpc.open_words(party, words.reshape(-1), plan.scales.truncated_bits, RELEASE)
        rate = plan.scales.rate_word(self.training.learning_rate)
        (after,) = moved(self._start, plan.unflatten(sums), rate, self.training)
        return after.values

    async def __call__(self) -> ArithmeticTensor | np.ndarray:
        self.last_noise = self._next_row()
        if self.plan.opens_sums:
            opened = await self._open_step()
            self._noise.wait()
            return opened
        (after,) = await self._step(self.rows, self.weights, self.last_noise, self._rate)
        self._noise.wait()
        return after.values

    def noise_in_weights(self) -> np.ndarray:
        """What this server's noise of the last step moved the weights by."""
        rate = self.plan.scales.learning_rate_used(self.plan.training.learning_rate) / self.plan.schedule.divisor
        return -rate * self.last_noise * 2.0**-GRADIENT_BITS


def _opened(party: Party, result: Any, step: _Step | None) -> np.ndarray | None:
    """The result in the clear, outside the time."""
    if isinstance(result, np.ndarray):
        return result if step is None else result * 2.0**-step.plan.scales.weight_bits
    if isinstance(result, refmpc.TwoHolderBits):
        result = party.complete(refmpc.bit_to_arithmetic(result))
    return party.complete(refmpc.reveal(result, release=RELEASE))


def _program(
    party: Party, job: tuple[Sequence[Workload], int]
) -> list[tuple[list[float], list[float], int, int, Any, Any]]:
    workloads, repeat = job
    found = []
    for workload in workloads:
        step = _Step(party, workload) if workload.program == "step" else None
        call: Call = step if step is not None else _primitive(party, workload)
        uncounted, calls = (1, 1) if step is None else (UNCOUNTED, IN_A_ROW)
        for _ in range(uncounted):  # compile, record, fill caches
            result = party.complete(call())
        times, cpu = [], []
        rounds = sent = 0
        for _ in range(repeat):
            in_step(party)
            before = party.ledger.total()
            begun, busy = time.perf_counter(), time.process_time()
            for _ in range(calls):
                result = party.complete(call())
            times.append((time.perf_counter() - begun) / calls)
            cpu.append((time.process_time() - busy) / calls)
            after = party.ledger.total()
            rounds, sent = (after.rounds - before.rounds) // calls, (after.bytes_sent - before.bytes_sent) // calls
        noise = None if step is None else step.noise_in_weights()
        opened = _opened(party, result, step)
        found.append((times, cpu, rounds, sent, opened if party.id == 0 else None, noise))
    return found


def measure_ours(
    workloads: Sequence[Workload], repeat: int = 3, network: str = "loopback", parties: str = "processes"
) -> list[OurResult]:
    """Run all workloads ``repeat`` times after one warm-up each, in one run of three parties."""
    job = (list(workloads), repeat)
    run = refmpc.run(
        _program,
        [job] * 3,
        parties=parties,
        network=network,
        timeout=600,
        releases={RELEASE: "synthetic data of a benchmark, nothing private"},
    )
    results = []
    for index in range(len(workloads)):
        rows = [output[index] for output in run.outputs]
        times = [max(each) for each in zip(*(row[0] for row in rows), strict=True)]
        cpu = [sum(each) / 3 for each in zip(*(row[1] for row in rows), strict=True)]
        values = rows[0][4]
        if rows[0][5] is not None:
            values = values - sum(row[5] for row in rows).reshape(values.shape)
        results.append(OurResult(times, cpu, rows[0][2], sum(row[3] for row in rows), values))
    return results
