"""Secure inference: clients share embeddings of new rows, the servers compute, only the named client gets the
predictions.

The model is a list of layers [W; b] with ReLU or a wave between them: the released one, or (one layer) the servers'
shares of it.
What is opened is the label of each row, its probabilities, its logits or (regression) its value, to one client; nothing
else, to nobody else. Two classes as one logit z are the classes of (0, z). The command is ``protocols.predict``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import refmpc
from accel.files import read_arrays
from accel.validate import require, require_choice, require_integer
from protocols.plan.scales import EMBEDDING_BITS, LOGIT_BITS, MOST_WEIGHT_BITS, PROBABILITY_BITS
from protocols.plan.smooth_scales import prediction_wave
from protocols.plan.squared_norm_ratio import ROOM
from protocols.state.model_file import SharedModel
from refmpc import ArithmeticTensor, Client, Party
from refmpc.primitives.dealing import held, row_segments
from vfl.dp.claim import NO_CLAIM
from vfl.losses import TASKS

__all__ = [
    "OUTPUTS",
    "PREDICTION_RELEASE",
    "PredictionClientJob",
    "PredictionPlan",
    "PredictionServerJob",
    "arg_maximum",
    "client_program",
    "plan_with_released_model",
    "plan_with_shares",
    "receive_chunk",
    "servers",
]

PREDICTION_RELEASE = "predictions"
OUTPUTS = ("label", "probabilities", "logits", "value")
CHUNK_ROWS = 4096
LEAST_WEIGHT_BITS = 8


# the public plan ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class PredictionPlan:
    """Public, the same at every participant. ``bounds[l]`` bounds ‖[a 1]·W_l‖ for every row that the clients may
    share."""

    receiver: str
    output: str
    rows: int
    client_names: tuple[str, ...]
    client_widths: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    reach: float  # of ‖[h 1]‖
    bounds: tuple[float, ...]
    weight_bits: int
    model: str  # which one, so that servers with different models are told apart
    training_claim: str
    task: str = "classification"
    activation: str = "relu"

    def __post_init__(self) -> None:
        require_choice("output", self.output, OUTPUTS)
        require_choice("task", self.task, TASKS)
        require(
            (self.task == "regression") == (self.output == "value"),
            "output",
            self.output,
            "value with a regression, and label, probabilities or logits with classes",
        )
        one = self.task == "classification" or self.shapes[-1][1] == 1
        require(one, "outputs of the model", self.shapes[-1][1], f"1 with task {self.task!r}")
        require_choice("receiver", self.receiver, self.client_names, "name one of the clients that share columns")
        require_integer("rows", self.rows, 1)
        sizes = [self.shapes[0][0], *(shape[1] + 1 for shape in self.shapes[:-1])]
        require(
            [shape[0] for shape in self.shapes] == sizes and self.shapes[0][0] == sum(self.client_widths) + 1,
            "shapes of the layers",
            self.shapes,
            f"a chain that begins with {sum(self.client_widths)} + 1 rows, the clients' columns and the bias",
        )
        require(
            self.weight_bits >= LEAST_WEIGHT_BITS,
            "weight_bits",
            self.weight_bits,
            f"at least {LEAST_WEIGHT_BITS}",
            f"layers reach {max(self.bounds):.3g}: the model or the row bound is too large for 64 bits",
        )

    @property
    def outputs(self) -> int:
        """Columns of the last layer."""
        return self.shapes[-1][1]

    @property
    def columns(self) -> int:
        """Columns of what is opened for a row."""
        if self.output == "label":
            return 1
        return 2 if self.task == "binary" and self.output == "probabilities" else self.outputs

    @property
    def cut_bits(self) -> int:
        """What the last product loses on its way to logits."""
        return EMBEDDING_BITS + self.weight_bits - LOGIT_BITS

    def high_bit(self, layer: int) -> int:
        """Compared bits of a hidden layer's sums, or of differences of logits (with room for the exponential)."""
        if layer + 1 < len(self.shapes):
            return EMBEDDING_BITS + math.ceil(math.log2(max(1.0, self.bounds[layer]))) + 1
        return LOGIT_BITS + math.ceil(math.log2(2 * self.bounds[layer] + 64)) + 1

    @property
    def chunks(self) -> list[slice]:
        return [slice(start, min(self.rows, start + CHUNK_ROWS)) for start in range(0, self.rows, CHUNK_ROWS)]

    @property
    def releases(self) -> dict[str, str]:
        """What may be opened, and what covers it."""
        names = {"label": "the label", "probabilities": "the class probabilities", "logits": "the logits"}
        what = names.get(self.output, "the predicted value")
        others = [name for name in self.client_names if name != self.receiver]
        begin = f"{NO_CLAIM}. " if self.training_claim.startswith(NO_CLAIM) else ""
        return {
            PREDICTION_RELEASE: (
                f"{begin}For each of {self.rows} new rows {what}, to {self.receiver!r} only. As regards the new rows "
                f"there is no "
                f"differential privacy: {self.receiver!r} learns a function of the columns of these rows that "
                f"{' and '.join(map(repr, others)) or 'nobody else'} holds, and more about them the more is opened (a "
                "label less than logits). Servers and other clients learn the number of rows. As regards the training "
                "data this is post-processing of a differentially private model, however many rows are asked for. The "
                f"claim of its training: {self.training_claim}"
            )
        }

    def public_parameters(self) -> dict[str, Any]:
        """What all participants compare before anything is shared."""
        return {"protocol": "predict", **{k: v for k, v in asdict(self).items() if k != "training_claim"}}

    def logit_error(self, norms: Sequence[float]) -> float:
        """How far a logit may be from that of the same model in floating point, ‖W_l‖ being ``norms``.

        Rounded are: each column of the embeddings (half a unit), each product (one unit; 1.5 when it is opened), and
        the weights (half a unit, none if they came out of a run). ReLU does not enlarge an error; φ adds
        less than two units.
        """
        error = math.sqrt(self.shapes[0][0]) * 2.0 ** -(EMBEDDING_BITS + 1)
        reach = self.reach
        for layer, ((rows, columns), norm) in enumerate(zip(self.shapes, norms, strict=True)):
            error = error * norm + reach * math.sqrt(rows * columns) * 2.0 ** -(self.weight_bits + 1)
            if layer + 1 < len(self.shapes):
                error += math.sqrt(columns) * 2.0**-EMBEDDING_BITS * (1 if self.activation == "relu" else 3)
            reach = math.hypot(self.bounds[layer], 1.0)
        return error + 1.5 * 2.0**-LOGIT_BITS


def plan_with_released_model(
    layers: Sequence[np.ndarray],
    row_bound: float,
    client_names: Sequence[str],
    client_widths: Sequence[int],
    *,
    receiver: str,
    output: str = "label",
    rows: int,
    training_claim: str,
    task: str = "classification",
    activation: str = "relu",
) -> PredictionPlan:
    """Everybody knows the layers; ranges follow from their norms and the row bound."""
    shapes = tuple((int(layer.shape[0]), int(layer.shape[1])) for layer in layers)
    width = sum(client_widths)
    reach = math.hypot(row_bound + math.sqrt(width) * 2.0 ** -(EMBEDDING_BITS + 1), 1.0)
    bounds: list[float] = []
    inputs = reach
    for layer in layers:
        rounding = math.sqrt(layer.shape[1]) * 2.0**-EMBEDDING_BITS
        bounds.append(1.001 * inputs * float(np.linalg.norm(layer, 2)) + rounding)
        inputs = math.hypot(bounds[-1], 1.0)
    largest = max(1.0, *bounds, *(float(np.abs(layer).max()) for layer in layers))
    weight_bits = min(MOST_WEIGHT_BITS, math.floor(ROOM - EMBEDDING_BITS - math.log2(largest)))
    words = [np.rint(layer * 2.0**weight_bits).astype("<i8").tobytes() for layer in layers]
    return PredictionPlan(
        receiver=receiver,
        output=output,
        rows=rows,
        client_names=tuple(client_names),
        client_widths=tuple(client_widths),
        shapes=shapes,
        reach=reach,
        bounds=tuple(bounds),
        weight_bits=weight_bits,
        model=f"released, {hashlib.sha256(b''.join(words)).hexdigest()}",
        training_claim=training_claim,
        task=task,
        activation=activation,
    )


def plan_with_shares(
    shared: SharedModel,
    client_names: Sequence[str],
    client_widths: Sequence[int],
    *,
    receiver: str,
    output: str = "label",
    rows: int,
    training_claim: str,
    task: str = "classification",
) -> PredictionPlan:
    """The servers use the shares they hold after training, whether or not they know the model; ranges as planned
    then."""
    return PredictionPlan(
        receiver=receiver,
        output=output,
        rows=rows,
        client_names=tuple(client_names),
        client_widths=tuple(client_widths),
        shapes=((sum(client_widths) + 1, shared.outputs),),
        reach=math.hypot(shared.row_bound, 1.0),
        bounds=(shared.logit_bound,),
        weight_bits=shared.weight_bits,
        model=f"shares of {shared.run}",
        training_claim=training_claim,
        task=task,
    )


# servers -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PredictionServerJob:
    """What a server gets: the plan, and the layers if they are public, or its own checkpoint of the last step."""

    plan: PredictionPlan
    layers: tuple[np.ndarray, ...] | None = None
    checkpoint: Path | None = field(default=None, repr=False)


async def servers(party: Party, job: PredictionServerJob) -> None:
    """What each server runs."""
    plan = job.plan
    layers = _layers(party, job)
    for number, chunk in enumerate(plan.chunks):
        party.step = number
        with party.phase("upload"):
            inputs = _receive_rows(party, plan, chunk.stop - chunk.start)
        with party.phase("prediction"):
            for index, layer in enumerate(layers[:-1]):
                inputs = _with_ones(await _outputs(inputs, layer, plan, index))
            answer = await _answer(plan, inputs, layers[-1])
        with party.phase("release"):
            if answer is None:  # logits: opened as a product, without a round between the servers
                words = refmpc.matmul_opening(inputs, layers[-1], plan.cut_bits)
                refmpc.open_to_client(party, words, plan.receiver, PREDICTION_RELEASE)
            else:
                refmpc.reveal_to_client(answer, plan.receiver, PREDICTION_RELEASE)
        party.report({"phase": "prediction", "done": chunk.stop, "total": plan.rows})


async def _outputs(
    inputs: ArithmeticTensor, layer: ArithmeticTensor, plan: PredictionPlan, index: int
) -> ArithmeticTensor:
    """Of a hidden layer. With waves 6 rounds: 2 for the sums, 2 for φ, 2 for the cut to the embeddings' bits."""
    if plan.activation == "relu":
        sums = await refmpc.matmul_truncate(inputs, layer, plan.weight_bits)
        return await refmpc.relu(sums, 0, plan.high_bit(index))
    wave = prediction_wave()
    cut = EMBEDDING_BITS + plan.weight_bits - wave.fraction_bits
    sums = await refmpc.matmul_truncate(inputs, layer, cut)
    segments = row_segments(sums.party, len(sums))
    return await refmpc.truncate_additive(await refmpc.series(held(sums, segments), wave), wave.bits - EMBEDDING_BITS)


async def _answer(plan: PredictionPlan, inputs: ArithmeticTensor, layer: ArithmeticTensor) -> ArithmeticTensor | None:
    """What the last layer says, on shares; None if the logits themselves are to be opened."""
    if plan.output in ("logits", "value"):
        return None
    logits = await refmpc.matmul_truncate(inputs, layer, plan.cut_bits)
    if plan.task == "binary":
        zeros = ArithmeticTensor.zeros(logits.party, logits.shape, logits.fraction_bits)
        logits = refmpc.concatenate([zeros, logits], axis=1)
    high_bit = plan.high_bit(len(plan.shapes) - 1)
    if plan.output == "label":
        return await arg_maximum(logits, high_bit)
    return await refmpc.softmax(logits, PROBABILITY_BITS, high_bit)


async def arg_maximum(x: ArithmeticTensor, high_bit: int) -> ArithmeticTensor:
    """The column of the largest entry of each row, as an integer, by a tournament: 4⌈log2 S⌉ rounds.

    Domain: differences of two entries below 2^high_bit. Exact; of equal entries one wins.
    """
    values = x.T
    columns = ArithmeticTensor.zeros(x.party, values.shape, 0) + np.arange(len(values)).reshape(-1, 1)
    while len(values) > 1:
        pairs, last = len(values) // 2, len(values) == 2
        left, right = slice(0, pairs), slice(pairs, 2 * pairs)
        difference = values[left] - values[right]
        wins = ~await refmpc.is_negative(difference, 0, high_bit)
        # the value of the final's winner is of no interest
        moves = [columns[left] - columns[right], *([] if last else [difference])]
        moved = await refmpc.gather(*(refmpc.select(wins, move) for move in moves))
        columns = refmpc.concatenate([columns[right] + moved[0], columns[2 * pairs :]])
        values = values[:1] if last else refmpc.concatenate([values[right] + moved[1], values[2 * pairs :]])
    return columns[0]


def _layers(party: Party, job: PredictionServerJob) -> list[ArithmeticTensor]:
    plan = job.plan
    if job.layers is not None:
        zeros = (ArithmeticTensor(party, np.zeros((2, *shape), np.uint64), plan.weight_bits) for shape in plan.shapes)
        return [zero + layer for zero, layer in zip(zeros, job.layers, strict=True)]
    assert job.checkpoint is not None
    stored = read_arrays(job.checkpoint)
    shares = [stored[name] for name in sorted(stored) if name.startswith("values")]
    found = tuple(share.shape[1:] for share in shares)
    require(found == plan.shapes, f"layers in {job.checkpoint.name}", found, f"those of the plan, {plan.shapes}")
    return [ArithmeticTensor(party, share, plan.weight_bits) for share in shares]


def _receive_rows(party: Party, plan: PredictionPlan, rows: int) -> ArithmeticTensor:
    parts = [
        refmpc.input_from_client(party, name, (rows, width), EMBEDDING_BITS)
        for name, width in zip(plan.client_names, plan.client_widths, strict=True)
    ]
    return _with_ones(refmpc.concatenate(parts, axis=1))


def _with_ones(rows: ArithmeticTensor) -> ArithmeticTensor:
    zeros = ArithmeticTensor(rows.party, np.zeros((2, rows.shape[0], 1), np.uint64), rows.fraction_bits)
    return refmpc.concatenate([rows, zeros + 1.0], axis=1)


# clients -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PredictionClientJob:
    """One client's own columns of the new rows, within its row bound; nobody else receives this object."""

    plan: PredictionPlan
    embeddings: np.ndarray = field(repr=False)


def client_program(client: Client, job: PredictionClientJob) -> np.ndarray | None:
    """Share all rows, chunk by chunk; the named client takes each chunk's predictions before it shares the next."""
    plan, found = job.plan, []
    shape = plan.rows, plan.client_widths[plan.client_names.index(client.name)]
    require(job.embeddings.shape == shape, "embeddings.shape", job.embeddings.shape, f"{shape}, as planned")
    for chunk in plan.chunks:
        client.share(job.embeddings[chunk], EMBEDDING_BITS)
        if client.name == plan.receiver:
            found.append(receive_chunk(client, plan, chunk.stop - chunk.start))
    return np.concatenate(found) if found else None


def receive_chunk(client: Client, plan: PredictionPlan, rows: int) -> np.ndarray:
    """The predictions of the next chunk of rows, at the named client."""
    if plan.output == "label":
        return client.receive((rows,), 0).astype(np.int64)
    if plan.output == "probabilities":
        return client.receive((rows, plan.columns), PROBABILITY_BITS)
    opened = refmpc.receive_opening(client, rows * plan.columns, plan.cut_bits, LOGIT_BITS)
    return opened.reshape(rows, plan.columns)
