"""The command ``python -m protocols.g_shuff``; the method is ``protocols.methods.g_shuff``."""

from __future__ import annotations

from protocols.methods import g_shuff
from protocols.run.launch import main

__all__: list[str] = []

if __name__ == "__main__":
    main(g_shuff.METHOD.facts.name, g_shuff.__doc__)
