"""The paper's tables from real runs: cells, presets, engines, tables and the report behind ``python -m bench.paper``."""
