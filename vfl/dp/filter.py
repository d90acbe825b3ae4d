"""From random words to correlated noise: sampling, filtering in blocks, and one row per step with resume."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

import accel
from accel.gaussian import GridGaussian
from accel.prg import Stream
from accel.validate import require, require_integer
from vfl.dp.factorisation import Factorisation

__all__ = ["NoiseFilter", "NoiseSource", "sample_grid_gaussian"]

_BLOCK = 64
_COLUMNS = 16  # a slice is a multiple of so many, which is what kernels like


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
    one of the two. ``largest`` is a public bound of the integers. Memory: (bands−1)·width words, and 64·width more
    where floats are enough for the integers; those are kept in ``memory``, zeros, if it is given. Cost: one float64
    matrix product of bands+63 terms an entry where Σ|taps|·largest ≤ 2^53 without the first tap, else two; blocks of 64
    rows are the cheapest, single rows pay a copy of the history.
    """

    def __init__(
        self, factorisation: Factorisation, width: int, largest: int = 1 << 63, memory: np.ndarray | None = None
    ):
        self.factorisation = factorisation
        self.width = require_integer("width", width, 1)
        self._largest = require_integer("largest", largest, 1)
        self.steps_done = 0
        self._depth = factorisation.bands - 1
        self._kind: type | None = None
        self._history: np.ndarray | None = None
        self._ring: np.ndarray | None = None  # the history as floats, and room for a block
        taps = factorisation.integer_taps
        self._fits_ring = taps is not None and accel.kernels.fir_fits_ring(taps, self._largest)
        if self._fits_ring and memory is not None:
            self._ring = memory.reshape(self._depth + _BLOCK, self.width)

    def next_block(self, z_rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Filter the next rows of int64 noise; the result is at scale f_z + tap_bits (in ``out``, which may be
        ``z_rows``)."""
        found = self._next_block(self._admit(z_rows, np.int64), np.empty_like(z_rows) if out is None else out)
        if out is not None and found is not out:
            out[:] = found
        return found

    def _next_block(self, z: np.ndarray, out: np.ndarray) -> np.ndarray:
        f = self.factorisation
        if self._fits_ring:
            if self._ring is None:
                self._ring = np.zeros((self._depth + _BLOCK, self.width))
            position = self.steps_done - len(z)
            for top in range(0, len(z), _BLOCK):
                piece = slice(top, top + _BLOCK)
                accel.kernels.fir_ring(
                    self._ring, (position + top) % len(self._ring), z[piece], f.integer_taps, out[piece]
                )
            return out
        if self._history is None:
            self._history = np.zeros((self._depth, self.width), dtype=np.int64)
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
        if self._history is None:
            self._history = np.zeros((self._depth, self.width))
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
        if z.dtype != dtype:  # texts are made only for those who read them: this runs in every step
            require(False, "z_rows", z.dtype.name, f"an array of {np.dtype(dtype).name}")
        if z.ndim != 2 or z.shape[1] != self.width:
            require(False, "z_rows", f"an array of shape {z.shape}", f"of shape (rows, {self.width})")
        limit = self.factorisation.num_steps
        if self.steps_done + len(z) > limit:
            require(
                False,
                "z_rows",
                f"rows {self.steps_done} to {self.steps_done + len(z) - 1}",
                f"within the {limit} steps of the factorisation",
                "its sensitivity covers no more steps: factorise for more",
            )
        if self._kind is None:
            self._kind = dtype
        if self._kind != dtype:
            require(False, "z_rows", z.dtype.name, f"{np.dtype(self._kind).name}, as before")
        self.steps_done += len(z)
        return z

    @property
    def takes_blas(self) -> bool:
        """Whether a block of 64 rows is a product of the BLAS library, which may start threads."""
        return not self._fits_ring or accel.kernels.fir_takes_blas(_BLOCK, self.width)

    def _remember(self, rows: np.ndarray) -> None:
        assert self._history is not None
        if self._depth:
            self._history = np.concatenate([self._history[len(rows) :], rows[-self._depth :]])


class NoiseSource:
    """One server's filtered noise, a row per step: samples, filters and hands out rows at scale f_z +
    tap_bits.

    ``open_stream(step)`` must give the stream of that step's noise, always the same for the same run
    (proofs §6.7), so a run resumed at ``start`` redraws nothing: FIR kinds replay bands−1 rows, bsr replays
    from step 0.

    Blocks of rows are the cheapest, but a block at once would hold up one step in ``block``. So the work is spread:
    while one block is handed out, the next is filtered, a slice of its columns a step, and the one after it is sampled,
    a row a step. ``work`` does one step's share; a caller that never calls it gets the same rows, a block at a time.
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
        self._width = require_integer("width", width, 1)
        ends = [width * part // self._block // _COLUMNS * _COLUMNS for part in range(self._block)] + [width]
        self._slices = [slice(left, right) for left, right in pairwise(ends) if left < right]
        # of all filters in one piece: small ones are touched page by page, each of which takes the system longer than
        # filtering it
        memory = np.zeros((factorisation.bands - 1 + _BLOCK) * width)
        self._filters = [self._filter_of(part, factorisation, memory) for part in self._slices]
        self.takes_blas = any(each.takes_blas for each in self._filters)  # which may start threads
        self._num_steps = factorisation.num_steps
        replayed = start if factorisation.is_recursive else min(start, factorisation.bands - 1)
        self._drawn = start - replayed
        for each in self._filters:
            each.steps_done = self._drawn
        self._ready = self._filtering = self._sampling = self._empty()
        while self._drawn < start:
            self._filter_rest(self._sampled_block(start))

    def _filter_of(self, part: slice, factorisation: Factorisation, memory: np.ndarray) -> NoiseFilter:
        rows = factorisation.bands - 1 + _BLOCK
        own = memory[rows * part.start : rows * part.stop]
        return NoiseFilter(factorisation, part.stop - part.start, self._sampler.largest, own)

    def next_row(self) -> np.ndarray:
        """The filtered noise of the next step, int64 of length ``width``."""
        if not len(self._ready.rows):
            require(self.step < self._num_steps, "step", self.step, f"below num_steps = {self.step}", "the run is over")
            if not len(self._filtering.rows):
                self._filtering = self._sampled_block(self._num_steps)
            self._filter_rest(self._filtering)
            self._ready, self._filtering = self._filtering, self._empty()
        row, self._ready.rows = self._ready.rows[0], self._ready.rows[1:]
        self.step += 1
        return row

    def work(self) -> None:
        """One step's share of the work for later blocks."""
        if not len(self._filtering.rows):
            self._filtering = self._sampled_block(self._num_steps)
        if self._filtering.slices_done < len(self._slices):
            self._filter_slice(self._filtering)
        if not len(self._sampling.rows):
            self._sampling = self._empty(min(self._block, self._num_steps - self._drawn))
        self._sample(1)

    def _empty(self, rows: int = 0) -> _Block:
        return _Block(np.empty((rows, self._width), dtype=np.int64))

    def _sample(self, rows: int) -> None:
        """Up to so many rows of the block that is being sampled."""
        block = self._sampling
        for row in block.rows[block.sampled : block.sampled + rows]:
            self._sampler.fill(self._open_stream(self._drawn), row)
            self._drawn += 1
            block.sampled += 1

    def _sampled_block(self, stop: int) -> _Block:
        """The block that is being sampled, or the next one up to step ``stop``, with all its rows."""
        if not len(self._sampling.rows):
            self._sampling = self._empty(min(self._block, stop - self._drawn))
        self._sample(self._block)
        block, self._sampling = self._sampling, self._empty()
        return block

    def _filter_slice(self, block: _Block) -> None:
        part = self._slices[block.slices_done]
        self._filters[block.slices_done].next_block(block.rows[:, part], out=block.rows[:, part])
        block.slices_done += 1

    def _filter_rest(self, block: _Block) -> None:
        while block.slices_done < len(self._slices):
            self._filter_slice(block)


class _Block:
    """Rows of noise: sampled one by one, then filtered in place slice by slice, then handed out."""

    def __init__(self, rows: np.ndarray):
        self.rows = rows
        self.sampled = 0
        self.slices_done = 0


def _band(taps: np.ndarray, rows: int) -> np.ndarray:
    """Row t holds the reversed taps so that it meets the rows t..t+len(taps)−1 of (history, block)."""
    band = np.zeros((rows, rows + len(taps) - 1))
    for t in range(rows):
        band[t, t : t + len(taps)] = taps[::-1]
    return band
