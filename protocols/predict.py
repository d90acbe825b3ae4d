"""Predict with a trained model, on shares: python -m protocols.predict --run runs/g_bmf-...

Takes the test rows of a finished run: every client shares its own columns of them, three servers compute, and one
client receives the predictions. What that opens, and to whom, is in ``protocols.methods.prediction``.
"""

from __future__ import annotations

from protocols.run.predict import main

__all__: list[str] = []

if __name__ == "__main__":
    main(__doc__)
