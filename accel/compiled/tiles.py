"""Matrix products modulo 2^64 by tiles: a few rows times a few columns are summed up in registers.

A word that was loaded then serves several products. The inner loops are written as LLVM vectors of eight words, which
every processor takes (it splits what is too wide for it): left to itself, LLVM neither tiles nor uses 512 bits. Tiles
write into memory without bounds checks; ``by_rows`` and ``by_columns`` hand out only tiles that lie inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["by_columns", "by_rows", "one_by_rows", "sum_by_rows"]

LANES = 8
ROWS, COLUMNS = 4, 5  # of a tile; 4·5 sums of eight words and what they need fit the registers
WIDE, DEEP = 10, 8  # columns, and rows of the transposed factors, of a tile of ``by_columns``
PANEL = 2048  # columns of the transposed factors whose sums stay in the second-level cache while all rows pass by
AHEAD = 64  # words that a row is asked for before they are needed: the rows of a batch come from far away

_WORD, _NUMBER = ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(_WORD, LANES)


class _Matrix:
    """Element addresses of a C-contiguous array of words."""

    def __init__(self, context: Any, builder: ir.IRBuilder, kind: Any, value: Any):
        self._builder = builder
        array = context.make_array(kind)(context, builder, value)
        self._data = array.data
        self.shape = cgutils.unpack_tuple(builder, array.shape)

    def at(self, *index: Any) -> Any:
        builder, place = self._builder, index[0]
        for extent, following in zip(self.shape[1:], index[1:], strict=True):
            place = builder.add(builder.mul(place, extent), following)
        return builder.gep(self._data, [place])

    def word(self, *index: Any) -> Any:
        return self._builder.load(self.at(*index))

    def vector(self, *index: Any) -> Any:
        """Eight words beside each other; memory of numpy is aligned to a word, not to a vector."""
        pointer = self._builder.bitcast(self.at(*index), _VECTOR.as_pointer())
        loaded = self._builder.load(pointer)
        loaded.align = 8
        return loaded

    def put(self, vector: Any, *index: Any) -> None:
        """Eight words to their places."""
        pointer = self._builder.bitcast(self.at(*index), _VECTOR.as_pointer())
        self._builder.store(vector, pointer).align = 8

    def fetch(self, *index: Any) -> None:
        """Ask for memory that will be read soon; it may lie behind the end."""
        builder, address = self._builder, ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [address, _NUMBER, _NUMBER, _NUMBER])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        to_read, to_keep, data = (ir.Constant(_NUMBER, value) for value in (0, 3, 1))
        builder.call(prefetch, [builder.bitcast(self.at(*index), address), to_read, to_keep, data])


def _number(value: int) -> ir.Constant:
    return ir.Constant(_WORD, value)


def _add_up(builder: ir.IRBuilder, sums: list[Any], products: Callable[[int], Any]) -> None:
    for place, total in enumerate(sums):
        builder.store(builder.add(builder.load(total), products(place)), total)


def _zeros(builder: ir.IRBuilder, count: int, kind: Any) -> list[Any]:
    return [cgutils.alloca_once_value(builder, ir.Constant(kind, None)) for _ in range(count)]


PAIR, ONE, SUM = range(3)


def _row_tile(rows: int, columns: int, what: int) -> Any:
    """A tile of ``by_rows``: out[i+r, j+c] += Σ_l x0[i+r, l]·y[0, j+c, l] + x1[i+r, l]·y[1, j+c, l]; of ``one_by_rows``
    without x1, of ``sum_by_rows`` with (x0 + x1)·y[0]."""

    @intrinsic
    def tile(_typing: Any, x0: Any, x1: Any, y: Any, out: Any, i: Any, j: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            x0_, x1_, y_, out_ = (
                _Matrix(context, builder, kind, value)
                for kind, value in zip(signature.args[:4], arguments[:4], strict=True)
            )
            lines = [builder.add(arguments[4], _number(r)) for r in range(rows)]
            places = [builder.add(arguments[5], _number(c)) for c in range(columns)]
            inner = x0_.shape[1]
            whole = builder.and_(inner, _number(-LANES))

            def sum_along(start: Any, stop: Any, step: int, load: str, kind: Any) -> list[Any]:
                sums = _zeros(builder, rows * columns, kind)
                with cgutils.for_range_slice(builder, start, stop, _number(step), intp=_WORD) as (l, _):
                    left = [
                        [getattr(x_, load)(line, l) for x_ in ((x0_,) if what == ONE else (x0_, x1_))] for line in lines
                    ]
                    if what == SUM:
                        left = [[builder.add(*both)] for both in left]
                    right = [
                        [getattr(y_, load)(_number(which), place, l) for which in range(2 if what == PAIR else 1)]
                        for place in places
                    ]

                    def product(tile_place: int) -> Any:
                        terms = [
                            builder.mul(a, b)
                            for a, b in zip(left[tile_place // columns], right[tile_place % columns], strict=True)
                        ]
                        return builder.add(*terms) if what == PAIR else terms[0]

                    _add_up(builder, sums, product)
                return [builder.load(total) for total in sums]

            vectors = sum_along(_number(0), whole, LANES, "vector", _VECTOR)
            rest = sum_along(whole, inner, 1, "word", _WORD)
            reduce_ = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(_WORD, [_VECTOR]), f"llvm.vector.reduce.add.v{LANES}i64"
            )
            for place, (vector, word) in enumerate(zip(vectors, rest, strict=True)):
                target = out_.at(lines[place // columns], places[place % columns])
                total = builder.add(builder.call(reduce_, [vector]), word)
                builder.store(builder.add(builder.load(target), total), target)
            return context.get_dummy_value()

        return types.void(x0, x1, y, out, types.int64, types.int64), generate

    return tile


def _splat(builder: ir.IRBuilder, word: Any) -> Any:
    """A word in all lanes."""
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    single = builder.insert_element(nothing, word, ir.Constant(_NUMBER, 0))
    return builder.shuffle_vector(single, nothing, ir.Constant(ir.VectorType(_NUMBER, LANES), [0] * LANES))


def _column_tile(columns: int, deep: int) -> Any:
    """A tile of ``by_columns``: sums[c, at] += Σ x0[l+r, i]·y[0, l+r, j+c] + x1[l+r, i]·y[1, l+r, j+c] over r < deep,
    for eight words from i and ``at`` on, which lie beside each other in the transposed factors."""

    @intrinsic
    def tile(_typing: Any, x0: Any, x1: Any, y: Any, sums: Any, l: Any, i: Any, j: Any, at: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            x0_, x1_, y_, sums_ = (
                _Matrix(context, builder, kind, value)
                for kind, value in zip(signature.args[:4], arguments[:4], strict=True)
            )
            first, i_, j_, at_ = arguments[4:]
            totals = [sums_.vector(_number(c), at_) for c in range(columns)]
            for row in (builder.add(first, _number(r)) for r in range(deep)):
                for which, factor in enumerate((x0_, x1_)):
                    factor.fetch(row, builder.add(i_, _number(AHEAD)))
                    left = factor.vector(row, i_)
                    for c in range(columns):
                        right = _splat(builder, y_.word(_number(which), row, builder.add(j_, _number(c))))
                        totals[c] = builder.add(totals[c], builder.mul(left, right))
            for c, total in enumerate(totals):
                sums_.put(total, _number(c), at_)
            return context.get_dummy_value()

        return types.void(x0, x1, y, sums, *[types.int64] * 4), generate

    return tile


_SHAPES = [(rows, columns) for rows in (ROWS, 1) for columns in (COLUMNS, 1)]
_whole, _thin, _flat, _single = (_row_tile(*shape, PAIR) for shape in _SHAPES)
_one_whole, _one_thin, _one_flat, _one_single = (_row_tile(*shape, ONE) for shape in _SHAPES)
_sum_whole, _sum_thin, _sum_flat, _sum_single = (_row_tile(*shape, SUM) for shape in _SHAPES)
_wide, _wide_shallow = _column_tile(WIDE, DEEP), _column_tile(WIDE, 1)
_half, _half_shallow = _column_tile(WIDE // 2, DEEP), _column_tile(WIDE // 2, 1)
_narrow, _narrow_shallow = _column_tile(1, DEEP), _column_tile(1, 1)


@njit(cache=True, nogil=True)
def by_rows(x0, x1, y, out):
    """out += x0·y[0]ᵀ + x1·y[1]ᵀ, all factors row by row in memory: x0, x1 (n, k), y (2, m, k), out (n, m)."""
    rows, columns = out.shape
    whole_rows, whole_columns = rows - rows % ROWS, columns - columns % COLUMNS
    for i in range(0, whole_rows, ROWS):
        for j in range(0, whole_columns, COLUMNS):
            _whole(x0, x1, y, out, i, j)
        for j in range(whole_columns, columns):
            _thin(x0, x1, y, out, i, j)
    for i in range(whole_rows, rows):
        for j in range(0, whole_columns, COLUMNS):
            _flat(x0, x1, y, out, i, j)
        for j in range(whole_columns, columns):
            _single(x0, x1, y, out, i, j)


@njit(cache=True, nogil=True)
def one_by_rows(x, y, out):
    """out += x·y[0]ᵀ, both row by row in memory: x (n, k), y (1, m, k), out (n, m)."""
    rows, columns = out.shape
    whole_rows, whole_columns = rows - rows % ROWS, columns - columns % COLUMNS
    for i in range(0, whole_rows, ROWS):
        for j in range(0, whole_columns, COLUMNS):
            _one_whole(x, x, y, out, i, j)
        for j in range(whole_columns, columns):
            _one_thin(x, x, y, out, i, j)
    for i in range(whole_rows, rows):
        for j in range(0, whole_columns, COLUMNS):
            _one_flat(x, x, y, out, i, j)
        for j in range(whole_columns, columns):
            _one_single(x, x, y, out, i, j)


@njit(cache=True, nogil=True)
def sum_by_rows(x0, x1, y, out):
    """out += (x0 + x1)·y[0]ᵀ, all row by row in memory: x0, x1 (n, k), y (1, m, k), out (n, m)."""
    rows, columns = out.shape
    whole_rows, whole_columns = rows - rows % ROWS, columns - columns % COLUMNS
    for i in range(0, whole_rows, ROWS):
        for j in range(0, whole_columns, COLUMNS):
            _sum_whole(x0, x1, y, out, i, j)
        for j in range(whole_columns, columns):
            _sum_thin(x0, x1, y, out, i, j)
    for i in range(whole_rows, rows):
        for j in range(0, whole_columns, COLUMNS):
            _sum_flat(x0, x1, y, out, i, j)
        for j in range(whole_columns, columns):
            _sum_single(x0, x1, y, out, i, j)


def _panel(columns: int, tile: Any, shallow: Any) -> Any:
    def add_panel(x0_transposed, x1_transposed, y, out, left, right, j, sums, fresh):
        """The sums of ``columns`` columns from j on and all whole vectors of the rows left to right."""
        inner = x0_transposed.shape[0]
        whole = inner - inner % DEEP
        for c in range(columns):
            for i in range(right - left):
                sums[c, i] = np.uint64(0)
        for l in range(0, whole, DEEP):
            for i in range(left, right, LANES):
                tile(x0_transposed, x1_transposed, y, sums, l, i, j, i - left)
        for l in range(whole, inner):
            for i in range(left, right, LANES):
                shallow(x0_transposed, x1_transposed, y, sums, l, i, j, i - left)
        for i in range(left, right):
            for c in range(columns):
                out[i, j + c] = sums[c, i - left] if fresh else out[i, j + c] + sums[c, i - left]

    add_panel.__qualname__ = f"add_panel_of_{columns}"  # part of the name that machine code is linked by
    return njit(cache=True, nogil=True)(add_panel)


_add_wide = _panel(WIDE, _wide, _wide_shallow)
_add_half = _panel(WIDE // 2, _half, _half_shallow)
_add_narrow = _panel(1, _narrow, _narrow_shallow)


@njit(cache=True, nogil=True)
def by_columns(x0_transposed, x1_transposed, y, out, fresh):
    """out += x0·y[0] + x1·y[1], or out = if it is ``fresh``, where x0, x1 lie transposed in memory, as in Hᵀ·u: (k, n),
    y (2, k, m), out (n, m).

    A few rows of the transposed factors at a time, from their beginning to their end, as memory likes it: a batch is
    larger than the caches of a core."""
    rows, columns = out.shape
    whole = rows - rows % LANES
    sums = np.empty((WIDE, PANEL), dtype=np.uint64)
    for left in range(0, whole, PANEL):
        right = min(left + PANEL, whole)
        j = 0
        while j < columns:
            if columns - j >= WIDE:
                _add_wide(x0_transposed, x1_transposed, y, out, left, right, j, sums, fresh)
                j += WIDE
            elif columns - j >= WIDE // 2:
                _add_half(x0_transposed, x1_transposed, y, out, left, right, j, sums, fresh)
                j += WIDE // 2
            else:
                _add_narrow(x0_transposed, x1_transposed, y, out, left, right, j, sums, fresh)
                j += 1
    for i in range(whole, rows):
        for j in range(columns):
            total = np.uint64(0) if fresh else out[i, j]
            for l in range(x0_transposed.shape[0]):
                total += x0_transposed[l, i] * y[0, l, j] + x1_transposed[l, i] * y[1, l, j]
            out[i, j] = total
