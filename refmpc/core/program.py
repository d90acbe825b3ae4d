"""Recorded steps: what a function of secrets did once is done again, without the Python between its instructions.

``party.recorded(step)`` gives a function of the same arguments. Its first call runs ``step`` and takes notes of
everything that passes the machine: draws, kernels, rounds. Later calls do the same again, with fresh masks, on new
inputs.

*Programs* are kept by what is public: shapes, layouts and scales of the inputs, and public arguments. Every call begins
at the same place in the rotation of dealers. Every array among the arguments is an *input*: inside it is sealed, so
nothing can be read from it and frozen. What a kernel or a round is given must be an input, or memory that an
instruction filled; anything else is refused, and so are releases, messages to clients, inputs and streams of this party
alone. Masks come from draws alone: every call draws under its own step and operation numbers, as it would without
recording, so no mask is ever used twice.

The code of a frame has to tell steps and inputs apart as well (``refmpc.core.digest``), so inside a recorded function
codes and histories count from its beginning, and all of them grow by one number that depends on step, first operation
and inputs. Whether a party records, repeats or (debug modes, ``REFMPC_RECORD=0``) does neither makes no difference to
what it sends.
"""

from __future__ import annotations

import bisect
import functools
import math
import os
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import numpy as np
from numpy.lib.array_utils import byte_bounds

from accel import kernels
from refmpc.core.digest import mix
from refmpc.core.draws import Draws
from refmpc.core.errors import NotRecordable
from refmpc.core.machine import Machine, kernel_argument
from refmpc.core.party import Operation, Party, fill_from_reserve, uniform_bytes
from refmpc.core.pytree import Inputs, Leaf, rebuilt, regions
from refmpc.core.rounds import Round, complete
from refmpc.core.words import Public, Words, seal, unseal
from refmpc.net.prepared import PreparedRound

__all__ = ["Recorded", "Recorder"]

MOST_PROGRAMS = 16
MOST_BYTES = 1 << 28  # of memory that a program keeps
_LOW = 0xFFFFFFFF

Instruction = tuple[Callable[..., Any], Any]


class Program:
    """Instructions, the draws they use, and where inputs have to be put before they run again.

    Kernels in a row are calls of one table (``accel``'s ``CallTable``), which does them without the interpreter between
    them. What it cannot do, rounds above all, is a Python call by itself, and so is a call that the table could not
    finish: a kernel that raises, a draw whose random bytes did not last.
    """

    def __init__(self, party: Party):
        self.party = party
        self.draws = Draws()
        self.instructions: list[Instruction] = []
        self.bound: dict[
            int, list[tuple[int, int, tuple[Any, ...]]]
        ] = {}  # by instruction: place, input, how to view it
        self.operations = 0
        self.rounds = 0
        self.result: Any = None
        self.code_base = np.zeros(1, dtype=np.uint64)  # of the present run, for compiled rounds
        self._calls = kernels.CallTable()
        self._instruction: list[int] = []  # of every call
        self._addresses: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by input: where they stand in the table
        self._parts: list[Instruction] = []
        self._inputs: list[np.ndarray] = []

    def finish(self, origin: Callable[[np.ndarray], tuple[int, int]]) -> None:
        """All is recorded. ``origin`` says which input an array is part of (−1: none), and how far behind its
        beginning."""
        calls, begun = self._calls, 0
        for number, (function, arguments) in enumerate(self.instructions):
            if self._put(function, arguments):
                self._instruction += [number] * (len(calls) - len(self._instruction))
                continue
            self._end_row(begun)
            begun = len(calls)
            self._parts.append((self._alone, (number,)) if number in self.bound else (function, arguments))
        self._end_row(begun)
        self._addresses = calls.finish(origin)

    def _put(self, function: Callable[..., Any], arguments: Any) -> bool:
        if isinstance(function, _Spoken):
            return function.compiled is not None and self._calls.add(*function.compiled, kernels.round_is_done)
        if function is _fill_uniform:
            raw, bound, out = arguments[:3]
            return self._calls.add(kernels.uniform_below, [raw, bound, out], out.size)
        return self._calls.add(function, arguments)

    def _end_row(self, begun: int) -> None:
        if len(self._calls) > begun:
            self._parts.append((self._row, (begun, len(self._calls))))

    def run(self, inputs: Inputs) -> None:
        """Do everything again on these inputs, as the party's next operations."""
        self._inputs = inputs.arrays
        for index, (places, offsets) in self._addresses.items():
            self._calls.bind(places, offsets, inputs.addresses[index])
        self.code_base[0] = self.party.code_base
        self.party.claim(self.draws, self.operations)
        with self.party.counting(self.rounds):
            for function, arguments in self._parts:
                function(*arguments)
        self._inputs = []

    def _row(self, first: int, stop: int) -> None:
        """Calls of the table."""
        while (first := self._calls.run(first, stop)) < stop:
            number = self._instruction[first]
            self._alone(number)
            while first < stop and self._instruction[first] == number:
                first += 1

    def _alone(self, number: int) -> None:
        """One instruction in Python."""
        function, arguments = self.instructions[number]
        for place, index, (shape, dtype, offset, strides) in self.bound.get(number, ()):
            arguments[place] = _view(self._inputs[index], shape, dtype, offset, strides)
        function(*arguments)


class _Spoken:
    """A round of a program, in Python; ``compiled`` is the same as a call of a table, if it has one."""

    def __init__(
        self, party: Party, exchange: Callable[[int], None], code: int, weight: int, numbers: list[int], compiled: Any
    ):
        self.compiled = compiled
        self._party = party
        self._arguments = exchange, code, weight, numbers

    def __call__(self) -> None:
        self._party.speak(*self._arguments)


def _view(array: np.ndarray, shape: Any, dtype: Any, offset: int, strides: Any) -> np.ndarray:
    """Memory of an input, ``offset`` bytes from its first element on."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if owner.flags.c_contiguous:
        start = array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
        return np.ndarray(shape, dtype, owner, start + offset, strides)
    interface = {
        "shape": shape,
        "strides": strides,
        "typestr": dtype.str,
        "data": (array.__array_interface__["data"][0] + offset, True),
        "version": 3,
    }
    return np.asarray(_Placed(interface, array))


class _Placed:
    """An array by its address; keeps its owner alive."""

    def __init__(self, interface: dict[str, Any], owner: np.ndarray):
        self.__array_interface__ = interface
        self.owner = owner


class Recorder(Machine):
    """Does everything at once, and notes it for a program."""

    recording = True

    def __init__(self, party: Party, inputs: list[np.ndarray]):
        super().__init__(party)
        self.program = Program(party)
        self.too_large = False  # from then on nothing is noted
        self._inputs = inputs
        self._bytes = 0
        self._regions: list[tuple[int, int, int]] = []  # first byte, byte behind the last, input (or −1)
        self._kept: list[np.ndarray] = []
        for index, array in enumerate(inputs):
            for low, high in regions(array):
                bisect.insort(self._regions, (low, high, index))

    # what is noted -------------------------------------------------------------------------------

    def _keep(self, array: np.ndarray, size: int) -> np.ndarray:
        """Memory of the program's own, for which it has to keep ``size`` bytes."""
        self._bytes += size
        if self._bytes > MOST_BYTES and not self.too_large:
            self.too_large = True
            self.program = Program(self.party)
            self._kept, self._regions = [], []
        if array.size and not self.too_large:
            self._kept.append(array)
            low, high = byte_bounds(array)
            bisect.insort(self._regions, (low, high, -1))
        return array

    def origin(self, array: np.ndarray, what: str) -> int:
        """Which input an array is part of, −1 for the program's own memory; anything else is refused."""
        if not array.size or self.too_large:
            return -1
        low, _ = byte_bounds(array)
        at = bisect.bisect_right(self._regions, low, key=lambda region: region[0]) - 1
        if at < 0 or low >= self._regions[at][1]:
            raise NotRecordable(
                f"{what} of a recorded step was given an array of shape {array.shape} that is neither an input of the "
                "step nor the result of a kernel, a draw or a round: pass it as an argument, or compute it by kernels"
            )
        return self._regions[at][2]

    def place(self, array: np.ndarray, what: str) -> tuple[int, int]:
        """Which input an array is part of (−1: none), and how many bytes behind its first element it begins."""
        index = -1 if isinstance(array, Public) else self.origin(array, what)
        if index < 0:
            return -1, 0
        start = self._inputs[index].__array_interface__["data"][0]
        return index, array.__array_interface__["data"][0] - start

    def note(self, function: Callable[..., Any], arguments: list[Any], what: str) -> None:
        """One instruction. Its arrays are inputs, whose place is taken by new ones later, or the program's own."""
        bound = []
        for place, value in enumerate(arguments):
            if isinstance(value, np.ndarray):
                index, offset = self.place(value, what)
                if index >= 0:
                    bound.append((place, index, (value.shape, value.dtype, offset, value.strides)))
        if self.too_large:
            return
        if bound:
            self.program.bound[len(self.program.instructions)] = bound
        self.program.instructions.append((function, arguments))

    # the machine ---------------------------------------------------------------------------------

    def memory(self, shape: int | tuple[int, ...], dtype: Any = np.uint64) -> Words:
        """As ``Machine.memory``; the program keeps it."""
        fresh = np.empty(shape, dtype=dtype)
        return seal(self._keep(fresh, fresh.nbytes))

    def call(self, kernel: str, *arguments: Any) -> None:
        """As ``Machine.call``, noted."""
        function = getattr(kernels, kernel)
        plain = [kernel_argument(kernel, value) for value in arguments]
        self.note(function, plain, f"kernel {kernel!r}")
        function(*plain)

    def masks(self, operation: Operation, side: str, *shape: int) -> Words:
        """As ``Machine.masks``; the program draws them again for its own step and operations."""
        return self._drawn(operation, side, super().masks, *shape)

    def mask_bytes(self, operation: Operation, side: str, count: int) -> Words:
        """As ``Machine.mask_bytes``, drawn again likewise."""
        return self._drawn(operation, side, super().mask_bytes, count)

    def _drawn(self, operation: Operation, side: str, draw: Callable[..., Words], *shape: int) -> Words:
        begin = operation.stream(side).position
        drawn = draw(operation, side, *shape)
        if self.too_large or not drawn.size:
            return drawn
        values, draws = unseal(drawn), self.program.draws
        before = draws.size
        place = draws.place(side, self.party.counted(operation.number), begin, values.nbytes)
        np.copyto(place, values.reshape(-1).view(np.uint8))
        self._keep(place, draws.size - before)
        if place.__array_interface__["data"][0] % values.itemsize == 0:
            return seal(place.view(values.dtype).reshape(values.shape))
        out = self.memory(values.shape, values.dtype)  # words behind an odd number of bytes
        self.note(kernels.copy, [place, unseal(out).reshape(-1).view(np.uint8)], "a draw")
        np.copyto(unseal(out), values)
        return out

    def uniform(self, operation: Operation, side: str, bound: int, *shape: int) -> Words:
        """As ``Machine.uniform``: rejection sampling, again for every draw."""
        count = math.prod(shape)
        out = self.memory(shape, np.uint8)
        if count:
            begin, number = operation.stream(side).position, self.party.counted(operation.number)
            raw = unseal(self.mask_bytes(operation, side, uniform_bytes(count, bound)))
            arguments = [raw, bound, unseal(out).reshape(-1), self.party, side, number, begin]
            self.note(_fill_uniform, arguments, "a draw")
            _fill_uniform(*arguments)
        return out

    def delivered(self, round_: Round, sends: dict[Any, Any], receives: dict[Any, Any]) -> None:
        """Note a round that was carried out."""
        own = {peer: [self._outgoing(part) for part in parts] for peer, parts in sends.items()}
        if any(self.origin(part, "a round") >= 0 for parts in receives.values() for part in parts):
            raise NotRecordable("a round of a recorded step receives into an input")
        if self.too_large:
            return
        transport: Any = self.party.transport
        prepare = getattr(transport, "prepare", functools.partial(functools.partial, transport.exchange))
        code = (round_.code - round_.weight * self.party.code_base) & 0xFFFFFFFF
        numbers = [self.party.counted(number) for number in round_.numbers]
        exchange, compiled = prepare(round_.operation, own, receives), None
        if isinstance(exchange, PreparedRound):
            compiled = exchange.compiled(code, round_.weight, self.program.code_base)
        for array in compiled[1] if compiled is not None else ():
            if isinstance(array, np.ndarray):
                self._keep(array, array.nbytes)
        spoken = _Spoken(self.party, exchange, code, round_.weight, numbers, compiled)
        self.program.instructions.append((spoken, ()))
        self.program.rounds += 1

    def _outgoing(self, part: np.ndarray) -> np.ndarray:
        """What a prepared round sends from: the program's own memory, into which inputs are copied."""
        if self.origin(part, "a round") < 0:
            return part
        copied = unseal(self.memory(part.shape, part.dtype))
        self.note(kernels.copy, [part, copied], "a round")
        return copied

    def leave(self, what: str) -> NoReturn:
        """Refuse."""
        raise NotRecordable(
            f"{what} inside a recorded step: it must happen anew in every step; do it before or after the step"
        )


def _fill_uniform(
    raw: np.ndarray, bound: int, out: np.ndarray, party: Party, side: str, number: int, begin: int
) -> None:
    found = kernels.uniform_below(raw, bound, out)
    if found < out.size:
        fill_from_reserve(party.claimed_stream(side, number).reserve(begin), bound, out[found:])


# the function ------------------------------------------------------------------------------------


class Recorded:
    """A function of secrets whose calls are recorded and repeated; see the head of this file."""

    def __init__(self, party: Party, function: Callable[..., Coroutine[Any, Any, Any]]):
        self._party = party
        self._function = function
        self._programs: dict[Any, Program | None] = {}  # None: too large, runs as it is

    async def __call__(self, *arguments: Any) -> Any:
        """Run the function on these arguments. Its rounds are its own: inside ``gather`` it runs as one piece."""
        party = self._party
        if party.is_inside_recorded:
            return await self._function(*arguments)
        inputs = Inputs(arguments)
        with party.inside_recorded(inputs.digest) as salt:
            program, result = self._run(arguments, inputs)

        def renewed(leaf: Leaf) -> Any:
            """For the caller: in memory that no later call writes to, with a history that names this call."""
            words = seal(leaf.words if program is None else unseal(leaf.words).copy())
            return leaf.with_words(words, mix(leaf.history, salt))

        return rebuilt(result, renewed)

    def _run(self, arguments: tuple[Any, ...], inputs: Inputs) -> tuple[Program | None, Any]:
        """The result, and the program in whose memory it lies, if it does."""
        party, key = self._party, inputs.key
        if self._runs_as_it_is or inputs.overlap:
            return None, self._once(party.machine, inputs.sealed(arguments))
        if key not in self._programs and len(self._programs) < MOST_PROGRAMS:
            recorder, begun = Recorder(party, inputs.arrays), party.operations
            result = self._once(recorder, inputs.sealed(arguments))
            if recorder.too_large:
                self._programs[key] = None
                return None, result
            program = recorder.program
            program.result = rebuilt(result, functools.partial(_own, recorder))
            program.operations = party.operations - begun
            program.finish(functools.partial(recorder.place, what="a kernel"))
            self._programs[key] = program
            return program, program.result
        found = self._programs.get(key)
        if found is None:
            return None, self._once(party.machine, inputs.sealed(arguments))
        found.run(inputs)
        return found, found.result

    @property
    def _runs_as_it_is(self) -> bool:
        party = self._party
        debug = party.insecure_check_ranges or party.transcript is not None
        return debug or os.environ.get("REFMPC_RECORD", "1") == "0"

    def _once(self, machine: Machine, arguments: tuple[Any, ...]) -> Any:
        outer, self._party.machine = self._party.machine, machine
        try:
            return complete(self._function(*arguments), self._party.deliver)
        finally:
            self._party.machine = outer


def _own(recorder: Recorder, leaf: Leaf) -> Any:
    """A result in the program's own memory, so that a repetition finds it there."""
    words = seal(leaf.words)
    if recorder.origin(unseal(words), "the result") < 0:
        return leaf.value
    return leaf.with_words(recorder.copy(words), leaf.history)
