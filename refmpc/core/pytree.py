"""The arrays inside the arguments and results of a recorded step: found, described, sealed, replaced.

Arguments and results are made of tensors, two-holder bits and numbers, additive numbers, arrays, dataclasses, lists,
tuples, dictionaries, and public values, which must be hashable.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from refmpc.core.digest import digest, mix, name_digest
from refmpc.core.tensor import ArithmeticTensor, BooleanTensor
from refmpc.core.words import Public, Words, seal, unseal
from refmpc.primitives.dealing import Additive, Lifted, TwoHolder
from refmpc.primitives.two_holder import TwoHolderBits

__all__ = ["Inputs", "Leaf", "rebuilt", "regions"]

_HOLDERS = frozenset(
    {ArithmeticTensor, BooleanTensor, TwoHolderBits, Additive, TwoHolder, Lifted, np.ndarray, Words, Public}
)
_INPUT = name_digest("input of a recorded step")


class Leaf:
    """Something that holds an array: a tensor, bits, or an array itself."""

    __slots__ = ("history", "value", "words")

    def __init__(self, value: Any):
        self.value = value
        self.words: Words | np.ndarray
        if isinstance(value, np.ndarray):
            self.words, self.history = value, 0
            return
        if isinstance(value, ArithmeticTensor | BooleanTensor):
            self.words = value.shares
        else:
            self.words = value.held if isinstance(value, TwoHolderBits) else value.words
        self.history = value.history

    def describe(self) -> tuple[Any, ...]:
        """What is public about it and must be the same in a repetition."""
        value, words = self.value, self.words
        if isinstance(value, np.ndarray):
            return (np.ndarray, words.shape, words.strides, words.dtype)
        if isinstance(value, ArithmeticTensor):
            kind: tuple[Any, ...] = (ArithmeticTensor, value.fraction_bits)
        elif isinstance(value, BooleanTensor):
            kind = (BooleanTensor, value.width)
        elif isinstance(value, TwoHolderBits):
            stretches = tuple((s.dealer, s.slice.start, s.slice.stop) for s in value.segments)
            kind = (TwoHolderBits, value.shape, stretches)
        else:
            stretches = tuple((s.dealer, s.slice.start, s.slice.stop) for s in value.segments)
            adds = isinstance(value, Additive) and value.dealer_adds
            kind = (type(value), value.fraction_bits, value.bits, adds, getattr(value, "offset", 0), stretches)
        return (*kind, words.shape, words.strides, words.dtype)

    def public_digest(self) -> int:
        """A digest of all that is public about it: the numbers themselves of a public array, the shape of another."""
        if not isinstance(self.value, np.ndarray):
            return self.value.public_digest()
        return digest(np.asarray(self.value)) if isinstance(self.value, Public) else mix(*self.value.shape)

    def with_words(self, words: Words, history: int) -> Any:
        """The same kind of thing with other words."""
        value = self.value
        if isinstance(value, ArithmeticTensor):
            return ArithmeticTensor(value.party, words, value.fraction_bits, history)
        if isinstance(value, BooleanTensor):
            return BooleanTensor(value.party, words, value.width, history)
        if isinstance(value, TwoHolderBits):
            return TwoHolderBits(value.party, words, value.segments, value.shape, history)
        if isinstance(value, Additive | TwoHolder):
            return value.with_words(words, history)
        return words


def rebuilt(value: Any, replace: Callable[[Leaf], Any]) -> Any:
    """A structure with every array in it replaced."""
    kind = type(value)
    if kind in _HOLDERS or isinstance(value, np.ndarray):
        return replace(Leaf(value))
    if kind is list or kind is tuple:
        return kind(rebuilt(item, replace) for item in value)
    if kind is dict:
        return {name: rebuilt(item, replace) for name, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if any(_holds_arrays(item) for item in fields.values()):
            return dataclasses.replace(value, **{name: rebuilt(item, replace) for name, item in fields.items()})
    return value


def _holds_arrays(value: Any) -> bool:
    found: list[Leaf] = []
    _describe(value, found)
    return bool(found)


def _describe(value: Any, leaves: list[Leaf]) -> Any:
    """A key for what is public about a structure; collects what holds arrays."""
    kind: Any = type(value)
    if kind in _HOLDERS or isinstance(value, np.ndarray):
        leaf = Leaf(value)
        leaves.append(leaf)
        return leaf.describe()
    if kind is int or kind is float or value is None:
        return (kind, value)
    if kind is list or kind is tuple:
        return (kind, *[_describe(item, leaves) for item in value])
    if kind is dict:
        return (kind, *((name, _describe(item, leaves)) for name, item in value.items()))
    if kind is slice:
        return (kind, value.start, value.stop, value.step)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (kind, *[_describe(getattr(value, name), leaves) for name in _field_names(kind)])
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"a recorded step was given {kind.__name__} as a public argument: give it numbers, texts, tensors and "
            f"arrays, "
            "or dataclasses, lists and dictionaries of these; bind other things beforehand (functools.partial)"
        ) from None
    return (kind, value)


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def regions(array: np.ndarray) -> list[tuple[int, int]]:
    """Where an array lies: its two shares for themselves, as other memory may lie between them."""
    if array.flags.forc:
        start = array.__array_interface__["data"][0]
        return [(start, start + array.nbytes)] if array.size else []
    pieces: Iterable[np.ndarray] = [array] if array.ndim < 2 else array
    return [byte_bounds(piece) for piece in pieces if piece.size]


class Inputs:
    """The arguments of one call of a recorded step, and where their arrays begin. This runs in every step: an address
    is asked for once."""

    def __init__(self, arguments: tuple[Any, ...]):
        leaves: list[Leaf] = []
        shape = _describe(arguments, leaves)
        self.arrays: list[np.ndarray] = [unseal(leaf.words) for leaf in leaves]
        self.addresses: list[int] = [array.__array_interface__["data"][0] for array in self.arrays]
        known: dict[tuple[int, tuple[int, ...]], int] = {}
        first, spans = [], []
        for i, (array, address) in enumerate(zip(self.arrays, self.addresses, strict=True)):
            first.append(known.setdefault((address, array.shape), i))
            if first[i] == i:
                spans += [(address, address + array.nbytes)] if array.flags.forc else regions(array)
        self.key = (shape, tuple(first))  # which arguments are the same array is public, and part of a program
        self.digest = mix(*[leaf.public_digest() for leaf in leaves])
        spans.sort()
        self.overlap = any(left[1] > right[0] for left, right in itertools.pairwise(spans))

    def sealed(self, arguments: tuple[Any, ...]) -> Any:
        """The arguments with every array sealed, and histories that say only which input it is."""
        count = 0

        def replace(leaf: Leaf) -> Any:
            nonlocal count
            count += 1
            return leaf.with_words(seal(unseal(leaf.words).view(np.ndarray)), mix(_INPUT, count))

        return rebuilt(arguments, replace)
