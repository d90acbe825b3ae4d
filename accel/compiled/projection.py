"""Sums over public random subsets in numba: additions only, and few of them.

All sixteen sums of four rows are made once, and each subset takes the one it needs: 13 additions a number instead of
41. Eight lanes are written as LLVM vectors of eight words, which every processor takes (``accel.compiled.tiles`` says
why). They write into memory without bounds checks: ``_eight_lanes`` hands out only rows that lie inside.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from accel.reference.projection import subset_parities  # a single pass
from accel.validate import require

__all__ = ["square_sums", "subset_parities", "subset_sums"]

LANES = 8
_TABLES = 8  # of four rows each: 32 rows a pick
_WORD = ir.IntType(64)
_VECTOR = ir.VectorType(_WORD, LANES)


def _number(value: int) -> ir.Constant:
    return ir.Constant(_WORD, value)


def _load(builder: ir.IRBuilder, address: Any) -> Any:
    loaded = builder.load(builder.bitcast(address, _VECTOR.as_pointer()))
    loaded.align = 8  # memory of numpy is aligned to a word, not to a vector
    return loaded


def _store(builder: ir.IRBuilder, value: Any, address: Any) -> None:
    builder.store(value, builder.bitcast(address, _VECTOR.as_pointer())).align = 8


@intrinsic
def _sums_of_four(_typing: Any, x: Any, row: Any, column: Any, tables: Any, which: Any) -> Any:
    """tables[which, s] = the sum of those of x[row : row + 4, column : column + 8] whose bit in s is one, for s from 1
    to 15."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        source = context.make_array(signature.args[0])(context, builder, arguments[0])
        target = context.make_array(signature.args[3])(context, builder, arguments[3])
        extent = cgutils.unpack_tuple(builder, source.shape)[1]
        sums: list[Any] = [None]
        for offset in range(4):
            place = builder.mul(builder.add(arguments[1], _number(offset)), extent)
            words = _load(builder, builder.gep(source.data, [builder.add(place, arguments[2])]))
            sums += [words if total is None else builder.add(total, words) for total in sums]
        first = builder.mul(arguments[4], _number(16 * LANES))
        for index, total in enumerate(sums):
            if total is not None:
                _store(builder, total, builder.gep(target.data, [builder.add(first, _number(LANES * index))]))
        return context.get_dummy_value()

    return types.none(x, row, column, tables, which), generate


@intrinsic
def _add_chosen(_typing: Any, sums: Any, subset: Any, tables: Any, pick: Any) -> Any:
    """sums[subset] += Σ_k tables[k, the k-th four bits of pick], eight words each; pick of 32 bits."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        target = context.make_array(signature.args[0])(context, builder, arguments[0])
        source = context.make_array(signature.args[2])(context, builder, arguments[2])
        address = builder.gep(target.data, [builder.mul(arguments[1], _number(LANES))])
        pick_ = builder.zext(arguments[3], _WORD)
        total = _load(builder, address)
        for which in range(_TABLES):
            index = builder.and_(builder.lshr(pick_, _number(4 * which)), _number(15))
            place = builder.add(builder.mul(index, _number(LANES)), _number(16 * LANES * which))
            total = builder.add(total, _load(builder, builder.gep(source.data, [place])))
        _store(builder, total, address)
        return context.get_dummy_value()

    return types.none(sums, subset, tables, pick), generate


@njit(cache=True, nogil=True)
def _eight_lanes(x, first, stop, picks, out):
    sums = np.zeros(out.shape, dtype=np.uint64)
    tables = np.zeros((8, 16, 8), dtype=np.uint64)
    edge = np.zeros((32, 8), dtype=np.uint64)
    at = 0
    for row in range(0, x.shape[0], 32):
        for column in range(first, stop, 8):
            if row + 32 <= x.shape[0] and column + 8 <= stop:
                for k in range(8):
                    _sums_of_four(x, row + 4 * k, column, tables, k)  # type: ignore[call-arg]
            else:
                edge[:] = 0
                for i in range(min(32, x.shape[0] - row)):
                    for l in range(min(8, stop - column)):
                        edge[i, l] = x[row + i, column + l]
                for k in range(8):
                    _sums_of_four(edge, 4 * k, 0, tables, k)  # type: ignore[call-arg]
            for t in range(out.shape[0]):
                _add_chosen(sums, t, tables, picks[at, t])  # type: ignore[call-arg]
            at += 1
    for t in range(out.shape[0]):
        for l in range(8):
            out[t, l] += sums[t, l]


@njit(cache=True, nogil=True)
def _one_lane(x, first, stop, picks, out):
    tables = np.zeros((8, 16), dtype=np.uint64)
    words = np.zeros(32, dtype=np.uint64)
    at = 0
    for row in range(0, x.shape[0], 32):
        for column in range(first, stop):
            words[:] = 0
            for i in range(min(32, x.shape[0] - row)):
                words[i] = x[row + i, column]
            for k in range(8):
                for bit in range(4):
                    for s in range(1 << bit):
                        tables[k, (1 << bit) + s] = tables[k, s] + words[4 * k + bit]
            for t in range(out.shape[0]):
                pick, total = picks[at, t], np.uint64(0)
                for k in range(8):
                    total += tables[k, pick >> np.uint32(4 * k) & np.uint32(15)]
                out[t, 0] += total
            at += 1


def subset_sums(x: np.ndarray, first: int, stop: int, picks: np.ndarray, out: np.ndarray) -> None:
    """See ``accel.reference.projection.subset_sums``; one lane or eight."""
    groups = -(-(stop - first) // out.shape[1])
    expected = (-(-len(x) // 32) * groups, len(out))
    require(
        picks.shape == expected and picks.dtype == np.uint32, "picks", (picks.shape, picks.dtype), f"{expected}, uint32"
    )
    require(0 <= first <= stop <= x.shape[1], "columns", (first, stop), f"within those of x, {x.shape[1]}")
    sums = {1: _one_lane, LANES: _eight_lanes}[out.shape[1]]
    sums(np.ascontiguousarray(x), first, stop, np.ascontiguousarray(picks), out)


@njit(cache=True, nogil=True)
def _square_sums(x, y, first, stop, out):
    for i in range(out.size):
        left, right = x[i, first:stop], y[i, first:stop]  # counted from 0, the loop becomes vector code
        total = np.uint64(0)
        for j in range(left.size):
            total += left[j] * (left[j] + right[j] + right[j])
        out[i] = total


def square_sums(x: np.ndarray, y: np.ndarray, first: int, stop: int, out: np.ndarray) -> None:
    """See ``accel.reference.projection.square_sums``."""
    _square_sums(np.ascontiguousarray(x), np.ascontiguousarray(y), first, stop, out)
