"""How fast a server draws noise: ``python -m bench.noise``. Samples of the grid Gaussian, and filtered coordinates.

The aim is 5 million samples a second.
"""

from __future__ import annotations

import time

import numpy as np
from rich.table import Table

import accel
from accel.gaussian import GridGaussian
from accel.prg import KEY_BYTES, Stream
from accel.validate import require_integer
from bench.harness import benchmark
from vfl.dp import NoiseFilter, factorise

__all__ = ["main", "measure"]

STD = 2.0**36  # a usual std in grid units; the speed does not depend on it


def measure(samples: int = 5_000_000, repeat: int = 3) -> dict[str, float]:
    """Millions of samples and of filtered coordinates a second, the best of ``repeat``."""
    require_integer("samples", samples, 1000)
    require_integer("repeat", repeat, 1)
    sampler = GridGaussian(STD, accel.backend())
    width, rows = 20_010, max(1, samples // 20_010)
    filtering = NoiseFilter(factorise("bisr", rows * (repeat + 1), bands=min(256, rows * (repeat + 1))), width)
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


def table(found: dict[str, float]) -> Table:
    """Speeds for people."""
    view = Table("what", title="Noise")
    view.add_column("millions a second", justify="right")
    view.add_row("grid Gaussian samples", f"{found['samples']:.1f}")
    view.add_row("coordinates filtered by BISR, 256 taps", f"{found['filtered']:.1f}")
    return view


main = benchmark(measure, table, samples="of the grid Gaussian", repeat="repetitions; the best counts")

if __name__ == "__main__":
    main()
