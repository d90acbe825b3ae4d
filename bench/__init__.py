"""Measurements: every speed or accuracy claim comes out of here."""
