"""What is on disk: rows, the log of steps, releases, models, budgets, audit logs."""
