"""Errors are the gradients of the losses, in every task; targets are scaled and back; scores are scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, r2_score

from vfl.gradients import GlobalModel, clipped_gradient, with_ones
from vfl.losses import (
    WEIGHT_BITS,
    classes_of,
    errors_and_losses,
    output_count,
    probabilities,
    scaled_targets,
    score,
    shared_labels,
    unscaled_targets,
    weight_words,
)

RANDOM = np.random.default_rng(4)
CASES = {
    "classification": (RANDOM.normal(size=(30, 4)) * 3, RANDOM.integers(0, 4, 30), (0.5, 1.0, 2.0, 7.3)),
    "binary": (RANDOM.normal(size=(30, 1)) * 5, RANDOM.integers(0, 2, 30), (0.25, 3.0)),
    "regression": (RANDOM.normal(size=(30, 1)) * 3, RANDOM.uniform(-1, 1, 30), ()),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("task", CASES)
def test_an_error_is_the_gradient_of_the_loss(task, weighted):
    logits, labels, weights = CASES[task]
    used = weights if weighted else ()
    delta, _ = errors_and_losses(task, logits, labels, used)
    assert delta.shape == logits.shape
    step = 1e-6
    for column in range(logits.shape[1]):
        moved = logits.copy()
        moved[:, column] += step
        above = errors_and_losses(task, moved, labels, used)[1]
        moved[:, column] -= 2 * step
        below = errors_and_losses(task, moved, labels, used)[1]
        assert np.allclose((above - below) / (2 * step), delta[:, column], atol=1e-6)


def test_one_logit_is_the_softmax_of_two():
    logits, labels, weights = CASES["binary"]
    both = np.concatenate([np.zeros_like(logits), logits], axis=1)
    assert np.allclose(probabilities("binary", logits), probabilities("classification", both))
    one, loss = errors_and_losses("binary", logits, labels, weights)
    two, same = errors_and_losses("classification", both, labels, weights)
    assert np.allclose(one[:, 0], two[:, 1]) and np.allclose(loss, same)
    assert np.isfinite(errors_and_losses("binary", np.array([[1e4], [-1e4]]), np.array([0, 1]))[1]).all()


@pytest.mark.parametrize("task", CASES)
def test_the_clip_of_one_output_is_a_clamp(task):
    logits, labels, _ = CASES[task]
    rows = with_ones(RANDOM.normal(size=(30, 3)))
    weights = RANDOM.normal(size=(4, logits.shape[1]))
    results = [
        clipped_gradient(GlobalModel([weights]), rows, labels, 0.8, method=method, task=task)
        for method in ("factored", "explicit")
    ]
    assert np.allclose(results[0].total, results[1].total)
    if logits.shape[1] == 1:
        delta, _ = errors_and_losses(task, rows @ weights, labels)
        bound = 0.8 / np.linalg.norm(rows, axis=1)
        clamped = np.clip(delta[:, 0], -bound, bound)
        assert np.allclose(results[0].total, rows.T @ clamped)


def test_targets_are_scaled_and_back():
    targets = np.array([-10.0, 0.0, 35.0, 50.0])
    assert scaled_targets(targets, (0.0, 50.0)).tolist() == [-1.0, -1.0, pytest.approx(0.4), 1.0]
    inside = np.linspace(3, 7, 9)
    assert np.allclose(unscaled_targets(scaled_targets(inside, (3.0, 7.0)), (3.0, 7.0)), inside)


def test_labels_are_shared_as_one_hot_rows_bits_or_targets():
    labels = np.array([1, 0])
    assert shared_labels("classification", labels, 3).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert shared_labels("binary", labels, 2).tolist() == [[1], [0]]
    assert shared_labels("regression", np.array([0.25, -3.0]), 1).tolist() == [[0.25], [-1.0]]
    assert [output_count(task, classes) for task, classes in (("classification", 4), ("binary", 2))] == [4, 1]
    assert weight_words((0.1,)).tolist() == [round(0.1 * 2**WEIGHT_BITS)]


def test_scores_are_those_of_scikit_learn():
    for task in ("classification", "binary"):
        logits, labels, _ = CASES[task]
        assert score(task, logits, labels) == accuracy_score(labels, classes_of(task, logits))
    logits, labels, _ = CASES["regression"]
    assert score("regression", logits, labels) == pytest.approx(r2_score(labels, logits[:, 0]))
    assert np.isnan(score("regression", logits[:0], labels[:0]))
    with pytest.raises(ValueError, match="a regression has no classes"):
        classes_of("regression", logits)
    with pytest.raises(ValueError, match="a regression has no probabilities"):
        probabilities("regression", logits)
