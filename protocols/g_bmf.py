"""The command ``python -m protocols.g_bmf``; the method is ``protocols.methods.g_bmf``."""

from __future__ import annotations

from protocols.methods import g_bmf
from protocols.run.launch import main

__all__: list[str] = []

if __name__ == "__main__":
    main(g_bmf.METHOD.facts.name, g_bmf.__doc__)
