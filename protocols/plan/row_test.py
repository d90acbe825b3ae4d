"""Public numbers of the servers' test that every row is within its bound: proofs §11.2."""

from __future__ import annotations

import math
from dataclasses import dataclass

from protocols.plan.scales import EMBEDDING_BITS
from refmpc.primitives.input_checks import TAIL, projection_limit

__all__ = [
    "FAULT_CLAIM",
    "NORM_ROWS",
    "STEP_FAULT_CLAIM",
    "NormTest",
    "RowTest",
    "norm_test",
    "row_test",
    "step_release",
    "upload_release",
]

FAULT_CLAIM = (
    "one bit: whether a row exceeds the row bound or a label is none. Of clients that follow the protocol it is 0 "
    "whatever their data are (but for 2^-80), and tells nothing about anybody (proofs §11.4)"
)

STEP_FAULT_CLAIM = (
    "one bit a step: whether what this client shared in it exceeds its public bounds. Of a client that follows the protocol it "
    "is 0 whatever its data are (but for 2^-80), and tells nothing about anybody (proofs §11.6)"
)

NORM_ROWS = 1 << 14  # rows whose squared norms are projected together
_FEWEST = 64  # rows that must fit into one projection, or the test would cost more than the upload


@dataclass(frozen=True)
class RowTest:
    """Public numbers of the test that rows of ``width`` columns have norm at most √``squared`` in ring units."""

    width: int
    squared: int
    rows: int  # in one projection of entries

    def high_bit(self, rows: int) -> int:
        """Beyond the difference of ``squared`` and any norm that passed the projections of so many rows."""
        return (2 * projection_limit(rows, self.squared)).bit_length()


def row_test(width: int, row_bound: float) -> RowTest | None:
    """The test of ``width`` columns against ``row_bound``, the bound of rows as the servers hold them (rounding included);
    None if 64 bits do not tell a large row from one that wrapped."""
    longest = row_bound * 2.0**EMBEDDING_BITS
    squared = math.floor(longest**2 * (1 + 1e-12)) + 1
    largest = math.isqrt(squared) + 1
    # entries of a passed projection of m rows are at most 2·limit(m): their squares must add up to less than 2^63
    rows = (2**63 - 1) // (4 * width * 82 * largest**2)
    norms = projection_limit(NORM_ROWS, squared)
    return RowTest(width, squared, rows) if rows >= _FEWEST and norms < 2**61 else None


@dataclass(frozen=True)
class NormTest:
    """Public numbers of the test that ``rows`` rows have norm at most √``squared`` each, in ring units; ``limit`` is what
    projections over all their entries do not exceed. Rows so long that their squares might wrap are tested in ``pieces`` of
    ``size`` entries, and then as a whole."""

    rows: int
    width: int
    squared: int
    limit: int
    size: int

    @property
    def pieces(self) -> int:
        """Of one row."""
        return -(-self.width // self.size)


def norm_test(rows: int, width: int, bound: float, bits: int) -> NormTest | None:
    """The test of a step's (rows, width) numbers at ``bits``, each row within ``bound`` before it was rounded; None if 64
    bits do not tell a large row from one that wrapped."""
    longest = bound * 2.0**bits + math.sqrt(width) / 2
    squared = math.floor(longest**2 * (1 + 1e-12)) + 1
    limit = math.isqrt(math.ceil(TAIL**2) * rows * squared) + 1
    # entries that pass are at most 2·limit: their squares must add up to less than 2^63, and so must pieces that pass
    size = min(width, (2**63 - 1) // (4 * limit**2))
    if size == 0 or -(-width // size) * squared >= 2**63:
        return None
    return NormTest(rows, width, squared, limit, size)


def step_release(client: str) -> str:
    """The name of the bit that says whether something is wrong with what a client shared in a step."""
    return f"fault in a step of {client}"


def upload_release(client: str = "") -> str:
    """The name of the bit that says whether something is wrong with a client's upload, or (no name) with any."""
    return f"fault in the upload of {client}" if client else "fault in an upload"
