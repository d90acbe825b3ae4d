"""``Words``: arrays that depend on secrets, sealed.

A sealed array can be cut, reshaped, read as another integer type, handed to a kernel, or put into a round. Nothing
else: arithmetic, comparison, ``bool``, ``int``, ``item``, fancy indexing, copying and printing raise TypeError. So a
branch on a secret, or a share in a log, fails in the first test that meets it; and everything that is ever computed
from secrets goes through ``refmpc.core.machine``, which is why a step can be recorded and done again.

``unseal`` is the one way out. It belongs where values leave the protocols: a release, a checkpoint, a test. (Python
cannot close ``np.asarray``: it drops the seal without asking. What is computed behind its back is a plain array, and no
kernel, round or tensor of a recorded step takes one that is not an input.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np

__all__ = ["Public", "Words", "public_array", "seal", "unseal"]

_VIEWS = (np.broadcast_to, np.shares_memory, np.may_share_memory, np.shape, np.ndim, np.size)


def _refuse(what: str) -> NoReturn:
    raise TypeError(
        f"{what} of a sealed array: it depends on secrets and is only cut, reshaped, handed to a kernel "
        "(machine.call) or put into a round; unseal() it where it may leave the protocol"
    )


class Words(np.ndarray):
    """An array whose content depends on secrets: views only."""

    def __getitem__(self, index: Any) -> Words:
        parts = index if isinstance(index, tuple) else (index,)
        for part in parts:
            if not (part is None or part is Ellipsis or isinstance(part, int | np.integer | slice)):
                _refuse(f"indexing with {type(part).__name__}")
        found: Any = super().__getitem__(index)
        if not isinstance(found, Words):  # a single word
            found = super().__getitem__((*parts, Ellipsis))
        return found

    def __iter__(self) -> Iterator[Words]:
        return (self[index] for index in range(len(self)))

    def view(self, dtype: Any) -> Words:  # type: ignore[override]
        """The same memory read as another integer type."""
        if np.dtype(dtype).kind != "u" and np.dtype(dtype).kind != "i":
            _refuse(f"view as {dtype}")
        return super().view(dtype)

    def reshape(self, *shape: Any) -> Words:  # type: ignore[override]
        """The same memory in another shape; refused if that would copy (``machine.contiguous`` copies)."""
        try:
            return super().reshape(*shape, copy=False)
        except ValueError as error:
            raise TypeError(
                f"{error}: this view of a sealed array has to be copied first (machine.contiguous)"
            ) from None

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        _refuse(f"{ufunc.__name__}")

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        if function not in _VIEWS:
            _refuse(f"{function.__name__}")
        found = function(*(unseal(part) for part in arguments), **options)
        return seal(found) if isinstance(found, np.ndarray) else found

    def __repr__(self) -> str:
        return f"Words(shape={self.shape}, dtype={self.dtype})"  # for tracebacks: never a value

    def __str__(self) -> str:
        _refuse("printing")

    def __format__(self, specification: str) -> str:
        _refuse("printing")


def _close(name: str) -> Any:
    def closed(self: Words, *arguments: Any, **options: Any) -> NoReturn:
        _refuse(name.strip("_"))

    closed.__name__ = name
    return closed


_OPEN = {  # everything else that can be called on an array is closed
    *(
        "__getitem__",
        "__iter__",
        "__len__",
        "__repr__",
        "__str__",
        "__format__",
        "__array_ufunc__",
        "__array_function__",
    ),
    *("__array_finalize__", "__array_priority__", "__array_interface__", "__array_struct__", "__buffer__"),
    *(
        "__class__",
        "__class_getitem__",
        "__delattr__",
        "__dir__",
        "__doc__",
        "__getattribute__",
        "__hash__",
        "__init__",
    ),
    *("__init_subclass__", "__new__", "__setattr__", "__sizeof__", "__subclasshook__", "__array_wrap__", "__array__"),
    *("view", "reshape", "transpose", "swapaxes", "squeeze"),
}
for _name in dir(np.ndarray):
    if _name not in _OPEN and callable(getattr(np.ndarray, _name)):
        setattr(Words, _name, _close(_name))
for _name in ("flat", "real", "imag", "data"):
    setattr(Words, _name, property(_close(_name)))


class Public(np.ndarray):
    """Public numbers that a kernel takes as an array: a table, weights, an index. Made by ``machine.public``."""


def public_array(values: Any) -> np.ndarray:
    """Public values as an array. A sealed array is refused: it would be taken for a constant."""
    if isinstance(values, Words):
        _refuse("use as public values")
    return np.asarray(values)


def seal(array: np.ndarray) -> Words:
    """The same memory, sealed."""
    return array if isinstance(array, Words) else array.view(Words)


def unseal(array: Any) -> Any:
    """The same memory as a plain array; anything else as it is."""
    return np.ndarray.view(array, np.ndarray) if isinstance(array, Words) else array
