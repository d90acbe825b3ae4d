"""The training loop of the twins: same batches, same clipping, same noise as the secure protocols.

Frozen embeddings: ``train_frozen`` (Plain without local training, G-Shuff, G-BMF). LoRA clients:
``train_with_adapters`` (GL-BMF, GL-Sub). One step is the same line of figures everywhere:

    ḡ = Σ_j c_j g_j,   g̃ = (ḡ + noise)/B,   v ← βv + g̃,   θ ← αθ − ηv  (or, with Adam, θ ← αθ − ηu).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from accel.validate import require
from vfl.bounded_softmax import BoundedSoftmax
from vfl.dp.claim import NO_CLAIM, Claim
from vfl.federation import Federation
from vfl.gradients import GlobalModel, clipped_gradient, with_ones
from vfl.hidden import HiddenClip, activation
from vfl.local.client import Client
from vfl.losses import OneOutput, output_count, score
from vfl.progress import progress_bar
from vfl.training import ADAM_FLOOR, ADAM_MEMORY, Schedule, TrainingConfig, averaging_share
from vfl.twins.mechanisms import NoisePlan
from vfl.twins.noise import StepNoise

__all__ = [
    "AdapterRun",
    "Optimiser",
    "Rows",
    "RowsOfStep",
    "TwinResult",
    "adapter_parameters",
    "train_frozen",
    "train_with_adapters",
]

Floats = npt.NDArray[np.floating]
Rows = slice | npt.NDArray[np.int64]
RowsOfStep = Callable[[int], Rows]


@dataclass
class TwinResult:
    """What a run gives back; ``curve`` holds (epoch, test accuracy) and is outside the claim. In a regression R² stands
    for accuracy."""

    method: str
    model: GlobalModel
    test_accuracy: float
    num_steps: int
    seconds: float
    plan: NoisePlan | None
    config: TrainingConfig
    curve: list[tuple[int, float]] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    clipped_share: float = 0.0

    @property
    def claim(self) -> Claim | None:
        """That nothing is claimed: the noise follows from a seed, or was handed in. ``plan`` holds the claim of the
        mechanism."""
        return None if self.plan is None else self.plan.claim.as_simulation()

    def summary(self) -> dict[str, Any]:
        """Plain numbers for --json."""
        plan, claim = self.plan, self.claim
        return {
            **({} if claim is None else {"no_claim": NO_CLAIM}),
            "method": self.method,
            "epsilon": None if plan is None else self.config.epsilon,
            "delta": None if plan is None else self.config.delta,
            "noise_multiplier": None if plan is None else plan.noise_multiplier,
            "test_accuracy": self.test_accuracy,
            "num_steps": self.num_steps,
            "seconds": self.seconds,
            "clipped_share": self.clipped_share,
            "curve": self.curve,
            "notes": self.notes,
            "claim": None if claim is None else json.loads(claim.to_json()),
        }


class Optimiser:
    """Moves weights, of any shape, by noised mean gradients: ``protocols.step.public_weights`` in floating point."""

    def __init__(self, config: TrainingConfig, like: Floats) -> None:
        self._config = config
        self._mean, self._square = np.zeros_like(like), np.zeros_like(like)
        self._steps = 0

    def move(self, weights: Floats, gradient: Floats, rate: float, noise_std: float | Floats) -> None:
        """One step, in place. ``noise_std``: of the noise in ``gradient``."""
        config = self._config
        if config.optimiser == "adam":
            change = self._adam(gradient, noise_std)
        elif config.momentum:
            self._mean *= config.momentum
            self._mean += gradient
            change = self._mean
        else:
            change = gradient
        if config.weight_decay != 1.0:
            weights *= config.weight_decay
        weights -= weights.dtype.type(rate) * change

    def _adam(self, gradient: Floats, noise_std: float | Floats) -> Floats:
        self._steps += 1
        first, second = (min(self._steps, memory) for memory in ADAM_MEMORY)
        variance = np.square(noise_std).astype(gradient.dtype)
        self._mean += (gradient - self._mean) / first
        self._square += (np.square(gradient) - variance - self._square) / second
        least = np.maximum(variance / ADAM_FLOOR**2, np.finfo(gradient.dtype).tiny)
        return np.clip(self._mean / np.sqrt(np.maximum(self._square, least)), -1.0, 1.0)


class _Parameters:
    """The flat parameter vector with its optimiser; the model's layers are views into it."""

    def __init__(self, model: GlobalModel, config: TrainingConfig) -> None:
        self.model = model
        self.flat = model.flatten().astype(config.dtype)
        model.layers = model.unflatten(self.flat)
        self.config = config
        self._optimiser = Optimiser(config, self.flat)
        self._average = np.zeros_like(self.flat)

    def note(self, step: int, num_steps: int) -> None:
        """Take the weights after ``step`` into the average, if one is asked for."""
        if share := averaging_share(self.config.average, step, num_steps):
            self._average += (self.flat - self._average) * self.flat.dtype.type(share)

    def finish(self) -> None:
        """The model becomes its average, if one is asked for."""
        if self.config.average != "none":
            self.flat[:] = self._average

    def step(self, mean_gradient: Floats, learning_rate: float, noise_std: float) -> None:
        self._optimiser.move(self.flat, mean_gradient, learning_rate, noise_std)


def start_model(federation: Federation, config: TrainingConfig, initial: GlobalModel | None) -> GlobalModel:
    if initial is not None:
        require(
            initial.layers[0].shape[0] == federation.width + 1,
            "initial",
            initial.layers[0].shape,
            f"a first layer with {federation.width + 1} rows",
        )
        return initial.copy()
    outputs, waved = (
        output_count(config.task, federation.classes, config.class_weights),
        hidden_clip(federation, config),
    )
    return GlobalModel.initial(
        federation.width,
        outputs,
        config.hidden,
        seed=config.seed,
        dtype=config.dtype,
        activation=activation(config.hidden, config.weights),
        deviation=1.0 if waved is None else waved.start_deviation(federation.width),
    )


def hidden_clip(federation: Federation, config: TrainingConfig) -> HiddenClip | None:
    """What is public about the clip of hidden layers with waves."""
    if activation(config.hidden, config.weights) != "tanh":
        return None
    bound, width = federation.row_bound, federation.width
    return HiddenClip.of_rows(config.task, config.clip_norm, bound, width, config.loss, federation.classes)


def train_frozen(
    method: str,
    federation: Federation,
    config: TrainingConfig,
    plan: NoisePlan | None,
    rows_of_step: RowsOfStep,
    num_steps: int,
    noise: StepNoise,
    *,
    schedule: Schedule | None = None,
    clip: bool = True,
    norm_limit: float | None = None,
    initial: GlobalModel | None = None,
    embeddings: Floats | None = None,
    labels: npt.NDArray[Any] | None = None,
    evaluate_every: int = 0,
    progress: bool = False,
) -> TwinResult:
    """Train the global model on frozen embeddings. ``embeddings``/``labels`` replace the clients' (LDP). ``schedule``:
    that of a secret order; by default batches of the aligned rows."""
    schedule = schedule or config.steps(federation.num_samples)
    started = time.perf_counter()
    model = start_model(federation, config, initial)
    parameters = _Parameters(model, config)
    rows = federation.rows() if embeddings is None else embeddings
    rows_with_one = with_ones(rows.astype(config.dtype, copy=False))
    squared = np.einsum("ij,ij->i", rows_with_one, rows_with_one)
    targets = federation.labels if labels is None else labels
    clip_norm = config.clip_norm if clip else None
    bounded: OneOutput | BoundedSoftmax | HiddenClip | None = hidden_clip(federation, config)
    if bounded is None and config.task != "classification":
        bounded = OneOutput.of_rows(config.task, config.clip_norm, federation.row_bound, federation.width)
    elif bounded is None and config.loss == "bounded_softmax":
        bounded = BoundedSoftmax.of_rows(federation.classes, config.clip_norm, federation.row_bound, federation.width)
    per_epoch = max(1, num_steps // config.epochs)
    curve, clipped = [], 0.0
    test = with_ones(federation.test_rows().astype(config.dtype, copy=False))
    with progress_bar(method, num_steps, progress) as advance:
        for step in range(num_steps):
            here = rows_of_step(step)
            result = clipped_gradient(
                model,
                rows_with_one[here],
                targets[here],
                clip_norm,
                method=config.gradients,
                input_squared_norms=squared[here],
                norm_limit=norm_limit,
                task=config.task,
                class_weights=config.class_weights,
                bounded=bounded,
            )
            mean = result.total
            mean += noise(step)
            mean /= schedule.divisor
            factor = config.learning_rate_factor(step, num_steps)
            std = 0.0 if plan is None else plan.step_std(step) / schedule.divisor
            parameters.step(mean, config.learning_rate * factor, std)
            parameters.note(step, num_steps)
            clipped += float((result.clip_factors < 1).mean()) if len(result.clip_factors) else 0.0
            advance(1)
            if evaluate_every and (step + 1) % (per_epoch * evaluate_every) == 0:
                curve.append(
                    ((step + 1) // per_epoch, score(config.task, model.forward(test)[1], federation.test_labels))
                )
    parameters.finish()
    accuracy = score(config.task, model.forward(test)[1], federation.test_labels)
    return TwinResult(
        method,
        model,
        accuracy,
        num_steps,
        time.perf_counter() - started,
        None if plan is None else plan.about(federation),
        config,
        curve,
        federation.clients,
        [schedule.sentence],
        clipped / num_steps,
    )


def adapter_parameters(clients: Sequence[Client]) -> list[int]:
    """Per client, how many coordinates of the release belong to its shared LoRA layers."""
    return [sum(f.num_parameters for f in c.adapters(slice(0, 1))) for c in clients]


def train_with_adapters(
    method: str,
    federation: Federation,
    config: TrainingConfig,
    plan: NoisePlan | None,
    rows_of_step: RowsOfStep,
    num_steps: int,
    noise: StepNoise,
    *,
    clip: bool = True,
    initial: GlobalModel | None = None,
    evaluate_every: int = 0,
    progress: bool = False,
) -> TwinResult:
    """Train the global model and every client's adapters; each client sees only its own released part.

    The clip runs over the concatenation of the global gradient and all shared layer gradients.
    """
    started = time.perf_counter()
    run = AdapterRun(federation, config, plan, num_steps, clip=clip, initial=initial)
    per_epoch = max(1, num_steps // config.epochs)
    curve: list[tuple[int, float]] = []
    with progress_bar(method, num_steps, progress) as advance:
        for step in range(num_steps):
            run.step(step, rows_of_step(step), noise(step))
            advance(1)
            if evaluate_every and (step + 1) % (per_epoch * evaluate_every) == 0:
                curve.append(((step + 1) // per_epoch, run.accuracy()))
    return run.result(method, time.perf_counter() - started, curve)


class AdapterRun:
    """One training of the global model and the adapters, a step at a time; the federation given is not touched."""

    def __init__(
        self,
        federation: Federation,
        config: TrainingConfig,
        plan: NoisePlan | None,
        num_steps: int,
        *,
        clip: bool = True,
        initial: GlobalModel | None = None,
    ) -> None:
        require(
            config.task == "classification" and not config.class_weights,
            "task",
            f"{config.task}{', with class weights' if config.class_weights else ''}",
            "classification without class weights where clients train layers",
        )
        self.federation = federation.fresh()
        self._config, self._plan, self._num_steps = config, plan, num_steps
        self._model = start_model(federation, config, initial)
        self._parameters = _Parameters(self._model, config)
        self._widths = adapter_parameters(self.federation.clients)
        self._clip_norm = config.clip_norm if clip else None
        self._clipped = 0.0

    def step(self, step: int, here: Rows, noise: Floats) -> None:
        """One batch; ``noise`` is added to the sum of clipped gradients."""
        config, plan, clients = self._config, self._plan, self.federation.clients
        # Client-server phase: embeddings and factors of this batch.
        shared = [c.share(here) for c in clients]
        embeddings = np.concatenate([rows for rows, _ in shared], axis=1).astype(config.dtype, copy=False)
        adapters = [adapter for _, own in shared for adapter in own]
        # Server phase: clip over everything, add noise, update the global model.
        result = clipped_gradient(
            self._model,
            with_ones(embeddings),
            self.federation.labels[here],
            self._clip_norm,
            adapters=adapters,
            method=config.gradients,
        )
        mean = (result.total + noise) / config.batch_size
        factor = config.learning_rate_factor(step, self._num_steps)
        start = self._model.num_parameters
        std = 0.0 if plan is None else plan.step_std(step) / config.batch_size
        self._parameters.step(mean[:start], config.learning_rate * factor, std)
        # Server-client phase: each client gets its own layers' gradient and nothing else.
        for client, width in zip(clients, self._widths, strict=True):
            client.receive_gradient(
                here,
                mean[start : start + width],
                step=step,
                learning_rate_factor=factor,
                noise_std=std,
                noise_row_norm=1.0 if plan is None else plan.row_norm(step),
                clip_norm=config.clip_norm,
            )
            start += width
        self._clipped += float((result.clip_factors < 1).mean()) if len(result.clip_factors) else 0.0

    def accuracy(self) -> float:
        """Accuracy of the model as it is now, on the test rows: outside the claim."""
        rows = self.federation.test_rows().astype(self._config.dtype)
        return self._model.accuracy(rows, self.federation.test_labels)

    def result(self, method: str, seconds: float, curve: list[tuple[int, float]]) -> TwinResult:
        return TwinResult(
            method,
            self._model,
            self.accuracy(),
            self._num_steps,
            seconds,
            None if self._plan is None else self._plan.about(self.federation),
            self._config,
            curve,
            self.federation.clients,
            [self._config.steps(self.federation.num_samples).sentence],
            self._clipped / self._num_steps,
        )
