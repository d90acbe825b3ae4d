"""The kernels in numba: the same names and results as ``accel.reference``."""
