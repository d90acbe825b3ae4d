"""The command ``python -m protocols.gl_bmf``; the method is ``protocols.methods.gl_bmf``."""

from __future__ import annotations

from protocols.methods import gl_bmf
from protocols.run.launch import main

__all__: list[str] = []

if __name__ == "__main__":
    main(gl_bmf.METHOD.facts.name, gl_bmf.__doc__)
