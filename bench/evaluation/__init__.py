"""The paper's tables from real runs: cells, presets, engines, tables and report of ``python -m bench.paper``."""
