"""Secret tensors. Party i holds shares (x_i, x_i+1) of x = x_0 + x_1 + x_2 (arithmetic) or x_0 ⊕ x_1 ⊕ x_2 (Boolean).

Shares are sealed (``refmpc.core.words``): they are cut and reshaped here, and computed with by kernels of the party's
machine. Everything in this file is local except the operators ``* @ < > <= >= &``, which run the protocol of the same
name at once. Inside an async protocol call the protocol itself and ``await`` it, so that independent ones can share
rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from accel.errors import InvalidArgument
from accel.validate import require, require_integer
from refmpc.core.digest import digest, mix
from refmpc.core.fixed import DEFAULT_FRACTION_BITS, encode, encode_number
from refmpc.core.words import Words, seal

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
        self.shares = seal(shares)
        if history is None:
            history = 0 if party is None else party.arrival()
        self.history = history  # ``refmpc.core.digest``: what is public about how this secret came about

    def _like(self: Kind, shares: Words, history: int) -> Kind:
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
    def first(self) -> Words:
        """This party's share x_id."""
        return self.shares[0]

    @property
    def second(self) -> Words:
        """This party's share x_id+1."""
        return self.shares[1]

    @property
    def flat(self) -> Words:
        """The shares as (2, size), each in one piece of memory: views if they lie so, else a copy."""
        return self._in_one_piece().reshape(2, self.size)

    def _in_one_piece(self) -> Words:
        if self.shares[0].flags.c_contiguous:  # the two shares may lie apart
            return self.shares
        return self.party.machine.copy(self.shares)

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
            shares = self._taken(index)
        return self._like(shares, mix(_INDEX, self.history, *map(digest, index)))

    def _taken(self, index: tuple[Any, ...]) -> Words:
        """Entries by arrays of indices, as numpy orders them: found by their numbers, and then copied."""
        numbers = np.arange(self.size).reshape(self.shape)[index]
        machine = self.party.machine
        out = machine.memory((2, numbers.size))
        machine.call("take_rows", self.flat, machine.public(numbers.reshape(-1)), 1, out)
        return out.reshape(2, *numbers.shape)

    def reshape(self: Kind, *shape: int | tuple[int, ...]) -> Kind:
        """The same elements in another shape."""
        target = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        try:
            shares = self.shares.reshape(2, *target)
        except TypeError:  # these shares lie so that the new shape needs a copy
            shares = self.party.machine.copy(self.shares).reshape(2, *target)
        return self._like(shares, self.history)

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
        return self._like(seal(np.broadcast_to(aligned, (2, *shape))), self.history)

    def copy(self: Kind) -> Kind:
        """The same secret in fresh memory."""
        return self._like(self.party.machine.copy(self.shares), self.history)

    def _binary(self, kernel: str, left: Words, right: Words) -> Words:
        """A kernel on two pairs of shares, with as many axes in front of the shorter one as it needs to broadcast."""
        ndim = max(left.ndim, right.ndim)
        left, right = (
            shares if shares.ndim == ndim else shares[(slice(None), *[None] * (ndim - shares.ndim))]
            for shares in (left, right)
        )
        return self.party.machine.binary(kernel, left, right)

    def _with_public(self, kernel: str, shares: Words, public: Any) -> Words:
        """``shares`` in fresh memory, with a public array or word taken in by the share x_0."""
        machine, shape = self.party.machine, shares.shape[1:]
        if isinstance(public, np.ndarray):
            public = machine.public(public)
            wide = np.broadcast_shapes(shape, public.shape)
            if wide != shape:
                aligned = shares[(slice(None), *[None] * (len(wide) - len(shape)))]
                shares = seal(np.broadcast_to(aligned, (2, *wide)))
        found = machine.copy(shares)
        if self.party.id != 1:
            mine = found[0 if self.party.id == 0 else 1]
            machine.call(kernel, mine, public, mine)
        return found


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

    def _like(self, shares: Words, history: int) -> ArithmeticTensor:
        return ArithmeticTensor(self.party, shares, self.fraction_bits, history)

    def public_digest(self) -> int:
        """Public digest of history, scale and shape."""
        return mix(self.history, self.fraction_bits, self.shape)

    @classmethod
    def zeros(cls, party: Party, shape: tuple[int, ...], fraction_bits: int) -> ArithmeticTensor:
        """Zero in every entry, the same at all parties: something to add public values to."""
        shares = party.machine.memory((2, *shape))
        party.machine.call("copy", np.uint64(0), shares)
        return cls(party, shares, fraction_bits, 0)

    # local arithmetic ----------------------------------------------------------------------------

    def rescale(self, fraction_bits: int) -> ArithmeticTensor:
        """The same value at a finer scale: exact and local. (Coarser: ``refmpc.truncate``.)"""
        require_integer(
            "fraction_bits", fraction_bits, self.fraction_bits, 62, way_out="truncate to reach a coarser scale"
        )
        if fraction_bits == self.fraction_bits:
            return self
        shift = np.uint64(fraction_bits - self.fraction_bits)
        shares = self.party.machine.binary("shift_left", self.shares, shift)
        history = mix(_SCALE, self.history, fraction_bits, int(shift))
        return ArithmeticTensor(self.party, shares, fraction_bits, history)

    def reinterpret(self, fraction_bits: int) -> ArithmeticTensor:
        """The same ring words read at another scale: multiplies the value by a power of two, free of charge."""
        require_integer("fraction_bits", fraction_bits, 0, 62)
        history = mix(_SCALE, self.history, fraction_bits)
        return ArithmeticTensor(self.party, self.shares, fraction_bits, history)

    def _public_word(self, other: Any) -> Any:
        """A public operand of a sum at this scale: one word for a number, else an array of words."""
        kind = type(other)
        if kind is int or (kind is float and self.fraction_bits > 0):
            return encode_number(other, self.fraction_bits, "public operand")
        if self.fraction_bits == 0 and np.asarray(other).dtype.kind == "f":
            whole = bool((np.asarray(other) == np.rint(other)).all())
            require(whole, "public operand", other, "whole numbers with an integer tensor", "rescale the tensor first")
        return encode(other, self.fraction_bits, name="public operand")

    def _sum(self, kernel: str, other: Any) -> ArithmeticTensor:
        sign = _ADD if kernel == "add" else _SUBTRACT
        if not isinstance(other, ArithmeticTensor):
            words = self._public_word(other)
            shares = self._with_public(kernel, self.shares, words)
            return self._like(shares, mix(sign, self.history, digest(words)))
        bits = max(self.fraction_bits, other.fraction_bits)
        shares = self._binary(kernel, self.rescale(bits).shares, other.rescale(bits).shares)
        return ArithmeticTensor(self.party, shares, bits, mix(sign, self.history, other.history))

    def __add__(self, other: Any) -> ArithmeticTensor:
        return self._sum("add", other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> ArithmeticTensor:
        return self._sum("subtract", other)

    def __rsub__(self, other: Any) -> ArithmeticTensor:
        return -self + other

    def __neg__(self) -> ArithmeticTensor:
        negative = self.party.machine.memory(self.shares.shape)
        self.party.machine.call("negate", self.shares, negative)
        return self._like(negative, mix(_NEGATE, self.history))

    def scale_by_integers(self, factor: Any) -> ArithmeticTensor:
        """Times public integers: local, exact, same scale. Ring words that a recorded step takes as an input (sealed)
        may be such factors too."""
        machine = self.party.machine
        words: Any = factor
        public = 0  # of an input of a recorded step, which has its own digest
        if not isinstance(factor, Words):
            integral = np.asarray(factor).dtype.kind in "biu"
            require(integral, "factor", factor, "integers", "multiply by real numbers with *")
            words = encode(factor, 0, name="factor")
            public = digest(words)
            words = machine.public(words) if words.ndim else np.uint64(words)
        wide = np.broadcast_shapes(self.shape, words.shape)
        shares = machine.binary("multiply", self.broadcast_to(wide).shares, words)
        return self._like(shares, mix(_TIMES, self.history, public))

    def sum(self, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> ArithmeticTensor:
        """The sum along axes: local."""
        if axis is None:
            axis = tuple(range(self.ndim))
        axes = (axis,) if isinstance(axis, int) else axis
        shifted = tuple(_axis(a, self.ndim) for a in axes)
        machine, shape = self.party.machine, self.shares.shape
        out = machine.memory(tuple(size for a, size in enumerate(shape) if a not in shifted))
        machine.call("sum_axes", self.shares, shifted, out)
        kept = tuple(1 if a in shifted else size for a, size in enumerate(shape))
        return self._like(out.reshape(kept) if keepdims else out, mix(_SUM, self.history, *shifted))

    # operators that run a protocol ---------------------------------------------------------------

    def __mul__(self, other: Any) -> ArithmeticTensor:
        from refmpc.primitives import arithmetic

        if isinstance(other, ArithmeticTensor):
            bits = min(self.fraction_bits, other.fraction_bits)
            if bits == 0:
                return self.party.complete(arithmetic.multiply(self, other))
            return self.party.complete(arithmetic.multiply_truncate(self, other, bits))
        return self._times_public(other, "multiply")

    __rmul__ = __mul__

    def __matmul__(self, other: Any) -> ArithmeticTensor:
        from refmpc.primitives import arithmetic

        if not isinstance(other, ArithmeticTensor):
            return self._times_public(other, "matmul_words")
        bits = min(self.fraction_bits, other.fraction_bits)
        if bits == 0:
            return self.party.complete(arithmetic.matmul(self, other))
        return self.party.complete(arithmetic.matmul_truncate(self, other, bits))

    def __rmatmul__(self, other: Any) -> ArithmeticTensor:
        return self._times_public(other, "matmul_words", from_left=True)

    def _times_public(self, other: Any, kernel: str, from_left: bool = False) -> ArithmeticTensor:
        """A product with public values: local for integers; real ones are taken at this scale and truncated back."""
        from refmpc.primitives import truncation

        public = np.asarray(other)
        bits = 0 if public.dtype.kind in "biu" else self.fraction_bits or DEFAULT_FRACTION_BITS
        words, machine = encode(public, bits, "public operand"), self.party.machine
        factor = machine.public(words)
        operands = (factor.shape, self.shape) if from_left else (self.shape, factor.shape)
        shape = np.broadcast_shapes(*operands) if kernel == "multiply" else _matmul_shape(*operands)
        shares = machine.memory((2, *shape))
        for share, out in zip(self.shares, shares, strict=True):
            machine.call(kernel, *((factor, share) if from_left else (share, factor)), out)
        scaled = self._like(shares, mix(_TIMES, self.history, digest(words)))
        if bits == 0:
            return scaled
        if self.party.insecure_check_ranges:
            from refmpc.core.debug import check_product

            product = np.multiply if kernel == "multiply" else np.matmul
            operation = self.party.operation("truncate", self)
            clear = (lambda x, y: product(y, x)) if from_left else product
            self.party.complete(check_product(operation, self, words, clear, 2**62))
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

    def _like(self, shares: Words, history: int) -> BooleanTensor:
        return BooleanTensor(self.party, shares, self.width, history)

    def public_digest(self) -> int:
        """Public digest of history, width and shape."""
        return mix(self.history, self.width, self.shape)

    @property
    def _mask(self) -> np.uint64:
        return np.uint64((1 << self.width) - 1)

    def _public_words(self, other: Any) -> np.ndarray:
        array = np.asarray(other)
        require(array.dtype.kind in "biu", "public operand", array.dtype, "integers or booleans")
        return np.asarray(array.astype(np.uint64) & self._mask)

    def __xor__(self, other: Any) -> BooleanTensor:
        if isinstance(other, BooleanTensor):
            require(other.width == self.width, "width of the other operand", other.width, f"{self.width} bits")
            shares = self._binary("xor", self.shares, other.shares)
            return self._like(shares, mix(_XOR, self.history, other.history))
        words = self._public_words(other)
        return self._like(self._with_public("xor", self.shares, words), mix(_XOR, self.history, digest(words)))

    __rxor__ = __xor__

    def __invert__(self) -> BooleanTensor:
        return self ^ self._mask

    def bit(self, index: int) -> BooleanTensor:
        """One bit of each word, as a tensor of width 1."""
        require_integer("index", index, 0, self.width - 1)
        machine = self.party.machine
        shifted = machine.binary("shift_right", self.shares, np.uint64(index))
        machine.call("bitwise_and", shifted, np.uint64(1), shifted)
        return BooleanTensor(self.party, shifted, 1, mix(_BIT, self.history, index))

    def __and__(self, other: Any) -> BooleanTensor:
        from refmpc.primitives.boolean import and_words

        if isinstance(other, BooleanTensor):
            return self.party.complete(and_words(self, other))
        machine, words = self.party.machine, self._public_words(other)
        wide = np.broadcast_shapes(self.shape, words.shape)
        shares = machine.binary("bitwise_and", self.broadcast_to(wide).shares, machine.public(words))
        return self._like(shares, mix(_AND, self.history, digest(words)))

    def __or__(self, other: BooleanTensor) -> BooleanTensor:
        return ~(~self & ~other)


def concatenate(tensors: Sequence[Kind], axis: int = 0) -> Kind:
    """Join tensors of one kind and scale along an axis: local."""
    first = _same_kind(tensors)
    machine, at = first.party.machine, _axis(axis, first.ndim)
    shape = list(first.shares.shape)
    for tensor in tensors:
        others = [size for a, size in enumerate(tensor.shares.shape) if a != at]
        fits = tensor.ndim == first.ndim and others == [size for a, size in enumerate(shape) if a != at]
        require(fits, "shape of a tensor", tensor.shape, f"that of the first, {first.shape}, but for axis {axis}")
    shape[at] = sum(tensor.shares.shape[at] for tensor in tensors)
    joined, start = machine.memory(tuple(shape)), 0
    for tensor in tensors:
        stop = start + tensor.shares.shape[at]
        machine.call("copy", tensor.shares, joined[(*[slice(None)] * at, slice(start, stop))])
        start = stop
    return first._like(joined, mix(_JOIN, at, *(tensor.history for tensor in tensors)))


def stack(tensors: Sequence[Kind], axis: int = 0) -> Kind:
    """Join tensors of one kind, scale and shape along a new axis: local."""
    first = _same_kind(tensors)
    at = _axis(axis, first.ndim + 1) - 1
    return concatenate([tensor[(*[slice(None)] * at, None)] for tensor in tensors], axis=at)


def _matmul_shape(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a matrix product, as numpy has it."""
    return np.matmul(np.broadcast_to(0, left), np.broadcast_to(0, right)).shape


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
