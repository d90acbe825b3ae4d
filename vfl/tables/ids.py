"""How ids are written, so that the same person has the same id at every client, or somebody is told that it does not.

========== =====================================================================================================
rule       meaning
========== =====================================================================================================
text       as written. Columns of whole numbers are their digits. Refused: space around an id, and numbers in
           another form than the plain one (007, 7.0, +7), which would silently match nothing elsewhere
trimmed    as text, after space around the id is taken away
integer    whole numbers: 007, 7 and 7.0 are all 7; anything else is refused
verbatim   text, unchecked and unchanged: 007 and 7 are two people
========== =====================================================================================================

What the first three accept is comparable with each other; ``verbatim`` must be chosen by all clients or by none
(``IdRule.form``, which clients compare before ids are matched).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from accel.validate import require, require_choice
from vfl.tables.cells import Misread, is_missing, plain, texts

__all__ = ["ID_RULES", "IdRule", "Ids", "describe_ids"]

ID_RULES = ("text", "trimmed", "integer", "verbatim")
_OTHER_FORM = r"^[+-]?0\d+$|^[+-]?\d+\.0*$|^\+\d+$|^-0$"  # 007, 7.0, 7., +7, -0
_WHOLE = r"^[+-]?\d+(\.0*)?$"


@dataclass(frozen=True)
class IdRule:
    """The column that names the person, how its ids are compared, and whether rows without an id are refused or
    dropped."""

    column: str = "id"
    rule: str = "text"
    missing: str = "refuse"

    def __post_init__(self) -> None:
        require(isinstance(self.column, str) and self.column != "", "[id] column", self.column, "a column's name")
        require_choice("[id] rule", self.rule, ID_RULES)
        require_choice("[id] missing", self.missing, ("refuse", "drop"))

    @property
    def form(self) -> str:
        """What clients compare: ids of another form would not match theirs."""
        return "verbatim" if self.rule == "verbatim" else "canonical"

    def read(self, column: pa.ChunkedArray) -> tuple[pa.Array, np.ndarray]:
        """Ids in their common form (null where there is none), and which are missing. Raises ``Misread``."""
        array = plain(column)
        missing = is_missing(array)
        if pa.types.is_boolean(array.type):
            raise Misread(0, "holds true and false, not ids")
        if self.rule == "verbatim" and pa.types.is_string(array.type):
            return array, missing
        ids = texts(array)  # without space around them
        if self.rule in ("text", "verbatim"):
            spaced = _where(pc.not_equal(ids, array)) if pa.types.is_string(array.type) else np.zeros(len(ids), bool)
            self._refuse(spaced & ~missing, "an id with space around it", "rule = 'trimmed' takes it away")
        if self.rule == "integer":
            whole = _where(pc.match_substring_regex(ids, _WHOLE))
            self._refuse(~whole & ~missing, "an id that is no whole number", "rule = 'text' compares ids as they are")
            return _digits(ids), missing
        if self.rule in ("text", "trimmed"):
            other = _where(pc.match_substring_regex(ids, _OTHER_FORM))
            way = "rule = 'integer' (007 is 7) or rule = 'verbatim' (007 is not 7), the same at every client"
            self._refuse(other & ~missing, "a number with leading zeros, a sign or a decimal point", way)
        return ids, missing

    def _refuse(self, wrong: np.ndarray, what: str, way_out: str) -> None:
        if wrong.any():
            row, count = int(np.flatnonzero(wrong)[0]) + 1, int(wrong.sum())
            raise Misread(row, f"is {what}, as are {count - 1} others; rule = {self.rule!r} refuses these: {way_out}")


def _digits(ids: pa.Array) -> pa.Array:
    """007, +7 and 7.0 as 7, -0 as 0."""
    plain_form = pc.replace_substring_regex(ids, r"^\+?(-?)0*(\d+?)(\.0*)?$", r"\1\2")
    return pc.replace_substring_regex(plain_form, r"^-0$", "0")


def _where(array: pa.Array) -> np.ndarray:
    return np.asarray(pc.fill_null(array, False).to_numpy(zero_copy_only=False), bool)


class Ids(Sequence[str]):
    """A column of ids in their common form, as Arrow has it: no Python text an id until somebody asks for one."""

    def __init__(self, ids: pa.Array | Iterable[str]):
        self.array = ids if isinstance(ids, pa.Array) else pa.array(list(ids), pa.string())

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, place: int) -> str: ...

    @overload
    def __getitem__(self, place: slice) -> Ids: ...

    def __getitem__(self, place: int | slice) -> str | Ids:
        if isinstance(place, slice):
            return self.take(np.arange(len(self))[place])
        found: str = self.array[operator.index(place)].as_py()
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.array.to_pylist())

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Ids({len(self)})"

    def take(self, rows: np.ndarray) -> Ids:
        """Those of these rows, in this order."""
        return Ids(self.array.take(pa.array(rows)))


def describe_ids(ids: Sequence[str]) -> str:
    """What ids look like without showing one: for messages about ids that do not match."""
    if not ids:
        return "no ids"
    lengths = sorted({len(name) for name in ids})
    long = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    digits = sum(name.lstrip("-").isdecimal() for name in ids)
    what = "whole numbers" if digits == len(ids) else "text" if digits == 0 else "text and whole numbers"
    return f"{len(ids)} ids ({what}, {long} characters)"
