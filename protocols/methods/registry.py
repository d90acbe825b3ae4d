"""The methods by name."""

from __future__ import annotations

from accel.validate import require_choice
from protocols.methods import g_bmf, g_shuff, gl_bmf
from protocols.methods.method import Method

__all__ = ["METHODS", "method"]

METHODS: dict[str, Method] = {one.facts.name: one for one in (g_bmf.METHOD, g_shuff.METHOD, gl_bmf.METHOD)}


def method(name: str) -> Method:
    """The method called ``name``."""
    return METHODS[require_choice("protocol", name, METHODS)]
