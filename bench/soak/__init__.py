"""A federation in processes that trains while faults happen to it: ``python -m bench.soak``."""
