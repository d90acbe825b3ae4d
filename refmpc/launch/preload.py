"""What the fork server imports once, so that every process forked from it starts warm.

Importing the library is half of it. The other half is the first call of a compiled kernel, which makes numba set up
its target; after one call here the parties inherit that.
"""

from __future__ import annotations

import contextlib

from refmpc.core.fixed import DEFAULT_FRACTION_BITS, decode, encode

__all__: list[str] = []

with contextlib.suppress(Exception):  # a fork server must start: what is wrong here shows in the parties
    decode(encode([0.0], DEFAULT_FRACTION_BITS), DEFAULT_FRACTION_BITS)
