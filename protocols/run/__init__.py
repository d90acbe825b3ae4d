"""Runs: options, processes of this machine, reports, curves, logs."""
