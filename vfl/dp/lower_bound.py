"""ε from below, from an attacker's scores alone: no assumption on their distributions."""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import beta

__all__ = ["epsilon_lower_bound"]


def epsilon_lower_bound(
    without: np.ndarray, with_canary: np.ndarray, delta: float, confidence: float = 0.999
) -> tuple[float, float, float]:
    """(ε lower bound, FPR, TPR) that holds with ``confidence``, whatever the distributions; at least 0.

    Tests "score > threshold ⇒ canary" and "score < threshold ⇒ none"; the better one and its threshold
    come from the first half of the trials, the Clopper–Pearson limits from the second.
    """
    tests = ((without, with_canary), (-with_canary, -without))
    best = max(
        (
            (_log_ratio(*_counts(low, high, threshold, 0), delta, confidence), index, threshold)
            for index, (low, high) in enumerate(tests)
            for threshold in np.quantile(high[: len(high) // 2], np.linspace(0.5, 0.9999, 200))
        ),
        key=lambda candidate: candidate[0],
    )
    low, high = tests[best[1]]
    false_hits, low_size, true_hits, high_size = _counts(low, high, best[2], 1)
    bound = _log_ratio(false_hits, low_size, true_hits, high_size, delta, confidence)
    return max(0.0, bound), false_hits / low_size, true_hits / high_size


def _counts(low: np.ndarray, high: np.ndarray, threshold: float, half: int) -> tuple[int, int, int, int]:
    middle_low, middle_high = len(low) // 2, len(high) // 2
    low = low[middle_low:] if half else low[:middle_low]
    high = high[middle_high:] if half else high[:middle_high]
    return int(np.sum(low > threshold)), len(low), int(np.sum(high > threshold)), len(high)


def _log_ratio(
    false_hits: int, low_size: int, true_hits: int, high_size: int, delta: float, confidence: float
) -> float:
    error = (1 - confidence) / 2
    most_false = 1.0 if false_hits == low_size else beta.ppf(1 - error, false_hits + 1, low_size - false_hits)
    least_true = 0.0 if true_hits == 0 else beta.ppf(error, true_hits, high_size - true_hits + 1)
    return math.log((least_true - delta) / most_false) if least_true > delta else -math.inf
