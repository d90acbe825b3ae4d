"""Are the uploads what the claim presumes? Tested by the servers on shares, once, before training: proofs §11.

Every row within the row bound (all clients together), every label one-hot, and the same shares at the servers that hold the
same share. One bit is opened, for all uploads; if it says that something is wrong, one more for each client, which names who.
Clients may send any 64-bit words: the tests do not presume that nothing wraps around, they show it.

A cheating client is missed with a probability of at most 2^−37 (five tests of 2^−40 each, and the parities); an honest one
is refused with at most 2^−80. Cost: 24 bytes a row that the norms need anyway, 50 to 65 for the comparison, and 10 kB (many
rows: 77 kB) a client for each ``RowTest.rows`` rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

import refmpc
from accel.errors import InvalidArgument
from protocols.plan.row_test import NORM_ROWS, RowTest, row_test, upload_release
from protocols.plan.run_plan import Plan
from protocols.server.stored_rows import CutByRows
from refmpc import ArithmeticTensor, Party, Words, seal, unseal
from refmpc.core.rounds import Round
from refmpc.primitives.input_checks import Faults, public_coins

__all__ = [
    "ShareDigests",
    "UploadRefused",
    "project_labels",
    "require_bits",
    "require_labels",
    "require_norms_within",
    "require_one_hot",
    "require_rows_within",
    "verify_uploads",
]


class UploadRefused(InvalidArgument):
    """The uploads of some ``clients`` are not what the claim presumes: nothing was trained on them."""

    def __init__(self, text: str, clients: Sequence[str] = ()):
        super().__init__(text)
        self.clients = tuple(clients)


async def require_rows_within(
    faults: Faults,
    x: CutByRows,
    test: RowTest,
    parts: Sequence[slice] = (slice(None),),
    note: Callable[[int, Words], None] = lambda part, sums: None,
) -> ArithmeticTensor:
    """Tests every row of x (n, test.width; other columns behind them do not count). Returns the exact squared norms, scale 2·14
    bits. Entries are projected ``test.rows`` rows at a time, all columns of one of the ``parts`` together; ``note`` gets the number
    of the part and its projections.

    Rounds: 7 for each NORM_ROWS rows, which is what is in memory at a time."""
    largest = math.isqrt(test.squared) + 1
    pieces = []
    for start in range(0, len(x), NORM_ROWS):
        rows = x[start : start + NORM_ROWS][:, : test.width].copy()
        sums = []
        for begin in range(0, len(rows), test.rows):
            for number, columns in enumerate(parts):
                sums.append(faults.project_all(rows.shares[:, begin : begin + test.rows, columns]))
                note(number, sums[-1])
        together = seal(np.concatenate([unseal(each) for each in sums], axis=2))
        await faults.require_small_sums(together, min(test.rows, len(rows)), largest)
        pieces.append(await require_norms_within(faults, rows, test))
    return refmpc.concatenate(pieces)


async def require_norms_within(faults: Faults, rows: ArithmeticTensor, test: RowTest) -> ArithmeticTensor:
    """Tests the norms of at most NORM_ROWS rows whose entries are small, and returns the exact squares. 5 rounds."""
    squares = await refmpc.dot(rows, rows)
    column = squares.reinterpret(0).reshape(len(rows), 1)
    await faults.require_small(column, test.squared)
    await faults.require_not_negative((-column) + test.squared, min(63, test.high_bit(len(rows))))
    return squares


async def require_one_hot(faults: Faults, labels: CutByRows) -> None:
    """Tests that every row of labels (n, S), ring integers, has one 1 and zeros else. 6 rounds in all."""
    await require_bits(faults, labels)
    sums = None
    for start in range(0, len(labels), NORM_ROWS):
        rows = labels[start : start + NORM_ROWS]
        machine = rows.party.machine
        rest = machine.memory((len(rows), 1))
        machine.call("sum_axes", rows.first, (1,), rest[:, 0])
        if rows.party.id == 0:
            machine.call("subtract", rest, np.uint64(1), rest)
        sums = faults.project(rest, sums)
    assert sums is not None
    await faults.require_zero_sums(sums)


async def require_bits(faults: Faults, labels: CutByRows) -> None:
    """Tests that all of labels (n, S) are 0 or 1. 3 rounds.

    y² = y modulo 2^64 only for 0 and 1, because y and y − 1 have no common factor."""
    sums = None
    for start in range(0, len(labels), NORM_ROWS):
        rows = labels[start : start + NORM_ROWS]
        machine = rows.party.machine
        own = machine.contiguous(rows.shares)
        squares = machine.memory(own.shape[1:])
        machine.call("product_pair", own, own, None, squares)
        machine.call("subtract", squares, own[0], squares)
        sums = faults.project(squares, sums)
    assert sums is not None
    await faults.require_zero_sums(sums)


async def require_labels(faults: Faults, plan: Plan, labels: CutByRows) -> None:
    """Of each task its own: a one-hot row, a 0 or 1, or a number from −1 to 1."""
    task = plan.training.task
    if task == "classification":
        await require_one_hot(faults, labels)
    elif task == "binary":
        await require_bits(faults, labels)
    else:
        test = row_test(1, 1.0)
        assert test is not None
        await require_rows_within(faults, labels, test)


class ShareDigests:
    """Whether the two servers that hold the same share of a client have got the same one: they compare hashes of its
    projections, which are the same for two different shares with 2^−40 (proofs §11.3)."""

    def __init__(self, clients: Sequence[str]):
        self._clients = tuple(clients)
        self._hashes = {client: (hashlib.sha256(), hashlib.sha256()) for client in clients}

    def add(self, client: str, projections: Words) -> None:
        """Projections of both of this server's shares of a client's columns (2, PROJECTIONS, …)."""
        for digest, share in zip(self._hashes[client], unseal(projections), strict=True):
            digest.update(np.ascontiguousarray(share).data)

    def differing(self, party: Party) -> list[str]:
        """The clients whose shares differ anywhere; all servers get the same answer. 2 rounds, 96 bytes a client and more."""
        first, second = (
            np.frombuffer(b"".join(self._hashes[client][side].digest() for client in self._clients), dtype=np.uint8)
            for side in (0, 1)
        )
        round_ = Round("share digests")
        round_.send_next(second)  # the next server's first share
        theirs = round_.expect_previous(first.shape, np.uint8)
        party.deliver(round_)
        wrong = (np.asarray(theirs) != first).reshape(len(self._clients), -1).any(axis=1).astype(np.uint8)
        verdicts = Round("share verdicts")
        verdicts.send_next(wrong)
        verdicts.send_previous(wrong)
        others = [verdicts.expect_next(wrong.shape, np.uint8), verdicts.expect_previous(wrong.shape, np.uint8)]
        party.deliver(verdicts)
        both = wrong | np.asarray(others[0]) | np.asarray(others[1])
        return [client for client, found in zip(self._clients, both, strict=True) if found]


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


@dataclass(frozen=True)
class _Columns:
    """Some of the columns."""

    rows: CutByRows
    columns: slice

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice) -> ArithmeticTensor:
        return self.rows[rows][:, self.columns]


def project_labels(faults: Faults, labels: CutByRows) -> Words:
    """Projections of the labels' shares themselves (2, PROJECTIONS, S). Local."""
    sums = None
    for start in range(0, len(labels), NORM_ROWS):
        rows = labels[start : start + NORM_ROWS]
        sums = faults.project(rows.party.machine.contiguous(rows.shares), sums)
    assert sums is not None
    return sums


async def verify_uploads(party: Party, plan: Plan, rows: CutByRows, labels: CutByRows) -> ArithmeticTensor:
    """Tests what all clients have shared: rows (n, d, and a column that does not count) and labels (n, S; rows of zeros may
    follow where n is padded). Returns the exact squared norms of the rows. Raises ``UploadRefused`` at all servers, with the
    names of the clients."""
    test = plan.row_test
    assert test is not None
    labelled = _First(labels, plan.schedule.num_samples)
    faults, digests = Faults(party, await public_coins(party)), ShareDigests(plan.client_names)
    names, ends = plan.client_names, np.cumsum(plan.client_widths).tolist()
    parts = [slice(end - width, end) for end, width in zip(ends, plan.client_widths, strict=True)]
    squares = await require_rows_within(faults, rows, test, parts, lambda part, sums: digests.add(names[part], sums))
    digests.add(plan.client_names[-1], project_labels(faults, labelled))
    await require_labels(faults, plan, labelled)
    if wrong := digests.differing(party):  # before anything is opened
        raise UploadRefused(f"{_named(wrong)} sent different shares of the same rows to two servers", wrong)
    if not await _opened(faults, upload_release()):
        return squares
    refused = []
    for name, columns, width, bound in zip(names, parts, plan.client_widths, plan.held_bounds, strict=True):
        faults = Faults(party, await public_coins(party))
        part = row_test(width, bound)
        assert part is not None  # narrower, and a smaller bound
        await require_rows_within(faults, _Columns(rows, columns), part)
        if name == plan.client_names[-1]:
            await require_labels(faults, plan, labelled)
        if await _opened(faults, upload_release(name)):
            refused.append(name)
    bounds = ", ".join(f"{bound:.5g}" for bound in plan.held_bounds)
    raise UploadRefused(
        f"{_named(refused) or 'no single client'} shared rows beyond the row bound ({bounds} for each client), or labels that "
        "are none: nothing was trained. Look at its file and its options; a client that does so on purpose would void "
        "the others' guarantee",
        refused,
    )


async def _opened(faults: Faults, release: str) -> bool:
    found = await refmpc.reveal(await faults.any(), release)
    assert found is not None
    return bool(found[0] != 0)


def _named(clients: Sequence[str]) -> str:
    return " and ".join(f"client {name!r}" for name in clients)
