"""One way to run a benchmark: its options, the machine it ran on, a table for people, JSON for programs.

A benchmark is a function with keyword arguments and a function that shows what it found::

    main = benchmark(measure, table, rows="rows of each client")

The options of the command are the arguments of ``measure``: name, type and default are read from its signature, and the
texts (or ``Option``) given here are their help. ``--json`` prints what was found beside the machine and its load.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, get_type_hints

from rich.console import Console, RenderableType

from accel.errors import PpvflError
from bench.comparison.systems import machine

__all__ = ["Option", "benchmark"]


@dataclass(frozen=True)
class Option:
    """Help of an argument, and the values it may take."""

    help: str
    choices: Sequence[str] | None = None
    metavar: str | None = None


def benchmark(
    measure: Callable[..., Any],
    show: Callable[[Any], RenderableType | Sequence[RenderableType]],
    **options: str | Option,
) -> Callable[..., None]:
    """The command ``main(argv)`` of a benchmark."""
    module = sys.modules[measure.__module__]
    name = module.__spec__.name if module.__spec__ else module.__name__  # a module that is run is called __main__

    def main(argv: Sequence[str] | None = None) -> None:
        parser = argparse.ArgumentParser(
            prog=f"python -m {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        hints = get_type_hints(measure)
        for parameter in inspect.signature(measure).parameters.values():
            _add(parser, parameter, hints[parameter.name], options.get(parameter.name, ""))
        parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
        arguments = vars(parser.parse_args(argv))
        as_json, about = arguments.pop("json"), machine()
        console, errors = Console(), Console(stderr=True)
        try:
            with errors.status(f"measuring ({name})"):
                found = measure(**arguments)
        except PpvflError as error:
            parser.error(str(error))
        if as_json:
            print(json.dumps({"machine": about, "found": _plain(found)}, indent=2))
            return
        shown = show(found)
        for part in shown if isinstance(shown, list | tuple) else [shown]:
            console.print(part)
        console.print(", ".join(f"{fact} {value}" for fact, value in about.items()), style="dim", highlight=False)

    return main


def _add(parser: argparse.ArgumentParser, parameter: inspect.Parameter, hint: Any, text: str | Option) -> None:
    option = text if isinstance(text, Option) else Option(text)
    flag, default = f"--{parameter.name.replace('_', '-')}", parameter.default
    shown = f" (default {default})" if default not in (None, "", False, inspect.Parameter.empty) else ""
    if hint is bool:
        parser.add_argument(flag, action="store_true", help=option.help)
        return
    types = [kind for kind in getattr(hint, "__args__", (hint,)) if kind in (int, float, str)]
    parser.add_argument(
        flag, type=types[0] if types else str, default=default, choices=option.choices, metavar=option.metavar,
        help=f"{option.help}{shown}".replace("%", "%%"),
    )  # fmt: skip


def _plain(found: Any) -> Any:
    """What ``json`` takes."""
    if is_dataclass(found) and not isinstance(found, type):
        return asdict(found)
    if isinstance(found, dict):
        return {name: _plain(value) for name, value in found.items()}
    return [_plain(each) for each in found] if isinstance(found, list | tuple) else found
