"""Which branches of a compiled kernel depend on what lies in its arrays: taint in the optimised code that LLVM makes of
it.

Everything loaded from memory counts as secret, and so does what is computed from it; addresses, and what was stored on
the stack without being secret (shapes, above all), do not. Conditions of branches and switches, and what a function
returns, must not be secret. A ``select`` chooses without a jump. Accesses to memory at secret places are not looked at:
they jump nowhere, but a cache knows them.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from numba import njit

__all__ = ["optimised", "secret_branches"]

_WRAPPERS = ("cfunc.", "_ZN7cpython", "NRT_")  # for Python's arguments


def optimised(kernel: Any, *kinds: Any) -> str:
    """The code of a kernel for arguments of these kinds, compiled here: what comes from the cache is machine code."""
    fresh = njit(nogil=True)(kernel.py_func)
    fresh.compile(kinds)
    (text,) = fresh.inspect_llvm().values()
    return text


def secret_branches(code: str) -> list[str]:
    """Function and instruction of every jump that depends on a secret."""
    found = []
    for function in llvm.parse_assembly(code).functions:
        if not function.is_declaration and not function.name.startswith(_WRAPPERS):
            instructions = [_Instruction(each) for block in function.blocks for each in block.instructions]
            found += [f"{function.name}: {text}" for text in _jumps(instructions)]
    return found


class _Instruction:
    def __init__(self, value: Any):
        self.text = str(value).strip()
        self.kind = value.opcode
        self.name = _name(value)
        self.operands = [_name(operand) for operand in value.operands]
        self.is_address = "ptr" in str(value.type) or str(value.type).endswith("*")

    @property
    def reads_memory(self) -> bool:
        return self.kind == "load" or (self.kind == "call" and "@llvm.masked." in self.text)


def _name(value: Any) -> str | None:
    """Name of an instruction; the values of LLVM's own binding have none if they are numbered."""
    text = str(value).strip()
    return text.split(" = ")[0] if text.startswith("%") and " = " in text else None


def _jumps(instructions: list[_Instruction]) -> list[str]:
    place = {each.name: each for each in instructions if each.name is not None}

    def stack(name: str | None) -> str | None:
        """The memory on the stack that an address lies in."""
        while name in place and place[name].kind in ("getelementptr", "bitcast"):
            name = place[name].operands[0]
        return name if name in place and place[name].kind == "alloca" else None

    secret: set[str | None] = set()
    tainted_stack: set[str] = set()
    before = -1
    while before != len(secret) + len(tainted_stack):
        before = len(secret) + len(tainted_stack)
        for each in instructions:
            if each.kind == "store" and each.operands[0] in secret:
                tainted_stack |= {stack(each.operands[1]) or ""}
            if each.name is None or each.is_address:
                continue
            own = stack(each.operands[0]) if each.reads_memory else None
            read = each.reads_memory and (own is None or own in tainted_stack)
            if read or any(operand in secret for operand in each.operands if operand is not None):
                secret.add(each.name)
    jumps = ("br", "switch", "indirectbr", "ret", "invoke")
    return [each.text for each in instructions if each.kind in jumps and secret & set(each.operands)]
