"""Local operations on words: numpy's own loops, one memory-bound pass each."""

from __future__ import annotations

from accel.reference.local import (
    add,
    bitwise_and,
    copy,
    matmul_words,
    multiply,
    negate,
    shift_left,
    shift_right,
    subtract,
    sum_axes,
    take_rows,
    xor,
)

__all__ = [
    "add",
    "bitwise_and",
    "copy",
    "matmul_words",
    "multiply",
    "negate",
    "shift_left",
    "shift_right",
    "subtract",
    "sum_axes",
    "take_rows",
    "xor",
]
