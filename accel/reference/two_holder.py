"""Local steps of the two-holder protocols: truncation and comparison of x = c − ρ (mod 2^64).

Two parties know c, the dealer knows ρ. The comparison works on digits of g = 2 or 3 bits: a digit of ρ travels as the
2^g − 1 bits [digit > 0], [digit > 1], ... shared modulo a small prime.
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "compare_deal",
    "compare_decide",
    "compare_reply",
    "comparison_digits",
    "truncate_finish",
    "uniform_below",
]

TOP = np.uint64(63)
ONE = np.uint64(1)


def _low(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def truncate_finish(c: np.ndarray, wrap: np.ndarray, bits: int) -> np.ndarray:
    """(c≫bits) + wrap·2^(64−bits) − 2^(62−bits): the share of the two holders of c."""
    return (c >> np.uint64(bits)) + (wrap << np.uint64(64 - bits)) - np.uint64(1 << (62 - bits))


def uniform_below(random: np.ndarray, bound: int, count: int) -> tuple[np.ndarray, int]:
    """``count`` values uniform in 0..bound−1 from random bytes, by rejection (no bias at all), and how many
    there were: fewer than ``count`` if the bytes did not last."""
    accepted = random[random < 256 - 256 % bound][:count]
    return accepted % np.uint8(bound), accepted.size


def comparison_digits(width: int, digit_bits: int) -> tuple[int, int]:
    """(digits, thresholds) of a number of ``width`` bits: a digit of g bits has 2^g − 1 thresholds, and the highest
    digit may be shorter."""
    whole, rest = divmod(width, digit_bits)
    return whole + (rest > 0), whole * (2**digit_bits - 1) + 2**rest - 1


def compare_deal(rho: np.ndarray, halves: np.ndarray, width: int, digit_bits: int, prime: int) -> np.ndarray:
    """The dealer's other halves of its threshold bits modulo ``prime``: (thresholds, n), uint8.

    Row (2^g − 1)·d + v is [digit d of ρ > v] − halves; digits count from the lowest.
    """
    out = np.empty_like(halves)
    value = rho & (np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width))
    for row in range(halves.shape[0]):
        d, v = divmod(row, 2**digit_bits - 1)
        digit = (value >> np.uint64(digit_bits * d)) & np.uint64(2**digit_bits - 1)
        out[row] = ((digit > v) + np.int64(prime) - halves[row]) % prime
    return out


def compare_reply(
    c: np.ndarray,
    halves: np.ndarray,
    reverse: np.ndarray,
    scale: np.ndarray,
    mask: np.ndarray,
    rotation: np.ndarray,
    width: int,
    digit_bits: int,
    prime: int,
    leads: bool,
) -> np.ndarray:
    """One holder's half of the blinded digit tests, (digits, n) uint8.

    For reverse = 0 the tests have a zero exactly when c < ρ, for reverse = 1 exactly when c ≥ ρ:
    e_d = 1 − [digit decides] + Σ_{k>d} [digits k differ], so at most one e_d is zero and e_d ≤ digits < prime.
    Each e_d is multiplied by its non-zero ``scale``, masked, and the column is rotated. Public constants are added by
    the holder that ``leads``, which also adds the mask where the other subtracts it.
    """
    digits, thresholds = comparison_digits(width, digit_bits)
    per_digit = 2**digit_bits - 1
    value = np.where(reverse == 1, c + ONE, c) & (np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - width))
    all_at_most = (reverse == 1) & (value == 0)  # c + 1 = 2^width: ρ ≤ c always
    constant = 1 if leads else 0
    out = np.empty((digits, c.size), dtype=np.uint8)
    differ_above = np.zeros(c.size, dtype=np.int64)
    columns = np.arange(c.size)
    for d in reversed(range(digits)):
        digit = ((value >> np.uint64(digit_bits * d)) & np.uint64(per_digit)).astype(np.int64)
        above_each = np.zeros((per_digit + 2, c.size), dtype=np.int64)  # row v+1: share of [digit of ρ > v]
        above_each[0] = constant
        rows = min(per_digit, thresholds - per_digit * d)
        above_each[1 : 1 + rows] = halves[per_digit * d : per_digit * d + rows]
        below, above = above_each[digit, columns], above_each[digit + 1, columns]
        decides = np.where(reverse == 1, constant - below, above)
        test = np.where(all_at_most, constant * (d != 0), constant - decides + differ_above)
        differ_above = differ_above + constant - (below - above)
        signed = mask[d].astype(np.int64) * (1 if leads else -1)
        out[(d + rotation.astype(np.int64)) % digits, columns] = (scale[d] * test + signed) % prime
    return out


def compare_decide(left: np.ndarray, right: np.ndarray, prime: int) -> np.ndarray:
    """1 where some left + right ≡ 0 (mod prime), else 0, per column (uint8)."""
    total = left.astype(np.int64) + right
    return ((total == 0) | (total == prime)).any(axis=0).astype(np.uint8)
