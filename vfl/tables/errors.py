"""The error of a client's file. Its text names file, column, row and kind, never what stands in a cell."""

from __future__ import annotations

from accel.errors import InvalidArgument

__all__ = ["ColumnsError"]


class ColumnsError(InvalidArgument):
    """A file that cannot be used as it is; the message names file, column and row."""
