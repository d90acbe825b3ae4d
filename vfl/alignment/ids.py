"""Ids as bytes: one documented encoding, and nothing is changed silently."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from accel.errors import InvalidArgument
from accel.validate import require
from vfl.tables.ids import Ids

__all__ = ["arrow_ids", "bytes_and_offsets", "encode_ids"]


def encode_ids(ids: Iterable[Any]) -> list[bytes]:
    """The bytes that are compared: text as UTF-8, whole numbers as decimal digits, bytes as they are.

    So 42, "42" and b"42" are one id, while "042", "42 " and "４２" are others: nothing is stripped, folded or
    normalised, because two clients that clean up differently would lose matches without noticing. Refused: missing and
    empty ids, other types (a float is most often a column of integers with gaps), and an id that occurs twice in a
    list. Errors name rows, never ids.
    """
    encoded = [_encode(row, value) for row, value in enumerate(ids)]
    first: dict[bytes, int] = {}
    for row, value in enumerate(encoded):
        earlier = first.setdefault(value, row)
        if earlier != row:
            raise InvalidArgument(
                f"ids: rows {earlier} and {row} have the same id ({len(encoded) - len(set(encoded))} repeated in all): "
                "must be one row per id; aggregate or drop the repeated rows first, or give each row an id of its "
                "own and state "
                "rows_per_person"
            )
    return encoded


def arrow_ids(ids: Iterable[Any]) -> pa.Array:
    """The same bytes as an Arrow column; of ids that are one already (``vfl.tables``), the column itself."""
    if isinstance(ids, Ids):
        require(ids.array.null_count == 0, "ids", f"{ids.array.null_count} missing", "an id in every row")
        return ids.array
    return pa.array(encode_ids(ids), pa.large_binary())


def bytes_and_offsets(ids: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """What an Arrow column of text or bytes holds: id i is bytes offsets[i] to offsets[i + 1]."""
    if not len(ids):
        return np.zeros(0, np.uint8), np.zeros(1, np.int64)
    _, offsets, data = ids.buffers()
    large = pa.types.is_large_string(ids.type) or pa.types.is_large_binary(ids.type)
    places = np.frombuffer(offsets, np.int64 if large else np.int32)[ids.offset : ids.offset + len(ids) + 1]
    low, high = int(places[0]), int(places[-1])
    return np.frombuffer(data, np.uint8)[low:high], places.astype(np.int64) - low


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
