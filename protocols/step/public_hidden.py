"""The public weights of one hidden layer as a step uses them: integers at few bits, and bounds that hold for every row.

With rows within ``reach``, |sum| ≤ reach·(longest column of W_1), ‖a‖ ≤ √hidden times that, logits at most
(‖a‖ + 1)·(longest column of W̃_2), and ‖δ_1‖ ≤ 1.42·‖W_2‖, for which the largest row sum of |W_2ᵀW_2| is a bound: of
the weights as they are used, rounded (proofs §4.11). All of it is integer arithmetic on public numbers, so every server
comes to the same; and bounds are powers of two, so that few different steps are recorded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from accel import kernels
from protocols.plan.hidden_scales import FEWEST_WEIGHT_BITS, HiddenScales
from protocols.plan.scales import EMBEDDING_BITS, HEAD_BITS, Scales
from protocols.plan.squared_norm_ratio import ERROR_NORM
from protocols.step.public_weights import REACH_BITS, Head, PublicLayer, centred, norm_above, rounded
from refmpc.core.integer_logs import ceil_log2
from refmpc.mathematics.probabilities import PROBABILITY_BITS

__all__ = ["HiddenHead", "hidden_head", "widest_hidden_head"]

FEWEST_BACK_BITS = 8  # of W_2 on the way back
MOST = 61  # bits of a number before it is opened or cut
LARGEST_OUTPUT = 15  # bits of ‖a‖: its square fits at 28 more


@dataclass(frozen=True)
class HiddenHead:
    """W_1 at ``bits``, W̃_2 as ``head``, W_2 without its bias at ``back_bits``; bounds of a sum and of ‖a‖."""

    words: np.ndarray
    bits: int
    head: Head
    back: np.ndarray
    back_bits: int
    sum_bound: float
    output_bound: float

    @property
    def sum_bits(self) -> int:
        """Sum bits of [H 1]·W_1, and of a before it is cut."""
        return EMBEDDING_BITS + self.bits

    @property
    def logit_bits(self) -> int:
        """Logit bits of [a 1]·W̃_2."""
        return self.sum_bits + self.head.bits


def _power_above(norm: int, factor: float, bits: int) -> float:
    """A power of two that is at least norm/2^bits·factor."""
    product = norm * math.ceil(factor * 2.0**REACH_BITS)
    return float(1 << ((product >> (REACH_BITS + bits)) + 1).bit_length())


def _norm_within(words: np.ndarray, bits: int, limit: float) -> bool:
    """Whether ‖words/2^bits‖ ≤ limit for sure."""
    largest = kernels.largest_absolute(words)
    if 2 * largest.bit_length() + len(words).bit_length() > 62:
        return False
    gram = words.T @ words
    return max(sum(abs(int(entry)) for entry in row) for row in gram) <= math.floor(limit * limit * 4.0**bits)


def hidden_head(model: Sequence[PublicLayer], scales: Scales) -> HiddenHead | None:
    """What a short step takes of the weights, or None if its ranges do not hold for them and the step takes the longer
    way.

    ‖W_1‖ is within the bound of the run, and with it ‖a‖ (``protocols.plan.plausibility``: looked at before every
    step)."""
    chain = scales.hidden_chain
    if chain is None:
        return None
    first, second = (layer.values for layer in model)
    found = _forward(first, second, scales.weight_bits, scales.layers[0].reach)
    return None if found is None else _back(found, second, scales.weight_bits, chain)


def _forward(first: np.ndarray, second: np.ndarray, weight_bits: int, reach: float) -> HiddenHead | None:
    """W_1 and W̃_2 at as many bits as logits leave, up to 16 each."""
    for total in range(2 * min(HEAD_BITS, weight_bits), 2 * FEWEST_WEIGHT_BITS - 1, -1):
        bits, head_bits = total // 2, total - total // 2
        used, words = rounded(first, weight_bits - bits), centred(second, weight_bits - head_bits)
        sum_bound = _power_above(norm_above(used), reach, bits)
        output_bound = sum_bound * 2.0 ** math.ceil(ceil_log2(first.shape[1]) / 2)
        logit_bound = _power_above(norm_above(words), output_bound + 1.0, head_bits)
        if output_bound > 2.0**LARGEST_OUTPUT:
            return None
        if EMBEDDING_BITS + total + math.log2(logit_bound) <= MOST:
            return HiddenHead(
                used, bits, Head(words, head_bits, logit_bound), words, head_bits, sum_bound, output_bound
            )
    return None


def _back(found: HiddenHead, second: np.ndarray, weight_bits: int, chain: HiddenScales) -> HiddenHead | None:
    """With W_2 for the way back, if ‖δ_1‖ stays within its limit."""
    for bits in range(min(HEAD_BITS, weight_bits), FEWEST_BACK_BITS - 1, -1):
        words = rounded(second[:-1], weight_bits - bits)
        entry = _power_above(norm_above(words.T), ERROR_NORM, bits)
        if PROBABILITY_BITS + bits + math.log2(entry) <= MOST:
            within = _norm_within(words, bits, chain.error_limit / ERROR_NORM)
            return replace(found, back=words, back_bits=bits) if within else None
    return None


def widest_hidden_head(scales: Scales) -> HiddenHead | None:
    """Zeros, with the widest bounds that a short step of this run can have: what it costs at most."""
    chain = scales.hidden_chain
    if chain is None:
        return None
    first, second = scales.layers
    sum_bound = 2.0 ** (ceil_log2(chain.sum_bound) + 1)
    output_bound = min(2.0**LARGEST_OUTPUT, sum_bound * 2.0 ** math.ceil(ceil_log2(first.fan_out) / 2))
    most = MOST - EMBEDDING_BITS - 2 * FEWEST_WEIGHT_BITS
    logit_bound = 2.0 ** min(ceil_log2(2 * (output_bound + 1.0) * second.weight_bound) + 1, most)
    total = min(2 * HEAD_BITS, MOST - EMBEDDING_BITS - ceil_log2(logit_bound))
    head = Head(np.zeros((first.fan_out + 1, second.fan_out), dtype=np.int64), total - total // 2, logit_bound)
    words = np.zeros((first.fan_in + 1, first.fan_out), dtype=np.int64)
    back = np.zeros((first.fan_out, second.fan_out), dtype=np.int64)
    return HiddenHead(words, total // 2, head, back, HEAD_BITS, min(sum_bound, output_bound), output_bound)
