"""The public plan of a run: everything the servers and clients must agree on before anything is shared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from accel.validate import require
from protocols.scales import GRADIENT_BITS, RELEASE_BITS, Scales, plan_scales
from vfl.dp import (
    CalibratedNoise,
    Claim,
    Factorisation,
    FixedPointSlack,
    calibrate_matrix_factorisation,
    calibrate_shuffled,
    default_bands,
    factorise,
)
from vfl.gradients import GlobalModel
from vfl.twins.config import Schedule, TrainingConfig

__all__ = ["MODEL_RELEASE", "Plan", "PublicFacts", "plan_run"]

MODEL_RELEASE = "global model"


class PublicShape(Protocol):
    """What everybody knows of a client."""

    @property
    def name(self) -> str: ...

    @property
    def width(self) -> int: ...


class PublicFacts(Protocol):
    """What a plan may depend on: the public side of ``vfl.federation.Federation``, and no row."""

    @property
    def clients(self) -> Sequence[PublicShape]: ...

    @property
    def num_samples(self) -> int: ...

    @property
    def width(self) -> int: ...

    @property
    def classes(self) -> int: ...

    @property
    def row_bound(self) -> float: ...

    @property
    def public_inputs(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Plan:
    """Public, the same at every participant."""

    protocol: str
    training: TrainingConfig
    schedule: Schedule
    factorisation: Factorisation
    noise: CalibratedNoise
    scales: Scales
    client_names: tuple[str, ...]
    client_widths: tuple[int, ...]
    classes: int

    @property
    def width(self) -> int:
        """d, without the column of ones."""
        return sum(self.client_widths)

    @property
    def parameters(self) -> int:
        """Coordinates of one noised gradient."""
        return sum(rows * columns for rows, columns in self.layer_shapes)

    @property
    def layer_shapes(self) -> list[tuple[int, int]]:
        """Of [W; b] of each layer of the global model."""
        sizes = (self.width, *self.training.hidden, self.classes)
        return [(fan_in + 1, fan_out) for fan_in, fan_out in pairwise(sizes)]

    @property
    def start(self) -> list[np.ndarray]:
        """The public starting weights, the twin's: zero, and random from the seed for the hidden layers of an MLP."""
        return _start(self.training, self.width, self.classes).layers

    def unflatten(self, flat: np.ndarray) -> list[np.ndarray]:
        """The layers of a model that was released as one vector."""
        ends = np.cumsum([rows * columns for rows, columns in self.layer_shapes])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(flat, ends), self.layer_shapes, strict=True)]

    @property
    def claim(self) -> Claim:
        return self.noise.claim

    @property
    def releases(self) -> dict[str, str]:
        """What may be opened, with the claim that covers it."""
        return {MODEL_RELEASE: self.claim.paragraph()}

    def public_parameters(self) -> dict[str, Any]:
        """What all participants compare before anything is shared."""
        training = self.training
        return {
            "protocol": self.protocol,
            "rows": self.schedule.num_samples,
            "batch_size": self.schedule.batch_size,
            "epochs": self.schedule.epochs,
            "widths": list(self.client_widths),
            "classes": self.classes,
            "clip_norm": training.clip_norm,
            "learning_rate": training.learning_rate,
            "schedule": training.schedule,
            "momentum": training.momentum,
            "weight_decay": training.weight_decay,
            "gradients": training.gradients,
            "hidden": list(training.hidden),
            "start": _digest(self.start, self.scales.weight_bits),
            "noise_multiplier": self.noise.noise_multiplier,
            "sensitivity": self.noise.sensitivity,
            "scales": str(self.scales),
            "factorisation": f"{self.factorisation.kind} {self.factorisation.bands}",
        }

    @property
    def fingerprint(self) -> str:
        """A hash of all public parameters."""
        return hashlib.sha256(json.dumps(self.public_parameters(), sort_keys=True).encode()).hexdigest()

    def learning_rate(self, step: int) -> float:
        """η of a step, by the public schedule."""
        training = self.training
        return training.learning_rate * training.learning_rate_factor(step, self.schedule.num_steps)


def _start(training: TrainingConfig, width: int, classes: int) -> GlobalModel:
    return GlobalModel.initial(width, classes, training.hidden, seed=training.seed)


def _digest(layers: list[np.ndarray], fraction_bits: int) -> str:
    """A hash of public fixed-point values: participants whose libraries draw other numbers are told apart."""
    words = [np.rint(layer * 2.0**fraction_bits).astype("<i8").tobytes() for layer in layers]
    return hashlib.sha256(b"".join(words)).hexdigest()


def plan_run(protocol: str, federation: PublicFacts, training: TrainingConfig) -> Plan:
    """Calibrate the noise with the slack of the arithmetic that will run, and choose all scales; or refuse."""
    require(
        not training.hidden or training.gradients == "factored",
        "gradients",
        training.gradients,
        "'factored' with hidden layers",
        "explicit gradients are the reference for one layer",
    )
    require(training.noise == "distributed", "noise", training.noise, "'distributed' in the secure protocols")
    schedule = training.steps(federation.num_samples)
    shuffled = protocol == "g_shuff"
    if shuffled or training.factorisation == "identity":
        factorisation = factorise("identity", schedule.num_steps)
    else:
        bands = training.bands
        if bands is None:
            whole = training.factorisation == "bsr"
            bands = schedule.num_batches if whole else default_bands(schedule.num_batches)
        factorisation = factorise(
            training.factorisation,
            schedule.num_steps,
            weight_decay=training.weight_decay,
            momentum=training.momentum,
            bands=bands,
        )
    sizes = (federation.width, *training.hidden, federation.classes)
    start_norms = [
        float(np.linalg.norm(layer, 2)) for layer in _start(training, federation.width, federation.classes).layers
    ]
    slack = FixedPointSlack(
        row_bound=federation.row_bound * 1.01,
        classes=federation.classes,
        width=federation.width,
        steps=schedule.num_steps,
        batch_size=training.batch_size,
        truncated_bits=GRADIENT_BITS - RELEASE_BITS,
        coordinates=sum((fan_in + 1) * fan_out for fan_in, fan_out in pairwise(sizes)),
        overflow_probability=1e-20,
    )

    def calibrate(slack: FixedPointSlack) -> CalibratedNoise:
        if shuffled:
            return calibrate_shuffled(
                training.epsilon,
                training.delta,
                training.clip_norm,
                schedule.num_samples,
                schedule.batch_size,
                schedule.epochs,
                slack=slack,
                split=training.noise,
                accounting=training.accounting,
            )
        return calibrate_matrix_factorisation(
            training.epsilon,
            training.delta,
            training.clip_norm,
            factorisation,
            schedule.epochs,
            schedule.num_batches,
            slack,
            training.noise,
        )

    # the ranges depend on the noise, and the claim on the ranges: plan once with a guess, then with the real figures
    noise = calibrate(slack)
    for _ in range(2):
        scales = plan_scales(
            training,
            schedule,
            factorisation,
            row_bound=federation.row_bound,
            width=federation.width,
            classes=federation.classes,
            noise_std=noise.outsider_std,
            start_norms=start_norms,
        )
        slack = replace(
            slack,
            row_bound=scales.row_bound,
            clip_rounding=scales.clip_rounding,
            overflow_probability=scales.overflow_probability,
        )
        noise = calibrate(slack)
    assumed = (*noise.claim.public, *federation.public_inputs)
    if training.hidden:
        assumed += ("the starting weights are public and random, from the seed of the run",)
    noise = replace(noise, claim=replace(noise.claim, public=assumed))
    return Plan(
        protocol=protocol,
        training=training,
        schedule=schedule,
        factorisation=factorisation,
        noise=noise,
        scales=scales,
        client_names=tuple(client.name for client in federation.clients),
        client_widths=tuple(client.width for client in federation.clients),
        classes=federation.classes,
    )
