"""Are the uploads what the claim presumes? Tested by the servers on shares, once, before training: proofs §11.

Every row of each client within that client's part of the row bound, every label one-hot, and the same shares at the
servers that hold the same share. Each client is tested by itself, and one bit is opened for each: so a client that
cheats learns nothing about another's rows, and is named. Clients may send any 64-bit words: the tests do not presume
that nothing wraps around, they show it.

A cheating client is missed with a probability of at most 2^−37 (six tests of 2^−40 each); an honest one is refused with
at most 2^−80. Rounds: 3, and 2 for each COMPARED_ROWS rows. Bytes: 24 a row for the sum of the squares, which the norms
need anyway; beyond that 24 a row and further client, about 25 a row and client for the comparison, and 40 kB a client
for each ``RowTest.rows`` rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

import refmpc
from accel import kernels
from accel.errors import InvalidArgument
from protocols.plan.row_test import NORM_ROWS, RowTest, row_test, upload_release
from protocols.plan.run_plan import Plan
from protocols.plan.scales import EMBEDDING_BITS
from protocols.step.clip import CutByRows
from refmpc import ArithmeticTensor, Party, Words, seal, unseal
from refmpc.primitives.input_checks import Faults, Projected, public_coins, shared_sums, side_by_side

__all__ = [
    "COMPARED_ROWS",
    "PIECE_ROWS",
    "LocalPart",
    "UploadRefused",
    "projected_labels",
    "require_bits",
    "require_labels",
    "require_one_hot",
    "require_rows_within",
    "require_squares_within",
    "verify_uploads",
]

PIECE_ROWS = 1 << 11  # 2 MB of a hundred columns: the second time they are read, they are still in the cache
COMPARED_ROWS = 1 << 16  # rows whose squares are compared in one go: 70 bytes of memory each


class UploadRefused(InvalidArgument):
    """The uploads of some ``clients`` are not what the claim presumes: nothing was trained on them."""

    def __init__(self, text: str, clients: Sequence[str] = ()):
        super().__init__(text)
        self.clients = tuple(clients)


class LocalPart:
    """What a server computes by itself of ``rows`` rows of one client, which lie in some ``columns``, piece by
    piece."""

    def __init__(self, faults: Faults, test: RowTest, columns: slice, rows: int):
        self._faults, self._test, self._columns = faults, test, columns
        self._block = min(test.rows, rows)
        self._side = side_by_side(self._block * test.width)
        self._blocks: list[Projected] = []
        self._done = 0
        self.squares = np.empty(rows, dtype=np.uint64)  # summands of the squared norms

    def add(self, shares: np.ndarray) -> None:
        """The next rows, this server's two shares of them (2, rows, all columns)."""
        first, stop, count = self._columns.start, self._columns.stop, shares.shape[1]
        squares = self.squares[self._done : self._done + count]
        kernels.square_sums(shares[0], shares[1], first, stop, squares)
        start = 0
        while start < count:
            begun = self._done % self._block
            if begun == 0:
                self._blocks.append(Projected(self._faults.subsets, 2, self._side))
            end = min(count, start + self._block - begun)
            self._blocks[-1].add(shares[0, start:end], shares[1, start:end], columns=self._columns)
            self._done += end - start
            start = end

    @property
    def projections(self) -> Words:
        """Projections of all blocks (2, PROJECTIONS, sums)."""
        return seal(np.concatenate([unseal(block.words) for block in self._blocks], axis=2))


async def require_squares_within(faults: Faults, squares: ArithmeticTensor, projections: Words, test: RowTest) -> None:
    """Tests that rows of these exact ``squares`` (scale 0), whose entries have these ``projections``, are within the
    bound.

    Rounds: 2 for each COMPARED_ROWS rows, projections included."""
    rows = len(squares)
    starts = range(0, rows, NORM_ROWS)
    blocks = [faults.project_all((squares[at : at + NORM_ROWS] - test.middle).shares) for at in starts]
    together = seal(np.concatenate([unseal(block) for block in blocks], axis=2))
    high_bit = test.high_bit(rows)

    async def every_row() -> None:
        for start in range(0, rows, COMPARED_ROWS):
            left = (-squares[start : start + COMPARED_ROWS]) + test.squared
            await faults.require_not_negative(left, high_bit, test.low_bit)

    await refmpc.gather(
        faults.require_small(projections, test.entry_limit(rows)),
        faults.require_small(together, test.square_limit(rows)),
        every_row(),
    )


async def require_rows_within(faults: Faults, x: CutByRows, test: RowTest) -> None:
    """Tests every row of x (n, test.width). 1 round, and 2 for each COMPARED_ROWS rows."""
    part = LocalPart(faults, test, slice(0, test.width), len(x))
    for piece in _pieces(x):
        part.add(piece.party.machine.unsealed(piece.shares))
    squares = await shared_sums(faults.party, seal(part.squares))
    await require_squares_within(faults, squares, part.projections, test)


async def require_one_hot(faults: Faults, labels: CutByRows) -> None:
    """Tests that every row of labels (n, S), ring integers, has one 1 and zeros else. 3 rounds."""
    ones = Projected(faults.subsets, 1, side_by_side(len(labels)))
    for rows in _pieces(labels):
        first = rows.party.machine.unsealed(rows.first)
        rest = (first @ np.ones(first.shape[1], dtype=np.uint64)).reshape(-1, 1)
        if rows.party.id == 0:
            rest -= np.uint64(1)
        ones.add(rest)
    await refmpc.gather(require_bits(faults, labels), faults.require_zero(ones.words))


async def require_bits(faults: Faults, labels: CutByRows) -> None:
    """Tests that all of labels (n, S) are 0 or 1. 3 rounds.

    y² = y modulo 2^64 only for 0 and 1, because y and y − 1 have no common factor."""
    differences = None
    for rows in _pieces(labels):
        if differences is None:
            differences = Projected(faults.subsets, 1, side_by_side(len(labels) * rows.shape[1]))
        machine = rows.party.machine
        own = machine.contiguous(rows.shares)
        squares = machine.memory(own.shape[1:])
        machine.call("product_pair", own, own, None, squares)
        machine.call("subtract", squares, own[0], squares)
        differences.add(unseal(squares))
    assert differences is not None
    await faults.require_zero(differences.words)


async def require_labels(faults: Faults, plan: Plan, labels: CutByRows) -> None:
    """Each task has a test of its own: a one-hot row, a 0 or 1, or a number from −1 to 1."""
    task = plan.training.task
    if task == "classification":
        await require_one_hot(faults, labels)
    elif task == "binary":
        await require_bits(faults, labels)
    else:
        test = row_test(1, 1.0, exact=True)
        assert test is not None
        await require_rows_within(faults, labels, test)


def projected_labels(faults: Faults, labels: CutByRows) -> Words:
    """Projections of the labels' shares themselves (2, PROJECTIONS, …). Local."""
    sums = None
    for rows in _pieces(labels):
        if sums is None:
            sums = Projected(faults.subsets, 2, side_by_side(len(labels) * rows.shape[1]))
        sums.add(*unseal(rows.shares))
    assert sums is not None
    return sums.words


@dataclass(frozen=True)
class _First:
    """The first ``count`` rows."""

    rows: CutByRows
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, rows: slice) -> ArithmeticTensor:
        start, stop, _ = rows.indices(self.count)
        return self.rows[start:stop]


async def verify_uploads(party: Party, plan: Plan, rows: CutByRows, labels: CutByRows) -> ArithmeticTensor:
    """Tests what all clients have shared: rows (n, d, and a column that does not count) and labels (n, S; rows of zeros
    may follow where n is padded). Returns the exact squared norms of the rows. Raises ``UploadRefused`` at all servers,
    with the names of the clients."""
    coins = await public_coins(party)
    every = [Faults(party, coins)]
    every += [Faults(party, coins, place, every[0].subsets) for place in range(1, len(plan.client_names))]
    ends = np.cumsum(plan.client_widths).tolist()
    parts = [
        LocalPart(faults, test, slice(end - test.width, end), len(rows))
        for faults, test, end in zip(every, plan.row_tests, ends, strict=True)
    ]
    for piece in _pieces(rows):
        words = party.machine.unsealed(piece.shares)
        for part in parts:
            part.add(words)
    labelled = _First(labels, plan.schedule.num_samples)
    own_labels = projected_labels(every[-1], labelled)

    async def tested(place: int) -> ArithmeticTensor:
        part, faults = parts[place], every[place]
        projections = part.projections
        with_labels = place == len(parts) - 1

        async def of_rows() -> ArithmeticTensor:
            squares = await shared_sums(party, seal(part.squares))
            await require_squares_within(faults, squares, projections, plan.row_tests[place])
            return squares

        squares, *_ = await refmpc.gather(
            of_rows(),
            faults.require_same_shares([projections, *([own_labels] if with_labels else [])]),
            *([require_labels(faults, plan, labelled)] if with_labels else []),
        )
        assert isinstance(squares, ArithmeticTensor)
        return squares

    total, *others = await refmpc.gather(*(tested(place) for place in range(len(parts))))
    for squares in others:
        total = total + squares
    names = plan.client_names
    found = await refmpc.gather(
        *(faults.opened(upload_release(name)) for faults, name in zip(every, names, strict=True))
    )
    if refused := [name for name, bad in zip(names, found, strict=True) if bad]:
        bounds = ", ".join(f"{name}: {bound:.5g}" for name, bound in zip(names, plan.client_bounds, strict=True))
        raise UploadRefused(
            f"{' and '.join(f'client {name!r}' for name in refused)} shared rows beyond the row bound ({bounds}), "
            "labels of another form, or different shares at two servers: nothing was trained. Check its file and its "
            "options. A client that does this on purpose would void the others' guarantee",
            refused,
        )
    assert isinstance(total, ArithmeticTensor)
    return total.reinterpret(2 * EMBEDDING_BITS)


def _pieces(x: CutByRows) -> Iterator[ArithmeticTensor]:
    """A few rows at a time, so that they are still in the cache when all that is local has been computed."""
    for start in range(0, len(x), PIECE_ROWS):
        yield x[start : start + PIECE_ROWS]
