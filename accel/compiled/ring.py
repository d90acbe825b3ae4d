"""Arithmetic modulo 2^64 in numba; loops are plain, so that LLVM vectorises them."""

from __future__ import annotations

import numpy as np
from numba import njit

from accel.compiled import tiles
from accel.compiled.calls import Call, Composed
from accel.reference.ring import decode_fixed

__all__ = [
    "decode_fixed",  # a single memory-bound pass: numpy's own loop is as fast
    "dot_pair",
    "encode_fixed",
    "matmul_each",
    "matmul_held",
    "matmul_pair",
    "product_pair",
    "random_permutation",
]


@njit(cache=True, nogil=True)
def _product_pair(x, y, out):
    for i in range(out.size):
        out[i] = x[0, i] * (y[0, i] + y[1, i]) + x[1, i] * y[0, i]


@njit(cache=True, nogil=True)
def _outer_pair(x, y, out):
    rows, width, columns = out.shape
    both = np.empty(columns, dtype=np.uint64)
    first = np.empty(columns, dtype=np.uint64)
    for row in range(rows):
        for j in range(columns):
            first[j] = y[0, row, j]
            both[j] = first[j] + y[1, row, j]
        for i in range(width):
            a, b = x[0, row, i], x[1, row, i]
            for j in range(columns):
                out[row, i, j] = a * both[j] + b * first[j]


def _as(shares: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Shares broadcast to a shape, in one piece of memory."""
    return np.ascontiguousarray(shares if shares.shape[1:] == shape else np.broadcast_to(shares, (2, *shape)))


def product_pair(x: np.ndarray, y: np.ndarray, addend: np.ndarray | None, out: np.ndarray) -> None:
    """See ``accel.reference.ring.product_pair``."""
    if out.ndim == 3 and x.shape == (2, *out.shape[:2], 1) and y.shape == (2, out.shape[0], 1, out.shape[2]):
        _outer_pair(x[..., 0], y[:, :, 0], out)  # every pair of entries of two rows: nothing is written out for it
        if addend is not None:
            np.add(out, addend, out)
        return
    left, right = (_as(shares, out.shape).reshape(2, out.size) for shares in (x, y))
    _product_pair(left, right, out.reshape(-1))
    if addend is not None:
        np.add(out, addend, out)


@njit(cache=True, nogil=True)
def _dot_pair(x, y, out):
    for i in range(out.size):
        total = np.uint64(0)
        for l in range(x.shape[2]):
            total += x[0, i, l] * (y[0, i, l] + y[1, i, l]) + x[1, i, l] * y[0, i, l]
        out[i] = total


def dot_pair(x: np.ndarray, y: np.ndarray, addend: np.ndarray | None, out: np.ndarray) -> None:
    """See ``accel.reference.ring.dot_pair``."""
    inner = x.shape[-1] if x.shape == y.shape else np.broadcast_shapes(x.shape, y.shape)[-1]
    left, right = (_as(shares, (*out.shape, inner)).reshape(2, out.size, inner) for shares in (x, y))
    _dot_pair(left, right, out.reshape(-1))
    if addend is not None:
        np.add(out, addend, out)


@Composed
def matmul_pair(x: np.ndarray, y: np.ndarray, addend: np.ndarray | None, out: np.ndarray) -> list[Call]:
    """See ``accel.reference.ring.matmul_pair``."""
    if out.ndim == 2 and x[0].T.flags.c_contiguous and not x[0].flags.c_contiguous:
        factors = y if y[0].flags.c_contiguous else np.ascontiguousarray(y)
        more = None if addend is None else np.ascontiguousarray(addend)
        return [(_pair_by_columns, (x[0].T, x[1].T, *factors, more, out))]
    return [(_matmul_pair, (x, y, addend, out))]


def _matmul_pair(x: np.ndarray, y: np.ndarray, addend: np.ndarray | None, out: np.ndarray) -> None:
    np.copyto(out, 0 if addend is None else addend)
    if out.ndim == 2:
        _matmul(x, y, out)
        return
    batch = out.shape[:-2]
    left, right = (np.broadcast_to(shares, (2, *batch, *shares.shape[-2:])) for shares in (x, y))
    for index in np.ndindex(*batch):
        _matmul(left[(slice(None), *index)], right[(slice(None), *index)], out[index])


@njit(cache=True, nogil=True)
def _pair_by_columns(x0_transposed, x1_transposed, y0, y1, addend, out):
    """out = addend (if there is one) + x0·(y0 + y1) + x1·y0 where x0, x1 lie transposed in memory."""
    factors = np.empty((2, *y0.shape), dtype=np.uint64)
    for l in range(y0.shape[0]):
        for j in range(y0.shape[1]):
            factors[0, l, j] = y0[l, j] + y1[l, j]
            factors[1, l, j] = y0[l, j]
    if addend is not None:
        for i in range(out.shape[0]):
            for j in range(out.shape[1]):
                out[i, j] = addend[i, j]
    tiles.by_columns(x0_transposed, x1_transposed, factors, out, addend is None)


_FEW = 4  # rows: the second factor is read once for each, and not turned
_BLOCK = 1024  # columns whose sums stay in the first-level cache


@njit(cache=True, nogil=True)
def _few_rows(x, y0, y1, out):
    """out += x0·(y0 + y1) + x1·y0, a stretch of columns at a time, four rows of y in one pass."""
    inner, columns = y0.shape
    whole = inner - inner % 4
    for left in range(0, columns, _BLOCK):
        right = min(left + _BLOCK, columns)
        for i in range(out.shape[0]):
            for l in range(0, whole, 4):
                a0, a1, a2, a3 = x[0, i, l], x[0, i, l + 1], x[0, i, l + 2], x[0, i, l + 3]
                b0, b1 = a0 + x[1, i, l], a1 + x[1, i, l + 1]
                b2, b3 = a2 + x[1, i, l + 2], a3 + x[1, i, l + 3]
                for j in range(left, right):
                    out[i, j] += (
                        b0 * y0[l, j] + a0 * y1[l, j] + b1 * y0[l + 1, j] + a1 * y1[l + 1, j]
                        + b2 * y0[l + 2, j] + a2 * y1[l + 2, j] + b3 * y0[l + 3, j] + a3 * y1[l + 3, j]
                    )  # fmt: skip
            for l in range(whole, inner):
                a = x[0, i, l]
                b = a + x[1, i, l]
                for j in range(left, right):
                    out[i, j] += b * y0[l, j] + a * y1[l, j]


def _matmul(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    """Adds the product of two pairs of matrices to ``out``."""
    inner, columns = y.shape[1:]
    if len(out) <= _FEW and columns >= _BLOCK and y[0].flags.c_contiguous:
        _few_rows(np.ascontiguousarray(x), y[0], y[1], out)
        return
    if x.strides[1] < x.strides[2] and x[0].T.flags.c_contiguous:
        factors = np.empty((2, inner, columns), dtype=np.uint64)
        np.add(y[0], y[1], out=factors[0])
        factors[1] = y[0]
        tiles.by_columns(x[0].T, x[1].T, factors, out, False)
        return
    factors = np.empty((2, columns, inner), dtype=np.uint64)
    np.add(y[0].T, y[1].T, out=factors[0])
    factors[1] = y[0].T
    tiles.by_rows(np.ascontiguousarray(x[0]), np.ascontiguousarray(x[1]), factors, out)


@njit(cache=True, nogil=True)
def random_permutation(words, order):
    """See ``accel.reference.ring.random_permutation``."""
    for i in range(order.size):
        order[i] = i
    position = 0
    for i in range(order.size - 1, 0, -1):
        choices = np.uint64(i + 1)
        largest = np.uint64(0xFFFFFFFFFFFFFFFF) - (np.uint64(0) - choices) % choices  # the last word without bias
        while words[position] > largest:
            position += 1
        j = np.int64(words[position] % choices)
        position += 1
        order[i], order[j] = order[j], order[i]


@njit(cache=True, nogil=True)
def _encode_fixed(values, scale, limit, out):
    first_bad = -1
    for i in range(values.size):
        value = values[i]
        if not abs(value) < limit:
            if first_bad < 0:
                first_bad = i
            value = 0.0
        out[i] = np.int64(np.rint(value * scale))
    return first_bad


def encode_fixed(values: np.ndarray, fraction_bits: int, limit: float) -> tuple[np.ndarray, int]:
    """See ``accel.reference.ring.encode_fixed``."""
    out = np.empty(values.shape, dtype=np.int64)
    flat = np.ascontiguousarray(values, dtype=np.float64).reshape(-1)
    first_bad = _encode_fixed(flat, 2.0**fraction_bits, float(limit), out.reshape(-1))
    return out.view(np.uint64), int(first_bad)


def matmul_each(x: np.ndarray, factor: np.ndarray, out: np.ndarray) -> None:
    """See ``accel.reference.ring.matmul_each``: both shares are one matrix of twice as many rows."""
    columns, inner = factor.shape[1], factor.shape[0]
    out[:] = 0
    count = x.shape[0] * x.shape[1]
    rows = np.ascontiguousarray(x).reshape(count, inner)
    turned = np.ascontiguousarray(factor.T).reshape(1, columns, inner)
    tiles.one_by_rows(rows, turned, out.reshape(count, columns))


@njit(cache=True, nogil=True)
def _one_held(x, turned, out):
    out[:] = 0
    tiles.one_by_rows(x, turned, out)


@njit(cache=True, nogil=True)
def _both_held(x0, x1, turned, out):
    out[:] = 0
    tiles.sum_by_rows(x0, x1, turned, out)
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = np.uint64(0) - out[i, j]


@Composed
def matmul_held(x: np.ndarray, role: int, turned: np.ndarray, out: np.ndarray) -> list[Call]:
    """See ``accel.reference.ring.matmul_held``. A share is read only where it is needed, and both together in one
    pass."""
    rows = [share if share.flags.c_contiguous else np.ascontiguousarray(share) for share in x]
    if role == 2:
        return [(_both_held, (*rows, turned[None], out))]
    return [(_one_held, (rows[1 - role], turned[None], out))]
