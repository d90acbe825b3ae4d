"""Local steps of the two-holder protocols: selection, conversion and weighted sums of two-holder bits, look-up.

A bit is β ⊕ β' with β at two holders and β' at the dealer. ``held`` (uint8) is what this party has of it, ``leads``
says whether it is role 0, which adds what both holders know.
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "inject_deal",
    "inject_hold",
    "inject_key",
    "inject_result",
    "lookup_deal",
    "lookup_hold",
    "reshare_hold",
    "select_deal",
    "select_hold",
    "uniform_below",
    "weigh_hold",
]

ONE = np.uint64(1)
TWO = np.uint64(2)


def uniform_below(random: np.ndarray, bound: int, out: np.ndarray) -> int:
    """Fills ``out`` with values uniform in 0..bound−1 (bound ≤ 256) from random bytes, and returns how many there were:
    fewer than asked for if the bytes did not last.

    Two bytes, v, give two values: the digits of v·bound²/2^16, rounded down. v is rejected if the low half of the
    product is below 2^16 mod bound²; of those left every pair of digits has equally many: no bias at all (Lemire,
    TOMACS 2019)."""
    bytes_ = random[: random.size // 2 * 2].reshape(-1, 2).astype(np.uint32)
    scaled = (bytes_[:, 0] | bytes_[:, 1] << np.uint32(8)) * np.uint32(bound * bound)
    pairs = scaled[(scaled & np.uint32(0xFFFF)) >= 65536 % (bound * bound)] >> np.uint32(16)
    values = np.stack(np.divmod(pairs, np.uint32(bound)), axis=1).reshape(-1)[: out.size]
    out[: values.size] = values
    return values.size


def reshare_hold(summand: np.ndarray, mask: np.ndarray, share: np.ndarray, mine: np.ndarray) -> None:
    """A holder's outer share, which is a mask, and what it sends to the other holder: its summand less that share."""
    share[:] = mask
    mine[:] = summand - mask


def select_deal(held: np.ndarray, d0: np.ndarray, d1: np.ndarray, masks: np.ndarray, out: np.ndarray) -> None:
    """The dealer's second halves of β' and of β'(d0 + d1), two rows."""
    bit = held.astype(np.uint64)
    out[0] = bit - masks[0]
    out[1] = bit * (d0 + d1) - masks[1]


def select_hold(
    held: np.ndarray, halves: np.ndarray, outer: np.ndarray, middle: np.ndarray, leads: bool, out: np.ndarray
) -> None:
    """A holder's summand of b·d: (1−2β)(middle·s + w) + β·outer, and β·middle at the holder that leads."""
    beta = held.astype(np.uint64)
    out[:] = (ONE - TWO * beta) * (middle * halves[0] + halves[1]) + beta * outer
    if leads:
        out += beta * middle


def inject_hold(held: np.ndarray, half: np.ndarray, leads: bool, out: np.ndarray) -> None:
    """A holder's summand of the bit as an integer: (1−2β)·half, and β at the holder that leads."""
    beta = held.astype(np.uint64)
    out[:] = (ONE - TWO * beta) * half
    if leads:
        out += beta


def inject_deal(
    held: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    share_0: np.ndarray,
    share_1: np.ndarray,
    to_next: np.ndarray,
    to_previous: np.ndarray,
) -> None:
    """The dealer of a conversion in one round: its shares are masks, and it offers the middle share for β = 0 and β = 1
    under the keys that the other holder has. Mask rows: outer share, key for β = 0, key for β = 1."""
    share_1[:], share_0[:] = first[0], second[0]
    for beta in range(2):
        middle = (held.astype(np.uint64) ^ np.uint64(beta)) - first[0] - second[0]
        to_next[beta] = middle + second[1 + beta]
        to_previous[beta] = middle + first[1 + beta]


def inject_key(held: np.ndarray, masks: np.ndarray, share: np.ndarray, key: np.ndarray) -> None:
    """A holder's outer share, and the key that it sends to the other holder."""
    share[:] = masks[0]
    key[:] = np.where(held == 1, masks[2], masks[1])


def inject_result(held: np.ndarray, offers: np.ndarray, key: np.ndarray, out: np.ndarray) -> None:
    """The middle share: the dealer's offer for β, opened."""
    out[:] = np.where(held == 1, offers[1], offers[0]) - key


def weigh_hold(held: np.ndarray, half: np.ndarray, weights: np.ndarray, leads: bool, out: np.ndarray) -> None:
    """A holder's summands of Σ_k weights[o, k]·bit_k: bits and halves are (k, n), the result (o, n)."""
    terms = np.empty(half.shape, dtype=np.uint64)
    inject_hold(held, half, leads, terms)
    np.matmul(weights, terms, out=out)


def lookup_deal(x0: np.ndarray, x1: np.ndarray, masks: np.ndarray, out: np.ndarray) -> None:
    """The dealer's second half of the one-hot vectors of ρ = −x0 − x1 modulo the row length: (n, entries)."""
    rho = (np.uint64(0) - x0 - x1) & np.uint64(out.shape[1] - 1)
    np.subtract(np.uint64(0), masks, out=out)
    out[np.arange(rho.size), rho.astype(np.int64)] += ONE


def lookup_hold(c: np.ndarray, half: np.ndarray, tables: np.ndarray, out: np.ndarray) -> None:
    """A holder's summands of tables[o, (c − ρ) mod entries]: halves are (n, entries), the result (o, n)."""
    entries = tables.shape[1]
    columns = np.arange(entries, dtype=np.uint64)
    places = ((c[:, np.newaxis] - columns) & np.uint64(entries - 1)).astype(np.int64)
    np.sum(half * tables[:, places], axis=2, dtype=np.uint64, out=out)
