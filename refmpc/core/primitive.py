"""The declaration that every primitive carries: rounds, bytes, and the paper it follows.

    @primitive(cost=lambda x, y: Cost(rounds=1, bytes=24 * x.size), source="...")
    async def multiply(x, y): ...

``multiply.cost(x, y)`` is the declared cost of that very call; a test runs every primitive and compares it with the
transport's counters. ``PROTOCOLS`` lists all of them with their sources.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

from refmpc.core.rounds import Round

__all__ = ["PROTOCOLS", "Cost", "Primitive", "primitive"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Cost:
    """Rounds, and payload bytes summed over the three parties."""

    rounds: int
    bytes: int

    def __add__(self, other: Cost) -> Cost:
        """One after the other."""
        return Cost(self.rounds + other.rounds, self.bytes + other.bytes)

    def beside(self, other: Cost) -> Cost:
        """Both in the same rounds."""
        return Cost(max(self.rounds, other.rounds), self.bytes + other.bytes)


class Primitive(Generic[Arguments, Result]):
    """An async protocol with its declared cost."""

    def __init__(
        self,
        function: Callable[Arguments, Coroutine[Round, None, Result]],
        cost: Callable[..., Cost],
        source: str,
    ):
        functools.update_wrapper(self, function)
        self._function = function
        self._cost = cost
        self.name = function.__name__
        self.source = source

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Coroutine[Round, None, Result]:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> str:
        return self.name  # pickled by reference, like a function

    def cost(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Cost:
        """The declared cost of the call with these arguments."""
        return self._cost(*args, **kwargs)


PROTOCOLS: dict[str, Primitive[Any, Any]] = {}


def primitive(
    *,
    source: str,
    cost: Callable[..., Cost],
) -> Callable[[Callable[Arguments, Coroutine[Round, None, Result]]], Primitive[Arguments, Result]]:
    """Declare the cost (a function of the call's arguments) and the source of an async protocol."""

    def declare(function: Callable[Arguments, Coroutine[Round, None, Result]]) -> Primitive[Arguments, Result]:
        primitive = Primitive(function, cost, source)
        PROTOCOLS[primitive.name] = primitive
        return primitive

    return declare
