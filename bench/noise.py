"""How fast a server draws noise: ``python -m bench.noise``. Samples of the grid Gaussian, and filtered coordinates.

The aim is 5 million samples a second.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from rich.console import Console
from rich.table import Table

import accel
from accel.gaussian import GridGaussian
from accel.prg import KEY_BYTES, Stream
from accel.validate import require_integer
from bench.comparison.systems import machine
from vfl.dp import NoiseFilter, factorise

__all__ = ["main", "measure"]

STD = 2.0**36  # a usual std in grid units; the speed does not depend on it


def measure(samples: int, repeat: int) -> dict[str, float]:
    """Millions of samples and of filtered coordinates a second, the best of ``repeat``."""
    require_integer("samples", samples, 1000)
    require_integer("repeat", repeat, 1)
    sampler = GridGaussian(STD, accel.backend())
    width, rows = 20_010, max(1, samples // 20_010)
    filtering = NoiseFilter(factorise("bisr", rows * (repeat + 1), bands=256), width)
    z = np.random.default_rng(0).standard_normal((rows, width))
    sampler.sample(Stream(bytes(KEY_BYTES)), 1000)
    filtering.next_block_float(z)
    best = {"samples": float("inf"), "filtered": float("inf")}
    for _ in range(repeat):
        started = time.perf_counter()
        sampler.sample(Stream(bytes(KEY_BYTES)), samples)
        best["samples"] = min(best["samples"], (time.perf_counter() - started) / samples)
        started = time.perf_counter()
        filtering.next_block_float(z)
        best["filtered"] = min(best["filtered"], (time.perf_counter() - started) / z.size)
    return {name: 1e-6 / seconds for name, seconds in best.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.noise", description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=5_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    found, about = measure(options.samples, options.repeat), machine()
    if options.json:
        print(json.dumps({"millions a second": found, "machine": about}))
        return
    table = Table(title=f"Noise, load {about['load before the run']}")
    table.add_column("what")
    table.add_column("millions a second", justify="right")
    table.add_row("grid Gaussian samples", f"{found['samples']:.1f}")
    table.add_row("coordinates filtered by BISR, 256 taps", f"{found['filtered']:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
