"""The public plan of a run: everything the servers and clients must agree on before anything is shared."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from accel.validate import require
from protocols.plan.bounded_softmax_scales import with_bounded_softmax
from protocols.plan.combinations import refuse_combination
from protocols.plan.hidden_scales import with_hidden_chain
from protocols.plan.low_round_scales import with_low_round
from protocols.plan.one_output_scales import plan_one_output
from protocols.plan.row_test import FAULT_CLAIM, RowTest, row_test, upload_release
from protocols.plan.scales import EMBEDDING_BITS, GRADIENT_BITS, RELEASE_BITS, Scales, plan_scales
from protocols.plan.smooth_scales import plan_smooth, require_start
from protocols.plan.squared_norm_ratio import ROOM
from refmpc.mathematics.gaussian import (
    JOINT_DISTANCE,
    JOINT_FRACTION_BITS,
    MAGNITUDE_ERROR,
    SLOPE_REACH,
    SMOOTHING,
    joint_slope_error,
)
from vfl.dp import (
    CalibratedNoise,
    Claim,
    Factorisation,
    FixedPointSlack,
    NoiseSplit,
    with_delta_checked,
)
from vfl.dp.claim import ROW_BOUND_CHECKED, ROW_BOUND_TRUSTED
from vfl.gradients import GlobalModel
from vfl.hidden import HiddenClip, activation
from vfl.losses import OneOutput, output_count, shared_labels
from vfl.methods import facts
from vfl.run_mechanism import calibrate_run, choose_factorisation, choose_schedule
from vfl.training import Schedule, TrainingConfig

if TYPE_CHECKING:
    from protocols.plan.public_rows import PublicRows

__all__ = [
    "MODEL_RELEASE",
    "SUMS_RELEASE",
    "Plan",
    "PublicClient",
    "PublicFacts",
    "PublicFederation",
    "digest",
    "joint_scale",
    "joint_slope",
    "own_bounds",
    "plan_run",
    "with_receivers",
]

MODEL_RELEASE = "global model"
SUMS_RELEASE = "noised gradient sums"  # of one step, with open weights


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


CHUNK_ROWS = 4096  # that a client shares at a time


@dataclass(frozen=True)
class PublicClient:
    """What the others know of a client. ``bound``: its part of the row bound; None: an equal part."""

    name: str
    width: int
    bound: float | None = None


@dataclass(frozen=True)
class PublicFederation:
    """The public side of ``vfl.federation.Federation``: sizes and bounds, no rows."""

    clients: tuple[PublicClient, ...]
    num_samples: int
    classes: int
    row_bound: float
    public_inputs: tuple[str, ...]

    @property
    def width(self) -> int:
        return sum(client.width for client in self.clients)


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
    classes: int  # 1 if the label is a number
    public_rows: PublicRows | None = field(
        default=None, kw_only=True
    )  # measured on after every epoch, with open weights
    client_bounds: tuple[float, ...] = field(kw_only=True)  # R of each client

    @property
    def row_tests(self) -> tuple[RowTest, ...]:
        """How the servers test that every row of each client is within its bound; none if they cannot, and clients are
        trusted with it."""
        return _row_tests(self.client_bounds, self.client_widths)

    @property
    def outputs(self) -> int:
        """Columns of the last layer, and of the labels as they are shared."""
        return output_count(self.training.task, self.classes)

    def labels_to_share(self, labels: np.ndarray) -> np.ndarray:
        """What the label client shares of its labels: a row for each, ``outputs`` wide."""
        return shared_labels(self.training.task, labels, self.classes)

    @property
    def label_bits(self) -> int:
        """Fraction bits of the labels: classes are integers."""
        return EMBEDDING_BITS if self.training.task == "regression" else 0

    @property
    def width(self) -> int:
        """d, without the column of ones."""
        return sum(self.client_widths)

    @cached_property
    def global_parameters(self) -> int:
        """Coordinates of the global model."""
        return sum(rows * columns for rows, columns in self.layer_shapes)

    @property
    def parameters(self) -> int:
        """Coordinates of one noised gradient."""
        return self.global_parameters

    @cached_property
    def layer_shapes(self) -> list[tuple[int, int]]:
        """Shapes of [W; b] of each layer of the global model."""
        sizes = (self.width, *self.training.hidden, self.outputs)
        return [(fan_in + 1, fan_out) for fan_in, fan_out in pairwise(sizes)]

    @property
    def start(self) -> list[np.ndarray]:
        """The public starting weights, the twin's: zero, and random from the seed for the hidden layers of an MLP."""
        smooth = self.scales.smooth
        return _start(self.training, self.width, self.outputs, None if smooth is None else smooth.public).layers

    def unflatten(self, flat: np.ndarray) -> list[np.ndarray]:
        """The layers of a model that was released as one vector."""
        layers, start = [], 0
        for rows, columns in self.layer_shapes:
            layers.append(flat[start : start + rows * columns].reshape(rows, columns))
            start += rows * columns
        return layers

    @property
    def secret_order(self) -> bool:
        """Whether rows and dummies are shuffled in secret, and the claim counts on it."""
        return self.schedule.dummies > 0

    @property
    def chunks(self) -> list[slice]:
        """The rows that clients share at a time."""
        rows = self.schedule.num_samples
        return [slice(start, min(rows, start + CHUNK_ROWS)) for start in range(0, rows, CHUNK_ROWS)]

    @property
    def shuffles_epochs(self) -> bool:
        """Whether every epoch has a secret order of its own."""
        return facts(self.protocol).takes("a new order in every epoch")

    @property
    def shuffles(self) -> int:
        """How often rows are shuffled in secret."""
        return self.schedule.epochs if self.shuffles_epochs else int(self.secret_order)

    def resumable(self, every: int) -> int:
        """Checkpoints every so many steps, where a run can go on: not within an epoch whose order is a secret
        permutation that is not kept. With open weights it is kept."""
        if not every or not self.shuffles_epochs or self.opens_sums:
            return every
        return max(self.schedule.num_batches, every // self.schedule.num_batches * self.schedule.num_batches)

    @property
    def server_noise_std(self) -> float:
        """Std, in grid units, of what each server samples for itself: its part of the noise, or the smoothing of a
        joint one."""
        own = SMOOTHING if self.noise.split is NoiseSplit.JOINT else 1.0
        return own * self.noise.server_std_in_grid_units

    @property
    def claim(self) -> Claim:
        return self.noise.claim

    def as_simulation(self) -> Self:
        """The same plan for a twin, or beside one: its claim says that nothing is claimed."""
        return replace(self, noise=replace(self.noise, claim=self.claim.as_simulation()))

    @property
    def releases(self) -> dict[str, str]:
        """What may be opened, with the claim that covers it."""
        tests = {upload_release(name): FAULT_CLAIM for name in self.client_names if self.row_tests}
        return {MODEL_RELEASE: self.claim.paragraph()} | tests | self._sums_release

    @property
    def _sums_release(self) -> dict[str, str]:
        """With open weights, what every step opens to the servers."""
        if not self.opens_sums:
            return {}
        together = (
            f"one of {self.schedule.num_steps} steps, which the claim of the {MODEL_RELEASE} covers all together: "
            f"{self.claim.headline()}"
        )
        return {SUMS_RELEASE: together}

    @property
    def opens_sums(self) -> bool:
        """Whether the noised gradient sum of every step is opened, so that the weights are public while training."""
        return self.training.weights == "open"

    def public_parameters(self) -> dict[str, Any]:
        """What all participants compare before anything is shared."""
        training = self.training
        chosen: dict[str, Any] = {} if training.average == "none" else {"average": training.average}
        if training.optimiser != "sgd":
            chosen["optimiser"] = training.optimiser
        if training.rows_per_person > 1:
            chosen["rows_per_person"] = training.rows_per_person
        if self.public_rows is not None:
            chosen["public_rows"] = self.public_rows.digest
        return {
            **chosen,
            "protocol": self.protocol,
            "rows": self.schedule.num_samples,
            "batch_size": self.schedule.batch_size,
            "dummies": self.schedule.dummies,
            "epochs": self.schedule.epochs,
            "widths": list(self.client_widths),
            "classes": self.classes,
            "clip_norm": training.clip_norm,
            "learning_rate": training.learning_rate,
            "schedule": training.schedule,
            "momentum": training.momentum,
            "weight_decay": training.weight_decay,
            "gradients": training.gradients,
            "weights": training.weights,
            "rates": self._rates_digest,
            "hidden": list(training.hidden),
            "task": training.task,
            "class_weights": list(training.class_weights),
            "noise": training.noise,
            "start": digest(self.start, self.scales.weight_bits),
            "noise_multiplier": self.noise.noise_multiplier,
            "sensitivity": self.noise.sensitivity,
            "scales": str(self.scales),
            "factorisation": f"{self.factorisation.kind} {self.factorisation.bands} {self.factorisation.digest}",
        }

    @property
    def fingerprint(self) -> str:
        """A hash of all public parameters."""
        return hashlib.sha256(json.dumps(self.public_parameters(), sort_keys=True).encode()).hexdigest()

    @property
    def _rates_digest(self) -> str:
        """Digest of the integers that stand for η/B in all steps, and of the noise that Adam subtracts: libraries whose
        cosines differ in the last bit are told apart."""
        steps = range(self.schedule.num_steps)
        words = [self.scales.rate_word(self.learning_rate(step)) for step in steps]
        words += [self.noise_square(step) for step in steps if self.training.optimiser == "adam"]
        return hashlib.sha256(np.array(words, dtype="<i8").tobytes()).hexdigest()

    def learning_rate(self, step: int) -> float:
        """η of a step, by the public schedule."""
        training = self.training
        return training.learning_rate * training.learning_rate_factor(step, self.schedule.num_steps)

    def noise_square(self, step: int) -> int:
        """The variance of the noise in a coordinate of the sum that a step opens, at twice ``RELEASE_BITS``."""
        return round((self.noise_std * float(self._noise_norms[step]) * 2.0**RELEASE_BITS) ** 2)

    @property
    def noise_std(self) -> float:
        """Of a coordinate of z really present, which is what everybody outside faces, in units of the sums."""
        joint = self.noise.split is NoiseSplit.JOINT
        return self.noise.outsider_std * (math.hypot(1.0, SMOOTHING) if joint else 1.0)

    @cached_property
    def _noise_norms(self) -> np.ndarray:
        return self.factorisation.noise_norms()


def _row_tests(bounds: Sequence[float], widths: Sequence[int]) -> tuple[RowTest, ...]:
    """The tests of each client's part of a row, as the servers hold it: each column is rounded; none if 64 bits are not
    enough for one."""
    rounded = (
        bound + math.sqrt(width) * 2.0 ** -(EMBEDDING_BITS + 1) for bound, width in zip(bounds, widths, strict=True)
    )
    tests = [row_test(width, bound) for width, bound in zip(widths, rounded, strict=True)]
    return tuple(test for test in tests if test is not None) if None not in tests else ()


def _own_bound(client: PublicShape) -> float | None:
    """R of a client, if it was given one."""
    bound = (
        client.bound if isinstance(client, PublicClient) else getattr(getattr(client, "row_bound", None), "norm", None)
    )
    return None if bound is None else float(bound)


def own_bounds(given: Sequence[float | None], row_bound: float) -> tuple[float, ...]:
    """R of each client: what it was given, or an equal part. Each is tested by itself, so together they must not be
    more than R."""
    equal = row_bound / math.sqrt(len(given))
    bounds = tuple(equal if bound is None else bound for bound in given)
    require(
        math.hypot(*bounds) <= row_bound * (1 + 1e-9),
        "bounds of the clients",
        bounds,
        f"of norm at most {row_bound:g}, the row bound",
        "lower them, or raise the row bound",
    )
    return bounds


def joint_scale(target_std: float) -> tuple[int, int]:
    """(integer, bits): the std of the joint part, rounded up, by which standard samples at 30 bits are multiplied."""
    std = math.sqrt(1 - 2 * SMOOTHING**2) * target_std
    room = math.floor(ROOM - JOINT_FRACTION_BITS - math.log2(12.0 * max(1.0, std)))  # samples stay below 12
    bits = min(24, room)
    require(bits >= 8, "noise", f"std {target_std:.3g}", "below 2^19", "lower the clip norm or raise epsilon")
    return math.ceil(std * 2.0**bits), bits


def joint_slope(target_std: float) -> float:
    """The slope error of joint noise with this std; see ``protocols.server.joint_noise`` for the further roundings."""
    error = MAGNITUDE_ERROR + 2.0**-JOINT_FRACTION_BITS * (1 + 1 / target_std)
    return joint_slope_error() * error / MAGNITUDE_ERROR


def _joint_claim(noise: CalibratedNoise) -> Claim:
    """What the claim of joint noise presumes. Its slope bound holds for shifts of a coordinate up to two deviations."""
    claim, reach = noise.claim, SLOPE_REACH - 10.0
    require(
        noise.noise_multiplier * reach >= 1,
        "epsilon",
        claim.epsilon,
        f"small enough for a noise multiplier of {1 / reach:g}, not {noise.noise_multiplier:.3g}, with joint noise",
        "lower epsilon, or use distributed noise",
    )
    assumed = (
        "the three servers draw the noise together by secure computation and follow the protocol; each knows of it "
        "only "
        "what it adds itself, 1/256 of the variance and beyond what the claim counts"
    )
    unbounded = noise.noise_multiplier * reach < 2  # replacing a record shifts twice as far
    return replace(
        claim,
        adversary="everybody who sees the releases and one corrupted server, to which all noise counted here is "
        "unknown",
        public=(*claim.public, assumed),
        epsilon_replace_one=math.inf if unbounded else claim.epsilon_replace_one,
        figures=tuple(replace(f, epsilon_replace_one=math.inf) for f in claim.figures) if unbounded else claim.figures,
    )


SECRET_WEIGHTS = (
    "The global model is opened to the clients only, at the end; no server sees it, or anything that depends on it"
)
ANY_COLUMNS = (
    "The other clients may choose their columns as they like, knowing all that was opened before, within the bounds "
    "that are "
    "assumed or checked below: the claim about a record holds all the same (proofs §6.9)"
)


def with_receivers(claim: Claim, weights: str, steps: int, of: str = "") -> Claim:
    """A claim that says who sees what, and that other clients may be adversaries; ``of``: whose sums open weights open,
    where that is not everything."""
    opened = (
        f"The weights are open while they are trained: the noised gradient sums{of} of all {steps} steps are opened "
        f"to the "
        "three servers and may be shown to anybody. The claim is about that whole sequence, and is the same as if "
        "only the "
        "last model were opened"
    )
    said = opened if weights == "open" else SECRET_WEIGHTS
    return replace(claim, caveats=(*claim.caveats, said, ANY_COLUMNS))


def _start(training: TrainingConfig, width: int, outputs: int, waved: HiddenClip | None) -> GlobalModel:
    return GlobalModel.initial(
        width,
        outputs,
        training.hidden,
        seed=training.seed,
        activation=activation(training.hidden, training.weights),
        deviation=1.0 if waved is None else waved.start_deviation(width),
    )


def digest(layers: list[np.ndarray], fraction_bits: int) -> str:
    """A hash of public fixed-point values: participants whose libraries draw other numbers are told apart."""
    words = [np.rint(layer * 2.0**fraction_bits).astype("<i8").tobytes() for layer in layers]
    return hashlib.sha256(b"".join(words)).hexdigest()


def plan_run(protocol: str, federation: PublicFacts, training: TrainingConfig) -> Plan:
    """Calibrate the noise with the slack of the arithmetic that will run, and choose all scales; or refuse."""
    refuse_combination(protocol, training)
    outputs = output_count(training.task, federation.classes, training.class_weights)
    one_layer = not training.hidden and training.gradients == "factored"
    joint = training.noise == "joint"
    schedule = choose_schedule(protocol, training, federation.num_samples)
    factorisation = choose_factorisation(protocol, training, schedule)
    sizes = (federation.width, *training.hidden, outputs)
    waved = None
    if activation(training.hidden, training.weights) == "tanh":
        bound = federation.row_bound
        waved = HiddenClip.of_rows(
            training.task, training.clip_norm, bound, federation.width, training.loss, federation.classes
        )
    start = _start(training, federation.width, outputs, waved).layers
    start_norms = [float(np.linalg.norm(layer, 2)) for layer in start]
    slack = FixedPointSlack(
        row_bound=federation.row_bound * 1.01,
        classes=outputs,
        width=federation.width,
        steps=schedule.num_steps,
        batch_size=schedule.batch_size,
        # with open weights β·v is public and not part of what is cut
        momentum=0.0 if training.weights == "open" else training.momentum,
        truncated_bits=GRADIENT_BITS - RELEASE_BITS,
        coordinates=sum((fan_in + 1) * fan_out for fan_in, fan_out in pairwise(sizes)),
        overflow_probability=1e-20,
    )

    # the ranges depend on the noise, and the claim on the ranges: plan once with a guess, then with the real figures
    noise = calibrate_run(protocol, training, schedule, factorisation, slack)
    for _ in range(3 if joint else 2):
        noise_std = noise.outsider_std * (math.hypot(1.0, SMOOTHING) if joint else 1.0)
        scales = plan_scales(
            training,
            schedule,
            factorisation,
            row_bound=federation.row_bound,
            width=federation.width,
            outputs=outputs,
            noise_std=noise_std,
            start_norms=start_norms,
        )
        truncated_std = noise_std * factorisation.velocity_norm(slack.momentum)
        if one_layer and outputs == 1:
            bounded = OneOutput.of_rows(training.task, training.clip_norm, federation.row_bound, federation.width)
            own = plan_one_output(scales, training, bounded, schedule.batch_size, truncated_std, slack.momentum)
            scales = replace(scales, one_output=own)
        elif waved is not None:
            assert waved.reach >= scales.layers[0].reach
            scales = replace(scales, smooth=plan_smooth(waved, schedule.batch_size, truncated_std))
        elif training.loss == "bounded_softmax":
            scales = with_bounded_softmax(scales, training, schedule.batch_size, truncated_std, slack.momentum)
        elif one_layer:
            scales = with_low_round(scales, training, schedule.batch_size, truncated_std, slack.momentum)
            require(
                not training.class_weights or scales.low_round is not None,
                "class_weights",
                training.class_weights,
                "small enough for the scales of a step in 18 rounds",
                "scale them down: only their ratios and the clip matter; or lower the noise (larger epsilon)",
            )
        elif len(training.hidden) == 1 and outputs > 1:
            scales = with_hidden_chain(scales, training, schedule.batch_size, truncated_std, slack.momentum)
        slack = replace(
            slack,
            truncated_bits=scales.truncated_bits,
            noise_shift=scales.noise_shift,
            row_bound=scales.row_bound,
            clip_rounding=scales.clip_rounding,
            overflow_probability=scales.overflow_probability,
        )
        if joint:
            samples = slack.released_coordinates * schedule.num_steps
            slack = replace(
                slack,
                slope_error=joint_slope(0.99 * noise.target_std),  # the noise still changes a little
                overflow_probability=slack.overflow_probability + samples * JOINT_DISTANCE,
            )
        noise = calibrate_run(protocol, training, schedule, factorisation, slack)
    if scales.smooth is not None:
        require_start(scales.smooth, start, scales.weight_bits)
    client_bounds = own_bounds([_own_bound(client) for client in federation.clients], federation.row_bound)
    checked = _row_tests(client_bounds, tuple(client.width for client in federation.clients))
    public = (ROW_BOUND_CHECKED if checked and text == ROW_BOUND_TRUSTED else text for text in noise.claim.public)
    assumed = (*public, *federation.public_inputs)
    if training.hidden:
        assumed += ("the starting weights are public and random, from the seed of the run",)
    if training.class_weights:
        assumed += ("the class weights are public, and not computed from the private labels",)
    if (training.task == "binary" or training.loss == "bounded_softmax") and not checked:
        assumed += ("labels are of their form (0 or 1, one of a row): the label client shares nothing else",)
    if training.task == "regression":
        assumed += ("the range of the target is public, and targets beyond it are moved to its ends",)
    claim = with_delta_checked(noise.claim, schedule.num_samples)
    claim = with_receivers(claim, training.weights, schedule.num_steps)
    noise = replace(noise, claim=replace(claim, public=assumed))
    if joint:
        noise = replace(noise, claim=_joint_claim(noise))
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
        client_bounds=client_bounds,
    )
