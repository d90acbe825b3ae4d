"""A banded Toeplitz matrix times float64 columns by tiles, for processors with 512-bit registers.

BLAS multiplies the zeros of the band too, and the one that comes with numpy may use half of such a register. A tile sums up
eight rows of the result and sixteen columns in registers; every row of z that was loaded serves eight results. What the next
columns need is asked for meanwhile: the rows of noise lie far apart.
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

__all__ = ["band_by_tiles", "is_worth_it", "padded_taps"]

LANES = 8
ROWS, VECTORS = 8, 2  # of a tile
COLUMNS = LANES * VECTORS

_WORD, _NUMBER, _BYTE, _DOUBLE = ir.IntType(64), ir.IntType(32), ir.IntType(8), ir.DoubleType()
_VECTOR = ir.VectorType(_DOUBLE, LANES)


@functools.cache
def _has_registers() -> bool:
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512f", False))


def is_worth_it(rows: int, columns: int) -> bool:
    """Whether most of such a product lies in tiles, on a processor that has the registers: otherwise BLAS is as fast."""
    return rows >= ROWS and columns >= 4 * COLUMNS and _has_registers()


def padded_taps(taps: np.ndarray) -> np.ndarray:
    """All taps but the first, the last one in front, with zeros on both sides: a tile's rows begin one after the other."""
    return np.concatenate([np.zeros(ROWS - 1), taps[:0:-1], np.zeros(ROWS - 1)])


@intrinsic
def _tile(_typing: Any, padded: Any, z: Any, out: Any, t: Any, c: Any) -> Any:
    """out[t+r, c+v] = Σ_q padded[ROWS − 1 + q − r]·z[t+q, c+v] for the rows and columns of a tile."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        arrays = [
            context.make_array(kind)(context, builder, value)
            for kind, value in zip(signature.args[:3], arguments[:3], strict=True)
        ]
        taps_, z_, out_ = (array.data for array in arrays)
        (length,), (_, columns), _ = (cgutils.unpack_tuple(builder, array.shape) for array in arrays)
        first_row, first_column = arguments[3:]

        def number(value: int) -> ir.Constant:
            return ir.Constant(_WORD, value)

        def vector(data: Any, row: Any, piece: int) -> Any:
            place = builder.add(builder.mul(row, columns), builder.add(first_column, number(LANES * piece)))
            return builder.bitcast(builder.gep(data, [place]), _VECTOR.as_pointer())

        def following(row: Any, piece: int) -> Any:
            """What the same row has for the next tile; it may lie behind the end."""
            return builder.bitcast(vector(z_, row, VECTORS + piece), _BYTE.as_pointer())

        def splat(scalar: Any) -> Any:
            single = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.Constant(_NUMBER, 0))
            everywhere = ir.Constant(ir.VectorType(_NUMBER, LANES), [0] * LANES)
            return builder.shuffle_vector(single, ir.Constant(_VECTOR, ir.Undefined), everywhere)

        fused = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fmuladd.v{LANES}f64"
        )
        prefetch = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), *[_NUMBER] * 3]), "llvm.prefetch.p0i8"
        )
        to_read = [ir.Constant(_NUMBER, value) for value in (0, 3, 1)]  # and keep; data
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(VECTORS)] for _ in range(ROWS)]
        rows = builder.sub(length, number(ROWS - 1))  # of z that a tile meets
        with cgutils.for_range_slice(builder, number(0), rows, number(1), intp=_WORD) as (q, _):
            loaded = []
            for piece in range(VECTORS):
                loaded.append(builder.load(vector(z_, builder.add(first_row, q), piece)))
                loaded[-1].align = 8
                builder.call(prefetch, [following(builder.add(first_row, q), piece), *to_read])
            for r, row in enumerate(sums):
                tap = splat(builder.load(builder.gep(taps_, [builder.add(q, number(ROWS - 1 - r))])))
                for total, values in zip(row, loaded, strict=True):
                    builder.store(builder.call(fused, [tap, values, builder.load(total)]), total)
        for r, row in enumerate(sums):
            for piece, total in enumerate(row):
                stored = builder.store(builder.load(total), vector(out_, builder.add(first_row, number(r)), piece))
                stored.align = 8
        return context.get_dummy_value()

    return types.void(padded, z, out, types.int64, types.int64), generate


@njit(cache=True, nogil=True)
def band_by_tiles(padded, z, out):
    """out[t] = Σ_k taps[k]·z[t + depth − k] over all taps but the first, given as ``padded_taps`` makes them: z (depth + n, m),
    out (n, m). Exact, in any order, where all sums are integers below 2^53."""
    rows, columns = out.shape
    depth = padded.size - 2 * (ROWS - 1)
    whole_rows, whole_columns = rows - rows % ROWS, columns - columns % COLUMNS
    for c in range(0, whole_columns, COLUMNS):  # of all rows: so much stays in the first-level cache
        for t in range(0, whole_rows, ROWS):
            _tile(padded, z, out, t, c)  # type: ignore[call-arg]
    for t in range(rows):
        for c in range(whole_columns if t < whole_rows else 0, columns):
            total = 0.0
            for q in range(depth):
                total += padded[ROWS - 1 + q] * z[t + q, c]
            out[t, c] = total
