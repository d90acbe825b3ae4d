"""A server's training run, and what it keeps on disk."""
