"""Arithmetic modulo 2^64 on uint64 arrays (numpy wraps around by itself)."""

from __future__ import annotations

import numpy as np

__all__ = [
    "decode_fixed",
    "encode_fixed",
    "gather_rows",
    "matmul_pair",
    "product_pair",
    "shift_right_arithmetic",
    "shift_right_logical",
]


def product_pair(x0: np.ndarray, x1: np.ndarray, y0: np.ndarray, y1: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """x0·(y0+y1) + x1·y0 + mask, element by element: one party's summand of a replicated product."""
    return x0 * (y0 + y1) + x1 * y0 + mask


def matmul_pair(x0: np.ndarray, x1: np.ndarray, y0: np.ndarray, y1: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """x0@(y0+y1) + x1@y0 + mask for matrices (n×k)·(k×m): two products, not three."""
    return x0 @ (y0 + y1) + x1 @ y0 + mask


def shift_right_logical(x: np.ndarray, bits: int) -> np.ndarray:
    """⌊x / 2^bits⌋ of the unsigned words, 0 ≤ bits ≤ 63."""
    return x >> np.uint64(bits)


def shift_right_arithmetic(x: np.ndarray, bits: int) -> np.ndarray:
    """⌊x / 2^bits⌋ of the words read as signed, 0 ≤ bits ≤ 63."""
    return (x.view(np.int64) >> np.int64(bits)).view(np.uint64)


def gather_rows(x: np.ndarray, index: np.ndarray) -> np.ndarray:
    """The rows ``x[index]`` of a matrix."""
    return np.take(x, index, axis=0)


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
