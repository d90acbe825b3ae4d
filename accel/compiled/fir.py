"""A banded Toeplitz matrix times the float64 rows of a ring by tiles, for processors with 512-bit registers.

BLAS multiplies the zeros of the band too, and the one that comes with numpy may use half of such a register. A tile
sums up eight rows of the result and sixteen columns in registers; every row of the ring that was loaded serves eight
results. What the next columns need is asked for meanwhile: the rows of noise lie far apart. The product with the first
tap is added in integers before anything is written, so nothing is written twice.
"""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["filter_by_tiles", "is_worth_it", "padded_taps"]

LANES = 8
ROWS, VECTORS = 8, 2  # of a tile
COLUMNS = LANES * VECTORS

_WORD, _NUMBER, _BYTE, _DOUBLE = ir.IntType(64), ir.IntType(32), ir.IntType(8), ir.DoubleType()
_VECTOR, _INTEGERS = ir.VectorType(_DOUBLE, LANES), ir.VectorType(_WORD, LANES)


@functools.cache
def _has_registers() -> bool:
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512f", False))


def is_worth_it(rows: int, columns: int) -> bool:
    """Whether most of such a product lies in tiles, on a processor that has the registers: otherwise BLAS is as
    fast."""
    return rows >= ROWS and columns >= 4 * COLUMNS and _has_registers()


def padded_taps(taps: np.ndarray) -> np.ndarray:
    """All taps but the first, the last one in front, with zeros on both sides: a tile's rows begin one after the
    other."""
    return np.concatenate([np.zeros(ROWS - 1), taps[:0:-1], np.zeros(ROWS - 1)])


@intrinsic
def _tile(_typing: Any, padded: Any, ring: Any, begin: Any, first: Any, rows: Any, out: Any, t: Any, c: Any) -> Any:
    """out[t+r, c+v] = first·rows[t+r, c+v] + Σ_q padded[ROWS − 1 + q − r]·ring[(begin + q) mod n, c+v] for a tile of
    rows and columns."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        taps_, ring_, rows_, out_ = (
            context.make_array(signature.args[place])(context, builder, arguments[place]) for place in (0, 1, 4, 5)
        )
        begin_, first_, row, column = (arguments[place] for place in (2, 3, 6, 7))
        (length,) = cgutils.unpack_tuple(builder, taps_.shape)
        around, _ = cgutils.unpack_tuple(builder, ring_.shape)

        def number(value: int) -> ir.Constant:
            return ir.Constant(_WORD, value)

        def place(array: Any, line: Any, piece: int, kind: ir.Type) -> Any:
            """The address of eight neighbours; rows may lie anywhere, their elements beside each other."""
            bytes_, _ = cgutils.unpack_tuple(builder, array.strides)
            start = builder.bitcast(array.data, _BYTE.as_pointer())
            behind = builder.mul(builder.add(column, number(LANES * piece)), number(8))
            return builder.bitcast(
                builder.gep(start, [builder.add(builder.mul(line, bytes_), behind)]), kind.as_pointer()
            )

        def load(array: Any, line: Any, piece: int, kind: ir.Type) -> Any:
            loaded = builder.load(place(array, line, piece, kind))
            loaded.align = 8
            return loaded

        def splat(scalar: Any, kind: ir.Type) -> Any:
            nothing = ir.Constant(kind, ir.Undefined)
            everywhere = ir.Constant(ir.VectorType(_NUMBER, LANES), [0] * LANES)
            return builder.shuffle_vector(
                builder.insert_element(nothing, scalar, ir.Constant(_NUMBER, 0)), nothing, everywhere
            )

        fused = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fmuladd.v{LANES}f64"
        )
        prefetch = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), *[_NUMBER] * 3]), "llvm.prefetch.p0i8"
        )
        to_read = [ir.Constant(_NUMBER, value) for value in (0, 3, 1)]  # and keep; data
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(VECTORS)] for _ in range(ROWS)]

        def add_up(start: Any, stop: Any, line: Any) -> None:
            """The terms of q from start to stop, whose rows of the ring begin at ``line``."""
            with cgutils.for_range_slice(builder, start, stop, number(1), intp=_WORD) as (q, _):
                here, loaded = builder.add(line, builder.sub(q, start)), []
                for piece in range(VECTORS):
                    loaded.append(load(ring_, here, piece, _VECTOR))
                    following = place(ring_, here, VECTORS + piece, _BYTE)  # of the next tile; may lie behind the end
                    builder.call(prefetch, [following, *to_read])
                for r, line_sums in enumerate(sums):
                    tap = builder.load(builder.gep(taps_.data, [builder.add(q, number(ROWS - 1 - r))]))
                    for total, values in zip(line_sums, loaded, strict=True):
                        builder.store(builder.call(fused, [splat(tap, _VECTOR), values, builder.load(total)]), total)

        terms = builder.sub(length, number(ROWS - 1))
        left = builder.sub(around, begin_)  # rows to the end of the ring
        turn = builder.select(builder.icmp_signed("<", left, terms), left, terms)
        add_up(number(0), turn, begin_)
        add_up(turn, terms, number(0))
        for r, line_sums in enumerate(sums):
            line = builder.add(row, number(r))
            for piece, total in enumerate(line_sums):
                product = builder.mul(load(rows_, line, piece, _INTEGERS), splat(first_, _INTEGERS))
                found = builder.add(product, builder.fptosi(builder.load(total), _INTEGERS))
                builder.store(found, place(out_, line, piece, _INTEGERS)).align = 8
        return context.get_dummy_value()

    kinds = types.int64, types.int64, rows, out, types.int64, types.int64
    return types.void(padded, ring, *kinds), generate


@njit(cache=True, nogil=True)
def filter_by_tiles(padded, first, ring, start, rows, out):
    """out[t] = first·rows[t] + Σ_k taps[k]·z[t + depth − k] over all taps but the first, given as ``padded_taps`` makes
    them; z are the rows of ``ring`` (n, m) from ``start`` on and around. Exact, in any order, where all sums of floats
    are integers below 2^53."""
    count, columns = out.shape
    depth, around = padded.size - 2 * (ROWS - 1), ring.shape[0]
    whole_rows, whole_columns = count - count % ROWS, columns - columns % COLUMNS
    for c in range(0, whole_columns, COLUMNS):  # of all rows: so much stays in the first-level cache
        for t in range(0, whole_rows, ROWS):
            _tile(padded, ring, (start + t) % around, first, rows, out, t, c)  # type: ignore[call-arg]
    for t in range(count):
        for c in range(whole_columns if t < whole_rows else 0, columns):
            total = 0.0
            for q in range(depth):
                total += padded[ROWS - 1 + q] * ring[(start + t + q) % around, c]
            out[t, c] = np.int64(total) + first * rows[t, c]
