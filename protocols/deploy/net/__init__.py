"""Connections between participants: credentials, the door, one TLS channel."""
