"""The tables of costs and of options, made from the declarations when the site is built.

mkdocs calls ``on_page_markdown``. Some primitives have the name of the module they live in, which hides them from
``::: refmpc``: these are documented under their full names. ``CALLS`` has one line per primitive, as
``tests/refmpc/test_cost.py`` has: a primitive without a line stops the build.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from fractions import Fraction
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

import refmpc
from protocols.settings import settings_table
from refmpc import ArithmeticTensor, BooleanTensor

__all__ = ["CALLS", "cost_table", "on_page_markdown"]

MARK = "<!-- cost table -->"
HIDDEN_MARK = "<!-- primitives named like their modules -->"
OPTIONS_MARK = "<!-- options table -->"
COUNT = 960  # a multiple of 64: packed bits then fill their words


def _tensor(*shape: int, bits: int = 16) -> ArithmeticTensor:
    """Only a shape and a scale: nothing runs."""
    return ArithmeticTensor(None, np.zeros((2, *shape), dtype=np.uint64), bits)  # type: ignore[arg-type]


X = _tensor(COUNT)
BITS = X  # declared costs look at sizes only


def _additive(*shape: int) -> Any:
    """The size of a number that is additive at two holders."""
    words = np.zeros(shape, dtype=np.uint64)
    return SimpleNamespace(words=words, shape=shape, size=words.size, ndim=len(shape), fraction_bits=50, bits=64)


A, AROWS = _additive(COUNT), _additive(COUNT, 10)
WORDS = BooleanTensor(None, np.zeros((2, COUNT), dtype=np.uint64), 64)  # type: ignore[arg-type]
KEPT = refmpc.Kept(13, 3, Fraction(3, 2))
LOW, HIGH = 2.0**-8, 2.0**8

# name → (what is called, in words; its arguments; elements that the bytes are divided by)
CALLS: dict[str, tuple[str, tuple[Any, ...], int]] = {
    "input_from_party": ("a value of one server", (None, 0, None, (COUNT,)), COUNT),
    "reveal": ("to all servers", (X, "name"), COUNT),
    "open_words": ("to all servers, 39 of 64 bits cut", (None, SimpleNamespace(size=COUNT), 39, "name"), COUNT),
    "multiply": ("", (X, X), COUNT),
    "dot": ("an output, any length", (_tensor(COUNT, 8), _tensor(COUNT, 8)), COUNT),
    "matmul": ("an output, any inner size", (_tensor(COUNT, 8), _tensor(8, 1)), COUNT),
    "multiply_truncate": ("16 bits cut", (X, X, 16), COUNT),
    "dot_truncate": ("an output, 16 bits cut", (_tensor(COUNT, 8), _tensor(COUNT, 8), 16), COUNT),
    "matmul_truncate": ("an output, 34 bits cut", (_tensor(COUNT, 8, bits=32), _tensor(8, 1), 34), COUNT),
    "truncate": ("16 bits cut", (X, 16), COUNT),
    "is_negative": ("63 bits; 20 bytes for 16 bits", (X,), COUNT),
    "thermometer": ("four thresholds, 37 bits", (X, [16, 64, 256, 2**20], [0, 2, 4, 16], 37), COUNT),
    "relu": ("63 bits", (X,), COUNT),
    "maximum": ("of 10 entries, 28 bits, a row", (_tensor(COUNT, 10), -1, 0, 28), COUNT),
    "select": ("", (BITS, X), COUNT),
    "where": ("", (BITS, X, X), COUNT),
    "bit_to_arithmetic": ("one round; 24 bytes in two", (BITS,), COUNT),
    "bits_to_boolean": ("", (BITS,), COUNT),
    "weigh_bits": ("three bits, one output", ([BITS] * 3, np.ones((1, 3), dtype=np.int64)), COUNT),
    "lookup": ("a table of 16 words", (X, np.arange(16)), COUNT),
    "equal": ("64 bits", (X, X), COUNT),
    "and_words": ("64 bits", (WORDS, WORDS), COUNT),
    "arithmetic_to_boolean": ("64 bits", (X,), COUNT),
    "boolean_to_arithmetic": ("64 bits", (WORDS,), COUNT),
    "is_negative_by_carry_tree": ("the all-purpose reference", (X,), COUNT),
    "polynomial": ("degree 3, 26 bits", (_tensor(COUNT, bits=26), [0.5] * 4), COUNT),
    "reciprocal": ("2^-8 to 2^8", (X, LOW, HIGH), COUNT),
    "reciprocal_narrow": ("1 to 13", (_tensor(COUNT, bits=22), 1.0, 13.0), COUNT),
    "divide": ("by 2^-8 to 2^8", (X, X, LOW, HIGH), COUNT),
    "inverse_sqrt": ("2^-8 to 2^8", (X, LOW, HIGH), COUNT),
    "sqrt": ("2^-8 to 2^8", (X, LOW, HIGH), COUNT),
    "clip_factor": ("up to 2^20", (X, 2.0**20), COUNT),
    "exp": ("below 0, 28 bits", (X, 0.0, None, 22, 28), COUNT),
    "log": ("2^-8 to 2^8", (X, LOW, HIGH), COUNT),
    "softmax": ("10 classes, 28 bits, a row", (_tensor(COUNT, 10), 18, 28), COUNT),
    # low-round primitives: numbers additive at two holders
    "replicate": ("additive to replicated", (A,), COUNT),
    "truncate_additive": ("16 bits cut", (A, 16), COUNT),
    "weigh_reached": (
        "four thresholds, 37 bits, one output",
        (X, [16, 64, 256, 2**20], [0, 2, 4, 16], 37, [([1, 2, 3, 4, 5], True)]),
        COUNT,
    ),
    "largest_coarse": ("of 10 entries, a row", (_tensor(COUNT, 10), 2, 20), COUNT),
    "exp_below": ("of 10 entries, a row", (AROWS, A, 12), COUNT),
    "octave": ("up to 10", (A, 10), COUNT),
    "spline_times": ("root, times a number", (A, A, "root"), COUNT),
    "series": ("16 terms, modulo 2^40", (A, refmpc.half_wave(6, 16), 40), COUNT),
    "series_times": ("5 terms, 10 entries of 16 bits, a row", (A, refmpc.half_wave(2, 5), AROWS, 64, KEPT), COUNT),
    "series_together": ("two functions of 16 terms, modulo 2^40", (A, [refmpc.half_wave(6, 16)] * 2, 40), COUNT),
    "open_squares": ("10 entries of 16 bits, a row", (AROWS, KEPT, 28), COUNT),
    "open_kept": ("16 bits", (A, KEPT), COUNT),
    "open_product": ("a number times 10 entries of 16 bits, a row", (A, KEPT, AROWS), COUNT),
    "smooth": ("sigmoid", (X, "sigmoid"), COUNT),
    "gated": ("a bit times a number", (X, X), COUNT),
    "scale_rows": ("10 entries, a row", (A, _tensor(COUNT, 10), 16), COUNT),
    "probabilities": ("10 classes, a row", (_tensor(COUNT, 10), 64.0), COUNT),
    "cut_and_square": ("10 entries, a row", (AROWS, 16, X), COUNT),
    "clip_root": ("up to 2^20", (X, 2.0**20), COUNT),
    "shuffle": ("an entry", ([_tensor(COUNT, 4)],), 4 * COUNT),
    "joint_gaussian": ("a sample", (None, (COUNT,)), COUNT),
}


def _full_name(name: str) -> str:
    """Under which name a primitive is documented."""
    module = refmpc.PROTOCOLS[name]._function.__module__
    return f"{module}.{name}" if isinstance(sys.modules.get(f"refmpc.{name}"), ModuleType) else f"refmpc.{name}"


def _hidden_primitives() -> str:
    names = [_full_name(name) for name in refmpc.PROTOCOLS]
    return "\n\n".join(f"::: {name}" for name in names if name.count(".") > 1)


def cost_table(primitives: dict[str, Any] | None = None) -> str:
    """Markdown: rounds, bytes an element, call and source of every declared primitive."""
    declared = refmpc.PROTOCOLS if primitives is None else primitives
    missing = sorted(set(declared) - set(CALLS))
    if missing:
        raise KeyError(f"docs/hooks/cost_table.py: add a line to CALLS for {', '.join(missing)}")
    lines = ["| primitive | rounds | bytes an element, all servers | of what | source |", "|---|---|---|---|---|"]
    for name, (words, arguments, elements) in CALLS.items():
        if name not in declared:
            raise KeyError(f"docs/hooks/cost_table.py: {name!r} is in CALLS but is no primitive any more")
        cost = declared[name].cost(*arguments)
        each = f"{cost.bytes / elements:.4g}"
        lines.append(f"| [`{name}`][{_full_name(name)}] | {cost.rounds} | {each} | {words} | {declared[name].source} |")
    return "\n".join(lines)


def on_page_markdown(markdown: str, **_: Callable[..., Any]) -> str:
    """Called by mkdocs for every page."""
    for mark, made in ((MARK, cost_table), (HIDDEN_MARK, _hidden_primitives), (OPTIONS_MARK, settings_table)):
        if mark in markdown:
            markdown = markdown.replace(mark, made())
    return markdown
