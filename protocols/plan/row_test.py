"""Public numbers of the servers' test that every row of a client is within its bound: proofs §11.2."""

from __future__ import annotations

import math
from dataclasses import dataclass

from protocols.plan.scales import EMBEDDING_BITS, ROW_TOLERANCE_BITS
from refmpc.primitives.input_checks import REACH, TAIL, projection_limit

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
    "one bit: whether a row of this client exceeds its own row bound, a label is none, or two servers were sent "
    "different shares. "
    "Of a client that follows the protocol it is 0 whatever anybody's data are (but for 2^-80), and tells nothing "
    "about anybody "
    "(proofs §11.4)"
)

STEP_FAULT_CLAIM = (
    "one bit a step: whether what this client shared in it exceeds its public bounds. Of a client that follows the "
    "protocol it "
    "is 0 whatever its data are (but for 2^-80), and tells nothing about anybody (proofs §11.6)"
)

NORM_ROWS = 1 << 13  # rows whose squared norms are projected together
_MOST = 1 << 16  # rows whose entries are projected together
_FEWEST = 64  # rows that must fit into one projection, or the test would cost more than the upload
_PASSED = math.ceil(REACH**2 * (math.ceil(TAIL**2) + 1))  # (REACH·limit)² is at most this · rows · largest²


@dataclass(frozen=True)
class RowTest:
    """Public numbers of the test that rows of ``width`` columns have a squared norm of at most ``squared`` in ring
    units; what is below ``squared`` + 2^``low_bit`` may pass."""

    width: int
    squared: int
    rows: int  # in one projection of entries
    low_bit: int

    @property
    def enforced(self) -> int:
        """No row that passes has a larger squared norm."""
        return self.squared + (1 << self.low_bit) - 1

    def entry_limit(self, rows: int) -> int:
        """What projections of the entries of so many honest rows do not exceed."""
        return projection_limit(min(rows, self.rows), math.isqrt(self.squared) + 1)

    @property
    def middle(self) -> int:
        """Middle of the squares of honest rows."""
        return self.squared // 2

    def square_limit(self, rows: int) -> int:
        """What projections of the squares of so many honest rows, less ``middle``, do not exceed."""
        return projection_limit(min(rows, NORM_ROWS), self.squared - self.middle)

    def high_bit(self, rows: int) -> int:
        """Beyond the difference of ``squared`` and any square that passed the projections of so many rows."""
        return (math.ceil(REACH * self.square_limit(rows)) + self.squared).bit_length()


def row_test(width: int, row_bound: float, *, exact: bool = False) -> RowTest | None:
    """The test of ``width`` columns against ``row_bound``, the bound of rows as the servers hold them (rounding
    included); None if 64 bits do not tell a large row from one that wrapped. Unless it is ``exact``, it may let squared
    norms pass that are 2^−ROW_TOLERANCE_BITS larger, which the plan counts."""
    longest = row_bound * 2.0**EMBEDDING_BITS
    squared = math.floor(longest**2 * (1 + 1e-12)) + 1
    largest = math.isqrt(squared) + 1
    # entries that pass are below REACH·limit: their squares must add up to less than 2^64 − 2^60, and one that passes
    # is below 2^60
    rows = min(_MOST, 15 * 2**60 // (_PASSED * width * largest**2))
    tolerated = 0 if exact else math.floor(longest**2 * (1 + 2.0**-ROW_TOLERANCE_BITS)) - squared
    low_bit = max(1, tolerated + 1).bit_length() - 1
    test = RowTest(width, squared, rows, low_bit)
    return test if rows >= _FEWEST and test.high_bit(NORM_ROWS) <= 60 else None


@dataclass(frozen=True)
class NormTest:
    """Public numbers of the test that ``rows`` rows have norm at most √``squared`` each, in ring units; ``limit`` is
    what projections over all their entries do not exceed. Rows so long that their squares might wrap are tested in
    ``pieces`` of ``size`` entries, each coarsely (2^``low_bit``), and then as a whole."""

    rows: int
    width: int
    squared: int
    limit: int
    size: int

    @property
    def pieces(self) -> int:
        """Pieces of one row."""
        return -(-self.width // self.size)

    @property
    def low_bit(self) -> int:
        """Low bit of the test of a piece, which may be up to twice as large as a whole row."""
        return self.squared.bit_length() - 1


def norm_test(rows: int, width: int, bound: float, bits: int) -> NormTest | None:
    """The test of a step's (rows, width) numbers at ``bits``, each row within ``bound`` before it was rounded; None if
    64 bits do not tell a large row from one that wrapped."""
    longest = bound * 2.0**bits + math.sqrt(width) / 2
    squared = math.floor(longest**2 * (1 + 1e-12)) + 1
    limit = math.isqrt(math.ceil(TAIL**2) * rows * squared) + 1
    # entries that pass are below REACH·limit: their squares must add up to less than 2^63, and so must pieces that pass
    size = min(width, 16 * (2**63 - 1) // (math.ceil(16 * REACH**2) * limit**2))
    if limit >= 2**61 or size == 0 or -(-width // size) * 2 * squared >= 2**63:
        return None
    return NormTest(rows, width, squared, limit, size)


def step_release(client: str) -> str:
    """The name of the bit that says whether something is wrong with what a client shared in a step."""
    return f"fault in a step of {client}"


def upload_release(client: str) -> str:
    """The name of the bit that says whether something is wrong with a client's upload."""
    return f"fault in the upload of {client}"
