"""Local steps of ``order``: all pairs of g numbers x_i = c_i − ρ_i modulo 2^(w+1) compared at once.

Numbers lie in rows (n, g), pairs i < j in the order of ``itertools.combinations``. Of ρ_i − ρ_j the dealer's message
holds, for each base-4 digit of the low w bits from the highest, the bits [digit > 0], [> 1], [> 2], and the top bit at
the end, each shared modulo a prime. A bit, or a test, of all pairs of all rows lies in one line of memory: (bits,
n·pairs). All results go into ``out``.
"""

from __future__ import annotations

import itertools

import numpy as np

__all__ = ["order_deal", "order_decide", "order_pick", "order_place", "order_reply", "order_shuffle"]

ONE = np.uint64(1)


def _low(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _pairs(count: int) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.array(list(itertools.combinations(range(count), 2)), dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _digit(words: np.ndarray, d: int, digits: int) -> np.ndarray:
    return ((words >> np.uint64(2 * (digits - 1 - d))) & np.uint64(3)).astype(np.int64)


def order_shuffle(draws: np.ndarray, out: np.ndarray) -> None:
    """Fisher and Yates: row r of ``out`` (n, g) becomes the permutation given by draws[i − 1, r] uniform in 0..i."""
    out[:] = np.arange(out.shape[1], dtype=np.uint8)
    rows = np.arange(len(out))
    for i in range(out.shape[1] - 1, 0, -1):
        j = draws[i - 1].astype(np.int64)
        swapped = out[rows, j]
        out[rows, j] = out[:, i]
        out[:, i] = swapped


def order_deal(rho: np.ndarray, halves: np.ndarray, width: int, prime: int, out: np.ndarray) -> None:
    """The dealer's bits of all pairs minus ``halves`` modulo ``prime``: (3·digits + 1, n·pairs), uint8."""
    digits = -(-width // 2)
    i, j = _pairs(rho.shape[1])
    difference = ((rho[:, i] - rho[:, j]) & _low(width + 1)).reshape(-1)
    low = difference & _low(width)
    bits = np.empty(out.shape, dtype=np.int16)
    for d in range(digits):
        digit = _digit(low, d, digits)
        for v in range(3):
            bits[3 * d + v] = digit > v
    bits[-1] = difference >> np.uint64(width)
    out[:] = (bits - halves) % prime


def order_reply(
    c: np.ndarray,
    halves: np.ndarray,
    slots: np.ndarray,
    scale: np.ndarray,
    mask: np.ndarray,
    turn: np.ndarray,
    width: int,
    prime: int,
    leads: bool,
    out: np.ndarray,
) -> None:
    """One holder's half of the blinded tests (2·digits + 1, n·pairs of slots), uint8.

    Of the tests of a pair exactly one is zero if the class in the lower slot is ahead (ties go to the lower class),
    else none: D = C − R ≥ 0 means equal top bits and R_low ≤ C_low, or different ones and R_low > C_low. ``slots`` (n,
    g) says which slot a class is in, ``scale`` + 1 multiplies a test, ``turn`` rotates the column of tests.
    """
    digits = -(-width // 2)
    count = 2 * digits + 1
    classes = c.shape[1]
    i, j = _pairs(classes)
    difference = ((c[:, i] - c[:, j]) & _low(width + 1)).reshape(-1)
    low = difference & _low(width)
    slot_i, slot_j = (slots[:, which].astype(np.int64).reshape(-1) for which in (i, j))
    same = ((difference >> np.uint64(width)) & ONE).astype(bool) ^ (slot_i > slot_j)
    one = np.int16(1 if leads else 0)
    half = halves.astype(np.int16)
    top = half[-1]
    differs, equals = np.where(same, one - top, top), np.where(same, top, one - top)
    before = np.zeros(difference.shape, dtype=np.int16)
    tests = np.empty((count, difference.size), dtype=np.int16)
    for d in range(digits):
        digit = _digit(low, d, digits)
        steps = [np.full_like(top, one), *half[3 * d : 3 * d + 3], np.zeros_like(top)]
        at_least, above = np.choose(digit, steps[:4]), np.choose(digit, steps[1:])
        tests[d] = before + at_least + differs
        tests[digits + 1 + d] = before + one - above + equals
        before = before + one - (at_least - above)
    tests[digits] = before + differs
    factor = scale.astype(np.int16) + np.int16(1)
    blinded = (tests * factor + (mask.astype(np.int16) if leads else -mask.astype(np.int16))) % prime
    first, second = np.minimum(slot_i, slot_j), np.maximum(slot_i, slot_j)
    pair = first * (2 * classes - first - 1) // 2 + second - first - 1
    place = np.repeat(np.arange(len(c)), len(i)) * len(i) + pair
    for t in range(count):
        out[(t + turn.astype(np.int64)) % count, place] = blinded[t]


def order_place(
    words: np.ndarray, slots: np.ndarray, first: np.ndarray, second: np.ndarray, width: int, out: np.ndarray
) -> None:
    """``words`` (n, g) put into their slots, plus ``first`` and ``second`` (by slot), modulo 2^(width + 1)."""
    placed = np.empty_like(words)
    np.put_along_axis(placed, slots.astype(np.int64), words, axis=1)
    out[:] = (placed + first + second) & _low(width + 1)


def order_decide(
    left: np.ndarray,
    right: np.ndarray,
    prime: int,
    rho_left: np.ndarray,
    rho_right: np.ndarray,
    width: int,
    best: np.ndarray,
    summand: np.ndarray,
) -> None:
    """The dealer: ``best`` (n, g) is 1 at the slot that is ahead of all others, ``summand`` (n,) −ρ of that slot."""
    classes = best.shape[1]
    total = left.astype(np.int16) + right
    lower_wins = ((total == 0) | (total == prime)).any(axis=0).reshape(len(best), -1)
    wins = np.zeros(best.shape, dtype=np.int64)
    for number, (a, b) in enumerate(itertools.combinations(range(classes), 2)):
        wins[:, a] += lower_wins[:, number]
        wins[:, b] += ~lower_wins[:, number]
    found = wins.argmax(axis=1)
    rows = np.arange(len(best))
    best[:] = 0
    best[rows, found] = 1
    summand[:] = (np.uint64(0) - rho_left[rows, found] - rho_right[rows, found]) & _low(width + 1)


def order_pick(half: np.ndarray, placed: np.ndarray, width: int, out: np.ndarray) -> None:
    """A holder's summand of the largest: Σ_h half_h·placed_h modulo 2^(width + 1)."""
    out[:] = (half * placed).sum(axis=1, dtype=np.uint64) & _low(width + 1)
