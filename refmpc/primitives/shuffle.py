"""Secret shuffling of rows: a uniformly random permutation that no party knows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from accel import kernels
from accel.prg import Stream
from accel.validate import require
from refmpc.core.party import Operation
from refmpc.core.protocol import Cost, protocol
from refmpc.core.rounds import gather
from refmpc.core.tensor import BooleanTensor, SecretTensor
from refmpc.core.words import seal

__all__ = ["shuffle"]

CHUNK = 1 << 22  # words of one column chunk: all that is in flight besides the old and the new copy


def _column_chunks(tensor: SecretTensor) -> list[slice]:
    rows = len(tensor)
    width = tensor.size // rows if rows else 0
    columns = max(1, CHUNK // max(1, rows))
    return [slice(start, min(width, start + columns)) for start in range(0, width, columns)]


def _shuffle_cost(tensors: Sequence[SecretTensor]) -> Cost:
    rounds = 2 * max(len(_column_chunks(tensor)) for tensor in tensors)
    return Cost(rounds, 32 * sum(tensor.size for tensor in tensors))


@protocol(cost=_shuffle_cost, source="Chida et al. 2019 (ePrint 2019/695), Alg. 9")
async def shuffle(tensors: Sequence[SecretTensor]) -> list[SecretTensor]:
    """The rows of all tensors under one uniformly random permutation π02∘π12∘π01; each party knows two of the three.

    2 rounds, 32 bytes an entry, arithmetic or Boolean, exact. (More than 2^22 entries go in column chunks, 2 rounds
    each, so that memory stays at one extra copy.) Roles rotate from call to call; for roles 0, 1, 2:

    local     0: a = π01(x0+x1) + r        1: b = π12(π01(x2) − r) + s        r from k01, s from k12
    round 1   0 → 2: a                     1 → 0: b
    local     2: v2 = π02(π12(a) − s)      0: v0 = π02(b)                     v0 + v2 is the shuffled secret
    round 2   2 → 0: v2 − y2               0 → 2: v0 − y1                     y1 from k01, y2 from k12
    result    y1 (roles 0, 1), y2 (roles 1, 2), y0 = the sum of what roles 2 and 0 exchanged

    Views: role 2 sees a under r and v0 under y1, both from k01; role 0 sees b under s and v2 under y2, both from k12;
    role 1 sees nothing. π01 is unknown to role 2, π12 to role 0, π02 to role 1.
    """
    require(len(tensors) > 0, "tensors", tensors, "at least one tensor")
    rows = len(tensors[0])
    for tensor in tensors:
        require(len(tensor) == rows, "rows of a tensor", len(tensor), f"{rows}, as the first tensor has")
    party = tensors[0].party
    operation = party.operation("shuffle", tensors)
    role = (party.id - operation.number) % 3
    permutations = _permutations(operation, role, rows)
    return await gather(
        *(_shuffle_one(operation, tensor, role, permutations, index) for index, tensor in enumerate(tensors))
    )


def _permutations(operation: Operation, role: int, rows: int) -> dict[str, np.ndarray]:
    """The two permutations that this role knows, drawn from its streams."""
    names = {0: ("01", "02"), 1: ("12", "01"), 2: ("02", "12")}[role]  # with the next role, with the previous one
    streams = (operation.stream("next"), operation.stream("previous"))
    return {
        name: kernels.random_permutation(stream.words(rows + 64), rows)
        for name, stream in zip(names, streams, strict=True)
    }


async def _shuffle_one(
    operation: Operation, tensor: SecretTensor, role: int, permutations: dict[str, np.ndarray], index: int
) -> SecretTensor:
    boolean = isinstance(tensor, BooleanTensor)
    add, subtract = (np.bitwise_xor, np.bitwise_xor) if boolean else (np.add, np.subtract)
    low = tensor._mask if isinstance(tensor, BooleanTensor) else np.uint64(2**64 - 1)
    rows = len(tensor)
    flat = operation.machine.unsealed(tensor.flat).reshape(2, rows, tensor.size // rows if rows else 0)
    result = np.empty(flat.shape, dtype=np.uint64)
    for columns in _column_chunks(tensor):
        x, out = flat[:, :, columns], result[:, :, columns]
        shape = x.shape[1:]

        def masks(stream: Stream, shape: tuple[int, int] = shape) -> np.ndarray:
            words = stream.words(shape[0] * shape[1]).reshape(shape)
            return words & low if boolean else words  # Boolean shares have no bits above their width

        first, second = operation.round(), operation.round()
        if role == 0:
            r, y1 = masks(operation.stream("next")), masks(operation.stream("next"))
            first.send_previous(add(kernels.gather_rows(add(x[0], x[1]), permutations["01"]), r))
            b = first.fill_next(np.empty(shape, np.uint64))
            await first
            mine = subtract(kernels.gather_rows(b, permutations["02"]), y1)
            second.send_previous(mine)
            theirs = second.fill_previous(np.empty(shape, np.uint64))
            await second
            out[0], out[1] = add(mine, theirs), y1
        elif role == 1:
            r, y1 = masks(operation.stream("previous")), masks(operation.stream("previous"))
            s, y2 = masks(operation.stream("next")), masks(operation.stream("next"))
            once = subtract(kernels.gather_rows(x[1], permutations["01"]), r)
            first.send_previous(add(kernels.gather_rows(once, permutations["12"]), s))
            await first
            await second
            out[0], out[1] = y1, y2
        else:
            s, y2 = masks(operation.stream("previous")), masks(operation.stream("previous"))
            a = first.fill_next(np.empty(shape, np.uint64))
            await first
            once = subtract(kernels.gather_rows(a, permutations["12"]), s)
            mine = subtract(kernels.gather_rows(once, permutations["02"]), y2)
            second.send_next(mine)
            theirs = second.fill_next(np.empty(shape, np.uint64))
            await second
            out[0], out[1] = y2, add(mine, theirs)
    return tensor._like(seal(result).reshape(tensor.shares.shape), operation.history(index))
