"""The methods of the paper: what servers and clients of each run, and what each can do."""
