"""The kernels in numba: the same names and results as ``accel.reference``."""

from accel.compiled.noise import fir_taps, grid_gaussian_attempts, recursive_filter

__all__ = ["fir_taps", "grid_gaussian_attempts", "recursive_filter"]
