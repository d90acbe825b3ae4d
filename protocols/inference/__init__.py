"""Predictions on shares."""
