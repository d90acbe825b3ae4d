"""From random words to correlated noise: sampling, filtering in blocks, and one row per step with resume."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import accel
from accel.gaussian import GridGaussian
from accel.prg import Stream
from accel.validate import require, require_integer
from vfl.dp.factorisation import Factorisation

__all__ = ["NoiseFilter", "NoiseSource", "sample_grid_gaussian"]

_BLOCK = 64


def sample_grid_gaussian(stream: Stream, count: int, std_in_grid_units: float) -> np.ndarray:
    """``count`` samples of round(N(0, std²)) as int64, exact (``accel.gaussian``); std from 8 to 2^52
    grid units.

    For many draws of one std keep a ``GridGaussian``: its table takes a few milliseconds to build.
    """
    return GridGaussian(std_in_grid_units).sample(stream, count)


class NoiseFilter:
    """Ω̂⁻¹ applied to a stream of noise rows, in order, a block at a time; history is carried along.

    Integers (``next_block``): rows at scale f_z in, filtered rows at scale f_z + tap_bits out, exact
    modulo 2^64. Floats (``next_block_float``): the same filter for the plaintext twin. One filter does
    one of the two. Memory: (bands−1)·width words. Cost: two float64 matrix products of bands+63 terms per
    entry; blocks of 64 rows are the cheapest, single rows pay a copy of the history.
    """

    def __init__(self, factorisation: Factorisation, width: int):
        self.factorisation = factorisation
        self.width = require_integer("width", width, 1)
        self.steps_done = 0
        self._depth = factorisation.bands - 1
        self._history: np.ndarray | None = None

    def next_block(self, z_rows: np.ndarray) -> np.ndarray:
        """Filter the next rows of int64 noise; the result is at scale f_z + tap_bits."""
        z = self._admit(z_rows, np.int64)
        assert self._history is not None
        f = self.factorisation
        if f.integer_taps is not None:
            out = accel.kernels.fir_taps(self._history, z, f.integer_taps)
            self._remember(z)
            return out
        assert f.integer_strategy is not None
        out = accel.kernels.recursive_filter(self._history, z, f.integer_strategy, f.strategy_bits)
        self._remember(out)
        return out << f.tap_bits

    def next_block_float(self, z_rows: np.ndarray) -> np.ndarray:
        """Filter the next rows of float noise; the result has the scale of the input."""
        z = self._admit(z_rows, np.float64)
        pieces = [self._float_piece(z[top : top + _BLOCK]) for top in range(0, len(z), _BLOCK)]
        return np.concatenate(pieces) if pieces else z

    def _float_piece(self, z: np.ndarray) -> np.ndarray:
        assert self._history is not None
        f = self.factorisation
        if f.integer_taps is not None:
            band = _band(f.noising_taps, len(z))
            out = band[:, : self._depth] @ self._history + band[:, self._depth :] @ z
            self._remember(z)
            return out
        band = _band(f.strategy_coefficients(f.bands), len(z))
        # Ω̂ y = z, block by block: the old y go to the right-hand side
        out = np.linalg.solve(band[:, self._depth :], z - band[:, : self._depth] @ self._history)
        self._remember(out)
        return out

    def _admit(self, z_rows: np.ndarray, dtype: type) -> np.ndarray:
        z = np.asarray(z_rows)
        require(z.dtype == dtype, "z_rows", z.dtype.name, f"an array of {np.dtype(dtype).name}")
        require(
            z.ndim == 2 and z.shape[1] == self.width,
            "z_rows",
            f"an array of shape {z.shape}",
            f"of shape (rows, {self.width})",
        )
        limit = self.factorisation.num_steps
        require(
            self.steps_done + len(z) <= limit,
            "z_rows",
            f"rows {self.steps_done} to {self.steps_done + len(z) - 1}",
            f"within the {limit} steps of the factorisation",
            "its sensitivity covers no further step: factorise for more steps",
        )
        if self._history is None:
            self._history = np.zeros((self._depth, self.width), dtype=dtype)
        require(self._history.dtype == dtype, "z_rows", z.dtype.name, f"{self._history.dtype.name}, as before")
        self.steps_done += len(z)
        return z

    def _remember(self, rows: np.ndarray) -> None:
        assert self._history is not None
        if self._depth:
            self._history = np.concatenate([self._history[len(rows) :], rows[-self._depth :]])


class NoiseSource:
    """One server's filtered noise, a row per step: samples, filters and hands out rows at scale f_z +
    tap_bits.

    ``open_stream(step)`` must give the stream of that step's noise, always the same for the same run
    (DESIGN §7), so a run resumed at ``start`` redraws nothing: FIR kinds replay bands−1 rows, bsr replays
    from step 0.
    """

    def __init__(
        self,
        factorisation: Factorisation,
        width: int,
        std_in_grid_units: float,
        open_stream: Callable[[int], Stream],
        *,
        start: int = 0,
        block: int = _BLOCK,
    ):
        self.step = require_integer("start", start, 0, factorisation.num_steps)
        self._block = require_integer("block", block, 1)
        self._sampler = GridGaussian(std_in_grid_units)
        self._open_stream = open_stream
        self._filter = NoiseFilter(factorisation, width)
        replayed = start if factorisation.is_recursive else min(start, factorisation.bands - 1)
        self._filter.steps_done = self._drawn = start - replayed
        while self._drawn < start:
            self._draw(min(self._block, start - self._drawn))
        self._ready = np.empty((0, width), dtype=np.int64)

    def next_row(self) -> np.ndarray:
        """The filtered noise of the next step, int64 of length ``width``."""
        if not len(self._ready):
            left = self._filter.factorisation.num_steps - self.step
            require(left > 0, "step", self.step, f"below num_steps = {self.step}", "the run is over")
            self._ready = self._draw(min(self._block, left))
        row, self._ready = self._ready[0], self._ready[1:]
        self.step += 1
        return row

    def _draw(self, rows: int) -> np.ndarray:
        steps = range(self._drawn, self._drawn + rows)
        z = np.stack([self._sampler.sample(self._open_stream(t), self._filter.width) for t in steps])
        self._drawn += rows
        return self._filter.next_block(z)


def _band(taps: np.ndarray, rows: int) -> np.ndarray:
    """Row t holds the reversed taps so that it meets the rows t..t+len(taps)−1 of (history, block)."""
    band = np.zeros((rows, rows + len(taps) - 1))
    for t in range(rows):
        band[t, t : t + len(taps)] = taps[::-1]
    return band
