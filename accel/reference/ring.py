"""Arithmetic modulo 2^64 on uint64 arrays (numpy wraps around by itself)."""

from __future__ import annotations

import numpy as np

__all__ = [
    "decode_fixed",
    "dot_pair",
    "encode_fixed",
    "matmul_each",
    "matmul_held",
    "matmul_pair",
    "product_pair",
    "random_permutation",
]


def product_pair(x: np.ndarray, y: np.ndarray, addend: np.ndarray | None, out: np.ndarray) -> None:
    """x0·(y0+y1) + x1·y0 + addend, element by element: one party's summand of a replicated product. ``x`` and ``y`` are
    pairs of shares with as many axes as each other, which broadcast."""
    np.add(x[0] * (y[0] + y[1]), x[1] * y[0], out=out)
    if addend is not None:
        out += addend


def dot_pair(x: np.ndarray, y: np.ndarray, addend: np.ndarray | None, out: np.ndarray) -> None:
    """The same, summed along the last axis."""
    np.sum(x[0] * (y[0] + y[1]) + x[1] * y[0], axis=-1, dtype=np.uint64, out=out)
    if addend is not None:
        out += addend


def matmul_pair(x: np.ndarray, y: np.ndarray, addend: np.ndarray | None, out: np.ndarray) -> None:
    """x0@(y0+y1) + x1@y0 + addend for pairs of matrices (n×k)·(k×m), or stacks of them: two products, not three."""
    np.add(x[0] @ (y[0] + y[1]), x[1] @ y[0], out=out)
    if addend is not None:
        out += addend


def random_permutation(words: np.ndarray, order: np.ndarray) -> None:
    """A uniformly random permutation of 0..count−1 from random words (Fisher–Yates) into ``order``. A word that would
    bias the choice is skipped, which happens with probability below count·2^-64: a few more words than ``count`` are
    enough."""
    order[:] = np.arange(order.size)
    source = iter(words.tolist())
    for i in range(order.size - 1, 0, -1):
        limit = 2**64 - 2**64 % (i + 1)
        word = next(word for word in source if word < limit)
        j = word % (i + 1)
        order[i], order[j] = order[j], order[i]


def encode_fixed(values: np.ndarray, fraction_bits: int, limit: float) -> tuple[np.ndarray, int]:
    """round(values·2^fraction_bits) as words, and the first flat position that is not finite or has
    |value| ≥ limit (-1 if there is none). Rounds half to even."""
    flat = values.ravel()
    good = np.abs(flat) < limit  # false for NaN too
    scaled = np.rint(np.where(good, flat, 0.0) * 2.0**fraction_bits)
    first_bad = -1 if good.all() else int(np.argmin(good))
    return scaled.astype(np.int64).view(np.uint64).reshape(values.shape), first_bad


def decode_fixed(words: np.ndarray, fraction_bits: int) -> np.ndarray:
    """The words read as signed, divided by 2^fraction_bits, as float64."""
    return words.view(np.int64).astype(np.float64) * 2.0**-fraction_bits


def matmul_each(x: np.ndarray, factor: np.ndarray, out: np.ndarray) -> None:
    """x0·factor and x1·factor: shares times a matrix that everybody knows. x (2, n, k), factor (k, m), out (2, n,
    m)."""
    np.matmul(x, factor, out=out)


def matmul_held(x: np.ndarray, role: int, turned: np.ndarray, out: np.ndarray) -> None:
    """What a party of ``role`` keeps of x·turnedᵀ in two-holder form, c − ρ, for a matrix that everybody knows: holders
    (0, 1) c, the product of the share that both have, the dealer (2) ρ, minus the products of its two. x (2, n, k),
    turned (m, k), out (n, m)."""
    left = np.negative(x[0] + x[1]) if role == 2 else x[1 - role]
    np.matmul(left, turned.T, out=out)
