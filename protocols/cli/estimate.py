"""``ppvfl estimate``: rounds, bytes, memory and time of the federation's training, before anybody connects.

Rounds, bytes and memory follow from the plan. Time is measured: short trainings of the same shape run on this machine,
with made-up rows and everything that servers do (``protocols.run.timing_run``), some 20 s; ``--no-calibration`` leaves
it out. Needs no keys and no data, and talks to nobody. Disks are measured where temporary files are made (TMPDIR).
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from accel.validate import require_choice, require_integer
from protocols.federation.public_plan import plan_for
from protocols.federation.read import load
from protocols.plan.gl_plan import LayerPlan
from protocols.run.calibration import calibrate, forecast, print_forecast
from protocols.run.report import estimate, estimate_as_facts, size_in_words
from protocols.run.timing_run import measure_trials
from refmpc.net.emulation import PROFILES

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """The command line."""
    parser = subparsers.add_parser(
        "estimate", help="what a training would cost, and how long it would take", description=__doc__
    )
    parser.add_argument("--config", default="federation.toml", metavar="FILE")
    parser.add_argument("--rows", type=int, required=True, metavar="N", help="people whom all clients have in common")
    parser.add_argument(
        "--network",
        default="loopback",
        metavar="NAME",
        help=f"{', '.join(PROFILES)}: between hosts, or (loopback, default) everybody on this machine",
    )
    parser.add_argument("--no-calibration", action="store_true", help="run nothing, and say nothing about time")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Prints, and leaves nothing behind."""
    config = load(arguments.config, pinned=False)
    network = require_choice("--network", arguments.network, PROFILES)
    plan = plan_for(config, require_integer("--rows", arguments.rows, 1))
    layers = isinstance(plan, LayerPlan)
    found = estimate(plan, keeps_steps=True)
    expected = None
    if not layers and not arguments.no_calibration:
        expected = forecast(
            plan, calibrate(plan, partial(measure_trials, config, arguments.rows), config.run.matching), network
        )
    if arguments.json:
        print(json.dumps(estimate_as_facts(plan, found, expected, network), indent=2))
        return 0
    console = Console()
    view = Table(
        title=f"{config.run.protocol}: {plan.schedule.num_steps:,} steps on {arguments.rows:,} rows", show_header=False
    )
    view.add_column(style="bold")
    view.add_column()
    view.add_row("between the servers", f"{found['rounds']:,.0f} rounds, {size_in_words(found['bytes'])}")
    view.add_row("from the clients", size_in_words(found["upload_bytes"]))
    view.add_row("memory", f"about {size_in_words(found['memory_per_server'])} a server")
    view.add_row("privacy", plan.claim.headline())
    console.print(view)
    if expected is not None:
        print_forecast(expected, network, console)
    elif layers:
        console.print(
            f"Time is not estimated for {config.run.protocol}: its clients compute in every step.", style="dim"
        )
    return 0
