"""The worst rows and weights that a plan admits, and what the servers make of them: on real shares, sample by
sample."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np

import refmpc
from protocols.plan.run_plan import Plan
from protocols.plan.scales import EMBEDDING_BITS, GRADIENT_BITS, NOISE_DEVIATIONS, RELEASE_BITS
from protocols.server.open_training import own_addend, public_inputs
from protocols.step.clip import clip_factors, clipped_updates
from protocols.step.open_step import layer_updates, step_words
from protocols.step.public_weights import PublicLayer
from protocols.step.secret_step import (
    SharedRows,
    Weights,
    explicit_clip,
    gradient_step,
    layer_factors,
    linear_updates,
    squared_norms,
)
from refmpc import ArithmeticTensor
from refmpc.core.words import seal, unseal
from tests.not_none import not_none
from vfl.gradients import GlobalModel, with_ones
from vfl.hidden import activation

__all__ = ["contributions", "extreme_step", "extreme_weights", "open_contributions", "plausible_weights", "worst_rows"]


def extreme_weights(plan: Plan, rng: np.random.Generator) -> list[list[np.ndarray]]:
    """Models within the plan's bounds: logits at their limit both ways, a confident one, and the one that knows
    nothing. With waves the largest of their kind that a step has room for."""
    found = plausible_weights(plan, rng)
    if plan.scales.smooth is None:
        return found
    held = found[:1]  # every run begins there
    for first, *others in found[1:]:
        shrunk = ([first, *(0.7**power * layer for layer in others)] for power in range(80))
        held += [next((layers for layers in shrunk if has_room(plan, layers)), plan.start)]
    return held


def has_room(plan: Plan, layers: list[np.ndarray]) -> bool:
    """Whether the gradients of these weights surely fit a step with waves, from Frobenius norms in floats: a step that
    ends the run all the same does so without need."""
    smooth = not_none(plan.scales.smooth)
    reach = math.hypot(plan.scales.row_bound, 1.0) * 1.01
    error, square = {"classification": 1.5}.get(plan.training.task, 1.03), 0.0
    for layer in reversed(layers[1:]):
        square += (1.05 * (len(layer) - 1) + 1) * (error + 2.0**-8 * (math.sqrt(layer.shape[1]) + 1)) ** 2
        rounding = 2.0**-8 * (math.sqrt(len(layer)) + 1)
        if (
            plan.training.task == "classification"
            and plan.training.loss == "softmax"
            and error * float(np.linalg.norm(layer[:-1])) > 2.0**9
        ):
            return False  # p·W lies modulo 2^64
        error = 0.93 * error * (float(np.linalg.norm(layer[:-1])) + 2.0**-12 * math.sqrt(layer.size)) + rounding
    square += reach**2 * (error + 2.0**-8 * (math.sqrt(layers[0].shape[1]) + 1)) ** 2
    levels = min(13, smooth.gradient_bits - 39)
    logits = 1.03 * math.sqrt(len(layers[-1])) * float(np.linalg.norm(layers[-1]))
    return bool(math.sqrt(square) <= 0.9 * plan.training.clip_norm * 2.0**levels and logits <= 2.0**24)


def plausible_weights(plan: Plan, rng: np.random.Generator) -> list[list[np.ndarray]]:
    """As ``extreme_weights``, whether or not the training has diverged."""
    if plan.training.hidden:
        found = [[np.array(layer) for layer in plan.start]]
        for share in (0.3, 0.99):
            drawn = [rng.normal(size=shape) for shape in plan.layer_shapes]
            bounds = [layer.weight_bound for layer in plan.scales.layers]
            found.append([w * share * b / np.linalg.norm(w, 2) for w, b in zip(drawn, bounds, strict=True)])
        return found
    length = plan.scales.logit_bound / plan.scales.layers[0].reach
    direction = np.zeros((plan.width + 1, plan.outputs))
    direction[0, 0], direction[0, -1] = -1.0, 1.0
    confident = min(0.99 * length, 30.0 / plan.scales.row_bound)
    return [[direction * 0.99 * length], [direction * confident], [direction * 0.0]]


def worst_rows(plan: Plan, rng: np.random.Generator, count: int = 24) -> np.ndarray:
    """[h 1] of every length up to R: along the weights' first direction and across, at R, and where the clip begins."""
    longest = plan.scales.row_bound - math.sqrt(plan.width) * 2.0 ** -(EMBEDDING_BITS + 1)
    begins = math.sqrt(max(0.0, plan.training.clip_norm**2 / 2 - 1))
    lengths = [longest, min(longest, begins), min(longest, 1.01 * begins), min(longest, 1.3 * begins)]
    lengths += list(longest * np.linspace(1.0, 0.02, count - len(lengths)))
    rows = np.zeros((count, plan.width))
    rows[:, 0] = lengths
    across = rng.normal(size=(count // 4, plan.width))
    rows[::4] = across / np.linalg.norm(across, axis=1, keepdims=True) * np.array(lengths)[::4, None]
    return with_ones(np.trunc(rows * 2.0**EMBEDDING_BITS) * 2.0**-EMBEDDING_BITS)


def _labels(plan: Plan, rows: np.ndarray, layers: list[np.ndarray]) -> np.ndarray:
    """As wrong as can be, so that ‖δ‖ is as long as can be; every sixth is right."""
    logits = GlobalModel(layers, activation(plan.training.hidden, plan.training.weights)).forward(rows)[1]
    if plan.training.task == "regression":
        return np.where(np.arange(len(rows)) % 6 == 0, np.clip(logits[:, 0], -1, 1), -np.sign(logits[:, 0]))
    if plan.training.task == "binary":
        logits = np.concatenate([np.zeros_like(logits), logits], axis=1)
    labels = logits.argmin(axis=1)
    labels[::6] = logits.argmax(axis=1)[::6]
    return labels


def _within_limit(plan: Plan, rows: np.ndarray, labels: np.ndarray, layers: list[np.ndarray]) -> np.ndarray:
    """Which rows count in an MLP: sums behind the others may wrap around, and are multiplied by zero."""
    limit = plan.scales.norm_limit
    if limit is None:
        return np.ones(len(rows), dtype=bool)
    model = GlobalModel(layers)
    inputs, logits = model.forward(rows)
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    delta = shifted / shifted.sum(axis=1, keepdims=True)
    delta[np.arange(len(labels)), labels] -= 1
    hidden = [*inputs[1:], *model.backward(inputs, delta)[:-1]]
    return np.all([np.linalg.norm(each, axis=1) < 0.98 * limit for each in hidden], axis=0)


async def _shared(party: Any, plan: Plan, rows: np.ndarray, labels: np.ndarray, layers: list[np.ndarray]):
    embeddings = await refmpc.input_from_party(party, 0, rows, rows.shape, EMBEDDING_BITS)
    shape = len(rows), plan.outputs
    shared_labels = await refmpc.input_from_party(party, 0, plan.labels_to_share(labels), shape, plan.label_bits)
    bits = plan.scales.weight_bits
    values = [await refmpc.input_from_party(party, 0, layer, layer.shape, bits) for layer in layers]
    return SharedRows(embeddings, shared_labels, await squared_norms(embeddings, plan.scales, shared_labels)), values


async def _contributions(party: Any, job: Any) -> np.ndarray:
    plan, rows, labels, layers = job
    shared, values = await _shared(party, plan, rows, labels, layers)

    async def lengths(tensor: ArithmeticTensor) -> np.ndarray:
        values = await refmpc.reveal(tensor, release="test")
        assert values is not None
        return np.linalg.norm(values, axis=1)

    if plan.scales.low_round is not None or plan.scales.bounded is not None:
        clipped = await linear_updates(shared, values[0], plan.scales, plan.training.class_weights)
        return await lengths(shared.embeddings) * await lengths(clipped)
    inputs, errors = await layer_factors(shared, [Weights(value, None) for value in values], plan.scales)
    if plan.training.gradients == "explicit":
        flat, factor = await explicit_clip(inputs[0], errors[0], plan.scales)
        return await lengths(factor.reshape(-1, 1)) * await lengths(flat)
    factor = await clip_factors(errors, inputs, shared.norms, plan.scales)
    updates = [await clipped_updates(factor, delta) for delta in errors]
    products = [await lengths(a) * await lengths(u) for a, u in zip(inputs, updates, strict=True)]
    return np.linalg.norm(products, axis=0)


def contributions(plan: Plan, rows: np.ndarray, layers: list[np.ndarray], *, check_ranges: bool = True) -> np.ndarray:
    """The norm of every sample's clipped gradient as the servers hold it, all roundings included.

    With ``check_ranges`` every operand is opened too, and the first that leaves its domain raises ``RangeError``.
    """
    if plan.scales.smooth is not None:  # there is no such step with secret weights
        return open_contributions(plan, rows, layers, check_ranges=check_ranges)
    labels = _labels(plan, rows, layers)
    if check_ranges:
        kept = _within_limit(plan, rows, labels, layers)
        rows, labels = rows[kept], labels[kept]
        if not len(rows):
            return np.zeros(0)
    return _run(_contributions, (plan, rows, labels, layers), check_ranges)


async def _open_contributions(party: Any, job: Any) -> np.ndarray:
    plan, rows, labels, layers = job
    shared, _ = await _shared(party, plan, rows, labels, [])
    integers = [np.rint(layer * 2.0**plan.scales.weight_bits).astype(np.int64) for layer in layers]
    head = public_inputs(party, [PublicLayer(each) for each in integers], plan)
    words = await step_words(shared, head, np.zeros(plan.parameters), plan.training, plan.scales)
    assert len(words) == len(layers)
    inputs, updates = await layer_updates(shared, head, plan.scales, plan.training.class_weights)
    products = []
    for a, u in zip(inputs, updates, strict=True):
        opened = [not_none(await refmpc.reveal(each, release="test")) for each in (a, u)]
        products.append(np.linalg.norm(opened[0], axis=1) * np.linalg.norm(opened[1], axis=1))
    return np.linalg.norm(products, axis=0)


def open_contributions(
    plan: Plan, rows: np.ndarray, layers: list[np.ndarray], *, check_ranges: bool = False
) -> np.ndarray:
    """``contributions`` of a step with open weights."""
    return _run(_open_contributions, (plan, rows, _labels(plan, rows, layers), layers), check_ranges)


async def _extreme_opening(party: Any, job: Any) -> np.ndarray:
    plan, rows, labels, layers, noise = job
    shared, _ = await _shared(party, plan, rows, labels, [])
    integers = [np.rint(layer * 2.0**plan.scales.weight_bits).astype(np.int64) for layer in layers]
    head = public_inputs(party, [PublicLayer(each) for each in integers], plan)
    addend = own_addend(party, np.full(plan.parameters, noise), plan)
    words = await step_words(shared, head, addend, plan.training, plan.scales)
    flat = seal(np.concatenate([unseal(each).reshape(-1) for each in words]))
    return await refmpc.open_words(party, flat, plan.scales.truncated_bits, "test")


def extreme_opening(plan: Plan, rows: np.ndarray, layers: list[np.ndarray]) -> None:
    """A whole open step with the largest noise that the plan has room for, both ways; raises if anything leaves its
    domain, and what it opens without the noise is what a batch may contribute."""
    reached = plan.schedule.batch_size * (plan.training.clip_norm + plan.scales.clip_rounding)
    deviation = plan.noise_std * plan.factorisation.velocity_norm(0.0) * 2.0**GRADIENT_BITS
    rows = rows[: plan.schedule.batch_size]
    for sign in (1, -1):
        each = sign * round(NOISE_DEVIATIONS * deviation / 3)
        opened = _run(_extreme_opening, (plan, rows, _labels(plan, rows, layers), layers, each), True)
        left = opened * 2.0**-RELEASE_BITS - 3 * each * 2.0**-GRADIENT_BITS
        assert np.linalg.norm(left) <= reached + 2.0 ** (1 - RELEASE_BITS) * math.sqrt(plan.parameters)


async def _extreme_step(party: Any, job: Any) -> list[np.ndarray]:
    plan, rows, labels, layers, velocity = job
    shared, values = await _shared(party, plan, rows, labels, layers)
    before = [
        Weights(
            value, await refmpc.input_from_party(party, 0, np.full(value.shape, velocity), value.shape, RELEASE_BITS)
        )
        for value in values
    ]
    noise = np.zeros(plan.parameters, dtype=np.int64)
    rate = plan.learning_rate(0)
    after = await gradient_step(shared, before, noise, rate, plan.training, plan.scales)
    opened: list[Any] = []
    for layer in after:
        assert layer.velocity is not None
        opened.append(await refmpc.reveal(layer.velocity, release="test"))
    return opened


def extreme_step(plan: Plan, rows: np.ndarray, layers: list[np.ndarray]) -> None:
    """A whole step from the largest momentum that a run may have gathered; raises if anything leaves its domain."""
    if plan.scales.smooth is not None:
        extreme_opening(plan, rows, layers)
        return
    noise = plan.noise
    # with open weights β·v is public and not part of what is truncated
    training = plan.training.with_(momentum=0.0) if plan.opens_sums else plan.training
    plan = replace(plan, training=training)
    reached = training.batch_size * (training.clip_norm + plan.scales.clip_rounding) / (1 - training.momentum)
    reached += 6 * noise.outsider_std * plan.factorisation.velocity_norm(training.momentum)
    labels = _labels(plan, rows, layers)
    kept = np.flatnonzero(_within_limit(plan, rows, labels, layers))[: training.batch_size]
    if len(kept):
        velocity = reached if training.momentum else 0.0
        found = _run(_extreme_step, (plan, rows[kept], labels[kept], layers, velocity), True)
        assert max(np.abs(layer).max() for layer in found) <= reached + 2.0**-RELEASE_BITS


def _run(program: Any, job: Any, check_ranges: bool) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="insecure_")
        result = refmpc.run(
            program, [job] * 3, releases={"test": "a test, no claim"}, insecure_check_ranges=check_ranges, timeout=60
        )
    return result.outputs[0]
