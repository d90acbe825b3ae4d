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

from accel.validate import require, require_integer
from refmpc.core.digest import digest, mix, name_digest
from refmpc.core.fixed import encode
from refmpc.core.party import Operation
from refmpc.core.primitive import Cost, primitive
from refmpc.core.tensor import ArithmeticTensor
from refmpc.core.words import Words, seal
from refmpc.primitives.dealing import TwoHolder, row_segments
from refmpc.primitives.truncation import truncate_summands, truncated_product_cost

__all__ = [
    "dot",
    "dot_summand",
    "dot_truncate",
    "matmul",
    "matmul_public",
    "matmul_public_held",
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

Summand = Callable[[ArithmeticTensor, ArithmeticTensor, Words | None, Words], None]


async def reshare(operation: Operation, shares: Words) -> None:
    """Replicated shares (2, …) from summands, already masked by a zero share, in ``shares[0]``: 1 round, 24 bytes an
    element."""
    round_ = operation.round()
    round_.send_previous(shares[0])
    round_.fill_next(shares[1])
    await round_


# summands ---------------------------------------------------------------------------------------


def _shape(x: ArithmeticTensor, y: ArithmeticTensor) -> tuple[int, ...]:
    """The shape of x·y."""
    return x.shape if x.shape == y.shape else np.broadcast_shapes(x.shape, y.shape)


def _pairs(x: ArithmeticTensor, y: ArithmeticTensor) -> tuple[Words, Words]:
    """The shares of both, with as many axes."""
    ndim = max(x.ndim, y.ndim)
    left, right = (t.shares[(slice(None), *[None] * (ndim - t.ndim))] if t.ndim < ndim else t.shares for t in (x, y))
    return left, right


def matmul_shape(x: ArithmeticTensor, y: ArithmeticTensor) -> tuple[int, ...]:
    """The shape of x@y."""
    require(x.ndim >= 1 and y.ndim >= 1, "matmul operands", (x.shape, y.shape), "of at least one axis each")
    inner = x.shape[-1], y.shape[-2 if y.ndim > 1 else -1]
    require(inner[0] == inner[1], "matmul operands", (x.shape, y.shape), "of matching inner sizes")
    batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    return (*batch, *x.shape[-2:-1], *(y.shape[-1:] if y.ndim > 1 else ()))


def _product_summand(x: ArithmeticTensor, y: ArithmeticTensor, addend: Words | None, out: Words) -> None:
    x.party.machine.call("product_pair", *_pairs(x, y), addend, out)


def dot_summand(x: ArithmeticTensor, y: ArithmeticTensor, addend: Words | None, out: Words) -> None:
    x.party.machine.call("dot_pair", *_pairs(x, y), addend, out)


def matmul_summand(x: ArithmeticTensor, y: ArithmeticTensor, addend: Words | None, out: Words) -> None:
    """This party's summand of x@y, plus ``addend``."""
    left, right = x if x.ndim > 1 else x[None], y if y.ndim > 1 else y[:, None]
    shape = matmul_shape(left, right)
    addend = None if addend is None else addend.reshape(shape)
    x.party.machine.call("matmul_pair", *_pairs(left, right), addend, out.reshape(shape))


_IN_THE_CLEAR: dict[Any, Callable[[Any, Any], Any]] = {  # for debug mode
    _product_summand: np.multiply,
    dot_summand: lambda x, y: (x * y).sum(axis=-1),
    matmul_summand: np.matmul,
}


def own_addend(shape: tuple[int, ...], addend: np.ndarray | None) -> Words | None:
    """This party's addend as ring words, checked."""
    if addend is None:
        return None
    require(addend.shape == shape, "addend.shape", addend.shape, f"the shape of the product, {shape}")
    require(addend.dtype in (np.int64, np.uint64), "addend.dtype", addend.dtype, "int64 or uint64 ring words")
    return seal(addend).view(np.uint64)


async def _plain(
    name: str, x: ArithmeticTensor, y: ArithmeticTensor, shape: tuple[int, ...], summand: Summand
) -> ArithmeticTensor:
    operation = x.party.operation(name, x, y)
    if x.party.insecure_check_ranges and x.fraction_bits + y.fraction_bits > 0:  # integers may be meant modulo 2^64
        from refmpc.core.debug import check_product

        await check_product(operation, x, y, _IN_THE_CLEAR[summand], 2**63)
    shares = operation.machine.memory((2, *shape))
    summand(x, y, operation.zero_share(shape), shares[0])
    await reshare(operation, shares)
    return ArithmeticTensor(x.party, shares, x.fraction_bits + y.fraction_bits, operation.history())


async def _truncated(
    name: str,
    x: ArithmeticTensor,
    y: ArithmeticTensor,
    shape: tuple[int, ...],
    summand: Summand,
    bits: int,
    addend: np.ndarray | None,
) -> ArithmeticTensor:
    scale = x.fraction_bits + y.fraction_bits
    require_integer("bits", bits, 1, min(62, scale) or 62, way_out="bits is what the product's scale loses")
    own = own_addend(shape, addend)
    operation = x.party.operation(name, x, y, bits)
    z = operation.machine.memory(shape)
    summand(x, y, own, z)
    if x.party.insecure_check_ranges:
        from refmpc.core.debug import check_product

        await check_product(operation, x, y, _IN_THE_CLEAR[summand], 2**62, addend)
    shares = await truncate_summands(operation, z.reshape(-1), bits)
    return ArithmeticTensor(x.party, shares.reshape(2, *shape), max(0, scale - bits), operation.history())


def matmul_public(x: ArithmeticTensor, factor: np.ndarray) -> ArithmeticTensor:
    """x@factor for public integers, both with two axes: local, exact modulo 2^64, at the scale of x. Ring words that a
    recorded step takes as an input (sealed) may be such factors too."""
    words, public = _factor_words(x, factor)
    shares = x.party.machine.memory((2, len(x), factor.shape[1]))
    x.party.machine.call("matmul_each", x.shares, words, shares)
    return x._like(shares, mix(name_digest("matmul_public"), x.history, public))


def matmul_public_held(x: ArithmeticTensor, factor: np.ndarray, fraction_bits: int) -> TwoHolder:
    """``held`` of x@factor, read at ``fraction_bits``: local, exact modulo 2^64. Half the products of
    ``matmul_public``, because a holder needs one share of a row and the dealer the sum of its two."""
    words, public = _factor_words(x, factor)
    segments = row_segments(x.party, len(x))
    machine = x.party.machine
    out, turned = machine.memory((len(x), factor.shape[1])), words.transpose()
    if not turned.flags.c_contiguous:
        turned = machine.memory(turned.shape)
        machine.call("copy", words.transpose(), turned)
    for segment in segments:
        machine.call("matmul_held", x.shares[:, segment.slice], segment.role(x.party.id), turned, out[segment.slice])
    history = mix(name_digest("matmul_public_held"), x.history, public)
    return TwoHolder(x.party, out, segments, fraction_bits, history)


def _factor_words(x: ArithmeticTensor, factor: np.ndarray) -> tuple[Any, int]:
    """The ring words of a public factor, and their digest."""
    require(x.ndim == 2 and factor.ndim == 2, "matmul operands", (x.shape, factor.shape), "of two axes each")
    require(x.shape[1] == factor.shape[0], "matmul operands", (x.shape, factor.shape), "of matching inner sizes")
    if isinstance(factor, Words):
        return factor.view(np.uint64), 0  # an input of a recorded step has its own digest
    words = encode(factor, 0, name="factor")
    return x.party.machine.public(words), digest(words)


# protocols --------------------------------------------------------------------------------------


def _outputs(x: ArithmeticTensor, y: ArithmeticTensor) -> int:
    return math.prod(_shape(x, y))


def _dot_outputs(x: ArithmeticTensor, y: ArithmeticTensor) -> int:
    return math.prod(_shape(x, y)[:-1])


def _matmul_outputs(x: ArithmeticTensor, y: ArithmeticTensor) -> int:
    return math.prod(matmul_shape(x, y))


@primitive(cost=lambda x, y: Cost(1, 24 * _outputs(x, y)), source=SOURCE)
async def multiply(x: ArithmeticTensor, y: ArithmeticTensor) -> ArithmeticTensor:
    """x·y element by element; the scale is the sum of the scales. 1 round, 24 bytes. Exact modulo 2^64."""
    return await _plain("multiply", x, y, _shape(x, y), _product_summand)


@primitive(cost=lambda x, y: Cost(1, 24 * _dot_outputs(x, y)), source=SOURCE)
async def dot(x: ArithmeticTensor, y: ArithmeticTensor) -> ArithmeticTensor:
    """Σ x·y along the last axis. 1 round, 24 bytes an *output*. Exact modulo 2^64."""
    return await _plain("dot", x, y, _shape(x, y)[:-1], dot_summand)


@primitive(cost=lambda x, y: Cost(1, 24 * _matmul_outputs(x, y)), source=SOURCE)
async def matmul(x: ArithmeticTensor, y: ArithmeticTensor) -> ArithmeticTensor:
    """x@y as in numpy, batches included. 1 round, 24 bytes an *output*. Exact modulo 2^64."""
    return await _plain("matmul", x, y, matmul_shape(x, y), matmul_summand)


@primitive(cost=lambda x, y, bits, addend=None: truncated_product_cost(_outputs(x, y), bits), source=SOURCE_TRUNCATED)
async def multiply_truncate(
    x: ArithmeticTensor, y: ArithmeticTensor, bits: int, addend: np.ndarray | None = None
) -> ArithmeticTensor:
    """x·y / 2^bits element by element. 2 rounds, 24 + 3·bits/8 bytes. Domain |x·y| < 2^62 in the ring; error at
    most one unit of the result, unbiased."""
    return await _truncated("multiply_truncate", x, y, _shape(x, y), _product_summand, bits, addend)


@primitive(
    cost=lambda x, y, bits, addend=None: truncated_product_cost(_dot_outputs(x, y), bits), source=SOURCE_TRUNCATED
)
async def dot_truncate(
    x: ArithmeticTensor, y: ArithmeticTensor, bits: int, addend: np.ndarray | None = None
) -> ArithmeticTensor:
    """Σ x·y / 2^bits along the last axis. 2 rounds, 24 + 3·bits/8 bytes an *output*. Domain and error as above."""
    shape = _shape(x, y)[:-1]
    return await _truncated("dot_truncate", x, y, shape, dot_summand, bits, addend)


@primitive(
    cost=lambda x, y, bits, addend=None: truncated_product_cost(_matmul_outputs(x, y), bits), source=SOURCE_TRUNCATED
)
async def matmul_truncate(
    x: ArithmeticTensor, y: ArithmeticTensor, bits: int, addend: np.ndarray | None = None
) -> ArithmeticTensor:
    """x@y / 2^bits. 2 rounds, 24 + 3·bits/8 bytes an *output*. Domain and error as above."""
    return await _truncated("matmul_truncate", x, y, matmul_shape(x, y), matmul_summand, bits, addend)
