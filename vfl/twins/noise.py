"""Noise of a twin: drawn from a seed and filtered in blocks, or given from outside.

A twin adds to the *sum* of clipped gradients, in the flat layout of ``vfl.gradients``. Noise given from
outside (an array of shape (steps, n) or a function of the step) is added as it is: this is how a secure run
is compared with its twin.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from accel.validate import require
from vfl.dp import Factorisation, NoiseFilter

__all__ = ["GivenNoise", "SinglePrecisionFilter", "StepNoise", "filtered_noise", "given_noise", "no_noise"]

Floats = npt.NDArray[np.floating]
StepNoise = Callable[[int], Floats]
GivenNoise = Floats | StepNoise

_BLOCK = 64


def no_noise(num_parameters: int, dtype: npt.DTypeLike) -> StepNoise:
    zeros = np.zeros(num_parameters, dtype=dtype)
    return lambda step: zeros


def given_noise(noise: GivenNoise, num_steps: int, num_parameters: int, dtype: npt.DTypeLike) -> StepNoise:
    """Check and wrap noise from outside; a wrong shape is refused before training starts."""
    if callable(noise):

        def from_function(step: int) -> Floats:
            row = np.asarray(noise(step), dtype=dtype)
            require(row.shape == (num_parameters,), f"noise({step})", row.shape, f"of shape ({num_parameters},)")
            return row

        return from_function
    table = np.asarray(noise)
    require(
        table.ndim == 2 and table.shape[0] >= num_steps and table.shape[1] == num_parameters,
        "noise",
        table.shape,
        f"of shape ({num_steps}, {num_parameters})",
    )
    return lambda step: table[step].astype(dtype, copy=False)


def filtered_noise(
    factorisation: Factorisation,
    num_parameters: int,
    std: float,
    seed: int,
    dtype: npt.DTypeLike = np.float64,
) -> StepNoise:
    """std·(Ω̂⁻¹ z)[t] for t = 0, 1, … in order, z standard normal from ``seed``; blocks of 64 steps.

    numpy's generator, because a twin releases nothing: the protocols draw theirs from AES-CTR. float64 goes
    through the DP engine's filter; float32 runs the same taps in single precision, twice as fast, on numbers
    of its own (one seed gives different noise in the two precisions).
    """
    return _FilteredNoise(factorisation, num_parameters, std, seed, dtype)


class _FilteredNoise:
    """One row per step, drawn and filtered a block at a time."""

    def __init__(self, factorisation: Factorisation, width: int, std: float, seed: int, dtype: npt.DTypeLike) -> None:
        self._random = np.random.Generator(np.random.SFC64([seed, 0x6E6F697365]))
        self._num_steps, self._width, self._std, self._dtype = factorisation.num_steps, width, std, dtype
        single = np.dtype(dtype) == np.float32
        self._single = SinglePrecisionFilter(factorisation, width) if single else None
        self._double = NoiseFilter(factorisation, width)
        self._block: Floats = np.empty((0, width), dtype=dtype)
        self._start = self._next = 0

    def __call__(self, step: int) -> Floats:
        require(step == self._next, "step", step, f"{self._next}: noise is drawn in order")
        if step - self._start >= len(self._block):
            self._block, self._start = self._draw(min(_BLOCK, self._num_steps - step)), step
        self._next += 1
        return self._block[step - self._start]

    def _draw(self, rows: int) -> Floats:
        if self._single is not None:
            block = self._single.next_block(self._random.standard_normal((rows, self._width), dtype=np.float32))
            block *= np.float32(self._std)
            return block
        z = self._random.standard_normal((rows, self._width))
        return (self._std * self._double.next_block_float(z)).astype(self._dtype)


class SinglePrecisionFilter:
    """The filter of Ω̂⁻¹ in float32: one matrix product per block over a window of past rows.

    FIR kinds keep past noise and multiply by the taps; bsr keeps past *filtered* rows y and solves Ω̂y = z, whose
    block on the diagonal is inverted once. The window has room for several blocks, so that the history moves only
    now and then.
    """

    def __init__(self, factorisation: Factorisation, width: int) -> None:
        self._recursive = factorisation.is_recursive
        taps = factorisation.noising_taps
        if self._recursive:
            taps = factorisation.strategy_coefficients(factorisation.bands)
        self._taps = taps.astype(np.float32)
        self._depth = len(self._taps) - 1
        self._window = np.zeros((self._depth + 8 * _BLOCK, width), dtype=np.float32)
        self._end = self._depth
        self._bands: dict[int, Floats] = {}

    def next_block(self, z: Floats) -> Floats:
        rows = len(z)
        if self._depth == 0:
            return z / self._taps[0] if self._recursive else z * self._taps[0]
        if self._end + rows > len(self._window):
            self._window[: self._depth] = self._window[self._end - self._depth : self._end].copy()
            self._end = self._depth
        past = self._window[self._end - self._depth : self._end]
        here = self._window[self._end : self._end + rows]
        here[:] = z
        self._end += rows
        band = self._band(rows)
        if self._recursive:
            np.subtract(z, band[:, : self._depth] @ past, out=here)
            here[:] = band[:, self._depth :] @ here
            return here.copy()
        return band @ self._window[self._end - rows - self._depth : self._end]

    def _band(self, rows: int) -> Floats:
        """(rows, depth + rows): what meets the past, and what meets this block (its inverse for bsr)."""
        if rows not in self._bands:
            band = np.zeros((rows, rows + self._depth))
            for t in range(rows):
                band[t, t : t + self._depth + 1] = self._taps[::-1]
            if self._recursive:
                band[:, self._depth :] = np.linalg.inv(band[:, self._depth :])
            self._bands[rows] = band.astype(np.float32)
        return self._bands[rows]
