"""A secure run and its twin agree within a derived bound."""

from __future__ import annotations

from typing import Any

import numpy as np

from protocols.plan.run_plan import Plan
from protocols.plan.scales import EMBEDDING_BITS, RELEASE_BITS
from tests.protocols.step.gl_inputs import rounded_up
from vfl.federation import Federation
from vfl.gradients import GlobalModel, clipped_gradient, with_ones
from vfl.hidden import activation
from vfl.losses import errors_and_losses

__all__ = ["assert_agrees", "entry_error", "factor_loss", "twin_and_bound"]


def contribution_errors(plan: Plan, model: GlobalModel, rows: np.ndarray, labels: np.ndarray, gaps: list[float]):
    """How far each sample's clipped gradient may be from the twin's, in norm, if layer l of the weights is off by
    gaps[l].

    Forward: embeddings are rounded to 2^-15 a column, sums cut to 2^-14 (logits 2^-16), and ReLU is 1-Lipschitz.
    Softmax is 1-Lipschitz and off by 2^-14 an entry (in 18 rounds by half of it, and δ is cut to its bits). Backward:
    each product is cut to the layer's bits; where a sum is closer to zero than its error the mask may differ, and the
    whole entry counts. Clipping is a projection, hence 1-Lipschitz; the factor itself may be too small by 2^-14, and by
    half of what q was rounded up by.
    """
    scales = plan.scales
    if scales.one_output is not None:
        return bounded_errors(plan, model, rows, gaps[0])
    if scales.smooth is not None:
        return smooth_errors(plan, model, rows, gaps)
    if scales.bounded_softmax is not None:  # u moves by less than a logit; δ and p' are opened at 13 bits, e at 14
        reach, columns = np.linalg.norm(rows, axis=1), np.sqrt(plan.width) * 2.0**-15
        output = reach * (gaps[0] + np.sqrt(model.layers[0].size) * 2.0**-17)
        return np.asarray(reach * (output + columns + 2.0**-9))
    inputs, logits = model.forward(rows)
    task, weights = plan.training.task, plan.training.class_weights
    delta, _ = errors_and_losses(task, logits, labels, weights)
    deltas = model.backward(inputs, delta)
    norms = [np.linalg.norm(layer, 2) for layer in model.layers]

    def size(values: np.ndarray) -> np.ndarray:
        return np.linalg.norm(values, axis=1)

    error = np.full(len(rows), np.sqrt(plan.width) * 2.0**-15)
    input_errors, sum_errors = [error], []
    for depth, layer in enumerate(model.layers):
        last = depth == len(model.layers) - 1
        cut = np.sqrt(layer.shape[1]) * 2.0 ** -(16 if last else EMBEDDING_BITS)
        error = error * (norms[depth] + gaps[depth]) + size(inputs[depth]) * gaps[depth] + cut
        sum_errors.append(error)
        if not last:
            input_errors.append(error)
    error = max(1.0, *weights, 0.0) * error + np.sqrt(plan.outputs) * entry_error(plan)
    delta_errors = [error]
    for depth in range(len(model.layers) - 1, 0, -1):
        through = deltas[depth] @ model.layers[depth][:-1].T
        sums = inputs[depth - 1] @ model.layers[depth - 1]
        undecided = size(through * (np.abs(sums) <= sum_errors[depth - 1][:, None]))
        cut = np.sqrt(through.shape[1]) * 2.0 ** -scales.layers[depth - 1].error_bits
        error = error * (norms[depth] + gaps[depth]) + size(deltas[depth]) * gaps[depth] + cut + undecided
        delta_errors.insert(0, error)
    squares: Any = 0.0
    excess: Any = 0.0
    for scale, a, d, da, dd in zip(scales.layers, inputs, deltas, input_errors, delta_errors, strict=True):
        squares = squares + (size(a) * dd + (size(d) + dd) * da) ** 2
        n = (size(a) / plan.training.clip_norm) ** 2
        excess = excess + 2 * 2.0**-scale.norm_bits * size(d) ** 2 + 2.0**-scale.square_bits * (n + 1)
        excess = excess + rounded_up(scale.norms) * n * size(d) ** 2
    gamma = plan.training.clip_norm
    return np.minimum(np.sqrt(squares), 2 * gamma) + gamma * (factor_loss(plan) + excess / 2)


def bounded_errors(plan: Plan, model: GlobalModel, rows: np.ndarray, gap: float) -> np.ndarray:
    """The same with one output: γ times what F may be off by, which is its slope times the output's error (rows at 14
    bits, open weights at 16), three units of its grid, and its rounding; and λ, which has nine bits, and the row's own
    rounding."""
    own, (weights,) = plan.scales.one_output, model.layers
    assert own is not None
    columns, reach = np.sqrt(plan.width) * 2.0**-15, np.linalg.norm(rows, axis=1)
    output = reach * (gap + np.sqrt(len(weights)) * 2.0**-17) + columns * (np.linalg.norm(weights) + gap)
    binary = own.task == "binary"
    slope = 0.25 / max(1.0, own.public.threshold) if binary else 1 / own.public.threshold
    wave = own.public.wave(plan.scales.logit_bound)
    off = slope * (output + 2.0**-15) + 0.5 * 3 * 2.0**-12 + float(own.function(wave).error) + 2.0**-8 + columns
    return np.asarray(plan.training.clip_norm * off)


def smooth_errors(plan: Plan, model: GlobalModel, rows: np.ndarray, gaps: list[float]) -> np.ndarray:
    """The same with waves: γ times a hundredth for all roundings (a and δ are off by less than 2^-7 of their size, q
    by as much twice), and what the gaps move: sums by ‖a‖ of them, errors by ‖δ‖, through at most the norms of the
    layers between; C·δ has a slope of at most γ/‖δ‖·2."""
    reach = np.array([np.linalg.norm(rows, axis=1).max(), *(np.sqrt(1.04 * len(w) + 1) for w in model.weights[1:])])
    through = np.prod([1 + np.linalg.norm(layer, 2) for layer in model.layers[1:]])
    moved = float((reach * np.array(gaps)).sum() * through) * 4
    return np.full(len(rows), plan.training.clip_norm * min(2.0, 0.01 + moved))


def entry_error(plan: Plan) -> float:
    """Error of an entry of δ, given the logits."""
    low = plan.scales.low_round
    if plan.training.task == "regression":
        return 2.0**-15  # the target is rounded to 14 bits
    largest = max(1.0, *plan.training.class_weights, 0.0)
    return largest * (2.0**-14 if low is None else 2.0**-15 + (plan.classes - 1) * 2.0**-18 + 2.0**-low.delta_bits)


def factor_loss(plan: Plan) -> float:
    """How much too small a clip factor may be."""
    low = plan.scales.low_round
    return 2.0**-14 if low is None else low.clip_loss


def twin_and_bound(plan: Plan, federation: Federation, noise: np.ndarray) -> tuple[list[np.ndarray], list[float]]:
    """The twin's layers after all steps, and for each layer how far (Frobenius) the secure run may be from it.

    A step adds (η/B)·(sum of the contributions' errors + 2^-12 an entry for the cut of y) to every layer's gap;
    momentum keeps a part β of what the gradients were off by.
    """
    training = plan.training
    model = GlobalModel([layer.copy() for layer in plan.start], activation(training.hidden, training.weights))
    velocity = [np.zeros_like(layer) for layer in model.layers]
    gaps = [np.sqrt(layer.size) * 2.0**-plan.scales.weight_bits for layer in model.layers]
    drifts = [0.0 for _ in gaps]
    rows, labels = with_ones(federation.rows()), federation.labels
    for step in range(plan.schedule.num_steps):
        here, rate = plan.schedule.rows(step), plan.learning_rate(step)
        off = contribution_errors(plan, model, rows[here], labels[here], gaps).sum()
        gradient = clipped_gradient(
            model,
            rows[here],
            labels[here],
            training.clip_norm,
            norm_limit=plan.scales.norm_limit,
            task=training.task,
            class_weights=training.class_weights,
            bounded=plan.scales.bounded,
        )
        total = model.unflatten(gradient.total + noise[step])
        used = plan.scales.learning_rate_used(rate)
        for depth, layer in enumerate(model.layers):
            velocity[depth] = training.momentum * velocity[depth] + total[depth]
            drifts[depth] = training.momentum * drifts[depth] + off + np.sqrt(layer.size) * 2.0**-RELEASE_BITS
            gaps[depth] += rate / training.batch_size * drifts[depth] * 1.001
            gaps[depth] += abs(used - rate) / training.batch_size * np.linalg.norm(velocity[depth])
            # α is taken at 16 bits, and α·W is cut
            gaps[depth] += (2.0**-17 * np.linalg.norm(layer) + np.sqrt(layer.size) * 2.0**-plan.scales.weight_bits) * (
                training.weight_decay != 1.0
            )
            model.layers[depth] = training.weight_decay * layer - rate / training.batch_size * velocity[depth]
    return model.layers, [float(gap) for gap in gaps]


def assert_agrees(plan: Plan, federation: Federation, opened: list[np.ndarray], noise: np.ndarray, twin) -> None:
    layers, gaps = twin_and_bound(plan, federation, noise)
    for layer, own, ours, gap in zip(twin.model.layers, layers, opened, gaps, strict=True):
        assert np.allclose(layer, own, atol=1e-9)  # the bound follows the twin
        assert np.linalg.norm(ours - layer) <= gap
        if plan.scales.smooth is not None:
            assert np.linalg.norm(ours - layer) <= 2.0**-9 * np.linalg.norm(layer)
            continue
        assert gap < 0.25 * np.linalg.norm(layer)  # the bound says something
