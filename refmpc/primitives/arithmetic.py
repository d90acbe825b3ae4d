"""Products of arithmetic tensors: plain, and fused with truncation.

Each party multiplies what it holds (x_i(y_i+y_i+1) + x_i+1·y_i) and has a summand z_i of the product. Plain products
mask it with a zero share and send it to one neighbour; truncated products go to ``truncate_summands``. ``addend`` is
this party's own contribution to the product, at the product's scale: noise that a server adds there costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from accel import kernels
from accel.validate import require, require_integer
from refmpc.core.party import Operation
from refmpc.core.protocol import Cost, protocol
from refmpc.core.tensor import ArithmeticTensor
from refmpc.primitives.truncation import truncate_summands, truncated_product_cost

__all__ = [
    "dot",
    "dot_truncate",
    "matmul",
    "matmul_shape",
    "matmul_summand",
    "matmul_truncate",
    "multiply",
    "multiply_truncate",
    "own_addend",
    "reshare",
]

SOURCE = "Araki, Furukawa, Lindell, Nof, Ohara, CCS 2016 (ePrint 2016/768)"
SOURCE_TRUNCATED = SOURCE + "; truncation: this project, proofs §2.2"

Pair = tuple[ArithmeticTensor, ArithmeticTensor]


async def reshare(operation: Operation, summand: np.ndarray) -> np.ndarray:
    """From summands, already masked by a zero share, to replicated shares: 1 round, 24 bytes an element."""
    round_ = operation.round()
    round_.send_previous(summand)
    shares = np.empty((2, *summand.shape), dtype=np.uint64)
    shares[0] = summand
    round_.from_next.append(shares[1:])  # a view also when the summand has no axis
    await round_
    return shares


# summands ---------------------------------------------------------------------------------------


def _shape(x: ArithmeticTensor, y: ArithmeticTensor) -> tuple[int, ...]:
    """The shape of x·y."""
    return x.shape if x.shape == y.shape else np.broadcast_shapes(x.shape, y.shape)


def _broadcast(x: ArithmeticTensor, y: ArithmeticTensor) -> Pair:
    shape = _shape(x, y)
    return x.broadcast_to(shape), y.broadcast_to(shape)


def matmul_shape(x: ArithmeticTensor, y: ArithmeticTensor) -> tuple[int, ...]:
    """The shape of x@y."""
    require(x.ndim >= 1 and y.ndim >= 1, "matmul operands", (x.shape, y.shape), "of at least one axis each")
    inner = x.shape[-1], y.shape[-2 if y.ndim > 1 else -1]
    require(inner[0] == inner[1], "matmul operands", (x.shape, y.shape), "of matching inner sizes")
    batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return (*batch, *x.shape[-2:-1], *(y.shape[-1:] if y.ndim > 1 else ()))


def _product_summand(
    x: ArithmeticTensor, y: ArithmeticTensor, shape: tuple[int, ...], mask: np.ndarray | None
) -> np.ndarray:
    x, y = _broadcast(x, y)
    return kernels.product_pair(x.shares, y.shares, mask)


def _dot_summand(
    x: ArithmeticTensor, y: ArithmeticTensor, shape: tuple[int, ...], mask: np.ndarray | None
) -> np.ndarray:
    x, y = _broadcast(x, y)
    inner = x.shape[-1]
    left, right = (t.shares.reshape(2, math.prod(shape), inner) for t in (x, y))
    start = np.zeros(shape, dtype=np.uint64) if mask is None else mask
    return kernels.dot_pair(left, right, start.reshape(-1)).reshape(shape)


def matmul_summand(
    x: ArithmeticTensor, y: ArithmeticTensor, shape: tuple[int, ...], mask: np.ndarray | None
) -> np.ndarray:
    """This party's summand of x@y, plus ``mask``."""
    if mask is None:
        mask = np.zeros(shape, dtype=np.uint64)
    left = x.shares if x.ndim > 1 else x.shares[:, np.newaxis, :]
    right = y.shares if y.ndim > 1 else y.shares[:, :, np.newaxis]
    if left.ndim == 3 and right.ndim == 3:
        matrix = mask.reshape(left.shape[1], right.shape[2])
        return kernels.matmul_pair(left[0], left[1], right[0], right[1], matrix).reshape(mask.shape)
    batch = np.broadcast_shapes(left.shape[1:-2], right.shape[1:-2])
    left, right = (
        np.broadcast_to(
            shares.reshape(2, *(1,) * (len(batch) + 3 - shares.ndim), *shares.shape[1:]),
            (2, *batch, *shares.shape[-2:]),
        )
        for shares in (left, right)
    )
    matrices = mask.reshape(*batch, left.shape[-2], right.shape[-1])
    out = np.empty_like(matrices)
    for index in np.ndindex(*batch):
        out[index] = kernels.matmul_pair(
            left[(0, *index)], left[(1, *index)], right[(0, *index)], right[(1, *index)], matrices[index]
        )
    return out.reshape(mask.shape)


_IN_THE_CLEAR: dict[Any, Callable[[Any, Any], Any]] = {  # for debug mode
    _product_summand: np.multiply,
    _dot_summand: lambda x, y: (x * y).sum(axis=-1),
    matmul_summand: np.matmul,
}


def own_addend(shape: tuple[int, ...], addend: np.ndarray | None) -> np.ndarray | None:
    """This party's addend as ring words, checked."""
    if addend is None:
        return None
    require(addend.shape == shape, "addend.shape", addend.shape, f"the shape of the product, {shape}")
    require(addend.dtype in (np.int64, np.uint64), "addend.dtype", addend.dtype, "int64 or uint64 ring words")
    return addend.view(np.uint64)


async def _plain(
    name: str, x: ArithmeticTensor, y: ArithmeticTensor, shape: tuple[int, ...], summand
) -> ArithmeticTensor:
    operation = x.party.operation(name, x, y)
    if x.party.insecure_check_ranges and x.fraction_bits + y.fraction_bits > 0:  # integers may be meant modulo 2^64
        from refmpc.core.debug import check_product

        await check_product(operation, x, y, _IN_THE_CLEAR[summand], 2**63)
    shares = await reshare(operation, summand(x, y, shape, operation.zero_share(shape)))
    return ArithmeticTensor(x.party, shares, x.fraction_bits + y.fraction_bits, operation.history())


async def _truncated(
    name: str, x: ArithmeticTensor, y: ArithmeticTensor, shape: tuple[int, ...], summand, bits: int, addend
) -> ArithmeticTensor:
    scale = x.fraction_bits + y.fraction_bits
    require_integer("bits", bits, 1, min(62, scale) or 62, way_out="bits is what the product's scale loses")
    own = own_addend(shape, addend)
    operation = x.party.operation(name, x, y, bits)
    z = summand(x, y, shape, own)
    if x.party.insecure_check_ranges:
        from refmpc.core.debug import check_product

        await check_product(operation, x, y, _IN_THE_CLEAR[summand], 2**62, own)
    shares = await truncate_summands(operation, z, bits)
    return ArithmeticTensor(x.party, shares.reshape(2, *shape), max(0, scale - bits), operation.history())


# protocols --------------------------------------------------------------------------------------


def _outputs(x: ArithmeticTensor, y: ArithmeticTensor) -> int:
    return math.prod(_shape(x, y))


def _dot_outputs(x: ArithmeticTensor, y: ArithmeticTensor) -> int:
    return math.prod(_shape(x, y)[:-1])


def _matmul_outputs(x: ArithmeticTensor, y: ArithmeticTensor) -> int:
    return math.prod(matmul_shape(x, y))


@protocol(cost=lambda x, y: Cost(1, 24 * _outputs(x, y)), source=SOURCE)
async def multiply(x: ArithmeticTensor, y: ArithmeticTensor) -> ArithmeticTensor:
    """x·y element by element; the scale is the sum of the scales. 1 round, 24 bytes. Exact modulo 2^64."""
    return await _plain("multiply", x, y, _shape(x, y), _product_summand)


@protocol(cost=lambda x, y: Cost(1, 24 * _dot_outputs(x, y)), source=SOURCE)
async def dot(x: ArithmeticTensor, y: ArithmeticTensor) -> ArithmeticTensor:
    """Σ x·y along the last axis. 1 round, 24 bytes an *output*. Exact modulo 2^64."""
    return await _plain("dot", x, y, _shape(x, y)[:-1], _dot_summand)


@protocol(cost=lambda x, y: Cost(1, 24 * _matmul_outputs(x, y)), source=SOURCE)
async def matmul(x: ArithmeticTensor, y: ArithmeticTensor) -> ArithmeticTensor:
    """x@y as in numpy, batches included. 1 round, 24 bytes an *output*. Exact modulo 2^64."""
    return await _plain("matmul", x, y, matmul_shape(x, y), matmul_summand)


@protocol(cost=lambda x, y, bits, addend=None: truncated_product_cost(_outputs(x, y), bits), source=SOURCE_TRUNCATED)
async def multiply_truncate(
    x: ArithmeticTensor, y: ArithmeticTensor, bits: int, addend: np.ndarray | None = None
) -> ArithmeticTensor:
    """x·y / 2^bits element by element. 2 rounds, 24 + 3·bits/8 bytes. Domain |x·y| < 2^62 in the ring; error at
    most one unit of the result, unbiased."""
    return await _truncated("multiply_truncate", x, y, _shape(x, y), _product_summand, bits, addend)


@protocol(
    cost=lambda x, y, bits, addend=None: truncated_product_cost(_dot_outputs(x, y), bits), source=SOURCE_TRUNCATED
)
async def dot_truncate(
    x: ArithmeticTensor, y: ArithmeticTensor, bits: int, addend: np.ndarray | None = None
) -> ArithmeticTensor:
    """Σ x·y / 2^bits along the last axis. 2 rounds, 24 + 3·bits/8 bytes an *output*. Domain and error as above."""
    shape = _shape(x, y)[:-1]
    return await _truncated("dot_truncate", x, y, shape, _dot_summand, bits, addend)


@protocol(
    cost=lambda x, y, bits, addend=None: truncated_product_cost(_matmul_outputs(x, y), bits), source=SOURCE_TRUNCATED
)
async def matmul_truncate(
    x: ArithmeticTensor, y: ArithmeticTensor, bits: int, addend: np.ndarray | None = None
) -> ArithmeticTensor:
    """x@y / 2^bits. 2 rounds, 24 + 3·bits/8 bytes an *output*. Domain and error as above."""
    return await _truncated("matmul_truncate", x, y, matmul_shape(x, y), matmul_summand, bits, addend)
