"""Connections between participants: credentials, the listener, one TLS channel, and what a doctor checks of them."""
