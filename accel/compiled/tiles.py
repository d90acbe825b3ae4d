"""Matrix products modulo 2^64 by tiles: a few rows times a few columns are summed up in registers.

A word that was loaded then serves several products. The inner loops are written as LLVM vectors of eight words, which
every processor takes (it splits what is too wide for it): left to itself, LLVM neither tiles nor uses 512 bits. Tiles
write into memory without bounds checks; ``by_rows`` and ``by_columns`` hand out only tiles that lie inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["by_columns", "by_rows", "one_by_rows", "sum_by_rows"]

LANES = 8
ROWS, COLUMNS = 4, 5  # of a tile; 4·5 sums of eight words and what they need fit the registers
DEEP = 2 * LANES  # rows of a tile of ``by_columns``

_WORD = ir.IntType(64)
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


def _number(value: int) -> ir.Constant:
    return ir.Constant(_WORD, value)


def _add_up(builder: ir.IRBuilder, sums: list[Any], products: Callable[[int], Any]) -> None:
    for place, total in enumerate(sums):
        builder.store(builder.add(builder.load(total), products(place)), total)


def _zeros(builder: ir.IRBuilder, count: int, kind: Any) -> list[Any]:
    return [cgutils.alloca_once_value(builder, ir.Constant(kind, None)) for _ in range(count)]


PAIR, ONE, SUM = range(3)


def _row_tile(rows: int, columns: int, what: int) -> Any:
    """A tile of ``by_rows``: out[i+r, j+c] += Σ_l x0[i+r, l]·y[0, j+c, l] + x1[i+r, l]·y[1, j+c, l]; of ``one_by_rows`` without
    x1, of ``sum_by_rows`` with (x0 + x1)·y[0]."""

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


def _column_tile(columns: int) -> Any:
    """A tile of ``by_columns``: DEEP rows from i on, whose words lie beside each other in the transposed factor."""

    @intrinsic
    def tile(_typing: Any, x0: Any, x1: Any, y: Any, out: Any, i: Any, j: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            x0_, x1_, y_, out_ = (
                _Matrix(context, builder, kind, value)
                for kind, value in zip(signature.args[:4], arguments[:4], strict=True)
            )
            pieces = DEEP // LANES
            starts = [builder.add(arguments[4], _number(LANES * piece)) for piece in range(pieces)]
            places = [builder.add(arguments[5], _number(c)) for c in range(columns)]
            sums = _zeros(builder, pieces * columns, _VECTOR)

            def splat(word: Any) -> Any:
                single = builder.insert_element(
                    ir.Constant(_VECTOR, ir.Undefined), word, ir.Constant(ir.IntType(32), 0)
                )
                everywhere = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
                return builder.shuffle_vector(single, ir.Constant(_VECTOR, ir.Undefined), everywhere)

            with cgutils.for_range_slice(builder, _number(0), x0_.shape[0], _number(1), intp=_WORD) as (l, _):
                left = [(x0_.vector(l, start), x1_.vector(l, start)) for start in starts]
                right = [
                    (splat(y_.word(_number(0), l, place)), splat(y_.word(_number(1), l, place))) for place in places
                ]

                def product(tile_place: int) -> Any:
                    (a0, a1), (b0, b1) = left[tile_place // columns], right[tile_place % columns]
                    return builder.add(builder.mul(a0, b0), builder.mul(a1, b1))

                _add_up(builder, sums, product)
            for piece, start in enumerate(starts):
                for c, place in enumerate(places):
                    vector = builder.load(sums[piece * columns + c])
                    for lane in range(LANES):
                        target = out_.at(builder.add(start, _number(lane)), place)
                        word = builder.extract_element(vector, ir.Constant(ir.IntType(32), lane))
                        builder.store(builder.add(builder.load(target), word), target)
            return context.get_dummy_value()

        return types.void(x0, x1, y, out, types.int64, types.int64), generate

    return tile


_SHAPES = [(rows, columns) for rows in (ROWS, 1) for columns in (COLUMNS, 1)]
_whole, _thin, _flat, _single = (_row_tile(*shape, PAIR) for shape in _SHAPES)
_one_whole, _one_thin, _one_flat, _one_single = (_row_tile(*shape, ONE) for shape in _SHAPES)
_sum_whole, _sum_thin, _sum_flat, _sum_single = (_row_tile(*shape, SUM) for shape in _SHAPES)
_deep, _deep_thin = _column_tile(COLUMNS), _column_tile(1)


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


@njit(cache=True, nogil=True)
def by_columns(x0_transposed, x1_transposed, y, out):
    """out += x0·y[0] + x1·y[1] where x0, x1 lie transposed in memory, as in Hᵀ·u: (k, n), y (2, k, m), out (n, m)."""
    rows, columns = out.shape
    whole_rows, whole_columns = rows - rows % DEEP, columns - columns % COLUMNS
    for i in range(0, whole_rows, DEEP):
        for j in range(0, whole_columns, COLUMNS):
            _deep(x0_transposed, x1_transposed, y, out, i, j)
        for j in range(whole_columns, columns):
            _deep_thin(x0_transposed, x1_transposed, y, out, i, j)
    for l in range(x0_transposed.shape[0]):
        for i in range(whole_rows, rows):
            for j in range(columns):
                out[i, j] += x0_transposed[l, i] * y[0, l, j] + x1_transposed[l, i] * y[1, l, j]
