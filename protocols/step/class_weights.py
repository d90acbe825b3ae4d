"""Class weights of many classes on shares: linear functions of the labels that are shared already, so nothing is sent
for them.

A row's error becomes w·(p − y) before the clip, w the public weight of its secret class. w·p is one secret product a
row and class, beside a round that is there anyway (``refmpc.probabilities``); w·y and w itself are local.
"""

from __future__ import annotations

from collections.abc import Sequence

from refmpc import ArithmeticTensor
from vfl.losses import WEIGHT_BITS, weight_words

__all__ = ["row_weights", "weighted_labels"]


def row_weights(labels: ArithmeticTensor, class_weights: Sequence[float]) -> ArithmeticTensor | None:
    """The class weight of each row, from its label: local. None without class weights."""
    if not class_weights:
        return None
    words = weight_words(class_weights)
    return labels.scale_by_integers(words).sum(axis=1).reinterpret(WEIGHT_BITS)


def weighted_labels(labels: ArithmeticTensor, class_weights: Sequence[float]) -> ArithmeticTensor:
    """w·y: each column times the weight of its class. Local."""
    if not class_weights:
        return labels
    return labels.scale_by_integers(weight_words(class_weights)).reinterpret(WEIGHT_BITS)
