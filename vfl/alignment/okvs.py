"""An oblivious key-value store over GF(2): a table of random lines in which the lines that an id names add up to the
id's value.

Every id names three lines of m (chosen by its hash) and, by 48 bits, some of 48 dense ones (RR22, eprint 2022/320). Ids
are first cut into bins of about 2^16, so that a store fits into the cache, the work is for several cores, and lists may
be longer than the memory.

Sizes are public, functions of the lengths of the lists. A bin takes ``capacity`` ids, the mean plus 8.6 deviations: an
overflow has a chance below 2^-40 up to 2^32 ids (exact binomial). m follows RR22's formula, asked for 48 + log2(bins)
bits instead of 40, since its margin was measured to be used up by then: 2^-14.3 and 2^-16.1 where it promises 2^-14 and
2^-17. That the rate of failure goes on falling like that below 2^-16 is extrapolated, not proven. At least 4096 ids a
bin, because the formula is not for less.

If no store exists the alignment begins again with another salt, before anything that depends on ids has left.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from accel import kernels
from accel.errors import InvalidArgument
from accel.reference.oprf import CHECKS, DENSE
from vfl.alignment.ids import bytes_and_offsets
from vfl.alignment.steps import Advance, AlignmentError

__all__ = ["Bins", "Shape", "bins_for", "rows_of", "store_values"]

BIN = 1 << 16  # ids, on average
IN_MEMORY = 1 << 28  # bytes of records above which they are kept in a file
_PIECE = 1 << 18  # ids hashed at a time
_LEAST = 4096
_WORDS = 5  # of a record


def bins_for(longest: int) -> int:
    """How many bins all clients cut their lists into."""
    return max(1, -(-longest // BIN))


@dataclass(frozen=True)
class Shape:
    """Public sizes of one client's list: ``size`` ids in ``bins``. A store has ``sparse`` + 48 lines, and lines of the
    OPRF are ``lines``, 128 of them masks of its check."""

    size: int
    bins: int

    @property
    def capacity(self) -> int:
        mean = self.size / self.bins
        return max(_LEAST, self.size if self.bins == 1 else math.ceil(mean + 8.6 * math.sqrt(mean) + 20))

    @property
    def sparse(self) -> int:
        """RR22, §5.2, for three sparse lines."""
        size, weight, bits = math.log2(self.capacity), math.log2(3), 48 + math.log2(self.bins)
        slope = 2 ** (0.555 * size + 0.093 * weight**3 - 1.01 * weight**2 + 2.925 * weight - 0.133)
        return math.ceil(self.capacity * (bits + 9.2 + slope * 1.223) / slope)

    @property
    def stored(self) -> int:
        return self.sparse + DENSE

    @property
    def lines(self) -> int:
        return -(-(self.stored + CHECKS) // 128) * 128


class Bins:
    """One client's ids under one salt, as records in bins; in a nameless file of ``folder`` if they would take much
    memory."""

    def __init__(self, ids: pa.Array, salt: bytes, shape: Shape, folder: Path | None, advance: Advance):
        size = (shape.bins, shape.capacity, _WORDS)
        if 8 * math.prod(size) > IN_MEMORY and folder is not None:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it lives as long as the map
            self._records = np.memmap(self._file, np.uint64, "w+", shape=size).view(np.ndarray)
        else:
            self._records = np.empty(size, np.uint64)
        self.filled = np.zeros(shape.bins, np.int64)
        key = np.frombuffer(salt, np.uint64).copy()
        for first in range(0, len(ids), _PIECE):
            data, offsets = bytes_and_offsets(ids.slice(first, _PIECE))
            if kernels.hash_into_bins(data, offsets, first, key, self._records, self.filled) >= 0:
                raise AlignmentError("a bin has more ids than room (less than once in 2^40): begins again")
            advance(len(offsets) - 1)

    def __getitem__(self, number: int) -> np.ndarray:
        """The records of a bin."""
        records: np.ndarray = self._records[number, : self.filled[number]]
        return records

    def checked(self, number: int) -> np.ndarray:
        """The records of a bin; an id that is there twice is refused."""
        records = self[number]
        order = np.argsort(records[:, 0])
        same = np.flatnonzero(~np.diff(records[order, 0]).astype(bool))
        for place in same:
            one, other = order[place], order[place + 1]
            if (records[one, :2] == records[other, :2]).all():
                first, second = sorted(rows_of(records[[one, other]]).tolist())
                raise InvalidArgument(
                    f"ids: rows {first} and {second} have the same id: must be one row per id; aggregate or drop the "
                    f"repeated "
                    "rows first"
                )
        return records


def rows_of(records: np.ndarray) -> np.ndarray:
    """The row numbers of records."""
    return (records[:, 3] >> np.uint64(32)).astype(np.int64)


def store_values(records: np.ndarray, values: np.ndarray, shape: Shape, store: np.ndarray) -> None:
    """Make ⟨row of record i, store⟩ = values[i] (128 bits). ``store`` holds uniform lines, and those that stay free
    stay so.

    Over uniform values the store is uniform: (values, free lines) and stores correspond one to one."""
    count, m = len(records), shape.sparse
    columns = np.empty((count, 3), np.int32)
    degree, met = np.empty(m, np.int32), np.empty(m, np.int32)
    order, own = np.empty(count, np.int32), np.empty(count, np.int32)
    done = kernels.peel(records, m, columns, degree, met, order, own)
    if done < count:
        left = np.ones(count, bool)
        left[order[:done]] = False
        _solve(records, values, columns, np.flatnonzero(left).tolist(), m, store)
    kernels.fill_back(records, values, columns, order, own, done, m, store)


def _solve(
    records: np.ndarray, values: np.ndarray, columns: np.ndarray, left: Sequence[int], m: int, store: np.ndarray
) -> None:
    """Gaussian elimination over the few records that have no column to themselves."""
    lines = [*sorted({int(c) for i in left for c in columns[i]}), *range(m, m + DENSE)]
    place = {line: bit for bit, line in enumerate(lines)}
    solved: list[tuple[int, int, int]] = []  # lines, value, the line that it decides
    for i in left:
        chosen, value = int(records[i, 4]) & (1 << DENSE) - 1, int.from_bytes(values[i].tobytes(), "little")
        row = chosen << place[m]
        for c in columns[i]:
            row ^= 1 << place[int(c)]
        for other, total, pivot in solved:
            if row >> pivot & 1:
                row, value = row ^ other, value ^ total
        if not row:
            raise AlignmentError("a bin has no encoding (less than once in 2^40): begins again")
        pivot = row.bit_length() - 1
        reduced = [(a ^ row, b ^ value, bit) if a >> pivot & 1 else (a, b, bit) for a, b, bit in solved]
        solved = [*reduced, (row, value, pivot)]
    decided = {pivot for _, _, pivot in solved}
    for row, value, pivot in solved:
        for bit, line in enumerate(lines):
            if row >> bit & 1 and bit not in decided:
                value ^= int.from_bytes(store[line].tobytes(), "little")
        store[lines[pivot]] = np.frombuffer(value.to_bytes(16, "little"), np.uint64)
