"""Local operations on words that need no message: sums, multiples, shifts, copies. All write into ``out``.

They broadcast and take any layout, as numpy does: each is one memory-bound pass, so both backends use these.
"""

from __future__ import annotations

from typing import Any

import numpy as np

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

add = np.add
bitwise_and = np.bitwise_and
matmul_words = np.matmul  # modulo 2^64
multiply = np.multiply
negate = np.negative
shift_left = np.left_shift
shift_right = np.right_shift
subtract = np.subtract
xor = np.bitwise_xor


def copy(x: Any, out: np.ndarray) -> None:
    """``out`` = x, an array or a number."""
    np.copyto(out, x, casting="unsafe")


def sum_axes(x: np.ndarray, axes: tuple[int, ...], out: np.ndarray) -> None:
    """Sums along axes; ``out`` has the other axes."""
    np.add.reduce(x, axis=axes, out=out)


def take_rows(x: np.ndarray, index: np.ndarray, axis: int, out: np.ndarray) -> None:
    """``x`` with its entries along an axis taken in the order of a public (or secret) index."""
    np.take(x, index, axis=axis, out=out)
