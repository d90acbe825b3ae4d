"""The machine of a party: where everything that depends on secrets is computed.

A primitive is a coroutine of three things: *draw* masks, *call* a kernel, *speak* in a round. The first two go through
this object, the third through ``Operation.round``. Kernels (``accel``) write their results into arrays they are given:

    machine, role = operation.machine, segment.role(party.id)
    masks = machine.masks(operation, "next", 2, n)               # words that the next party draws alike
    message = machine.memory(n)
    machine.call("truncation_hold", z, masks[0], role == 0, message)
    round_.send_next(message)

``Machine`` does all this at once. ``refmpc.core.program.Recorder`` does it and takes notes; a ``Program`` does it
again.

Rules for protocol code. Arguments of ``call`` are sealed arrays, public arrays (``machine.public``), numbers and None;
a plain array is refused. A kernel returns nothing that depends on secrets. Numbers and public arrays are fixed when a
step is recorded: they may depend on shapes, scales and public arguments, on nothing else.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import kernels
from refmpc.core.words import Public, Words, public_array, seal, unseal

if TYPE_CHECKING:
    from refmpc.core.party import Operation, Party
    from refmpc.core.rounds import Round

__all__ = ["Machine", "kernel_argument"]

Shape = int | tuple[int, ...]


def kernel_argument(kernel: str, value: Any) -> Any:
    """What a kernel gets: the plain memory of a sealed array, public arrays and numbers as they are."""
    if isinstance(value, Words):
        return unseal(value)
    if isinstance(value, np.ndarray) and not isinstance(value, Public):
        raise TypeError(
            f"kernel {kernel!r} was given a plain array of shape {value.shape}: "
            "seal() it if it depends on secrets, or make it public (machine.public)"
        )
    return value


class Machine:
    """Memory, masks and kernels of one party; does everything at once."""

    recording = False

    def __init__(self, party: Party):
        self.party = party

    # memory --------------------------------------------------------------------------------------

    def memory(self, shape: Shape, dtype: Any = np.uint64) -> Words:
        """Fresh memory for a kernel to fill or a round to receive into; its content is arbitrary."""
        return seal(np.empty(shape, dtype=dtype))

    def packed(self, count: int, width: int, *rows: int) -> Words:
        """Fresh memory for ``count`` values of ``width`` bits (several ``rows`` of them), in whole words, as packing
        kernels want it. What goes into a round is ``packed_bytes`` of it."""
        return self.memory((*rows, -(-kernels.packed_size(count, width) // 8)))

    def packed_bytes(self, packed: Words, count: int, width: int) -> Words:
        """The bytes that ``count`` values of ``width`` bits really take."""
        return packed.view(np.uint8)[: kernels.packed_size(count, width)]

    def public(self, values: Any, dtype: Any = None) -> Public:
        """Public numbers as an argument of kernels (a copy that cannot be written to, laid out as they are)."""
        array = np.array(public_array(values), dtype=dtype, order="A").view(Public)
        array.flags.writeable = False
        return array

    # masks ---------------------------------------------------------------------------------------

    def masks(self, operation: Operation, side: str, *shape: int) -> Words:
        """The next words of the stream shared with the ``side`` ("next" or "previous") neighbour, row by row."""
        stream = operation.stream(side)
        if len(shape) == 2 and shape[0] <= shape[1]:  # several vectors
            return seal(stream.rows(*shape))
        return seal(stream.words(math.prod(shape))).reshape(shape)

    def mask_bytes(self, operation: Operation, side: str, count: int) -> Words:
        """The next bytes of that stream."""
        return seal(operation.stream(side).bytes(count))

    def uniform(self, operation: Operation, side: str, bound: int, *shape: int) -> Words:
        """Values uniform in 0..bound−1 (uint8, no bias) that both holders of the stream draw alike."""
        return seal(operation.uniform_below(operation.stream(side), bound, shape))

    # kernels -------------------------------------------------------------------------------------

    def call(self, kernel: str, *arguments: Any) -> None:
        """Run a kernel of ``accel``. Its results lie in the arrays among its arguments."""
        getattr(kernels, kernel)(*(kernel_argument(kernel, value) for value in arguments))

    def contiguous(self, words: Words) -> Words:
        """The same words in one piece of memory: themselves if they are, else a copy."""
        return words if words.flags.c_contiguous else self.copy(words)

    def copy(self, words: Words) -> Words:
        """The same words in fresh memory."""
        fresh = self.memory(words.shape, words.dtype)
        self.call("copy", words, fresh)
        return fresh

    def binary(self, kernel: str, left: Any, right: Any) -> Words:
        """The result of a kernel of two operands that broadcast like numpy's (one may be a number)."""
        shapes = [operand.shape for operand in (left, right) if isinstance(operand, np.ndarray)]
        out = self.memory(shapes[0] if len(shapes) == 1 or shapes[0] == shapes[1] else np.broadcast_shapes(*shapes))
        self.call(kernel, left, right, out)
        return out

    # what a recorder wants to know ---------------------------------------------------------------

    def delivered(self, round_: Round, sends: dict[Any, Any], receives: dict[Any, Any]) -> None:
        """A round was carried out."""

    def leave(self, what: str) -> None:
        """Called where something happens that a recorded step must not contain: a release, a message to a client, a
        stream of this party alone."""

    def unsealed(self, words: Words) -> np.ndarray:
        """Plain memory of a sealed array, for code that computes with numpy: not inside a recorded step."""
        self.leave("a computation outside kernels")
        return unseal(words)
