"""Plain: one server, no secure computation, no privacy: the upper end of every table.

    python -m protocols.plain

Same data, same command line as the secure protocols; prints no claim, because there is none.
"""

from __future__ import annotations

from protocols.run.launch import main_in_the_clear
from vfl.twins import train_plain

__all__: list[str] = []

if __name__ == "__main__":
    main_in_the_clear("plain", __doc__, train_plain)
