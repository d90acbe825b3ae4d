"""The end-to-end audit: the protocols on real shares, many canaries at once, seen as a corrupted server could at best.

    python -m vfl.dp.audit --protocol g_bmf

Every record is a canary with a column of its own: there, it has the largest row in that column, so its gradient is the
worst one, clipped to γ; absent, it has one unit of the grid there, so it contributes nothing but stays findable. With
open weights (unless asked otherwise) every server sees all noised, cut gradient sums y_t. With secret ones the observer
is told more than any server: it adds up the shares of all weights after every step, which gives the y_t. It subtracts
the noise that one server drew itself, and looks at each canary's own column, where no other record contributes. What is
left there is the canary's contribution and the two honest servers' noise, independent between columns. The score is the
matched filter over all steps, in the coordinates of Ω̂, where the noise is white: its deviation is that of the claim,
and its shift by a canary at most the sensitivity (γ·R/√(R²+1) a step here: the constant column takes the rest of γ).

The secret order of G-Shuff is reconstructed too, so its claim is the one proven for any order. In GL-BMF the weights
stay near zero, so the layers' gradients do: what is opened to clients is their noise, and its deviation is compared.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import refmpc
from accel.validate import require_choice, require_integer, require_real
from protocols.methods.registry import METHODS, method
from protocols.plan.run_plan import Plan
from protocols.plan.scales import EMBEDDING_BITS, RELEASE_BITS
from protocols.server.gl_training import OpenLayerRun, SecretLayerRun
from protocols.server.intake import receive_rows
from protocols.server.open_training import OpenTrainingRun
from protocols.server.server_noise import insecure_total_noise
from protocols.server.training import ServerJob, TrainingRun
from protocols.state.checkpoint import ServerDirectory
from protocols.step.secret_step import SharedRows
from refmpc import ArithmeticTensor, Party
from refmpc.primitives.opening import joined_words
from vfl.data.scaling import RowBound
from vfl.dp import DeltaWarning
from vfl.dp.protocol_audit import ProtocolScores, Scores
from vfl.federation import Federation
from vfl.local.client import LocalUpdate, make_clients
from vfl.training import TrainingConfig

__all__ = ["protocol_scores"]

ROW_BOUND = 8.0
CLIP_NORM = 1.0
CLASSES = 2
BATCHES, EPOCHS, BATCH_SIZE = 2, 2, 256
CANARIES = BATCH_SIZE  # in one run, a column each: the whole first batch, whose records move most that follows
UNIT = 2.0**-EMBEDDING_BITS  # an absent record's row: one step of the grid of embeddings


@dataclass
class Observation:
    """One server's shares, step by step: of the weights (one more than steps), the rows used, and words opened."""

    weights: list[np.ndarray]
    rows: list[np.ndarray]
    words: list[list[np.ndarray]]
    sums: list[np.ndarray] = field(default_factory=list)  # opened to all servers: integers at RELEASE_BITS


class ObservedRun(TrainingRun):
    """The training as it is, with a note of this server's shares before and after every step."""

    def __init__(self, party: Party, job: ServerJob):
        super().__init__(party, job)
        self.seen = Observation([_words(self.layers[0].values)], [], [])

    async def gradient_step(self, rows: SharedRows) -> None:
        self.seen.rows.append(_words(rows.embeddings))
        await super().gradient_step(rows)
        self.seen.weights.append(_words(self.layers[0].values))


class ObservedOpenRun(OpenTrainingRun):
    """The training with open weights, with a note of the rows used and of all that is opened."""

    def __init__(self, party: Party, job: ServerJob):
        super().__init__(party, job)
        self.seen = Observation([], [], [])

    async def gradient_step(self, rows: SharedRows) -> None:
        self.seen.rows.append(_words(rows.embeddings))
        await super().gradient_step(rows)

    def _move(self, step: int, sums: np.ndarray) -> None:
        super()._move(step, sums)
        self.seen.sums.append(sums.copy())


class ObservedLayerRun(SecretLayerRun):
    """The same for GL-BMF."""

    def __init__(self, party: Party, job: Any):
        super().__init__(party, job)
        self.seen = Observation([_words(self.layers[0].values)], [], [])

    async def step(self, embeddings: ArithmeticTensor, labels: ArithmeticTensor, clients: Any) -> list[refmpc.Words]:
        self.seen.rows.append(_words(embeddings))
        openings = await super().step(embeddings, labels, clients)
        self.seen.weights.append(_words(self.layers[0].values))
        self.seen.words.append([refmpc.unseal(words) for words in openings])
        return openings


class ObservedOpenLayerRun(OpenLayerRun):
    """GL-BMF with open weights: the rows used, all that is opened to servers, and this server's words for clients."""

    def __init__(self, party: Party, job: Any):
        super().__init__(party, job)
        self.seen = Observation([], [], [])

    async def step(self, embeddings: ArithmeticTensor, labels: ArithmeticTensor, clients: Any) -> list[refmpc.Words]:
        self.seen.rows.append(_words(embeddings))
        openings = await super().step(embeddings, labels, clients)
        self.seen.words.append([refmpc.unseal(words) for words in openings[1:]])
        return openings

    def _move(self, step: int, sums: np.ndarray) -> None:
        super()._move(step, sums)
        self.seen.sums.append(sums.copy())


def _words(tensor: ArithmeticTensor) -> np.ndarray:
    return np.array(refmpc.unseal(tensor.first))


async def _servers(party: Party, job: ServerJob) -> Observation:
    train = method(job.plan.protocol).train
    with (ObservedOpenRun if job.plan.opens_sums else ObservedRun)(party, job) as run:
        await train(run, await receive_rows(party, job.plan, None, run.directory))
    return run.seen


async def _layer_servers(party: Party, job: Any) -> Observation:
    with (ObservedOpenLayerRun if job.plan.opens_sums else ObservedLayerRun)(party, job) as run:
        await method(job.plan.protocol).train(run)
    return run.seen


# data and plan -----------------------------------------------------------------------------------


def _canaries(present: np.ndarray, joint: bool) -> Federation:
    """Two clients with half of the columns each; canaries have one column each, all other rows are zero."""
    rows = np.zeros((BATCHES * BATCH_SIZE, CANARIES))
    rows[:CANARIES] = np.diag(np.where(present, ROW_BOUND, UNIT))
    labels = np.zeros(len(rows), dtype=np.int64)
    half = CANARIES // 2
    columns: list[npt.NDArray[np.floating]] = [rows[:, :half], rows[:, half:]]
    bounds = [RowBound(ROW_BOUND, "clip"), RowBound(ROW_BOUND, "clip")]
    if not joint:
        clients = make_clients(columns, labels, bounds)
        return Federation(clients, CLASSES, labels, columns, [], math.hypot(ROW_BOUND, ROW_BOUND))
    blocks: list[list[npt.NDArray[np.floating]]] = [[np.full((len(rows), 2), 0.5)] for _ in columns]
    update = LocalUpdate("released", learning_rate=1e-6)
    clients = make_clients(columns, labels, bounds, block_outputs=blocks, rank=2, alpha=1.0, update=update)
    return Federation(clients, CLASSES, labels, columns, blocks, math.hypot(ROW_BOUND, ROW_BOUND))


def _plan(protocol: str, epsilon: float, delta: float, weights: str) -> Plan:
    training = TrainingConfig(
        epochs=EPOCHS,
        batch_size=BATCH_SIZE,
        learning_rate=0.01,
        clip_norm=CLIP_NORM,
        epsilon=epsilon,
        delta=delta,
        accounting="any-order",
        weights=weights,
    )
    federation = _canaries(np.ones(CANARIES, dtype=bool), method(protocol).stays)
    with warnings.catch_warnings():
        # of the canaries' number only: a large δ makes the audit sharp, as what decides is seen often
        warnings.simplefilter("ignore", DeltaWarning)
        return method(protocol).plan(federation, training)


# one run -----------------------------------------------------------------------------------------


def _run(plan: Plan, federation: Federation, directory: Path) -> list[Observation]:
    """The three servers' notes of one run in threads."""
    chosen = method(plan.protocol)
    program = _layer_servers if chosen.stays else _servers
    jobs, clients = chosen.server_jobs(plan, directory, 0, True), chosen.clients(plan, federation)
    return refmpc.run(program, jobs, clients=clients, releases=plan.releases, timeout=120).outputs


def _added(shares: list[np.ndarray]) -> np.ndarray:
    """The secret integers, from one share of each server."""
    words: np.ndarray = shares[0] + shares[1] + shares[2]
    return words.view(np.int64)


def _sums(plan: Plan, seen: list[Observation]) -> np.ndarray:
    """Every y_t, (steps × rows × classes): opened, or from secret weights: W_{t+1} = W_t − k·y_t in integers,
    exactly."""
    if plan.opens_sums:
        return np.stack(seen[0].sums).reshape(-1, *plan.layer_shapes[0]) * 2.0**-RELEASE_BITS
    weights = np.stack([_added([one.weights[t] for one in seen]) for t in range(len(seen[0].weights))])
    words = [plan.scales.rate_word(plan.learning_rate(step)) for step in range(plan.schedule.num_steps)]
    sums: np.ndarray = -np.diff(weights, axis=0) / np.array(words)[:, None, None] * 2.0**-RELEASE_BITS
    return sums


def _taking_part(plan: Plan, seen: list[Observation]) -> np.ndarray:
    """(steps × canaries): whose row is in the batch; its own column is the one that is not zero."""
    steps = plan.schedule.num_steps
    return np.stack([_added([one.rows[t] for one in seen])[:, :CANARIES].any(axis=0) for t in range(steps)])


def _whitened(plan: Plan, columns: np.ndarray) -> np.ndarray:
    """Ω̂ times (steps × anything)."""
    strategy = plan.factorisation.strategy_coefficients()
    return np.stack([np.convolve(strategy, column)[: len(column)] for column in columns.T], axis=1)


def _scores_of_run(
    plan: Plan, seen: list[Observation], own_noise: Callable[[int], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """A score for each canary, and the whitened noise that was opened to clients (none in G-BMF and G-Shuff)."""
    sums, taking_part = _sums(plan, seen), _taking_part(plan, seen)
    own = np.stack([own_noise(step) for step in range(plan.schedule.num_steps)])
    size = sums[0].size
    left = sums - own[:, :size].reshape(sums.shape)
    # δ of label 0 at W ≈ 0 is (−1/2, 1/2): the direction of every canary's gradient in its column
    along = (left[:, :CANARIES] @ np.array([-1.0, 1.0])) / math.sqrt(2)
    expected = _whitened(plan, taking_part.astype(float))
    scores = np.sum(_whitened(plan, along) * expected, axis=0) / np.linalg.norm(expected, axis=0)
    opened = []
    for step in range(len(seen[0].words)):
        words = [np.concatenate(one.words[step]) for one in seen]
        opened.append(joined_words(words, plan.scales.truncated_bits, RELEASE_BITS) - own[step, size:])
    return scores, _whitened(plan, np.stack(opened)).ravel() if opened else np.empty(0)


def protocol_scores(
    protocol: str,
    *,
    epsilon: float,
    delta: float,
    trials: int,
    noise_scale: float = 1.0,
    seed: int | None = None,
    progress: Callable[[int], None] | None = None,
    weights: str | None = None,
) -> ProtocolScores:
    """Runs of 256 canaries each until there are ``trials``; the corrupted server changes from run to run.

    ``noise_scale`` below 1 plants the fault that the audit must see: servers draw that much of the calibrated noise.
    ``seed`` fixes which canaries are there; noise and masks are always fresh. About half a second a run. ``weights``:
    open, unless given.
    """
    require_choice("protocol", protocol, METHODS)
    require_real("noise_scale", noise_scale, 0, open_low=True)
    runs = math.ceil(require_integer("trials", trials, 1) / CANARIES)
    plan = _plan(protocol, epsilon, delta, weights or "open")
    weak = replace(plan, noise=replace(plan.noise, noise_multiplier=noise_scale * plan.noise.noise_multiplier))
    coins = np.random.default_rng(seed)
    values, worlds, opened = [], [], []
    for number in range(runs):
        present = coins.random(CANARIES) < 0.5
        federation = _canaries(present, method(protocol).stays)
        with tempfile.TemporaryDirectory(prefix="audit-") as folder:
            seen = _run(weak, federation, Path(folder))
            stream = ServerDirectory(Path(folder) / f"server-{number % 3}").noise_stream(weak.fingerprint)
            scores, noise = _scores_of_run(plan, seen, insecure_total_noise(weak, [stream]))
        values.append(scores)
        worlds.append(present)
        opened.append(noise)
        if progress is not None:
            progress(CANARIES)
    claim, deviation, beside = plan.claim, plan.noise.target_std, np.concatenate(opened)
    assert claim.gaussian_multiplier is not None
    return ProtocolScores(
        protocol=protocol,
        claimed_epsilon=claim.proven_pair()[0],
        delta=claim.delta,
        allowed_shift=deviation / claim.gaussian_multiplier,
        claimed_deviation=deviation,
        steps=plan.schedule.num_steps,
        runs=runs,
        scores=Scores(np.concatenate(values), np.concatenate(worlds)),
        layer_deviation=(deviation, float(beside.std()), len(beside)) if len(beside) else None,
    )
