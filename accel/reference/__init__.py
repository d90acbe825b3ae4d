"""The kernels in plain numpy: short and obviously right."""
