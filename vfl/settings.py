"""How an option is declared: once, as a field of a dataclass, with its default, its range and a sentence of help.

    epochs: int = setting(40, "passes over the rows", low=1)

``check_settings(self)`` in ``__post_init__`` holds every value against its declaration. The command line,
``federation.toml``, the estimators and the documentation are made from the same declarations (``protocols.settings``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from accel.validate import require, require_choice, require_integer, require_real

__all__ = ["DOORS", "Setting", "check_settings", "setting", "settings_of"]

DOORS = ("command", "file", "api")


@dataclass(frozen=True)
class Setting:
    """One option. ``several``: a tuple of such values. ``optional``: None means that the run chooses.

    ``needs``: what a method must be able to do for the option to mean something (``vfl.methods``). ``open_weights``:
    why another value than the default needs ``weights = "open"``, and the way out. ``doors``: where users give it.
    ``usual``: what holds at a door where nothing is given, if that is not ``default``; None is chosen from public
    sizes.
    """

    default: Any
    help: str
    name: str = ""
    kind: type = str
    several: bool = False
    optional: bool = False
    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    choices: tuple[str, ...] = ()
    way_out: str = ""
    metavar: str | None = None
    group: str = "training"
    needs: str = ""
    open_weights: str = ""
    doors: tuple[str, ...] = DOORS
    usual: tuple[tuple[str, Any], ...] = ()
    written: str = "value"  # in a new federation.toml: its value, a "comment", or "nothing"
    agreed: str = "always"  # whether participants compare it: "always", "if changed" or "never"

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def type_in_words(self) -> str:
        """What may be given, for tables and error messages."""
        if self.choices:
            return ", ".join(self.choices)
        word = {bool: "true or false", int: "whole number", float: "number", str: "text"}[self.kind]
        if self.several:
            word = f"list of {word}s"
        if math.isinf(self.low) and math.isinf(self.high):
            return word
        left, right = "(" if self.open_low or math.isinf(self.low) else "[", ")" if self._ends_open else "]"
        return f"{word} in {left}{self.low:g}, {self.high:g}{right}"

    @property
    def _ends_open(self) -> bool:
        return self.open_high or math.isinf(self.high)

    def at(self, door: str) -> Any:
        """The default at a door."""
        return dict(self.usual).get(door, self.default)

    def check(self, value: Any, where: str = "") -> Any:
        """The value, of its type; or ``InvalidArgument`` that names it as ``where``."""
        name = where or self.name
        if value is None and self.optional:
            return None
        if self.several:
            listed = isinstance(value, Sequence) and not isinstance(value, str)
            require(listed, name, value, f"a list of {'whole ' if self.kind is int else ''}numbers, such as [1, 3]")
            return tuple(self._check_one(name, one) for one in value)
        return self._check_one(name, value)

    def _check_one(self, name: str, value: Any) -> Any:
        if self.choices:
            return require_choice(name, value, self.choices, self.way_out)
        if self.kind is bool:
            require(isinstance(value, bool), name, value, "true or false")
            return value
        if self.kind is str:
            require(isinstance(value, str), name, value, "text")
            return value
        if self.kind is int:
            low, high = (None if math.isinf(end) else int(end) for end in (self.low, self.high))
            return require_integer(name, value, low, high, self.way_out)
        require(not isinstance(value, str | bool), name, value, "a number, without quotes")
        value = float(value) if isinstance(value, int) else value
        ends = {"open_low": self.open_low, "open_high": self.open_high}
        return require_real(name, value, self.low, self.high, way_out=self.way_out, **ends)


def setting(default: Any, help: str, **facts: Any) -> Any:
    """A field of a dataclass that is an option; ``facts`` as in ``Setting``."""
    several = isinstance(default, tuple)
    facts.setdefault("kind", str if several else type(default))
    return field(default=default, metadata={"setting": Setting(default, help, several=several, **facts)})


def settings_of(options: Any) -> tuple[Setting, ...]:
    """The options that a dataclass declares, in its order."""
    return tuple(
        replace(each.metadata["setting"], name=each.name) for each in fields(options) if "setting" in each.metadata
    )


def check_settings(options: Any) -> None:
    """Hold every value against its declaration."""
    for each in settings_of(options):
        each.check(getattr(options, each.name))
