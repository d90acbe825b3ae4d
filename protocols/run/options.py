"""The command line that all methods share: ``protocols.settings`` says which options there are."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from accel.errors import InvalidArgument
from protocols.plan.combinations import refuse_combination, refuse_measuring, usual_task
from protocols.run.exit import leaving
from protocols.settings import RunOptions, add_arguments, declared, refuse_what_is_not_taken
from protocols.version import add_version_option
from vfl.data.sets import EMBEDDED_TABLES, NUMBERS, TWO_CLASSES
from vfl.defaults import adam_rate, chosen_training, table_row_bound
from vfl.methods import Facts, facts
from vfl.training import SETTINGS, TrainingConfig

__all__ = ["RunOptions", "parse_options"]

MLP_LEARNING_RATE = 0.5  # on digits at ε = 3: 84 to 89 %; at 2 the noise in two layers multiplies


def parse_options(method: str, description: str | None, argv: list[str] | None = None) -> RunOptions:
    """Read the command line of one method; refuse what no run could be."""
    parser = argparse.ArgumentParser(
        prog=f"python -m protocols.{method}",
        usage="%(prog)s [options]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version_option(parser)
    add_arguments(parser, facts(method))
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    given |= SETTINGS.get(given.pop("setting", 0), {})
    try:
        return options_of(facts(method), given)
    except InvalidArgument as error:
        raise leaving(method, error) from None


def options_of(method: Facts, given: dict[str, Any]) -> RunOptions:
    """The options of a run on this machine, of which ``given`` were stated."""
    given = {each.name: each.check(given[each.name]) for each in declared("command") if each.name in given}
    own = given.get("embeddings") is None
    data = given.get("data", RunOptions.data)
    if method.takes("servers"):
        given.setdefault("weights", "open")
    if own and data in NUMBERS:
        given.setdefault("task", "regression")
    classes = 2 if own and data in TWO_CLASSES else 0
    given.setdefault("task", usual_task(method, classes, given.get("hidden", ()), given.get("gradients", "factored")))
    if own and data in EMBEDDED_TABLES and method.takes("frozen rows"):
        usual = _of_tables(method, given, *EMBEDDED_TABLES[data])
    else:
        usual = {"learning_rate": MLP_LEARNING_RATE} if given.get("hidden") else {}
        if given.get("optimiser") == "adam":
            usual["learning_rate"] = adam_rate(hidden=bool(given.get("hidden")))
    chosen = usual | given
    names = {field.name for field in fields(TrainingConfig)}
    training = TrainingConfig(**{name: value for name, value in chosen.items() if name in names})
    if method.takes("servers"):
        refuse_combination(method.name, training)
    refuse_what_is_not_taken(method.name, given)
    options = RunOptions(method.name, training, **{k: v for k, v in chosen.items() if k not in names})
    refuse_measuring(method, training, "public_fraction", options.public_fraction, options.patience)
    if options.resume is not None and not (Path(options.resume) / "config.json").exists():
        raise InvalidArgument(f"--resume {options.resume}: no config.json there, so no run to continue")
    return options


def _of_tables(method: Facts, given: dict[str, Any], rows: int, width: int) -> dict[str, Any]:
    """What holds for tables where nothing is stated."""
    rule = given.get("row_rule", "clip")
    training = chosen_training(
        given,
        rows,
        regression=given["task"] == "regression",
        averages=method.takes("averages"),
        patience=given.get("patience", 0),
    )
    return {"row_rule": "clip", "row_bound": table_row_bound(width) if rule == "clip" else 1.0, **training}
