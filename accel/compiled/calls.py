"""Kernels called one behind the other by one compiled loop, without the interpreter between them.

To call a compiled function from Python, numba looks at every argument, takes it apart and finds the machine code: a
microsecond or two, which is more than most kernels of a training step need for their work. Here that is done once. A
*table* holds, for every call, the address of the machine code and its arguments as words, as numba's calling convention
wants them: a number is one word, an array of n axes 5 + 2n (two for its owner, which is nobody; elements, bytes of one,
address, shape, strides). A small compiled *entry* for each list of argument types loads them from the table into
registers and calls.

Arrays in a table must outlive it, or be bound anew (``CallTable.bind``) before every run.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, typeof, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target
from numba.extending import intrinsic

__all__ = ["CallTable"]

Call = tuple[Callable[..., Any], Sequence[Any]]

_WORD = ir.IntType(64)
_ADDRESS = 4  # the place of an array's address among its words
_NONE = -2  # numba's second way to say that all went well
_entries: dict[tuple[str, ...], int] = {}  # addresses, by types of the arguments


class Composed:
    """A kernel made of calls of other functions; which ones depends on shapes and types of its arguments, never on
    values."""

    def __init__(self, calls: Callable[..., Iterable[Call]]):
        self.calls = calls
        self.__name__ = calls.__name__
        self.__doc__ = calls.__doc__

    def __call__(self, *arguments: Any) -> None:
        for function, own in self.calls(*arguments):
            function(*own)


class CallTable:
    """Calls that can be done again and again."""

    def __init__(self) -> None:
        self._calls: list[
            tuple[int, int, int, int, int]
        ] = []  # entry, machine code, place of the words, result, whether
        self._words: list[int] = []
        self._arrays: list[tuple[int, np.ndarray]] = []  # the places of addresses
        self._table = np.empty((0, 5), dtype=np.int64)
        self._arguments = np.empty(0, dtype=np.uint64)

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, function: Callable[..., Any], arguments: Sequence[Any], result: int | None = None) -> bool:
        """Put a call at the end, or all those that a composed kernel consists of. A kernel that returns a number is
        *done* if that is ``result``. False, and nothing is added, if a function is not compiled for such arguments, or
        takes arrays that are not memory of the arguments: those would be computed once and never again."""
        found = []
        for single, own in function.calls(*arguments) if isinstance(function, Composed) else [(function, arguments)]:
            code = _machine_code(single, own, result is not None)
            if code is None or not all(_is_part(value, arguments) for value in own):
                return False
            found.append((code, own))
        for (address, kinds), own in found:
            expected = (0, 0) if result is None else (result, 1)
            self._calls.append((_entry(kinds), address, len(self._words), *expected))
            for value in own:
                if isinstance(value, np.ndarray):
                    self._arrays.append((len(self._words) + _ADDRESS, value))
                self._words += _as_words(value)
        return True

    def finish(self, origin: Callable[[np.ndarray], tuple[int, int]]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """No calls are added from here on. ``origin`` says which input an array lies in, −1 for none, and how many
        bytes from its beginning; returns, by input, the places of such addresses and those distances, for ``bind``."""
        self._table = np.array(self._calls, dtype=np.int64).reshape(-1, 5)
        self._arguments = np.array(self._words, dtype=np.uint64)
        kept, placed = [], collections.defaultdict(list)
        for place, array in self._arrays:
            index, offset = origin(array)
            if index < 0:
                kept.append((place, array))
            else:
                placed[index].append((place, offset))
        self._arrays = kept  # alive; inputs are their owner's
        return {
            index: (np.array(places), np.array(offsets, dtype=np.uint64))
            for index, (places, offsets) in ((index, zip(*pairs, strict=True)) for index, pairs in placed.items())
        }

    def bind(self, places: np.ndarray, offsets: np.ndarray, address: int) -> None:
        """Let arrays lie that many bytes behind an address."""
        self._arguments[places] = offsets + np.uint64(address)

    def run(self, first: int, stop: int) -> int:
        """Do these calls. Returns ``stop``, or the first call that was not done: it raised, or returned another number
        than expected."""
        return _run(self._table, self._arguments, first, stop)


def _machine_code(function: Any, arguments: Sequence[Any], returns: bool) -> tuple[int, tuple[str, ...]] | None:
    """The address of what numba compiled for such arguments, and their kinds as its calling convention has them."""
    if not isinstance(function, Dispatcher):
        return None
    compiled: Any = function.overloads.get(tuple(map(typeof, arguments)))
    if compiled is None and returns:  # a kernel that only tables call
        function.compile(tuple(map(typeof, arguments)))
        compiled = function.overloads.get(tuple(map(typeof, arguments)))
    if compiled is None or isinstance(compiled.fndesc.restype, types.NoneType) == returns:
        return None
    kinds = cpu_target.target_context.call_conv.get_function_type(types.none, compiled.fndesc.argtypes).args[2:]
    address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return address, tuple("i64" if isinstance(kind, ir.PointerType) else str(kind) for kind in kinds)


def _is_part(value: Any, arguments: Sequence[Any]) -> bool:
    """Whether an array is memory of one of the arguments; anything else is."""
    if not isinstance(value, np.ndarray) or not value.size:
        return True
    return any(isinstance(argument, np.ndarray) and np.may_share_memory(value, argument) for argument in arguments)


def _as_words(value: Any) -> list[int]:
    """An argument as the words that an entry loads."""
    if isinstance(value, np.ndarray):
        shape, strides = value.shape, (stride % 2**64 for stride in value.strides)
        return [0, 0, value.size, value.itemsize, value.__array_interface__["data"][0], *shape, *strides]
    if isinstance(value, tuple):
        return [word for item in value for word in _as_words(item)]
    if isinstance(value, float):
        return [struct.unpack("<Q", struct.pack("<d", value))[0]]
    return [0 if value is None else int(value) % 2**64]


@global_compiler_lock  # type: ignore[untyped-decorator]
def _entry(kinds: tuple[str, ...]) -> int:
    """The address of a compiled function (address of a kernel, its words, place of a result) → status for arguments of
    these kinds."""
    if kinds not in _entries:
        library = cpu_target.target_context.codegen().create_library(f"entry of {len(kinds)} arguments")
        module = library.create_ir_module("entry")
        pointer = _WORD.as_pointer()
        function = ir.Function(
            module, ir.FunctionType(ir.IntType(32), [_WORD, pointer, pointer]), "call_" + "_".join(kinds)
        )
        builder = ir.IRBuilder(function.append_basic_block())
        address, words, result = function.args
        raised = builder.alloca(_WORD)  # where numba puts what it raises; the call is done again by the interpreter
        loaded: list[Any] = [result, raised]
        for place, kind in enumerate(kinds):
            word = builder.load(builder.gep(words, [ir.Constant(_WORD, place)]))
            if kind == "double":
                word = builder.bitcast(word, ir.DoubleType())
            elif kind != "i64":
                word = builder.trunc(word, ir.IntType(int(kind[1:])))
            loaded.append(word)
        called = ir.FunctionType(ir.IntType(32), [value.type for value in loaded])
        builder.ret(builder.call(builder.inttoptr(address, called.as_pointer()), loaded))
        library.add_ir_module(module)
        library.finalize()
        _entries[kinds] = library.get_pointer_to_function(function.name)
        _libraries.append(library)
    return _entries[kinds]


_libraries: list[Any] = []  # machine code lives as long as they do


@intrinsic
def _call(_typing: Any, entry: Any, kernel: Any, words: Any, place: Any, result: Any) -> Any:
    """The status of a call through an entry."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        entry_, kernel_, words_, place_, result_ = arguments
        pointer = _WORD.as_pointer()
        words_, result_ = (
            context.make_array(kind)(context, builder, value).data
            for kind, value in ((signature.args[2], words_), (signature.args[4], result_))
        )
        called = ir.FunctionType(ir.IntType(32), [_WORD, pointer, pointer]).as_pointer()
        own = builder.gep(builder.bitcast(words_, pointer), [place_])
        return builder.call(builder.inttoptr(entry_, called), [kernel_, own, builder.bitcast(result_, pointer)])

    return types.int32(types.int64, types.int64, words, types.int64, result), generate


@njit(cache=True, nogil=True)
def _run(table, words, first, stop):
    result = np.empty(2, dtype=np.int64)
    for k in range(first, stop):
        status: Any = _call(table[k, 0], table[k, 1], words, table[k, 2], result)  # type: ignore[call-arg]
        if (status != 0 and status != _NONE) or (table[k, 4] and result[0] != table[k, 3]):
            return k
    return stop
