"""Local steps of dealt sines and cosines (``refmpc.mathematics.series``), in integers: every server gets the same
words.

An angle is a word of m ≤ 20 bits, a whole turn 2^m. ``tables`` (4, 1024) hold cosine and sine of i/1024 and of i/2^20
turns at 30 bits; one angle addition gives those of a word, further ones its multiples. A function F has ``sine`` and
``cosine`` coefficients p, q (words read as signed) at some scale; ``cut`` is what brings p·sin at that scale plus 30
bits to those of a holder. Words that are dealt are wanted modulo 2^bits. All results go into ``out``.
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "cut_low",
    "lifted_product_deal",
    "lifted_product_hold",
    "lifted_squares_deal",
    "lifted_squares_hold",
    "scaled_deal",
    "scaled_hold",
    "series_deal",
    "series_hold",
]

HALF = np.int64(1 << 29)
ONE, TWO = np.uint64(1), np.uint64(2)
Turn = tuple[np.ndarray, np.ndarray]


def _low(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _sum_of_angles(one: Turn, other: Turn) -> Turn:
    (a, b), (c, d) = one, other
    return (a * c - b * d + HALF) >> 30, (a * d + b * c + HALF) >> 30


def _harmonics(words: np.ndarray, m: int, odd: bool, terms: int, tables: np.ndarray) -> Turn:
    """Cosines and sines (…, terms) of k turns for k = 1, 2, 3, … or 1, 3, 5, …"""
    turn = ((words << np.uint64(20 - m)) & _low(20)).astype(np.int64)
    high, low = turn >> 10, turn & 1023
    one = _sum_of_angles((tables[0][high], tables[1][high]), (tables[2][low], tables[3][low]))
    step = _sum_of_angles(one, one) if odd else one
    found = [one]
    for _ in range(terms - 1):
        found.append(_sum_of_angles(found[-1], step))
    return np.stack([c for c, _ in found], axis=-1), np.stack([s for _, s in found], axis=-1)


def _dealt(rho: np.ndarray, m: int, odd: bool, terms: int, dealt_bits: int, tables: np.ndarray) -> np.ndarray:
    """Cosines, then sines, of ρ at ``dealt_bits``, as words."""
    both = np.concatenate(_harmonics(rho, m, odd, terms, tables), axis=-1)
    return ((both + (np.int64(1) << np.int64(29 - dealt_bits))) >> np.int64(30 - dealt_bits)).view(np.uint64)


def _held(
    c: np.ndarray, m: int, odd: bool, sine: np.ndarray, cosine: np.ndarray, cut: int, tables: np.ndarray
) -> np.ndarray:
    """What a holder multiplies these words with: p·sin kc + q·cos kc, then q·sin kc − p·cos kc."""
    cosines, sines = _harmonics(c, m, odd, len(sine), tables)
    half = np.int64(1) << np.int64(cut - 1)
    with_cosine = (sine * sines + cosine * cosines + half) >> np.int64(cut)
    with_sine = (cosine * sines - sine * cosines + half) >> np.int64(cut)
    return np.concatenate([with_cosine, with_sine], axis=-1).view(np.uint64)


def cut_low(z: np.ndarray, offset: int, bits: int, cut: int, low: int, out: np.ndarray) -> None:
    """The ``low`` low bits of (z + offset modulo 2^bits) / 2^cut, over flat arrays."""
    out[:] = (((z + np.uint64(offset)) & _low(bits)) >> np.uint64(cut)) & _low(low)


def series_deal(
    rho: np.ndarray,
    m: int,
    odd: bool,
    terms: int,
    dealt_bits: int,
    bits: int,
    tables: np.ndarray,
    halves: np.ndarray,
    out: np.ndarray,
) -> None:
    """The dealer's 2·terms words of every angle (n,), less ``halves``."""
    out[:] = (_dealt(rho, m, odd, terms, dealt_bits, tables) - halves) & _low(bits)


def series_hold(
    c: np.ndarray,
    m: int,
    odd: bool,
    sine: np.ndarray,
    cosine: np.ndarray,
    cut: int,
    constant: int,
    bits: int,
    tables: np.ndarray,
    halves: np.ndarray,
    leads: bool,
    out: np.ndarray,
) -> None:
    """A holder's summand of F(c − ρ), flat."""
    total = (_held(c, m, odd, sine, cosine, cut, tables) * halves).sum(axis=1, dtype=np.uint64)
    out[:] = (total + np.uint64(constant if leads else 0)) & _low(bits)


def scaled_deal(
    rho: np.ndarray,
    m: int,
    odd: bool,
    terms: int,
    dealt_bits: int,
    factor: np.ndarray,
    shift: int,
    bits: int,
    tables: np.ndarray,
    halves: np.ndarray,
    out: np.ndarray,
) -> None:
    """The words of a row's angle (if ``out`` has room for them), then for each entry (factor ≫ shift)·(1, words), less
    ``halves``."""
    words = _dealt(rho, m, odd, terms, dealt_bits, tables)
    rows = len(factor)
    every = np.concatenate([np.ones((rows, 1), np.uint64), words], axis=1)
    products = ((factor >> np.uint64(shift))[:, :, np.newaxis] * every[:, np.newaxis, :]).reshape(rows, -1)
    begun = out.shape[1] - products.shape[1]
    out[:, :begun] = (words[:, :begun] - halves[:, :begun]) & _low(bits)
    out[:, begun:] = (products - halves[:, begun:]) & _low(bits)


def scaled_hold(
    c_angle: np.ndarray,
    m: int,
    odd: bool,
    sine: np.ndarray,
    cosine: np.ndarray,
    cut: int,
    constant: int,
    c: np.ndarray,
    width: int,
    offset: int,
    bits: int,
    tables: np.ndarray,
    halves: np.ndarray,
    tops: np.ndarray,
    leads: bool,
    out: np.ndarray,
) -> None:
    """A holder's summand of F(c_angle − ρ')·x for every entry x = c − offset + 1 − ρ + v·2^width·top(ρ), where v = 1
    if the top bit of c is clear. ``halves`` are those of the words of the angle and of ρ, ``tops`` those of ρ's top
    bits."""
    held = _held(c_angle, m, odd, sine, cosine, cut, tables)
    (rows, entries), count = c.shape, held.shape[1]
    every = np.concatenate([np.full((rows, 1), constant, np.uint64), held], axis=1)[:, np.newaxis, :]
    own = (held * halves[:, :count]).sum(axis=1, dtype=np.uint64) + np.uint64(constant if leads else 0)
    known = c - np.uint64(offset) + ONE
    products = (every * halves[:, count:].reshape(rows, entries, -1)).sum(axis=2, dtype=np.uint64)
    total = known * own[:, np.newaxis] - products
    if tops.size:
        above = (every * tops.reshape(rows, entries, -1)).sum(axis=2, dtype=np.uint64) << np.uint64(width)
        total += np.where(c >> np.uint64(width - 1) == 0, above, np.uint64(0))
    out[:] = total & _low(bits)


def lifted_squares_deal(rho: np.ndarray, width: int, bits: int, halves: np.ndarray, out: np.ndarray) -> None:
    """For each entry ρ, T = 2^width·top(ρ) and T² − 2ρT, and of the row Σρ², less ``halves``."""
    rows, entries = rho.shape
    top = (rho >> np.uint64(width - 1)) << np.uint64(width)
    words = np.stack([rho, top, top * top - TWO * rho * top], axis=2).reshape(rows, -1)
    out[:, : 3 * entries] = (words - halves[:, : 3 * entries]) & _low(bits)
    out[:, 3 * entries] = ((rho * rho).sum(axis=1, dtype=np.uint64) - halves[:, 3 * entries]) & _low(bits)


def lifted_squares_hold(
    c: np.ndarray, width: int, offset: int, bits: int, halves: np.ndarray, leads: bool, out: np.ndarray
) -> None:
    """A holder's summand of Σx², x as in ``scaled_hold``: x = g − ρ + v·T with g = c − offset + 1."""
    rows, entries = c.shape
    g = c - np.uint64(offset) + ONE
    dealt = halves[:, : 3 * entries].reshape(rows, entries, 3)
    clear = (c >> np.uint64(width - 1) == 0).astype(np.uint64)
    each = clear * (TWO * g * dealt[:, :, 1] + dealt[:, :, 2]) - TWO * g * dealt[:, :, 0]
    if leads:
        each += g * g
    out[:] = (each.sum(axis=1, dtype=np.uint64) + halves[:, 3 * entries]) & _low(bits)


def lifted_product_deal(
    rho_x: np.ndarray, width_x: int, rho_y: np.ndarray, width_y: int, bits: int, halves: np.ndarray, out: np.ndarray
) -> None:
    """Of each row's ρ_x and T_x, and of each entry ρ_y, T_y and their products with both of the row, less ``halves``.
    T is 2^width times the top bit."""
    rows = len(rho_y)
    top_x = (rho_x >> np.uint64(width_x - 1)) << np.uint64(width_x)
    top_y = (rho_y >> np.uint64(width_y - 1)) << np.uint64(width_y)
    x, t = rho_x[:, np.newaxis], top_x[:, np.newaxis]
    words = np.stack([rho_y, top_y, x * rho_y, x * top_y, t * rho_y, t * top_y], axis=2).reshape(rows, -1)
    out[:, 0], out[:, 1], out[:, 2:] = rho_x, top_x, words
    out[:] = (out - halves) & _low(bits)


def lifted_product_hold(
    c_x: np.ndarray,
    width_x: int,
    offset_x: int,
    c_y: np.ndarray,
    width_y: int,
    offset_y: int,
    bits: int,
    halves: np.ndarray,
    leads: bool,
    out: np.ndarray,
) -> None:
    """A holder's summand of x·y for one x a row, x and y as in ``scaled_hold``: X − ρ + v·T with X = c − offset + 1."""
    rows, entries = c_y.shape
    x = (c_x - np.uint64(offset_x) + ONE)[:, np.newaxis]
    y = c_y - np.uint64(offset_y) + ONE
    v = (c_x >> np.uint64(width_x - 1) == 0).astype(np.uint64)[:, np.newaxis]
    w = (c_y >> np.uint64(width_y - 1) == 0).astype(np.uint64)
    rho_x, top_x = halves[:, :1], halves[:, 1:2]
    rho, top, both, of_top, top_of, tops = np.moveaxis(halves[:, 2:].reshape(rows, entries, 6), 2, 0)
    total = y * (v * top_x - rho_x) - x * rho + both - v * top_of + w * (x * top - of_top + v * tops)
    if leads:
        total = total + x * y
    out[:] = total & _low(bits)
