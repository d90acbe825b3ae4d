"""Secret shuffling of rows: a uniformly random permutation that no party knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from accel.validate import require
from refmpc.core.party import Operation
from refmpc.core.primitive import Cost, primitive
from refmpc.core.rounds import gather
from refmpc.core.tensor import BooleanTensor, SecretTensor
from refmpc.core.words import Words

__all__ = ["ColumnStore", "column_chunks", "shuffle", "shuffle_in_place"]

SPARE_WORDS = 64  # for words that would bias a permutation: each is one with probability rows·2^-64
CHUNK = 1 << 22  # words of one column chunk: all that is in flight besides the old and the new copy


def column_chunks(shape: tuple[int, ...]) -> list[slice]:
    """Columns (all axes but the first, flat) that are shuffled at a time."""
    rows, width = shape[0], int(np.prod(shape[1:])) if shape[0] else 0
    columns = max(1, CHUNK // max(1, rows))
    return [slice(start, min(width, start + columns)) for start in range(0, width, columns)]


class ColumnStore(Protocol):
    """A secret tensor whose shares lie somewhere else than in memory, in chunks of columns."""

    @property
    def like(self) -> SecretTensor:
        """Its kind, shape, scale and history; no values."""
        ...

    def read_columns(self, columns: slice) -> Words:
        """Both shares of one of ``column_chunks``: (2, rows, columns)."""
        ...

    def write_columns(self, columns: slice, words: Words) -> None:
        """Replace them."""
        ...

    def replaced(self, history: int) -> None:
        """All columns hold something else now, of this history."""
        ...


def _shuffle_cost(tensors: Sequence[SecretTensor]) -> Cost:
    rounds = 2 * max(len(column_chunks(tensor.shape)) for tensor in tensors)
    return Cost(rounds, 32 * sum(tensor.size for tensor in tensors))


@primitive(cost=_shuffle_cost, source="Chida et al. 2019 (ePrint 2019/695), Alg. 9")
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
    operation, role, permutations = _begun(tensors)
    return await gather(
        *(_shuffle_one(operation, tensor, role, permutations, index) for index, tensor in enumerate(tensors))
    )


async def shuffle_in_place(stores: Sequence[ColumnStore]) -> None:
    """``shuffle`` of tensors that are not in memory: the same messages, costs and views; memory holds a few chunks of
    each."""
    operation, role, permutations = _begun([store.like for store in stores])
    await gather(*(_shuffle_store(operation, store, role, permutations, index) for index, store in enumerate(stores)))


def _begun(tensors: Sequence[SecretTensor]) -> tuple[Operation, int, dict[str, Words]]:
    """The operation, this party's role in it, and the two permutations that it knows."""
    require(len(tensors) > 0, "tensors", tensors, "at least one tensor")
    rows = len(tensors[0])
    for tensor in tensors:
        require(len(tensor) == rows, "rows of a tensor", len(tensor), f"{rows}, as the first tensor has")
    party = tensors[0].party
    operation = party.operation("shuffle", tensors)
    role = (party.id - operation.number) % 3
    return operation, role, _permutations(operation, role, rows)


def _permutations(operation: Operation, role: int, rows: int) -> dict[str, Words]:
    """The two permutations that this role knows, drawn from its streams."""
    machine = operation.machine
    names = {0: ("01", "02"), 1: ("12", "01"), 2: ("02", "12")}[role]  # with the next role, with the previous one
    found = {}
    for name, side in zip(names, ("next", "previous"), strict=True):
        found[name] = machine.memory(rows, np.int64)
        machine.call("random_permutation", machine.masks(operation, side, rows + SPARE_WORDS), found[name])
    return found


async def _shuffle_one(
    operation: Operation, tensor: SecretTensor, role: int, permutations: dict[str, Words], index: int
) -> SecretTensor:
    rows = len(tensor)
    flat = tensor.flat.reshape(2, rows, tensor.size // rows if rows else 0)
    result = operation.machine.memory(flat.shape)
    for columns in column_chunks(tensor.shape):
        await _shuffle_chunk(operation, tensor, role, permutations, flat[:, :, columns], result[:, :, columns])
    return tensor._like(result.reshape(tensor.shares.shape), operation.history(index))


async def _shuffle_store(
    operation: Operation, store: ColumnStore, role: int, permutations: dict[str, Words], index: int
) -> None:
    like = store.like
    for columns in column_chunks(like.shape):
        x = store.read_columns(columns)
        await _shuffle_chunk(operation, like, role, permutations, x, x)
        store.write_columns(columns, x)
    store.replaced(operation.history(index))


async def _shuffle_chunk(
    operation: Operation, like: SecretTensor, role: int, permutations: dict[str, Words], x: Words, out: Words
) -> None:
    """Columns x, (2, rows, columns), into ``out``, which may be x: it is written when x is no longer needed."""
    machine, shape = operation.machine, x.shape[1:]
    add, subtract = ("xor", "xor") if isinstance(like, BooleanTensor) else ("add", "subtract")

    def masks(side: str) -> Words:
        words = machine.masks(operation, side, shape[0] * shape[1]).reshape(shape)
        if isinstance(like, BooleanTensor):  # its shares have no bits above their width
            words = machine.binary("bitwise_and", words, like._mask)
        return words

    def moved(x: Words, name: str, kernel: str, mask: Words) -> Words:
        """The rows of x under a permutation, and a mask added to them or taken from them."""
        rows_moved = machine.memory(x.shape)
        machine.call("take_rows", x, permutations[name], 0, rows_moved)
        machine.call(kernel, rows_moved, mask, rows_moved)
        return rows_moved

    first, second = operation.round(), operation.round()
    if role == 0:
        r, y1 = masks("next"), masks("next")
        first.send_previous(moved(machine.binary(add, x[0], x[1]), "01", add, r))
        b = first.expect_next(shape)
        await first
        mine = moved(b, "02", subtract, y1)
        second.send_previous(mine)
        theirs = second.expect_previous(shape)
        await second
        machine.call(add, mine, theirs, out[0])
        machine.call("copy", y1, out[1])
    elif role == 1:
        r, y1 = masks("previous"), masks("previous")
        s, y2 = masks("next"), masks("next")
        first.send_previous(moved(moved(x[1], "01", subtract, r), "12", add, s))
        await first
        await second
        machine.call("copy", y1, out[0])
        machine.call("copy", y2, out[1])
    else:
        s, y2 = masks("previous"), masks("previous")
        a = first.expect_next(shape)
        await first
        mine = moved(moved(a, "12", subtract, s), "02", subtract, y2)
        second.send_next(mine)
        theirs = second.expect_next(shape)
        await second
        machine.call("copy", y2, out[0])
        machine.call(add, mine, theirs, out[1])
