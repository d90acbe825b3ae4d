"""What a server writes down: the audit log and structured logs."""
