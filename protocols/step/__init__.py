"""One training step on shares, and the clip inside it."""
