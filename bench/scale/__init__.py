"""A federation of many rows through ``ppvfl``, with time, bytes and peak memory of every phase: ``python -m
bench.scale``."""
