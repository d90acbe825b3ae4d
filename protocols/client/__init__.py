"""What a client does: commit to its columns, share them, take part in GL-BMF."""
