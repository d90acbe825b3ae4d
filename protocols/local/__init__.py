"""Runs on this machine: options, processes, reports, curves, logs."""
