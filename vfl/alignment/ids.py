"""Ids as bytes: one documented encoding, and nothing is changed silently."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from accel.errors import InvalidArgument
from accel.validate import require

__all__ = ["encode_ids"]


def encode_ids(ids: Iterable[Any]) -> list[bytes]:
    """The bytes that are compared: text as UTF-8, whole numbers as decimal digits, bytes as they are.

    So 42, "42" and b"42" are one id, while "042", "42 " and "４２" are others: nothing is stripped, folded or normalised,
    because two clients that clean up differently would lose matches without noticing. Refused: missing and empty ids,
    other types (a float is most often a column of integers with gaps), and an id that occurs twice in a list. Errors
    name rows, never ids.
    """
    encoded = [_encode(row, value) for row, value in enumerate(ids)]
    first: dict[bytes, int] = {}
    for row, value in enumerate(encoded):
        earlier = first.setdefault(value, row)
        if earlier != row:
            raise InvalidArgument(
                f"ids: rows {earlier} and {row} have the same id ({len(encoded) - len(set(encoded))} repeated in all): "
                "must be one row per id; aggregate or drop the repeated rows first, or give each row an id of its own and state "
                "rows_per_person"
            )
    return encoded


def _encode(row: int, value: Any) -> bytes:
    if isinstance(value, str):
        encoded = value.encode()
    elif isinstance(value, bytes):
        encoded = bytes(value)
    elif hasattr(value, "__index__") and not isinstance(value, bool):
        encoded = str(int(value)).encode()
    else:
        raise InvalidArgument(
            f"ids: row {row} has an id of type {type(value).__name__}: must be text, bytes or a whole number, "
            "the same way at every client; convert the column (floats lose digits and have gaps)"
        )
    require(len(encoded) > 0, f"length of the id in row {row}", 0, "at least one byte", "drop rows without an id")
    return encoded
