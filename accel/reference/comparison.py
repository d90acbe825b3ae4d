"""Local steps of the comparison of x = c − ρ with thresholds: c known to two holders, ρ to the dealer.

It works on digits of g = 2 or 3 bits: a digit of ρ travels as the 2^g − 1 bits [digit > 0], [digit > 1], ... shared
modulo a small prime, packed. Only the bits from ``low`` to ``low`` + ``width`` are compared, the one above them is the
sign.
"""

from __future__ import annotations

import numpy as np

from accel.reference.bits import pack_small, unpack_small

__all__ = ["compare_deal", "compare_decide", "compare_reply", "comparison_digits"]

ONE = np.uint64(1)


def comparison_digits(width: int, digit_bits: int) -> tuple[int, int]:
    """(digits, thresholds) of a number of ``width`` bits: a digit of g bits has 2^g − 1 thresholds, and the highest
    digit may be shorter."""
    whole, rest = divmod(width, digit_bits)
    return whole + (rest > 0), whole * (2**digit_bits - 1) + 2**rest - 1


def _low_bits(width: int) -> np.uint64:
    return np.uint64((1 << width) - 1)


def compare_deal(
    x0: np.ndarray,
    x1: np.ndarray,
    halves: np.ndarray,
    low: int,
    width: int,
    digit_bits: int,
    prime: int,
    top: np.ndarray,
    packed: np.ndarray,
) -> None:
    """The dealer, ρ = −x0 − x1: the other halves of its threshold bits modulo ``prime``, (thresholds, n) packed, and
    ρ's sign bit. Row (2^g − 1)·d + v is [digit d of ρ > v] − halves; digits count from the lowest."""
    rho = np.uint64(0) - x0 - x1
    value = (rho >> np.uint64(low)) & _low_bits(width)
    out = np.empty_like(halves)
    for row in range(halves.shape[0]):
        d, v = divmod(row, 2**digit_bits - 1)
        digit = (value >> np.uint64(digit_bits * d)) & np.uint64(2**digit_bits - 1)
        out[row] = ((digit > v) + np.int64(prime) - halves[row]) % prime
    top[:] = (rho >> np.uint64(low + width)) & ONE
    packed[:] = pack_small(out.reshape(-1), prime.bit_length())


def compare_reply(
    c: np.ndarray,
    threshold: np.uint64,
    halves: np.ndarray,
    coins: np.ndarray,
    scale: np.ndarray,
    mask: np.ndarray,
    rotation: np.ndarray,
    low: int,
    width: int,
    digit_bits: int,
    prime: int,
    leads: bool,
    held: np.ndarray,
    packed: np.ndarray,
) -> None:
    """One holder's half of the blinded digit tests for c − threshold, (digits, n) packed, and its bit of the result.

    For coin (lowest bit) 0 the tests have a zero exactly when c < ρ, for 1 exactly when c ≥ ρ:
    e_d = 1 − [digit decides] + Σ_{k>d} [digits k differ], so at most one e_d is zero and e_d ≤ digits < prime.
    Each e_d is multiplied by its non-zero ``scale`` + 1, masked, and the column is rotated. Public constants are added
    by the holder that ``leads``, which also adds the mask where the other subtracts it.
    """
    digits, thresholds = comparison_digits(width, digit_bits)
    per_digit = 2**digit_bits - 1
    shifted = c - np.uint64(threshold)
    reverse = coins & np.uint8(1)
    value = ((shifted >> np.uint64(low)) + reverse.astype(np.uint64)) & _low_bits(width)
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
        factor = scale[d].astype(np.int64) + 1
        out[(d + rotation.astype(np.int64)) % digits, columns] = (factor * test + signed) % prime
    held[:] = ((shifted >> np.uint64(low + width)) & ONE).astype(np.uint8) ^ reverse
    packed[:] = pack_small(out.reshape(-1), prime.bit_length())


def compare_decide(
    left: np.ndarray, right: np.ndarray, digits: int, prime: int, top: np.ndarray, held: np.ndarray
) -> None:
    """The dealer's bit: its sign bit, turned where some left + right ≡ 0 (mod prime) in its column."""
    bits = prime.bit_length()
    tests = [unpack_small(side, bits, digits * top.size).reshape(digits, -1).astype(np.int64) for side in (left, right)]
    total = tests[0] + tests[1]
    held[:] = top ^ ((total == 0) | (total == prime)).any(axis=0).astype(np.uint8)
