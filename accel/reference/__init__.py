"""The kernels in plain numpy: short and obviously right."""

from accel.reference.noise import fir_taps, grid_gaussian_attempts, recursive_filter

__all__ = ["fir_taps", "grid_gaussian_attempts", "recursive_filter"]
