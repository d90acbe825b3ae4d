"""How samples are held against the Gaussian they should follow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats


def departures(
    samples: np.ndarray, std: float, tails: Sequence[float] = (2.0, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5)
) -> list[str]:
    """What in ``samples`` contradicts N(0, std²); each check errs with probability below 10^-5."""
    found = []
    x, n = samples / std, samples.size
    for k in range(1, 9):
        expected = float(stats.norm.moment(k))
        spread = math.sqrt((float(stats.norm.moment(2 * k)) - expected**2) / n)
        if abs(np.mean(x**k) - expected) > 4.5 * spread:
            found.append(f"moment {k}")
    if stats.kstest(x, "norm").pvalue < 1e-5:
        found.append("Kolmogorov-Smirnov")
    for bound in tails:
        for side, count in (("above", np.sum(x > bound)), ("below", np.sum(x < -bound))):
            if stats.binomtest(int(count), n, float(stats.norm.sf(bound))).pvalue < 1e-5:
                found.append(f"{side} {bound}")
    return found
