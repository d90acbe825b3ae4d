"""Secret tensors. Party i holds shares (x_i, x_i+1) of x = x_0 + x_1 + x_2 (arithmetic) or x_0 ⊕ x_1 ⊕ x_2 (Boolean).

Everything in this file is local except the operators ``* @ < > <= >= &``, which run the protocol of the same name at
once. Inside an async protocol call the protocol itself and ``await`` it, so that independent ones can share rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from accel.errors import InvalidArgument
from accel.validate import require, require_integer
from refmpc.core.digest import digest, mix
from refmpc.core.fixed import DEFAULT_FRACTION_BITS, encode, encode_number

if TYPE_CHECKING:
    from refmpc.core.party import Party
    from refmpc.primitives.two_holder import TwoHolderBits

__all__ = ["ArithmeticTensor", "BooleanTensor", "SecretTensor", "concatenate", "stack"]

Kind = TypeVar("Kind", bound="SecretTensor")

# what a history says of local operations
_INDEX, _AXES, _JOIN, _SCALE, _ADD, _SUBTRACT, _NEGATE, _TIMES, _SUM, _XOR, _AND, _BIT = range(12)


class SecretTensor:
    """What both kinds share: two arrays of words of one shape, and the moves that need no arithmetic."""

    __array_ufunc__ = None  # numpy arrays on the left defer to our operators

    __slots__ = ("history", "party", "shares")

    def __init__(self, party: Party, shares: np.ndarray, history: int | None):
        self.party = party
        self.shares = shares
        if history is None:
            history = 0 if party is None else party.arrival()
        self.history = history  # ``refmpc.core.digest``: what is public about how this secret came about

    def _like(self: Kind, shares: np.ndarray, history: int) -> Kind:
        raise TypeError(f"{type(self).__name__} has no way to carry its scale")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the secret."""
        return self.shares.shape[1:]

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.shares.size // 2

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.shares.ndim - 1

    @property
    def first(self) -> np.ndarray:
        """This party's share x_id."""
        return self.shares[0]

    @property
    def second(self) -> np.ndarray:
        """This party's share x_id+1."""
        return self.shares[1]

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r} is secret: it has no truth value; reveal it, or select with where()")

    def __len__(self) -> int:
        require(self.ndim > 0, "len()", self, "a tensor with at least one axis")
        return self.shape[0]

    def __iter__(self: Kind) -> Iterator[Kind]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self: Kind, index: Any) -> Kind:
        """A view, as in numpy (a copy if arrays or lists are among the indices); the index is public."""
        index = index if isinstance(index, tuple) else (index,)
        if all(part is None or part is Ellipsis or isinstance(part, int | np.integer | slice) for part in index):
            shares = self.shares[(slice(None), *index)]
        else:
            shares = np.stack([share[index] for share in self.shares])  # numpy may move the indexed axes
        return self._like(shares, mix(_INDEX, self.history, *map(digest, index)))

    def reshape(self: Kind, *shape: int | tuple[int, ...]) -> Kind:
        """The same elements in another shape."""
        target = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        return self._like(self.shares.reshape(2, *target), self.history)

    def transpose(self: Kind, *axes: int) -> Kind:
        """Axes permuted (reversed without arguments); a view."""
        order = axes or tuple(reversed(range(self.ndim)))
        places = tuple(_axis(axis, self.ndim) for axis in order)
        return self._like(self.shares.transpose(0, *places), mix(_AXES, self.history, *places))

    @property
    def T(self: Kind) -> Kind:
        """The transpose; a view."""
        return self.transpose()

    def broadcast_to(self: Kind, shape: tuple[int, ...]) -> Kind:
        """A view of a larger shape."""
        if shape == self.shape:
            return self
        missing = len(shape) - self.ndim
        aligned = self.shares.reshape(2, *(1,) * missing, *self.shape)
        return self._like(np.broadcast_to(aligned, (2, *shape)), self.history)

    def copy(self: Kind) -> Kind:
        """The same secret in fresh memory."""
        return self._like(self.shares.copy(), self.history)

    def _public_shares(self, words: np.ndarray) -> np.ndarray:
        """A public value as shares (words, 0, 0)."""
        shares = np.zeros((2, *words.shape), dtype=np.uint64)
        if self.party.id == 0:
            shares[0] = words
        elif self.party.id == 2:
            shares[1] = words
        return shares


class ArithmeticTensor(SecretTensor):
    """Secret integers or fixed-point numbers modulo 2^64, with their scale.

    ``fraction_bits`` 0 means integers. Sums align scales exactly (by a shift to the left); products add them up:
    ``x * y`` and ``x @ y`` truncate back to the larger of the two scales, ``refmpc.multiply`` does not truncate.
    """

    __slots__ = ("fraction_bits",)

    def __init__(
        self,
        party: Party,
        shares: np.ndarray,
        fraction_bits: int = DEFAULT_FRACTION_BITS,
        history: int | None = None,
    ):
        super().__init__(party, shares, history)
        self.fraction_bits = fraction_bits

    def __repr__(self) -> str:
        return f"ArithmeticTensor(shape={self.shape}, fraction_bits={self.fraction_bits}, party={self.party.id})"

    def _like(self, shares: np.ndarray, history: int) -> ArithmeticTensor:
        return ArithmeticTensor(self.party, shares, self.fraction_bits, history)

    def public_digest(self) -> int:
        """Of history, scale and shape."""
        return mix(self.history, self.fraction_bits, self.shape)

    # local arithmetic ----------------------------------------------------------------------------

    def rescale(self, fraction_bits: int) -> ArithmeticTensor:
        """The same value at a finer scale: exact and local. (Coarser: ``refmpc.truncate``.)"""
        require_integer(
            "fraction_bits", fraction_bits, self.fraction_bits, 62, way_out="truncate to reach a coarser scale"
        )
        if fraction_bits == self.fraction_bits:
            return self
        shift = np.uint64(fraction_bits - self.fraction_bits)
        history = mix(_SCALE, self.history, fraction_bits, int(shift))
        return ArithmeticTensor(self.party, self.shares << shift, fraction_bits, history)

    def reinterpret(self, fraction_bits: int) -> ArithmeticTensor:
        """The same ring words read at another scale: multiplies the value by a power of two, free of charge."""
        require_integer("fraction_bits", fraction_bits, 0, 62)
        history = mix(_SCALE, self.history, fraction_bits)
        return ArithmeticTensor(self.party, self.shares, fraction_bits, history)

    def _aligned(self, other: Any) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Shares that broadcast, their scale, and the history of the other operand."""
        if isinstance(other, ArithmeticTensor):
            if self.fraction_bits == other.fraction_bits and self.shares.ndim == other.shares.ndim:
                return self.shares, other.shares, self.fraction_bits, other.history
            bits = max(self.fraction_bits, other.fraction_bits)
            mine, theirs = self.rescale(bits), other.rescale(bits)
            if mine.shares.ndim == theirs.shares.ndim:
                return mine.shares, theirs.shares, bits, other.history
        else:
            bits = self.fraction_bits
            if bits == 0 and np.asarray(other).dtype.kind == "f":
                whole = bool((np.asarray(other) == np.rint(other)).all())
                require(
                    whole, "public operand", other, "whole numbers with an integer tensor", "rescale the tensor first"
                )
            words = encode(other, bits, name="public operand")
            mine, theirs = self, ArithmeticTensor(self.party, self._public_shares(words), bits, digest(words))
        ndim = max(mine.ndim, theirs.ndim)
        left, right = (t.shares.reshape(2, *(1,) * (ndim - t.ndim), *t.shape) for t in (mine, theirs))
        return left, right, bits, theirs.history

    def _is_number(self, other: Any) -> bool:
        """A plain Python number that this scale can hold; everything else takes the general way, with its checks."""
        kind = type(other)
        return kind is int or (kind is float and self.fraction_bits > 0)

    def _plus_number(self, shares: np.ndarray, number: float, sign: int) -> ArithmeticTensor:
        """Fresh ``shares`` plus one public number, which the share x_0 takes."""
        word = encode_number(number, self.fraction_bits, "public operand")
        if self.party.id != 1:
            shares[0 if self.party.id == 0 else 1] += word
        return self._like(shares, mix(sign, self.history, digest(word)))

    def __add__(self, other: Any) -> ArithmeticTensor:
        if self._is_number(other):
            return self._plus_number(self.shares.copy(), other, _ADD)
        left, right, bits, history = self._aligned(other)
        return ArithmeticTensor(self.party, left + right, bits, mix(_ADD, self.history, history))

    __radd__ = __add__

    def __sub__(self, other: Any) -> ArithmeticTensor:
        if self._is_number(other):
            return self._plus_number(self.shares.copy(), -other, _ADD)
        left, right, bits, history = self._aligned(other)
        return ArithmeticTensor(self.party, left - right, bits, mix(_SUBTRACT, self.history, history))

    def __rsub__(self, other: Any) -> ArithmeticTensor:
        if self._is_number(other):
            return self._plus_number(np.uint64(0) - self.shares, other, _SUBTRACT)
        left, right, bits, history = self._aligned(other)
        return ArithmeticTensor(self.party, right - left, bits, mix(_SUBTRACT, history, self.history))

    def __neg__(self) -> ArithmeticTensor:
        return self._like(np.uint64(0) - self.shares, mix(_NEGATE, self.history))

    def scale_by_integers(self, factor: Any) -> ArithmeticTensor:
        """Times public integers: local, exact, same scale."""
        integral = np.asarray(factor).dtype.kind in "biu"
        require(integral, "factor", factor, "integers", "multiply by real numbers with *")
        words = encode(factor, 0, name="factor")
        ndim = max(self.ndim, words.ndim)
        shares = self.shares.reshape(2, *(1,) * (ndim - self.ndim), *self.shape)
        return self._like(shares * words, mix(_TIMES, self.history, digest(words)))

    def sum(self, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> ArithmeticTensor:
        """The sum along axes: local."""
        if axis is None:
            axis = tuple(range(self.ndim))
        axes = (axis,) if isinstance(axis, int) else axis
        shifted = tuple(_axis(a, self.ndim) for a in axes)
        shares = np.asarray(self.shares.sum(axis=shifted, dtype=np.uint64, keepdims=keepdims))
        return self._like(shares, mix(_SUM, self.history, *shifted))

    # operators that run a protocol ---------------------------------------------------------------

    def __mul__(self, other: Any) -> ArithmeticTensor:
        from refmpc.primitives import arithmetic

        if isinstance(other, ArithmeticTensor):
            bits = min(self.fraction_bits, other.fraction_bits)
            if bits == 0:
                return self.party.complete(arithmetic.multiply(self, other))
            return self.party.complete(arithmetic.multiply_truncate(self, other, bits))
        return self._times_public(other, lambda share, words: share * words)

    __rmul__ = __mul__

    def __matmul__(self, other: Any) -> ArithmeticTensor:
        from refmpc.primitives import arithmetic

        if not isinstance(other, ArithmeticTensor):
            return self._times_public(other, lambda share, words: share @ words)
        bits = min(self.fraction_bits, other.fraction_bits)
        if bits == 0:
            return self.party.complete(arithmetic.matmul(self, other))
        return self.party.complete(arithmetic.matmul_truncate(self, other, bits))

    def __rmatmul__(self, other: Any) -> ArithmeticTensor:
        return self._times_public(other, lambda share, words: words @ share)

    def _times_public(self, other: Any, product: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> ArithmeticTensor:
        """A product with public values: local for integers; real ones are taken at this scale and truncated back."""
        from refmpc.primitives import truncation

        public = np.asarray(other)
        bits = 0 if public.dtype.kind in "biu" else self.fraction_bits or DEFAULT_FRACTION_BITS
        factor = encode(public, bits, "public operand")
        shares = np.stack([product(share, factor) for share in self.shares])
        scaled = self._like(shares, mix(_TIMES, self.history, digest(factor)))
        if bits == 0:
            return scaled
        if self.party.insecure_check_ranges:
            from refmpc.core.debug import check_product

            operation = self.party.operation("truncate", self)
            self.party.complete(check_product(operation, self, factor, product, 2**62))
        return self.party.complete(truncation.truncate(scaled.reinterpret(self.fraction_bits + bits), bits))

    def __lt__(self, other: Any) -> TwoHolderBits:
        from refmpc.primitives.comparison import is_negative

        return self.party.complete(is_negative(self - other))

    def __gt__(self, other: Any) -> TwoHolderBits:
        from refmpc.primitives.comparison import is_negative

        return self.party.complete(is_negative(-(self - other)))

    def __ge__(self, other: Any) -> TwoHolderBits:
        return ~(self < other)

    def __le__(self, other: Any) -> TwoHolderBits:
        return ~(self > other)


class BooleanTensor(SecretTensor):
    """Secret words of ``width`` bits, shared by XOR. ``^ ~`` and taking bits are local, ``&`` and ``|`` are not."""

    __slots__ = ("width",)

    def __init__(self, party: Party, shares: np.ndarray, width: int = 64, history: int | None = None):
        super().__init__(party, shares, history)
        self.width = require_integer("width", width, 1, 64)

    def __repr__(self) -> str:
        return f"BooleanTensor(shape={self.shape}, width={self.width}, party={self.party.id})"

    def _like(self, shares: np.ndarray, history: int) -> BooleanTensor:
        return BooleanTensor(self.party, shares, self.width, history)

    def public_digest(self) -> int:
        """Of history, width and shape."""
        return mix(self.history, self.width, self.shape)

    @property
    def _mask(self) -> np.uint64:
        return np.uint64((1 << self.width) - 1)

    def _public_words(self, other: Any) -> np.ndarray:
        array = np.asarray(other)
        require(array.dtype.kind in "biu", "public operand", array.dtype, "integers or booleans")
        return np.asarray(array.astype(np.uint64) & self._mask)

    def _aligned(self, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """These shares and others with as many axes, so that they broadcast behind the share axis."""
        ndim = max(self.shares.ndim, other.ndim)
        mine, theirs = (
            shares.reshape(shares.shape[0], *(1,) * (ndim - shares.ndim), *shares.shape[1:])
            for shares in (self.shares, other)
        )
        return mine, theirs

    def __xor__(self, other: Any) -> BooleanTensor:
        if isinstance(other, BooleanTensor):
            require(other.width == self.width, "width of the other operand", other.width, f"{self.width} bits")
            left, right = self._aligned(other.shares)
            history = other.history
        else:
            words = self._public_words(other)
            left, right = self._aligned(self._public_shares(words))
            history = digest(words)
        return self._like(left ^ right, mix(_XOR, self.history, history))

    __rxor__ = __xor__

    def __invert__(self) -> BooleanTensor:
        return self ^ self._mask

    def bit(self, index: int) -> BooleanTensor:
        """One bit of each word, as a tensor of width 1."""
        require_integer("index", index, 0, self.width - 1)
        shares = (self.shares >> np.uint64(index)) & np.uint64(1)
        return BooleanTensor(self.party, shares, 1, mix(_BIT, self.history, index))

    def __and__(self, other: Any) -> BooleanTensor:
        from refmpc.primitives.boolean import and_words

        if isinstance(other, BooleanTensor):
            return self.party.complete(and_words(self, other))
        words = self._public_words(other)
        left, right = self._aligned(words[np.newaxis])
        return self._like(left & right, mix(_AND, self.history, digest(words)))

    def __or__(self, other: BooleanTensor) -> BooleanTensor:
        return ~(~self & ~other)


def concatenate(tensors: Sequence[Kind], axis: int = 0) -> Kind:
    """Join tensors of one kind and scale along an axis: local."""
    first = _same_kind(tensors)
    place = _axis(axis, first.ndim)
    return first._like(np.concatenate([t.shares for t in tensors], axis=place), _joined(tensors, place))


def stack(tensors: Sequence[Kind], axis: int = 0) -> Kind:
    """Join tensors of one kind, scale and shape along a new axis: local."""
    first = _same_kind(tensors)
    place = _axis(axis, first.ndim + 1)
    return first._like(np.stack([t.shares for t in tensors], axis=place), _joined(tensors, place))


def _joined(tensors: Sequence[SecretTensor], place: int) -> int:
    return mix(_JOIN, place, *(tensor.history for tensor in tensors))


def _axis(axis: int, ndim: int) -> int:
    """An axis as a position in the shares, which have one axis in front."""
    return require_integer("axis", axis, -ndim, ndim - 1) % ndim + 1


def _same_kind(tensors: Sequence[Kind]) -> Kind:
    require(len(tensors) > 0, "tensors", [], "at least one tensor")
    for tensor in tensors:
        same = type(tensor) is type(tensors[0])
        scale = "fraction_bits" if isinstance(tensor, ArithmeticTensor) else "width"
        if not same or getattr(tensor, scale) != getattr(tensors[0], scale):
            raise InvalidArgument(f"tensors = {list(tensors)!r}: must all be of one kind and scale; rescale them first")
    return tensors[0]
