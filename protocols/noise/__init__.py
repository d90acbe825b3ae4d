"""The noise of a run: each server's own, and joint noise that no server knows."""
