"""Clients that run side by side in threads."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["together"]

PATIENCE = 120.0  # seconds for what takes one: the machine may have other work


def together(work: dict[str, Any]) -> dict[str, Any]:
    """Run one function per client, side by side; what each returned or raised."""
    found: dict[str, Any] = {}

    def play(name: str) -> None:
        try:
            found[name] = work[name]()
        except Exception as error:
            found[name] = error

    threads = [threading.Thread(target=play, args=(name,), daemon=True) for name in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    return found
