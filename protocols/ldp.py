"""LDP-G: every client noises its own rows before they leave; no secure computation is needed, and accuracy pays for it.

    python -m protocols.ldp

Labels stay at the label client, who trains the model on everybody's noised rows.
"""

from __future__ import annotations

from protocols.run.launch import main_in_the_clear
from vfl.twins import train_ldp_g

__all__: list[str] = []

if __name__ == "__main__":
    main_in_the_clear("ldp", __doc__, train_ldp_g)
