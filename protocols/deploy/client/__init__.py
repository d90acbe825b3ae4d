"""A client between organisations: its columns, alignment, uploads, live training."""
