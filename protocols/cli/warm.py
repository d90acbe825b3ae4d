"""``ppvfl warm``: compile every kernel once, at the installation or when an image is built, so that no training does.

A kernel is compiled for this machine's kind of processor when it is first used, and kept: where NUMBA_CACHE_DIR says,
or beside the source, or in the user's cache directory. A process that may write to none of them uses what was compiled
there.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import accel
from protocols.run.warm_up import KINDS, warm_up
from vfl.alignment import rehearse

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """The command line."""
    words = "compile the kernels of this machine, once after an installation"
    subparsers.add_parser("warm", help=words, description=__doc__)


def run(arguments: argparse.Namespace) -> int:
    """Compile, and say what and where."""
    begun = time.monotonic()
    for number, (training, classes) in enumerate(KINDS, 1):
        layers = "a hidden layer" if training.hidden else "one layer"
        print(f"compiling {number} of {len(KINDS)}: {training.task}, {training.weights} weights, {layers}", flush=True)
        warm_up(training, classes)
    print("compiling the matching of rows", flush=True)
    rehearse("ot", 64)
    print(f"every kernel is compiled ({time.monotonic() - begun:.0f} s), kept in {accel.kept_in()}")
    return 0
