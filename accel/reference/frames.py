"""Rounds in one compiled call: numpy has none, so rounds are carried out in Python (``refmpc.net.prepared``)."""

from __future__ import annotations

from typing import Any

__all__ = ["ROUND_SCRATCH", "carry_round", "has_compiled_rounds", "round_is_done"]

has_compiled_rounds = False
round_is_done = 1
ROUND_SCRATCH = 0


def carry_round(*arguments: Any) -> int:
    """Nothing is done."""
    return 0
